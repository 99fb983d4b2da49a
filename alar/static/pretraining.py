"""Conversations on the embedded arithmetic set, as its tiny base model is pretrained on them: ids with labels, and texts.

A conversation holds one to three problems, all in one form (tagged or raw) and one length of the chain of thought. So the model
knows both lengths, writes either when asked without examples, and follows the examples where a prompt has some: what concise
self-training asks of a base.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from alar import protocol
from alar.records import Question
from alar.rollout.codec import Codec
from alar.static.arithmetic import STYLES, Problem, problems
from alar.static.forms import EXCHANGE_END, FORMS

LENGTHS = (1, 1, 2, 3)  # problems of a conversation
FULL_SHARE = 0.75  # of the conversations, whose chains of thought are full
FIRST_SEED = 1_000_000  # of the problems that bases are pretrained on; later stages use small seeds


def conversations(number: int, count: int, seed: int) -> Iterator[tuple[str, str, list[Problem]]]:
    """(form, style, problems): part `number` of an endless stream of training problems."""
    rng = random.Random(f"conversations {number} {seed}")
    stream = problems("train", FIRST_SEED + 10_000 * seed + number)
    for _ in range(count):
        style = STYLES[rng.random() >= FULL_SHARE]
        yield rng.choice(list(FORMS)), style, list(itertools.islice(stream, rng.choice(LENGTHS)))


def turn_text(form: str, chain: str, answer: str) -> str:
    """What the policy writes in one turn, less the end of the turn; an empty chain gives the answer alone."""
    if form == "raw":
        return f"{chain}\n{FORMS[form].action('answer', answer)}".strip()
    return protocol.BLOCK_SEPARATOR.join(["", protocol.think_block(chain), FORMS[form].action("answer", answer)])


def encode(codec: Codec, form: str, style: str, solved: list[Problem]) -> tuple[list[int], list[int]]:
    """ids and labels (-100 where the policy did not write)."""
    ids, labels = [], []
    for problem in solved:
        prompt = codec.encode(FORMS[form].prompt(Question("", problem.question, ())))
        turn = codec.untrusted(turn_text(form, problem.chains[style], str(problem.answer)))
        end, *after = codec.trusted(EXCHANGE_END)
        ids += [*prompt, *turn, end, *after]
        labels += [*[-100] * len(prompt), *turn, end, *[-100] * len(after)]
    return ids, labels


def texts(count: int, seed: int) -> Iterator[str]:
    """Pieces of text to train a tokenizer on."""
    for form, style, solved in conversations(-1, count, seed):
        for problem in solved:
            yield "".join(FORMS[form].prompt(Question("", problem.question, ())))
            yield turn_text(form, problem.chains[style], str(problem.answer))

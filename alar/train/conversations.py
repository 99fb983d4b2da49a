"""Conversations on the embedded arithmetic set, as supervised examples: what makes a base that
knows them.

A conversation holds one to three problems, all in one form (tagged or raw) and one length of the
chain of thought. So the model knows both lengths, writes either when asked without examples, and
follows the examples where a prompt has some: what concise self-training asks of a base. The shipped
search base, which reads and computes by columns already, learns them in minutes.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from alar import protocol
from alar.domains.static.arithmetic import STYLES, Problem, problems
from alar.domains.static.forms import EXCHANGE_END, FORMS
from alar.records import Question
from alar.rollout.codec import Codec
from alar.train.examples import Example

LENGTHS = (1, 1, 2, 3)  # problems of a conversation
FULL_SHARE = 0.75  # of the conversations, whose chains of thought are full
FIRST_SEED = 1_000_000  # of the problems taught; what is asked later has small seeds


def conversations(count: int, seed: int) -> Iterator[tuple[str, str, list[Problem]]]:
    """(form, style, problems) of `count` conversations on training problems."""
    rng = random.Random(f"conversations {seed}")
    stream = problems("train", FIRST_SEED + seed)
    for _ in range(count):
        style = STYLES[rng.random() >= FULL_SHARE]
        yield rng.choice(list(FORMS)), style, list(itertools.islice(stream, rng.choice(LENGTHS)))


def conversation_turn(form: str, chain: str, answer: str) -> str:
    """What the policy writes in one turn, less the end of the turn."""
    if form == "raw":
        return f"{chain}\n{FORMS[form].action('answer', answer)}"
    return protocol.BLOCK_SEPARATOR.join(
        ["", protocol.think_block(chain), FORMS[form].action("answer", answer)]
    )


def example(codec: Codec, form: str, style: str, solved: list[Problem]) -> Example:
    """One conversation; the loss is on what the policy writes, the end of its turns included."""
    ids, labels = [], []
    for problem in solved:
        prompt = codec.encode(FORMS[form].prompt(Question("", problem.question, ())))
        turn = codec.untrusted(conversation_turn(form, problem.chains[style], str(problem.answer)))
        end, *after = codec.trusted(EXCHANGE_END)
        ids += [*prompt, *turn, end, *after]
        labels += [*[-100] * len(prompt), *turn, end, *[-100] * len(after)]
    return Example(ids, labels, 0)


def examples(codec: Codec, count: int, seed: int) -> list[Example]:
    return [example(codec, *conversation) for conversation in conversations(count, seed)]

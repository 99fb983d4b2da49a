"""Conversations on the embedded arithmetic set, as supervised examples.

They make a base that knows the set, for notebook 15 and for concise self-training. A conversation
holds one to three problems, all in one form (tagged or raw) and with chains of thought of one
length. So the model learns both lengths. Without examples it writes either; with examples in the
prompt it follows them. The shipped search base already reads and computes by columns, so it learns
this in minutes.
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
from alar.train.examples import NO_LOSS, Example

LENGTHS = (1, 1, 2, 3)  # problems of a conversation
FULL_SHARE = 0.75  # share of the conversations whose chains of thought are full
FIRST_SEED = 1_000_000  # seeds of the problems taught; what is asked later has small seeds


def conversations(count: int, seed: int) -> Iterator[tuple[str, str, list[Problem]]]:
    """(form, style, problems) of `count` conversations on training problems."""
    rng = random.Random(f"conversations {seed}")
    stream = problems("train", FIRST_SEED + seed)
    for _ in range(count):
        style = STYLES[rng.random() >= FULL_SHARE]
        yield rng.choice(list(FORMS)), style, list(itertools.islice(stream, rng.choice(LENGTHS)))


def conversation_turn(form: str, chain: str, answer: str) -> str:
    """What the policy writes in one turn, without the end of the turn."""
    action = FORMS[form].action("answer", answer)
    if form == "raw":
        return f"{chain}\n{action}"
    return protocol.BLOCK_SEPARATOR.join(["", protocol.think_block(chain), action])


def example(codec: Codec, form: str, style: str, solved: list[Problem]) -> Example:
    """One conversation; the loss is on what the policy writes, the end of its turns included."""
    ids, labels = [], []
    for problem in solved:
        prompt = codec.encode(FORMS[form].prompt(Question("", problem.question, ())))
        chain, answer = problem.chains[style], str(problem.answer)
        turn = codec.untrusted(conversation_turn(form, chain, answer))
        end, *after = codec.trusted(EXCHANGE_END)
        ids += [*prompt, *turn, end, *after]
        labels += [*[NO_LOSS] * len(prompt), *turn, end, *[NO_LOSS] * len(after)]
    return Example(ids, labels, 0)


def examples(codec: Codec, count: int, seed: int) -> list[Example]:
    return [example(codec, *conversation) for conversation in conversations(count, seed)]

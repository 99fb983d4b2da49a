"""An embedded set of word problems in GSM8K's shape, with chains of thought in two lengths.

    Ann has 47 pens and gets 85 more. How many pens does Ann have?

    full   Ann has 47 pens. Then Ann gets 85 pens. I add 47 and 85.
           47+85: ones 7+5=12, tens 4+8+1=13, so 132
           That makes 132 pens for Ann.
    brief  47+85: ones 7+5=12, tens 4+8+1=13, so 132

(In a full chain the first two lines are one.) Both are right. The brief one leaves out words, never
a step of the computation: concise self-training should find it. The kinds are sum, difference and
two_steps (a sum, then a difference). The splits share words, but no problem has the same numbers in
both.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from alar.domains.arithmetic import add_text, subtract_text

KINDS = ("sum", "difference", "two_steps")
STYLES = ("full", "brief")
_NAMES = ("Ann", "Ben", "Cara", "Dan", "Eva", "Finn", "Gina", "Hugo")
_THINGS = ("pens", "apples", "cards", "coins", "books", "shells", "stamps", "marbles")


@dataclass(frozen=True)
class Problem:
    """One word problem with a chain of thought for every style."""

    kind: str
    question: str
    answer: int
    chains: dict[str, str]  # style → chain of thought

    def row(self, style: str = "full") -> dict[str, str]:
        """The problem as GSM8K would write it."""
        return {
            "question": self.question,
            "answer": f"{self.chains[style]}\n#### {self.answer}",
            "subject": self.kind,  # not a column of GSM8K: for tables by kind
        }


def problems(split: str, seed: int = 0) -> Iterator[Problem]:
    """An endless stream, the kinds in turn; the same arguments always give the same stream."""
    rng, number = random.Random(f"arithmetic {split} {seed}"), 0
    while True:
        kind = KINDS[number % len(KINDS)]
        values = _values(kind, rng)
        if _split_of(kind, values) == split:  # otherwise the same kind is drawn again
            number += 1
            yield _problem(kind, values, rng.choice(_NAMES), rng.choice(_THINGS))


def rows(split: str, count: int, seed: int = 0, style: str = "full") -> list[dict[str, str]]:
    """`count` distinct problems as rows of GSM8K's columns, with an id."""
    found: dict[str, dict[str, str]] = {}  # question → row
    for problem in problems(split, seed):
        row = problem.row(style) | {"id": f"{problem.kind}-{len(found)}"}
        found.setdefault(problem.question, row)
        if len(found) == count:
            return list(found.values())


def _split_of(kind: str, values: tuple[int, ...]) -> str:
    """The split that a combination of numbers belongs to; one in five is for the test."""
    # CRC32 is the same in every process; Python's `hash` is not.
    return "test" if zlib.crc32(f"{kind} {values}".encode()) % 5 == 0 else "train"


def _values(kind: str, rng: random.Random) -> tuple[int, ...]:
    a, b = rng.randint(11, 99), rng.randint(11, 99)
    if kind == "difference":
        return (max(a, b), min(a, b))  # nobody can give away more than there is
    if kind == "two_steps":
        return (a, b, rng.randint(11, min(99, a + b)))
    return (a, b)


def _problem(kind: str, values: tuple[int, ...], name: str, things: str) -> Problem:
    a, b, c = (*values, 0)[:3]  # only two_steps has a third number
    if kind == "difference":
        answer, steps = a - b, subtract_text(a, b)
        text = f"{name} has {a} {things} and gives away {b}."
        words = f"{name} has {a} {things}. Then {name} gives away {b} {things}."
        words += f" I take {b} from {a}."
    else:
        answer, steps = a + b, add_text(a, b)
        text = f"{name} has {a} {things} and gets {b} more."
        words = f"{name} has {a} {things}. Then {name} gets {b} {things}. I add {a} and {b}."
    if kind == "two_steps":
        answer, steps = a + b - c, f"{steps}; {subtract_text(a + b, c)}"
        text = f"{text[:-1]}, then gives away {c}."
        words = f"{words[:-1]}. Then {name} gives away {c} {things}. I take {c} from that."
    last = f"That makes {answer} {things} for {name}."
    chains = {"full": f"{words} {steps}\n{last}", "brief": steps}
    return Problem(kind, f"{text} How many {things} does {name} have?", answer, chains)

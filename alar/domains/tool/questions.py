"""Requests over the tool world in BFCL's categories, and the explicit chain of thought that solves
each.

| category | offered | turns | example |
|---|---|---|---|
| simple | 1 function | 2 | What is the greatest common divisor of 12 and 18? |
| multiple | 2–3 | 2 | the same; one of the functions fits |
| parallel | 1 | 2 | two or three calls of it, in one turn |
| parallel_multiple | 2–3 | 2 | two calls of two functions, in one turn |
| irrelevance | 1–2 | 1 | none fits, and the answer says so |
| multi_turn | 2–3 | 3 | What is the factorial of the number of bits of 100? |

A turn is hard if a number or a date in its call has to be worked out first: "12 more than 30", "the
minutes of 7 hours", "25 days after 2024-02-10". The last turn states the results, which is easy.

Which provider's name a function has, `gcd_oak` or `gcd_elm`, is drawn for every request: names have
to be read.

Splits share functions and their phrases. They do not share calls: every combination of a function
and its arguments belongs to one split (`world.split_of`), whichever sentence asks for it. Nor do
validation and test use the sentences and connections of training, or each other's. Base models are
pretrained on "pretraining": the calls of "train" in fewer wordings. Later stages get more, as what
is trained on few of them forgets how to read others.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from alar.domains.tool import arithmetic, world
from alar.domains.tool.protocol import calls_text
from alar.domains.tool.requests import Request, request_of
from alar.domains.tool.schema import Tool
from alar.files import write_jsonl
from alar.records import Question, Solved, Step

CATEGORIES = ("simple", "multiple", "parallel", "parallel_multiple", "irrelevance", "multi_turn")
SPLITS = ("pretraining", "train", "validation", "test")
HARD_SHARE = 0.4  # of the requests that call
NOTHING_FITS = "None of the functions fits."
_PRETRAINING_SENTENCES = (
    "What is {0}?", "Tell me {0}.", "I need {0}.", "Find {0}.", "Please give me {0}.", "I want to know {0}, please.",
)  # fmt: skip
_SENTENCES = {
    "pretraining": _PRETRAINING_SENTENCES,
    "train": (
        _PRETRAINING_SENTENCES
        + (
            "I need to know {0}.",
            "Find {0}, please.",
            "Please, what is {0}?",
            "Find me {0}.",
            "Tell me, please, {0}.",
            "Can you tell me {0}?",
            "Can you find {0}, please?",
            "Could you give me {0}?",
            "Do you know {0}?",
            "Find out {0}.",
            "I would like to know {0}.",
            "I am looking for {0}.",
            "I have to know {0}.",
            "I must know {0}.",
            "We need {0}.",
            "Now tell me {0}.",
            "Now find {0}.",
            "Look up {0}.",
            "Show me {0}.",
            "Show me, please, {0}.",
            "Please let me know {0}.",
            "Please get me {0}.",
            "Help me find {0}.",
            "What would {0} be?",
        )
    ),
    "validation": (
        "I want {0}.",
        "I need to find {0}.",
        "Please, I need {0}.",
        "Tell me {0}, please.",
    ),
    "test": ("Please tell me {0}.", "Give me {0}.", "Please find {0}.", "I want to find {0}."),
}
_PRETRAINING_CONNECTIONS = (" and also ", "; and ", ", then ")
_CONNECTIONS = {
    "pretraining": _PRETRAINING_CONNECTIONS,
    "train": (
        _PRETRAINING_CONNECTIONS
        + ("; then ", ", and also ", "; and also ", "; next ", "; after that ")
    ),
    "validation": (", also ", ", then also "),
    "test": (" and then ", "; also "),
}
_UNITS = (
    ("the days of {0} weeks", 7),
    ("the months of {0} years", 12),
    ("the hours of {0} days", 24),
    ("the minutes of {0} hours", 60),
)


@dataclass(frozen=True)
class Call:
    """A call with the phrase that asks for it, what has to be worked out first, and its result."""

    tool: Tool
    arguments: dict
    asked: str
    working: str
    result: str

    def written(self) -> dict:
        return {"name": self.tool.name, "arguments": self.arguments}

    def thought(self) -> str:
        """The name stands in quotes, as in the list of functions, so that it is made of the same
        tokens."""
        return f'"{self.tool.name}", with ' + ", ".join(
            f"{name} {world.noted(value)}" for name, value in self.arguments.items()
        )


def _calls_of(split: str) -> str:
    """The split that a split's calls belong to."""
    return "train" if split == "pretraining" else split


def computed(value: Any, slot: world.Slot, rng: random.Random) -> tuple[str, str] | None:
    """(words, working) for a value that is to be worked out; None where no computation fits."""
    if slot.kind == "date":
        end, days = date.fromisoformat(value), rng.randint(3, 28)
        start = end - timedelta(days=days)
        return f"the day {days} days after {start}", arithmetic.later_text(start, days)
    if slot.kind != "integer" or not 10 <= value <= 999:
        return None
    units = [
        (words, factor)
        for words, factor in _UNITS
        if value % factor == 0 and 2 <= value // factor <= 40
    ]
    if units and rng.random() < 0.5:
        words, factor = rng.choice(units)
        return words.format(value // factor), arithmetic.times_text(value // factor, factor)
    if rng.random() < 0.5:
        part = rng.randint(3, value - 3)
        return f"{value - part} plus {part}", arithmetic.add_text(value - part, part)
    part = rng.randint(3, max(4, min(500, 999 - value)))
    return f"{value + part} minus {part}", arithmetic.subtract_text(value + part, part)


def sample_call(
    phrase: world.Phrase,
    split: str,
    rng: random.Random,
    offer: dict[str, Tool],
    *,
    hard: bool = False,
    given: dict | None = None,
    inner: bool = False,
) -> Call | None:
    """Draw the arguments of one call; None if the draw belongs to another split, fails, or has
    nothing to compute.

    `offer` has every function as the request names it. `given` maps one parameter to (value,
    words), taken instead of a draw. `inner` words it as a noun, to stand in a sentence.
    """
    given = given or {}
    values = {
        name: given[name][0] if name in given else slot.draw(rng)
        for name, slot in phrase.slots.items()
    }
    arguments = {
        name: value
        for name in phrase.tool.parameters
        if (value := (values | phrase.fixed).get(name)) is not None
    }
    if world.split_of(phrase.tool, arguments) != _calls_of(split):
        return None
    result = world.result_of(phrase.tool, arguments)
    if result is None:
        return None
    words, working = (
        {
            name: given[name][1] if name in given else world.said(value)
            for name, value in values.items()
        },
        "",
    )
    if hard:
        places = [name for name in phrase.slots if name not in given and phrase.slots[name].kind]
        rng.shuffle(places)
        found = next(
            (
                (name, c)
                for name in places
                if (c := computed(values[name], phrase.slots[name], rng))
            ),
            None,
        )
        if found is None:
            return None
        words[found[0]], working = found[1]
    wording = phrase.wordings[0] if inner else rng.choice(phrase.wordings)
    return Call(offer[phrase.tool.name], arguments, wording.format(**words), working, result)


def sample_question(
    category: str, split: str, rng: random.Random, *, hard_share: float = HARD_SHARE
) -> Solved:
    """Draw one request of a category from a split, with its expert steps."""
    if category not in CATEGORIES:
        raise ValueError(f"unknown category {category!r}: expected one of {', '.join(CATEGORIES)}")
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}: expected one of {', '.join(SPLITS)}")
    hard = rng.random() < hard_share
    while True:
        offer = world.offer(rng)
        if category == "multi_turn":
            solved = _chain(split, rng, offer, hard)
        elif category == "irrelevance":
            solved = _irrelevant(split, rng, offer)
        else:
            solved = _one_turn(category, split, rng, offer, hard)
        if solved is not None:
            return solved


def _one_turn(
    category: str, split: str, rng: random.Random, offer: dict[str, Tool], hard: bool
) -> Solved | None:
    count = (
        rng.choice((2, 2, 3))
        if category == "parallel"
        else 2
        if category == "parallel_multiple"
        else 1
    )
    if category == "parallel_multiple":
        phrases = rng.sample(world.PHRASES, 2)
    else:
        phrases = [rng.choice(world.PHRASES)] * count
    calls = [
        sample_call(phrase, split, rng, offer, hard=hard and number == 0)
        for number, phrase in enumerate(phrases)
    ]
    if None in calls or len({(c.tool.name, json.dumps(c.arguments)) for c in calls}) < count:
        return None
    if category == "parallel_multiple" and calls[0].tool is calls[1].tool:
        return None
    rng.shuffle(calls)
    extra = {"multiple": (1, 2), "parallel_multiple": (0, 1)}.get(category, (0, 0))
    working = "".join(f"{call.working}. " for call in calls if call.working)
    first = Step(
        f"{working}{_plan(calls)}.", "call", calls_text([call.written() for call in calls])
    )
    text = rng.choice(_CONNECTIONS[split]).join(call.asked for call in calls)
    return _finish(
        category,
        split,
        rng,
        offer,
        text,
        calls,
        [calls],
        extra,
        (0,) if hard else (),
        [first, _last(calls)],
    )


def _chain(split: str, rng: random.Random, offer: dict[str, Tool], hard: bool) -> Solved | None:
    outer = rng.choice(world.PHRASES)
    places = [name for name, slot in outer.slots.items() if slot.kind]
    if not places:
        return None
    place = rng.choice(places)
    slot = outer.slots[place]
    inner = sample_call(
        rng.choice(world.PHRASES), split, rng, offer, hard=hard and rng.random() < 0.5, inner=True
    )
    value = (
        _as_argument(inner.result, slot)
        if inner is not None and inner.tool is not offer[outer.tool.name]
        else None
    )
    if value is None:
        return None
    working, words, hard_turns = "", inner.asked, (0,) if inner.working else ()
    if hard and not inner.working:
        if slot.kind != "integer" or value + 2 > slot.high:
            return None
        more = rng.randint(2, min(slot.high - value, 99))
        working, words, hard_turns = (
            f" {arithmetic.add_text(value, more)}.",
            f"{more} more than {words}",
            (1,),
        )
        value += more
    last = sample_call(outer, split, rng, offer, given={place: (value, words)})
    if last is None:
        return None
    steps = [
        Step(
            f"{inner.working}{'. ' if inner.working else ''}First {inner.thought()}.",
            "call",
            calls_text([inner.written()]),
        ),
        Step(
            f"It gives {world.noted(inner.result)}.{working} Now {last.thought()}.",
            "call",
            calls_text([last.written()]),
        ),
        _last([last]),
    ]
    return _finish(
        "multi_turn",
        split,
        rng,
        offer,
        last.asked,
        [last],
        [[inner], [last]],
        (0, 1),
        hard_turns,
        steps,
    )


def _as_argument(result: str, slot: world.Slot) -> Any:
    """An earlier result as the value of an argument; None where it does not fit."""
    if slot.kind == "integer":
        return int(result) if result.isdecimal() and slot.low <= int(result) <= slot.high else None
    try:
        return date.fromisoformat(result).isoformat() if len(result) == 10 else None
    except ValueError:
        return None


def _irrelevant(split: str, rng: random.Random, offer: dict[str, Tool]) -> Solved | None:
    phrase = rng.choice(world.PHRASES)
    call = sample_call(phrase, split, rng, offer)
    if call is None:
        return None
    step = Step(f'I need "{phrase.tool.name}" but it is not offered.', "answer", NOTHING_FITS)
    return _finish(
        "irrelevance", split, rng, offer, call.asked, [], [], (1, 2), (), [step], without=call.tool
    )


def _plan(calls: Sequence[Call]) -> str:
    """It begins to name a function before it matters whether that is offered: a small model learns
    to look a name up, and to go on as the list does, but not to say at once whether anything fits.
    """
    return f"I need {' and '.join(call.thought() for call in calls)}"


def _last(calls: Sequence[Call]) -> Step:
    seen = " and ".join(world.noted(call.result) for call in calls)
    said = f"The result{' is' if len(calls) == 1 else 's are'} {seen}."
    return Step(said, "answer", "; ".join(call.result for call in calls))


def _finish(
    category: str,
    split: str,
    rng: random.Random,
    offer: dict[str, Tool],
    text: str,
    answered: Sequence[Call],
    turns: Sequence[Sequence[Call]],
    extra: tuple[int, int],
    hard_turns: tuple[int, ...],
    steps: Sequence[Step],
    without: Tool | None = None,
) -> Solved:
    tools = list({call.tool.name: call.tool for turn in turns for call in turn}.values())
    others = [t for t in offer.values() if t is not without and t not in tools]
    tools += rng.sample(others, rng.randint(*extra))
    rng.shuffle(tools)
    sentence = rng.choice(_SENTENCES[split]).format(text)
    truth = tuple(
        tuple(world.accepted(call.tool, call.arguments) for call in turn) for turn in turns
    )
    request = Request(
        ({"role": "user", "content": sentence},),
        tuple(t.function() for t in tools),
        truth,
        category,
    )
    identity = hashlib.sha256(f"{sentence}|{[t.name for t in tools]}".encode()).hexdigest()[:16]
    answers = ("; ".join(call.result for call in answered),) if answered else ()
    return Solved(
        request.question(identity, answers=answers, hard_turns=hard_turns, world=split),
        tuple(steps),
    )


def solved_questions(
    split: str,
    count: int,
    seed: int,
    categories: Sequence[str] = CATEGORIES,
    *,
    hard_share: float = HARD_SHARE,
) -> list[Solved]:
    """`count` distinct requests of a split, the categories in turn; the same arguments always give
    the same list."""
    rng = random.Random(f"tool {_calls_of(split)} {seed}")
    drawn: dict[str, Solved] = {}
    while len(drawn) < count:
        solved = sample_question(
            categories[len(drawn) % len(categories)], split, rng, hard_share=hard_share
        )
        drawn.setdefault(solved.question.id, solved)
    return list(drawn.values())


def training_questions(count: int, *, seed: int, types: Sequence[str] = ()) -> list[Question]:
    """Requests of the training split; `types` (all categories without) come in turn."""
    return [
        solved.question for solved in solved_questions("train", count, seed, types or CATEGORIES)
    ]


def validation_questions(count: int, *, seed: int = 0) -> list[Question]:
    """Calls and sentences that no stage trains on; what choices are made on, never results."""
    return [solved.question for solved in solved_questions("validation", count, seed)]


def test_questions(count: int) -> list[Question]:
    """The first `count` of the fixed test split; categories alternate, so that any prefix is
    balanced."""
    return [solved.question for solved in solved_questions("test", count, 0)]


def write_bfcl(questions: Sequence[Question], folder: str | Path) -> list[Path]:
    """Write requests in BFCL's file format, one pair of files per category: NAME.json and
    possible_answer/NAME.json.

    In "multi_turn" the ground truth has one list of calls per turn; elsewhere it is the calls, as
    in BFCL.
    """
    folder, written = Path(folder), []
    for category in dict.fromkeys(question.type for question in questions):
        requests = [(q.id, request_of(q)) for q in questions if q.type == category]
        asked = (
            {"id": i, "question": [list(r.messages)], "function": list(r.functions)}
            for i, r in requests
        )
        truths = ((i, [list(turn) for turn in r.truth]) for i, r in requests)
        answers = (
            {"id": i, "ground_truth": t if category == "multi_turn" else t[0] if t else []}
            for i, t in truths
        )
        for path, rows in (
            (folder / f"{category}.json", asked),
            (folder / "possible_answer" / f"{category}.json", answers),
        ):
            write_jsonl(path, rows)
            written.append(path)
    return written

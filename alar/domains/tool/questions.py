"""Requests over the tool world in BFCL's categories, each with a chain of thought that solves it.

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

The provider in a function's name, `gcd_oak` or `gcd_elm`, is drawn for every request, so a model
has to read the names.

Splits share functions and their phrases, but no calls. Every combination of a function and its
arguments belongs to one split (`world.split_of_call`), whichever sentence asks for it. Validation
and test also have their own sentences and connections. Base models are pretrained on "pretraining":
the calls of "train" in fewer wordings. Later stages get more wordings, because a model that trains
on few wordings forgets how to read others.
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

from alar.domains import arithmetic
from alar.domains.tool import world
from alar.domains.tool.protocol import calls_text
from alar.domains.tool.requests import ToolRequest, request_of
from alar.domains.tool.schema import Tool
from alar.files import write_jsonl
from alar.records import Question, Solved, Step

CATEGORIES = ("simple", "multiple", "parallel", "parallel_multiple", "irrelevance", "multi_turn")
SPLITS = ("pretraining", "train", "validation", "test")
HARD_SHARE = 0.4  # of the requests that call a function
NOTHING_FITS = "None of the functions fits."
_PRETRAINING_SENTENCES = (
    "What is {0}?",
    "Tell me {0}.",
    "I need {0}.",
    "Find {0}.",
    "Please give me {0}.",
    "I want to know {0}, please.",
)
_SENTENCES = {  # split → sentences around what is asked; validation and test have their own
    "pretraining": _PRETRAINING_SENTENCES,
    "train": (
        *_PRETRAINING_SENTENCES,
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
_CONNECTIONS = {  # split → words between the calls of one request
    "pretraining": _PRETRAINING_CONNECTIONS,
    "train": (
        *_PRETRAINING_CONNECTIONS,
        "; then ",
        ", and also ",
        "; and also ",
        "; next ",
        "; after that ",
    ),
    "validation": (", also ", ", then also "),
    "test": (" and then ", "; also "),
}
_UNITS = (  # words for a multiple, and its factor
    ("the days of {0} weeks", 7),
    ("the months of {0} years", 12),
    ("the hours of {0} days", 24),
    ("the minutes of {0} hours", 60),
)


@dataclass(frozen=True)
class SolvedCall:
    """A call with the phrase that asks for it, what has to be worked out first, and its result."""

    tool: Tool  # under its name in the request, such as gcd_oak
    arguments: dict
    asked: str  # the phrase, filled in
    working: str  # the computation, digit by digit; "" if the call is easy
    result: str  # what the model will observe

    def written(self) -> dict:
        return {"name": self.tool.name, "arguments": self.arguments}

    def thought(self) -> str:
        """The call in a chain of thought.

        The name stands in quotes, as in the list of functions. So it has the same tokens there.
        """
        arguments = [f"{name} {world.noted(value)}" for name, value in self.arguments.items()]
        return f'"{self.tool.name}", with {", ".join(arguments)}'


@dataclass(frozen=True)
class Draw:
    """What one request is drawn with. `offer` maps own names to functions under drawn names."""

    category: str
    split: str
    rng: random.Random
    offer: dict[str, Tool]
    hard: bool  # whether one turn needs a computation


def _calls_of(split: str) -> str:
    """The split whose calls a split asks for: "pretraining" asks for those of "train"."""
    return "train" if split == "pretraining" else split


def computed(value: Any, slot: world.ArgumentSlot, rng: random.Random) -> tuple[str, str] | None:
    """(words, working) for a value that the model shall work out. None if no computation fits."""
    if slot.kind == "date":
        # At most 28 days, so that the day lies in the same month or the next (`later_text`).
        end, days = date.fromisoformat(value), rng.randint(3, 28)
        start = end - timedelta(days=days)
        return f"the day {days} days after {start}", arithmetic.later_text(start, days)
    if slot.kind != "integer" or not 10 <= value <= 999:
        return None
    units = []  # the value as a number of weeks, years, …
    for words, factor in _UNITS:
        if value % factor == 0 and 2 <= value // factor <= 40:
            units.append((words, factor))
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
    draw: Draw,
    *,
    hard: bool = False,
    given: dict | None = None,
    inner: bool = False,
) -> SolvedCall | None:
    """Draw the arguments of one call.

    None if the draw belongs to another split, if the call fails, or if it should be hard and has
    nothing to compute. `given` maps one parameter to (value, words), which replace a draw. `inner`
    words the call as a noun, so that it can stand inside another phrase.
    """
    given = given or {}
    values, words = {}, {}  # parameter → its value, what the question says for it
    for name, slot in phrase.slots.items():
        if name in given:
            values[name], words[name] = given[name]
        else:
            values[name] = slot.draw(draw.rng)
            words[name] = world.said(values[name])
    known = values | phrase.fixed
    # In the order of the function's parameters.
    arguments = {name: known[name] for name in phrase.tool.parameters if name in known}
    if world.split_of_call(phrase.tool, arguments) != _calls_of(draw.split):
        return None
    result = world.result_of(phrase.tool, arguments)
    if result is None:
        return None
    working = ""
    if hard:
        # Parameters whose value can be asked for as a computation; the first that works is taken.
        places = [name for name, slot in phrase.slots.items() if slot.kind and name not in given]
        draw.rng.shuffle(places)
        for place in places:
            found = computed(values[place], phrase.slots[place], draw.rng)
            if found:
                words[place], working = found
                break
        else:
            return None
    # the first is a noun
    wording = phrase.wordings[0] if inner else draw.rng.choice(phrase.wordings)
    tool = draw.offer[phrase.tool.name]
    return SolvedCall(tool, arguments, wording.format(**words), working, result)


def sample_question(
    category: str, split: str, rng: random.Random, *, hard_share: float = HARD_SHARE
) -> Solved:
    """Draw one request of a category from a split, with its expert steps.

    Raises ValueError for an unknown category or split.
    """
    if category not in CATEGORIES:
        raise ValueError(f"unknown category {category!r}: expected one of {', '.join(CATEGORIES)}")
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}: expected one of {', '.join(SPLITS)}")
    write = {"multi_turn": _chain, "irrelevance": _irrelevant}.get(category, _one_turn)
    hard = rng.random() < hard_share
    # A draw may fail: it is of another split, its result is too long, or nothing can be computed.
    while True:
        solved = write(Draw(category, split, rng, world.offer(rng), hard))
        if solved is not None:
            return solved


def _one_turn(draw: Draw) -> Solved | None:
    """One to three calls, all in the first turn."""
    if draw.category == "parallel_multiple":
        count = 2
        phrases = draw.rng.sample(world.PHRASES, 2)
    else:
        count = draw.rng.choice((2, 2, 3)) if draw.category == "parallel" else 1
        # parallel: one function, other arguments
        phrases = [draw.rng.choice(world.PHRASES)] * count
    calls = [
        # One computation in a turn is enough to make it hard.
        sample_call(phrase, draw, hard=draw.hard and number == 0)
        for number, phrase in enumerate(phrases)
    ]
    if None in calls:
        return None
    if len({(call.tool.name, json.dumps(call.arguments)) for call in calls}) < count:
        return None  # the same call twice
    if draw.category == "parallel_multiple" and calls[0].tool is calls[1].tool:
        return None  # two phrases for one function
    draw.rng.shuffle(calls)  # so that the hard call is not always the first
    working = "".join(f"{call.working}. " for call in calls if call.working)
    written = calls_text([call.written() for call in calls])
    steps = [Step(f"{working}{_plan(calls)}.", "call", written), _last(calls)]
    text = draw.rng.choice(_CONNECTIONS[draw.split]).join(call.asked for call in calls)
    # fewest, most
    extra = {"multiple": (1, 2), "parallel_multiple": (0, 1)}.get(draw.category, (0, 0))
    hard_turns = (0,) if draw.hard else ()
    return _finish(draw, text, [calls], steps, extra=extra, answered=calls, hard_turns=hard_turns)


def _chain(draw: Draw) -> Solved | None:
    """Two turns of calls: the result of the first call is an argument of the second."""
    outer = draw.rng.choice(world.PHRASES)
    # Only an integer or a date can come from an earlier call.
    places = [name for name, slot in outer.slots.items() if slot.kind]
    if not places:
        return None
    place = draw.rng.choice(places)
    slot = outer.slots[place]
    phrase = draw.rng.choice(world.PHRASES)
    inner = sample_call(phrase, draw, hard=draw.hard and draw.rng.random() < 0.5, inner=True)
    if inner is None or inner.tool is draw.offer[outer.tool.name]:  # two turns, two functions
        return None
    value = _as_argument(inner.result, slot)
    if value is None:
        return None
    working, words = "", inner.asked  # for the argument that comes from the first call
    hard_turns = (0,) if inner.working else ()
    if draw.hard and not inner.working:  # the second call needs the computation instead
        if slot.kind != "integer" or value + 2 > slot.high:
            return None  # nothing to add, or no room for it
        more = draw.rng.randint(2, min(slot.high - value, 99))
        working = f" {arithmetic.add_text(value, more)}."
        words = f"{more} more than {words}"
        hard_turns = (1,)
        value += more
    last = sample_call(outer, draw, given={place: (value, words)})
    if last is None:
        return None
    computing = f"{inner.working}. " if inner.working else ""
    first = f"{computing}First {inner.thought()}."
    second = f"It gives {world.noted(inner.result)}.{working} Now {last.thought()}."
    steps = [
        Step(first, "call", calls_text([inner.written()])),
        Step(second, "call", calls_text([last.written()])),
        _last([last]),
    ]
    turns = [[inner], [last]]
    return _finish(
        draw, last.asked, turns, steps, extra=(0, 1), answered=[last], hard_turns=hard_turns
    )


def _as_argument(result: str, slot: world.ArgumentSlot) -> Any:
    """An earlier result as the value of an argument. None if it does not fit."""
    if slot.kind == "integer":
        fits = result.isdecimal() and slot.low <= int(result) <= slot.high
        return int(result) if fits else None
    try:
        # Python also reads 20240210 and 2024-W06-6; the functions get YYYY-MM-DD only.
        return date.fromisoformat(result).isoformat() if len(result) == 10 else None
    except ValueError:
        return None


def _irrelevant(draw: Draw) -> Solved | None:
    """A request whose function is not on offer."""
    phrase = draw.rng.choice(world.PHRASES)
    call = sample_call(phrase, draw)
    if call is None:
        return None
    step = Step(f'I need "{phrase.tool.name}" but it is not offered.', "answer", NOTHING_FITS)
    return _finish(draw, call.asked, [], [step], extra=(1, 2), without=call.tool)


def _plan(calls: Sequence[SolvedCall]) -> str:
    """The thought that names the functions, before it matters whether they are offered.

    A small model can learn to look a name up and to continue it as the list does. It does not learn
    to say at once whether any function fits.
    """
    return f"I need {' and '.join(call.thought() for call in calls)}"


def _last(calls: Sequence[SolvedCall]) -> Step:
    seen = " and ".join(world.noted(call.result) for call in calls)
    said = f"The result{' is' if len(calls) == 1 else 's are'} {seen}."
    return Step(said, "answer", "; ".join(call.result for call in calls))


def _finish(
    draw: Draw,
    text: str,
    turns: Sequence[Sequence[SolvedCall]],
    steps: Sequence[Step],
    *,
    extra: tuple[int, int],
    answered: Sequence[SolvedCall] = (),
    hard_turns: tuple[int, ...] = (),
    without: Tool | None = None,
) -> Solved:
    """The request that asks for `text`.

    It offers the functions of `turns` and as many others as `extra` (fewest, most) says, but never
    `without`. The final answer states the results of `answered`.
    """
    rng = draw.rng
    # Each function once, in the order of the calls.
    tools = list({call.tool.name: call.tool for turn in turns for call in turn}.values())
    others = [tool for tool in draw.offer.values() if tool is not without and tool not in tools]
    tools += rng.sample(others, rng.randint(*extra))
    rng.shuffle(tools)  # the place in the list says nothing
    sentence = rng.choice(_SENTENCES[draw.split]).format(text)
    truth = []  # per turn, the accepted values of every call
    for turn in turns:
        truth.append(tuple(world.accepted(call.tool, call.arguments) for call in turn))
    message = {"role": "user", "content": sentence}
    functions = tuple(tool.function() for tool in tools)
    request = ToolRequest((message,), functions, tuple(truth), draw.category)
    names = [tool.name for tool in tools]
    # equal requests, equal ids
    identity = hashlib.sha256(f"{sentence}|{names}".encode()).hexdigest()[:16]
    answers = ("; ".join(call.result for call in answered),) if answered else ()
    question = request.question(identity, answers=answers, hard_turns=hard_turns, world=draw.split)
    return Solved(question, tuple(steps))


def solved_questions(
    split: str,
    count: int,
    seed: int,
    categories: Sequence[str] = CATEGORIES,
    *,
    hard_share: float = HARD_SHARE,
) -> list[Solved]:
    """`count` distinct requests of a split. The categories take turns.

    The same arguments always give the same list.
    """
    rng = random.Random(f"tool {_calls_of(split)} {seed}")
    drawn: dict[str, Solved] = {}  # question id → request; a second draw of one is dropped
    while len(drawn) < count:
        category = categories[len(drawn) % len(categories)]
        solved = sample_question(category, split, rng, hard_share=hard_share)
        drawn.setdefault(solved.question.id, solved)
    return list(drawn.values())


def training_questions(count: int, *, seed: int, types: Sequence[str] = ()) -> list[Question]:
    """Requests of the training split. The `types` take turns; without them all categories do."""
    drawn = solved_questions("train", count, seed, types or CATEGORIES)
    return [solved.question for solved in drawn]


def validation_questions(count: int, *, seed: int = 0) -> list[Question]:
    """Requests with calls and sentences that no stage trains on: for choices, never for results."""
    return [solved.question for solved in solved_questions("validation", count, seed)]


def test_questions(count: int) -> list[Question]:
    """The first `count` requests of the fixed test split, in which the categories take turns."""
    return [solved.question for solved in solved_questions("test", count, 0)]


def write_bfcl(questions: Sequence[Question], folder: str | Path) -> list[Path]:
    """Write requests in BFCL's file format and return the files.

    Every category has two: NAME.json and possible_answer/NAME.json. In "multi_turn" the ground
    truth has one list of calls per turn. Elsewhere it is the calls themselves, as in BFCL.
    """
    folder, written = Path(folder), []
    for category in dict.fromkeys(question.type for question in questions):
        asked, answers = [], []
        for question in questions:
            if question.type != category:
                continue
            request = request_of(question)
            row = {"id": question.id, "question": [list(request.messages)]}  # one turn of messages
            asked.append(row | {"function": list(request.functions)})
            truth = [list(turn) for turn in request.truth]
            if category != "multi_turn":
                truth = truth[0] if truth else []  # irrelevance: no call
            answers.append({"id": question.id, "ground_truth": truth})
        for path, rows in (
            (folder / f"{category}.json", asked),
            (folder / "possible_answer" / f"{category}.json", answers),
        ):
            write_jsonl(path, rows)
            written.append(path)
    return written

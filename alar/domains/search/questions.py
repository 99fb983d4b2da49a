"""Questions over a world, in 2WikiMultihopQA's types, and the explicit chain of thought that solves
each.

| type | turns | example | hard turn |
|---|---|---|---|
| single | 2 | Which currency is used in Peru? | none |
| bridge | 3 | Which currency is used in the territory of Lima? | none |
| comparison | 3 | Which adopted its currency earlier, Peru or Chile? | the last: compares two years
digit by digit | | arithmetic | 2–3 | How many years after Chile did Peru adopt its currency? | the
last: subtracts or adds digit by digit |

The chains of thought are what the embedded base model is pretrained on; they use only what the
passages say. Splits: training and validation ask about counterfactual worlds, the test about the
real one (`test_questions`).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from functools import lru_cache

from alar.domains.search.world import REAL, World, world
from alar.records import Question, Solved, Step

TYPES = ("single", "bridge", "comparison", "arithmetic")
FIRST_VALIDATION_WORLD = 1_000_000  # counterfactual worlds from here on are never trained on
FIRST_PRETRAINING_WORLD = (
    2_000_000  # the base model's own worlds, apart from those of every later stage
)

_ATTRIBUTES = {
    "currency": (
        "Which currency is used in {0}",
        "What is the currency of {0}",
        "What money do people pay with in {0}",
    ),
    "year": (
        "In which year did {0} adopt its currency",
        "Since which year has {0} had its currency",
        "When was the currency of {0} adopted",
    ),
    "language": (
        "Which language is most spoken in {0}",
        "What is the most spoken language of {0}",
        "What do most people in {0} speak",
    ),
}
_CITY = (
    "In which territory is the city of {0}",
    "Which territory does {0} belong to",
    "Where is the city of {0}",
)
_HOME = ("the territory of {0}", "the territory where {0} is", "the territory that {0} belongs to")
_COMPARE = (
    "Which adopted its currency {0}, {1} or {2}",
    "Was the currency adopted {0} in {1} or in {2}",
    "Of {1} and {2}, which adopted its currency {0}",
)
_GAP = (
    "How many years after {1} did {0} adopt its currency",
    "By how many years does the currency of {0} follow the currency of {1}",
    "{0} adopted its currency how many years later than {1}",
)
_SUM = (
    "What do the shares of the two most spoken languages of {0} add up to",
    "How many percent do the two most spoken languages of {0} have together",
    "What is the sum of the two largest language shares in {0}",
)


def compare_text(a: int, b: int) -> str:
    """Compare two years digit by digit, e.g. `1=1, hundreds 9=9, tens 9>7, so 1991>1975`."""
    parts = []
    for place, left, right in zip(("", "hundreds ", "tens ", "ones "), str(a), str(b)):
        sign = "=" if left == right else ">" if left > right else "<"
        parts.append(f"{place}{left}{sign}{right}")
        if sign != "=":
            break
    return f"{', '.join(parts)}, so {a}{'>' if a > b else '<'}{b}"


def subtract_text(a: int, b: int) -> str:
    """Subtract column by column, e.g. `2013-1921: ones 3-1=2, tens 1+10-2=9, hundreds 0-1+10-9=0,
    so 92` (a ≥ b).

    `+10` marks a column that borrows, `-1` the next one, which pays. The thousands of two years
    cancel and are left out.
    """
    parts, borrow = [], False
    for place, name in enumerate(("ones", "tens", "hundreds")):
        top, bottom = a // 10**place % 10, b // 10**place % 10
        borrows = top - borrow < bottom
        difference = top - borrow + 10 * borrows - bottom
        parts.append(
            f"{name} {top}{'-1' if borrow else ''}{'+10' if borrows else ''}-{bottom}={difference}"
        )
        borrow = borrows
    return f"{a}-{b}: {', '.join(parts)}, so {a - b}"


def add_text(a: int, b: int) -> str:
    """Add two numbers up to 100 column by column, e.g. `73+18: ones 3+8=11, tens 7+1+1=9, so 91`."""
    ones = a % 10 + b % 10
    carry = "+1" if ones > 9 else ""
    tens = a // 10 + b // 10 + (ones > 9)
    return (
        f"{a}+{b}: ones {a % 10}+{b % 10}={ones}, tens {a // 10}+{b // 10}{carry}={tens}, so"
        f" {a + b}"
    )


def _lookup(territory, attribute: str) -> tuple[str, str, str]:
    """(query, sentence that reads the passage, answer) of one attribute of a territory."""
    name = territory.name
    if attribute == "currency":
        return (
            f"{name} currency",
            f"the currency of {name} is the {territory.currency}",
            territory.currency,
        )
    if attribute == "year":
        return (
            f"{name} currency",
            f"the currency of {name} was adopted in {territory.since}",
            str(territory.since),
        )
    language = territory.languages[0][0]
    return f"{name} languages", f"the most spoken language of {name} is {language}", language


def _finish(
    world_name: str, kind: str, text: str, answer: str, hard: tuple[int, ...], steps: list[Step]
) -> Solved:
    identity = hashlib.sha256(f"{world_name}|{text}".encode()).hexdigest()[:16]
    return Solved(Question(identity, text + "?", (answer,), kind, hard, world_name), tuple(steps))


def sample_question(facts: World, kind: str, rng: random.Random) -> Solved:
    """Draw one question of type `kind` about `facts`, with its expert steps."""
    if kind not in TYPES:
        raise ValueError(f"unknown question type {kind!r}: expected one of {', '.join(TYPES)}")
    names = list(facts.territories)
    opening = rng.choice(("I need", "The question asks for"))
    reading = rng.choice(("The passage says that", "I read that"))
    if kind in ("single", "bridge"):
        if kind == "single" and rng.random() < 0.25:
            city, home = rng.choice(list(facts.cities.items()))
            steps = [
                Step(f"{opening} the territory of {city}. I look up {city}.", "search", city),
                Step(f"{reading} {city} is a city in {home}.", "answer", home),
            ]
            return _finish(facts.name, kind, rng.choice(_CITY).format(city), home, (), steps)
        attribute = rng.choice(list(_ATTRIBUTES))
        city, home = rng.choice(list(facts.cities.items()))
        territory = facts.territories[home if kind == "bridge" else rng.choice(names)]
        if attribute == "language" and not territory.languages:
            return sample_question(facts, kind, rng)
        query, sentence, answer = _lookup(territory, attribute)
        wanted = {
            "currency": "the currency",
            "year": "the year of the currency",
            "language": "the languages",
        }[attribute]
        template = rng.choice(_ATTRIBUTES[attribute])
        last = Step(f"{reading} {sentence}.", "answer", answer)
        if kind == "single":
            first = Step(
                f"{opening} {wanted} of {territory.name}. I look up {query}.", "search", query
            )
            return _finish(
                facts.name, kind, template.format(territory.name), answer, (), [first, last]
            )
        steps = [
            Step(f"First I need the territory of {city}. I look up {city}.", "search", city),
            Step(
                f"{city} is a city in {home}. Now I need {wanted} of {home}. I look up {query}.",
                "search",
                query,
            ),
            last,
        ]
        return _finish(
            facts.name, kind, template.format(rng.choice(_HOME).format(city)), answer, (), steps
        )
    if kind == "arithmetic" and rng.random() < 0.5:
        territory = facts.territories[rng.choice(names)]
        if len(territory.languages) < 2:
            return sample_question(facts, kind, rng)
        (_, a), (_, b) = territory.languages
        query = f"{territory.name} languages"
        steps = [
            Step(
                f"{opening} the language shares of {territory.name}. I look up {query}.",
                "search",
                query,
            ),
            Step(f"The shares are {a} and {b}. {add_text(a, b)}.", "answer", str(a + b)),
        ]
        return _finish(
            facts.name, kind, rng.choice(_SUM).format(territory.name), str(a + b), (1,), steps
        )
    one, two = (facts.territories[name] for name in rng.sample(names, 2))
    if one.since == two.since:
        return sample_question(facts, kind, rng)
    if kind == "arithmetic" and one.since < two.since:
        one, two = two, one
    both = f"{one.name} has {one.since} and {two.name} has {two.since}."
    steps = [
        Step(
            f"I need the years of {one.name} and of {two.name}. I look up {one.name} currency.",
            "search",
            f"{one.name} currency",
        ),
        Step(
            f"{one.name} has {one.since}. Now I look up {two.name} currency.",
            "search",
            f"{two.name} currency",
        ),
    ]
    if kind == "comparison":
        wanted = rng.choice(("earlier", "later"))
        answer = (
            min(one, two, key=lambda t: t.since)
            if wanted == "earlier"
            else max(one, two, key=lambda t: t.since)
        )
        both = f"{one.since} is {one.name} and {two.since} is {two.name}."
        comparison = compare_text(one.since, two.since)
        thought = (
            f"{both} {comparison}. The {wanted} year is {answer.since} and {answer.since} is"
            f" {answer.name}."
        )
        text = rng.choice(_COMPARE).format(wanted, one.name, two.name)
        return _finish(
            facts.name,
            kind,
            text,
            answer.name,
            (2,),
            [*steps, Step(thought, "answer", answer.name)],
        )
    gap = one.since - two.since
    steps.append(Step(f"{both} {subtract_text(one.since, two.since)}.", "answer", str(gap)))
    return _finish(
        facts.name, kind, rng.choice(_GAP).format(one.name, two.name), str(gap), (2,), steps
    )


def solved_questions(
    world_name: str, count: int, seed: int, types: Sequence[str] = TYPES
) -> list[Solved]:
    """`count` distinct questions about one world, the types in turn; the same arguments always give
    the same list."""
    rng, facts = random.Random(f"{world_name} {seed}"), world(world_name)
    drawn: dict[str, Solved] = {}
    while len(drawn) < count:
        solved = sample_question(facts, types[len(drawn) % len(types)], rng)
        drawn.setdefault(solved.question.id, solved)
    return list(drawn.values())


def training_questions(
    count: int, *, worlds: int, seed: int, types: Sequence[str] = ()
) -> list[Question]:
    """Questions about `worlds` counterfactual worlds chosen by `seed`, spread evenly; `types` (all
    without) come in turn."""
    names = [f"counterfactual-{1000 * seed + number}" for number in range(worlds)]
    return _spread(names, count, seed, types or TYPES)


def validation_questions(count: int, *, worlds: int = 2, seed: int = 0) -> list[Question]:
    """Questions about counterfactual worlds that no stage trains on; for early stopping, never for
    results."""
    names = [f"counterfactual-{FIRST_VALIDATION_WORLD + number}" for number in range(worlds)]
    return _spread(names, count, seed)


def _spread(
    names: list[str], count: int, seed: int, types: Sequence[str] = TYPES
) -> list[Question]:
    shares = [count // len(names) + (row < count % len(names)) for row in range(len(names))]
    return [
        solved.question
        for name, share in zip(names, shares)
        for solved in solved_questions(name, share, seed, types)
    ]


def test_questions(count: int | None = None) -> list[Question]:
    """The first `count` questions of the fixed test split over the real world; all of them without
    `count`.

    The split is all that 3000 draws per type contain, ordered by the hash in the id; types
    alternate, so that any prefix is balanced.
    """
    split = _test_split()
    if count is not None and count > len(split):
        raise ValueError(
            f"the embedded test split has {len(split)} questions, {count} were asked for"
        )
    return list(split[:count])


@lru_cache(maxsize=1)
def _test_split() -> tuple[Question, ...]:
    by_type = []
    for kind in TYPES:
        rng = random.Random(f"test split {kind}")
        drawn = {
            q.question.id: q.question
            for q in (sample_question(world(REAL), kind, rng) for _ in range(3000))
        }
        by_type.append([drawn[identity] for identity in sorted(drawn)])
    return tuple(question for row in zip(*by_type) for question in row)

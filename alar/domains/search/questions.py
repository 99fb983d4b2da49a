"""Questions over a world in 2WikiMultihopQA's types, each with the chain of thought that solves it.

| type | turns | example | hard turn |
|---|---|---|---|
| single | 2 | Which currency is used in Peru? | none |
| bridge | 3 | Which currency is used in the territory of Lima? | none |
| comparison | 3 | Which adopted its currency earlier, Peru or Chile? | the last: compares years |
| arithmetic | 2–3 | How many years after Chile did Peru adopt its currency? | the last: computes |

Hard turns compare, add or subtract digit by digit (`alar.domains.arithmetic`).

The embedded base model is pretrained on the chains of thought. They use only what the passages say.
Training and validation ask about counterfactual worlds, the test asks about the real one
(`test_questions`).
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Sequence
from functools import lru_cache

from alar.domains.arithmetic import add_text, subtract_text, working_conclusions
from alar.domains.search.world import REAL, Territory, World, world
from alar.records import Question, Solved, Step

TYPES = ("single", "bridge", "comparison", "arithmetic")
# No stage trains on the counterfactual worlds from this number up to the next.
FIRST_VALIDATION_WORLD = 1_000_000
# The base model has worlds of its own, apart from those of every later stage.
FIRST_PRETRAINING_WORLD = 2_000_000
SHARE_COLUMNS = 2  # columns of a sum of two language shares, which are at most 100 each
YEAR_PLACES = 4  # digits of a year
YEAR_COLUMNS = 3  # columns of a difference of two years: the thousands cancel

# attribute → ways to ask for it; {0} is a territory.
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
# attribute → what the chain of thought calls it
_WANTED = {
    "currency": "the currency",
    "year": "the year of the currency",
    "language": "the languages",
}
_CITY = (
    "In which territory is the city of {0}",
    "Which territory does {0} belong to",
    "Where is the city of {0}",
)
# A city stands for its territory: this makes a bridge of any attribute's question.
_HOME = ("the territory of {0}", "the territory where {0} is", "the territory that {0} belongs to")
# {0} is "earlier" or "later", {1} and {2} are territories.
_COMPARE = (
    "Which adopted its currency {0}, {1} or {2}",
    "Was the currency adopted {0} in {1} or in {2}",
    "Of {1} and {2}, which adopted its currency {0}",
)
# {0} is the territory with the later year.
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
        if sign != "=":  # the first digits that differ decide
            break
    return f"{', '.join(parts)}, so {a}{'>' if a > b else '<'}{b}"


# What a thought that compares finds: signs, the last digits of the chosen year, whose year that is.
_COMPARISON = re.compile(
    r"(?P<places>\d[<=>].*), so .* year is \d\d(?P<year>\d\d) and \d+ is(?P<name> .*)\.$"
)


def conclusions(thought: str) -> list[str]:
    """What the steps of a thought conclude, one symbol or name each; [] if it only reads or plans.

    A comparison gives a sign for each place (the deciding one again for those behind it), the last
    two digits of the chosen year, and the name. Otherwise those of `alar.domains.arithmetic`.
    """
    comparison = _COMPARISON.search(thought)
    if comparison is None:
        return working_conclusions(thought)
    signs = re.findall("[<=>]", comparison["places"])
    signs += signs[-1:] * (YEAR_PLACES - len(signs))
    return [*signs, *comparison["year"], comparison["name"]]


def _lookup(territory: Territory, attribute: str) -> tuple[str, str, str]:
    """(query, sentence that reads the passage, answer) for one attribute of a territory."""
    name = territory.name
    if attribute == "currency":
        answer = territory.currency
        return f"{name} currency", f"the currency of {name} is the {answer}", answer
    if attribute == "year":
        answer = str(territory.since)
        return f"{name} currency", f"the currency of {name} was adopted in {answer}", answer
    answer = territory.languages[0][0]
    return f"{name} languages", f"the most spoken language of {name} is {answer}", answer


def _solved(
    facts: World, kind: str, text: str, answer: str, hard: tuple[int, ...], steps: list[Step]
) -> Solved:
    # From world and text, so that a question drawn twice has one id and is kept once.
    identity = hashlib.sha256(f"{facts.name}|{text}".encode()).hexdigest()[:16]
    return Solved(Question(identity, text + "?", (answer,), kind, hard, facts.name), tuple(steps))


def sample_question(facts: World, kind: str, rng: random.Random) -> Solved:
    """Draw one question of type `kind` about `facts`, with its expert steps."""
    if kind not in TYPES:
        raise ValueError(f"unknown question type {kind!r}: expected one of {', '.join(TYPES)}")
    while True:
        # Both phrases are drawn for every kind, also where they are not used.
        opening = rng.choice(("I need", "The question asks for"))
        reading = rng.choice(("The passage says that", "I read that"))
        if kind == "single" and rng.random() < 0.25:
            solved = _city_question(facts, rng, opening, reading)
        elif kind in ("single", "bridge"):
            solved = _attribute_question(facts, kind, rng, opening, reading)
        elif kind == "arithmetic" and rng.random() < 0.5:
            solved = _sum_question(facts, rng, opening)
        else:
            solved = _years_question(facts, kind, rng)
        if solved is not None:  # None: the draw does not fit the facts, so draw again
            return solved


def _city_question(facts: World, rng: random.Random, opening: str, reading: str) -> Solved:
    city, home = rng.choice(list(facts.cities.items()))
    steps = [
        Step(f"{opening} the territory of {city}. I look up {city}.", "search", city),
        Step(f"{reading} {city} is a city in {home}.", "answer", home),
    ]
    return _solved(facts, "single", rng.choice(_CITY).format(city), home, (), steps)


def _attribute_question(
    facts: World, kind: str, rng: random.Random, opening: str, reading: str
) -> Solved | None:
    """One attribute of a territory. The question names it ("single") or a city in it ("bridge").

    None for the language of a territory whose languages are not known.
    """
    attribute = rng.choice(list(_ATTRIBUTES))
    city, home = rng.choice(list(facts.cities.items()))
    name = home if kind == "bridge" else rng.choice(list(facts.territories))
    territory = facts.territories[name]
    if attribute == "language" and not territory.languages:
        return None
    query, sentence, answer = _lookup(territory, attribute)
    wanted = _WANTED[attribute]
    template = rng.choice(_ATTRIBUTES[attribute])
    last = Step(f"{reading} {sentence}.", "answer", answer)
    if kind == "single":
        first = Step(f"{opening} {wanted} of {name}. I look up {query}.", "search", query)
        return _solved(facts, kind, template.format(name), answer, (), [first, last])
    thought = f"{city} is a city in {home}. Now I need {wanted} of {home}. I look up {query}."
    steps = [
        Step(f"First I need the territory of {city}. I look up {city}.", "search", city),
        Step(thought, "search", query),
        last,
    ]
    text = template.format(rng.choice(_HOME).format(city))
    return _solved(facts, kind, text, answer, (), steps)


def _sum_question(facts: World, rng: random.Random, opening: str) -> Solved | None:
    """The sum of two language shares; None for a territory that has fewer than two."""
    territory = facts.territories[rng.choice(list(facts.territories))]
    if len(territory.languages) < 2:
        return None
    (_, a), (_, b) = territory.languages
    query = f"{territory.name} languages"
    first = f"{opening} the language shares of {territory.name}. I look up {query}."
    last = f"The shares are {a} and {b}. {add_text(a, b, SHARE_COLUMNS)}."
    steps = [Step(first, "search", query), Step(last, "answer", str(a + b))]
    text = rng.choice(_SUM).format(territory.name)
    # The second turn adds, so turn 1 (counted from 0) is the hard one.
    return _solved(facts, "arithmetic", text, str(a + b), (1,), steps)


def _years_question(facts: World, kind: str, rng: random.Random) -> Solved | None:
    """Which of two years is earlier or later, or their difference; None where they are equal."""
    one, two = (facts.territories[name] for name in rng.sample(list(facts.territories), 2))
    if one.since == two.since:
        return None
    if kind == "arithmetic" and one.since < two.since:
        one, two = two, one  # the later year first: differences are positive
    query, other_query = f"{one.name} currency", f"{two.name} currency"
    first = f"I need the years of {one.name} and of {two.name}. I look up {query}."
    second = f"{one.name} has {one.since}. Now I look up {other_query}."
    steps = [Step(first, "search", query), Step(second, "search", other_query)]
    if kind == "comparison":
        wanted = rng.choice(("earlier", "later"))
        choose = min if wanted == "earlier" else max
        chosen = choose(one, two, key=lambda territory: territory.since)
        thought = (
            f"{one.since} is {one.name} and {two.since} is {two.name}."
            f" {compare_text(one.since, two.since)}."
            f" The {wanted} year is {chosen.since} and {chosen.since} is {chosen.name}."
        )
        text = rng.choice(_COMPARE).format(wanted, one.name, two.name)
        answer = chosen.name
    else:
        thought = (
            f"{one.name} has {one.since} and {two.name} has {two.since}."
            f" {subtract_text(one.since, two.since, YEAR_COLUMNS)}."
        )
        text = rng.choice(_GAP).format(one.name, two.name)
        answer = str(one.since - two.since)
    steps.append(Step(thought, "answer", answer))
    return _solved(facts, kind, text, answer, (2,), steps)  # after two searches


def solved_questions(
    world_name: str, count: int, seed: int, types: Sequence[str] = TYPES
) -> list[Solved]:
    """`count` distinct questions about one world, the types in turn.

    The same arguments always give the same list.
    """
    rng, facts = random.Random(f"{world_name} {seed}"), world(world_name)
    drawn: dict[str, Solved] = {}  # question id → question
    while len(drawn) < count:
        solved = sample_question(facts, types[len(drawn) % len(types)], rng)
        drawn.setdefault(solved.question.id, solved)
    return list(drawn.values())


def training_questions(
    count: int, *, worlds: int, seed: int, types: Sequence[str] = ()
) -> list[Question]:
    """Questions spread evenly over `worlds` counterfactual worlds that `seed` chooses.

    `types` come in turn; without `types`, all types come.
    """
    # Up to 1000 worlds of one seed, apart from those of any other.
    names = [f"counterfactual-{1000 * seed + number}" for number in range(worlds)]
    return _spread(names, count, seed, types or TYPES)


def validation_questions(count: int, *, worlds: int = 2, seed: int = 0) -> list[Question]:
    """Questions about counterfactual worlds that no stage trains on.

    They are for early stopping, never for results.
    """
    names = [f"counterfactual-{FIRST_VALIDATION_WORLD + number}" for number in range(worlds)]
    return _spread(names, count, seed)


def _spread(
    names: list[str], count: int, seed: int, types: Sequence[str] = TYPES
) -> list[Question]:
    questions = []
    for row, name in enumerate(names):
        share = count // len(names) + (row < count % len(names))  # the first worlds take the rest
        solved = solved_questions(name, share, seed, types)
        questions += [item.question for item in solved]
    return questions


def test_questions(count: int | None = None) -> list[Question]:
    """The first `count` questions of the fixed test split over the real world; by default all.

    The split holds the distinct questions of 3000 draws per type, ordered by the hash in the id.
    The types alternate, so any prefix is balanced.
    """
    split = _test_split()
    if count is not None and count > len(split):
        raise ValueError(
            f"the embedded test split has {len(split)} questions, {count} were asked for"
        )
    return list(split[:count])


@lru_cache(maxsize=1)
def _test_split() -> tuple[Question, ...]:
    by_type = []  # per type, its distinct questions in order of id
    for kind in TYPES:
        rng = random.Random(f"test split {kind}")
        drawn = [sample_question(world(REAL), kind, rng).question for _ in range(3000)]
        distinct = {question.id: question for question in drawn}
        by_type.append([distinct[identity] for identity in sorted(distinct)])
    # `zip` ends with the type that has the fewest distinct questions.
    return tuple(question for row in zip(*by_type) for question in row)

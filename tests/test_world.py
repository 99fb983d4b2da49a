"""The embedded world and its questions: real facts, answers that follow from the passages, fixed
splits."""

import random
import re

import pytest
from babel import Locale
from babel.core import get_global

from alar.domains import arithmetic
from alar.domains.search import questions
from alar.domains.search.metrics import exact_match
from alar.domains.search.world import counterfactual_world, real_world, world


def test_the_real_world_holds_cldr_facts():
    real = real_world()
    peru = real.territories["Peru"]
    assert (peru.currency, peru.since) == ("Peruvian Sol", 1991) and peru.languages[0][
        0
    ] == "Spanish"
    assert real.cities["Lima"] == "Peru" and len(real.territories) > 240 and len(real.cities) > 300
    latest = [
        entry for entry in get_global("territory_currencies")["JP"] if entry[2] is None and entry[3]
    ][-1]
    assert real.territories["Japan"].currency == Locale("en").currencies[latest[0]]


def test_counterfactual_worlds_keep_names_and_shuffle_facts():
    one, same, other = counterfactual_world(3), counterfactual_world(3), counterfactual_world(4)
    assert (
        one == same
        and one.territories.keys() == real_world().territories.keys() == other.territories.keys()
    )
    for facts in (one, other):
        agree = sum(
            facts.territories[n].currency == t.currency for n, t in real_world().territories.items()
        )
        assert agree < 10
    assert one.cities != other.cities


def test_passages_are_short_and_titled_uniquely(tokenizer):
    for name in ("real", "counterfactual-7"):
        passages = world(name).passages()
        assert len(passages) > 1900
        assert len({passage.title for passage in passages}) == len(passages)
        assert max(len(tokenizer.encode(passage.text)) for passage in passages) <= 60


@pytest.mark.parametrize("name", ["real", "counterfactual-7"])
@pytest.mark.parametrize("kind", questions.TYPES)
def test_the_answer_stands_in_the_passages_or_follows_by_arithmetic(name, kind):
    facts, rng = world(name), random.Random(5)
    text = {passage.title: passage.text for passage in facts.passages()}
    for _ in range(60):
        solved = questions.sample_question(facts, kind, rng)
        looked_up = [step.argument for step in solved.steps if step.action == "search"]
        titles = [
            q if q in text else re.sub(r" (currency|languages)$", r", \1", q) for q in looked_up
        ]
        read = " ".join(text[title] for title in titles)
        answer = solved.question.answers[0]
        if kind != "arithmetic":
            assert answer in read
        elif len(titles) == 2:
            years = [int(re.search(r"adopted in (\d+)", text[title])[1]) for title in titles]
            assert int(answer) == years[0] - years[1] > 0
        else:
            assert int(answer) == sum(int(n) for n in re.findall(r"(\d+) percent", read))
        assert solved.steps[-1].action == "answer" and exact_match(
            solved.steps[-1].argument, [answer]
        )
        assert all(turn == len(solved.steps) - 1 for turn in solved.question.hard_turns)
        assert bool(solved.question.hard_turns) == (kind in ("comparison", "arithmetic"))


def test_chains_of_thought_compute_what_they_say():
    rng = random.Random(6)
    for _ in range(500):
        a, b = sorted((rng.randint(1690, 2025), rng.randint(1690, 2025)), reverse=True)
        columns = re.findall(
            r" (\d)(-1)?(\+10)?-(\d)=(\d)", arithmetic.subtract_text(a, b, questions.YEAR_COLUMNS)
        )
        assert len(columns) == 3
        digits = [
            int(top) - bool(paid) + 10 * bool(lent) - int(low)
            for top, paid, lent, low, _ in columns
        ]
        assert digits == [int(result) for *_, result in columns]
        assert sum(digit * 10**place for place, digit in enumerate(digits)) == a - b
        a, b = rng.randint(1, 100), rng.randint(1, 100)
        ones, tens = re.findall(
            r"(?:ones|tens) [\d+]+=(\d+)", arithmetic.add_text(a, b, questions.SHARE_COLUMNS)
        )
        assert 10 * int(tens) + int(ones) % 10 == a + b
    assert questions.compare_text(1991, 1975) == "1=1, hundreds 9=9, tens 9>7, so 1991>1975"


def test_the_conclusions_of_a_chain_of_thought_are_what_its_steps_compute():
    rng = random.Random(7)
    for _ in range(300):
        a, b = sorted(rng.sample(range(1690, 2026), 2), reverse=True)
        working = arithmetic.subtract_text(a, b, questions.YEAR_COLUMNS)
        borrowed = ["+" if a % 10**n < b % 10**n else "-" for n in (1, 2)]
        digits = f"{a - b:03}"
        expected = [digits[2], borrowed[0], digits[1], borrowed[1], digits[0], *str(a - b)]
        assert questions.conclusions(f"X has {a} and Y has {b}. {working}.") == expected

        chosen = rng.choice((a, b))
        thought = f"{a} is X and {b} is Y. {questions.compare_text(a, b)}."
        found = questions.conclusions(thought + f" The later year is {chosen} and {chosen} is A b.")
        first = next(n for n in range(4) if str(a)[n] != str(b)[n])
        assert found == ["="] * first + [">"] * (4 - first) + [*str(chosen)[2:], " A b"]

        a, b = rng.randint(1, 99), rng.randint(1, 99)
        working = arithmetic.add_text(a, b, questions.SHARE_COLUMNS)
        carries = "+" if a % 10 + b % 10 > 9 else "-"
        tens = (a + b) // 10 % 10
        expected = [str((a + b) % 10), carries, str(tens), *str(a + b)]
        assert questions.conclusions(f"The shares are {a} and {b}. {working}.") == expected
    # They are the text's own, whatever it should have said.
    assert arithmetic.working_conclusions("9-4: ones 9-4=6, so 7") == ["6", "7"]


def test_only_chains_of_thought_of_hard_turns_conclude_something():
    for solved in questions.solved_questions("counterfactual-4", 80, 0):
        for number, step in enumerate(solved.steps):
            hard = number in solved.question.hard_turns
            assert bool(questions.conclusions(step.thought)) == hard


def test_the_test_split_is_fixed_balanced_and_about_the_real_world():
    split = questions.test_questions(1600)
    assert split[:100] == questions.test_questions(100)
    assert len({q.id for q in split}) == 1600 and {q.world for q in split} == {"real"}
    assert all(sum(q.type == kind for q in split) == 400 for kind in questions.TYPES)


def test_training_and_validation_never_share_a_world_with_the_test_or_each_other():
    train = {q.world for q in questions.training_questions(200, worlds=8, seed=0)}
    other = {q.world for q in questions.training_questions(200, worlds=8, seed=1)}
    validation = {q.world for q in questions.validation_questions(100)}
    assert (
        not train & other and not (train | other) & validation and "real" not in train | validation
    )


def test_an_unknown_world_or_type_is_an_error():
    with pytest.raises(ValueError, match="atlantis"):
        world("atlantis")
    with pytest.raises(ValueError, match="expected one of"):
        questions.sample_question(world("real"), "riddle", random.Random(0))

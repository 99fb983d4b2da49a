"""Exact match: SQuAD's order, checked against the SQuAD code that transformers carries."""

import random
import string

import pytest
from transformers.data.metrics import squad_metrics

from alar.domains.search import exact_match, normalize_answer


@pytest.mark.parametrize(
    ("prediction", "gold"),
    [
        ("A-ha", "Aha"),
        ("U.S.A.", "USA"),
        ("The Beatles", "beatles"),
        ("  an   apple\n", "Apple"),
        ('"Hello, World!"', "hello world"),
        ("the a an cat", "cat"),
        ("Zürich", "zürich"),
    ],
)
def test_punctuation_goes_before_articles(prediction, gold):
    assert exact_match(prediction, [gold])
    assert exact_match(gold, [prediction])


@pytest.mark.parametrize(
    ("prediction", "gold"),
    [
        ("Peru", "Peruvian sol"),
        ("1,000.5", "1000"),
        ("another", "other"),
        ("a-ha", "ha"),
        ("theatre", "atre"),
    ],
)
def test_different_answers_do_not_match(prediction, gold):
    assert not exact_match(prediction, [gold])


def test_normalisation_equals_the_squad_script_on_random_text():
    rng = random.Random(0)
    pieces = [
        "a",
        "an",
        "the",
        "The",
        "A",
        "cat",
        "U.S.A.",
        "A-ha",
        "–",
        "’",
        " ",
        "  ",
        "\t",
        "É",
        "1,5",
    ]
    pieces += list(string.punctuation)
    for _ in range(3000):
        text = rng.choice(["", " "]).join(rng.choice(pieces) for _ in range(rng.randrange(8)))
        assert normalize_answer(text) == squad_metrics.normalize_answer(text), repr(text)


def test_any_gold_answer_is_enough_and_one_string_is_one_answer():
    assert exact_match("sol", ["nuevo sol", "Sol."])
    assert exact_match("sol", "sol")
    assert not exact_match("s", "sol")
    assert not exact_match("sol", [])


@pytest.mark.parametrize("prediction", [None, "", "   ", "the", "...", "a the"])
def test_an_empty_prediction_is_never_right(prediction):
    assert not exact_match(prediction, ["", "the", "..."])

"""The official BFCL checker through this project: known oracle scores, and verdicts that nothing on
the way changes."""

import copy
import importlib
import json
import random
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from alar.domains.tool import bfcl
from alar.evaluate.accuracy import accuracy_table

ORACLE = {
    "simple_python": (400, 400),
    "multiple": (200, 200),
    "parallel": (200, 200),
    "parallel_multiple": (198, 200),
    "live_simple": (256, 258),
    "live_multiple": (1050, 1053),
    "live_parallel": (16, 16),
    "live_parallel_multiple": (24, 24),
}


@pytest.fixture(scope="module")
def questions():
    return {category: bfcl.load_category(category) for category in bfcl.AST_CATEGORIES}


@pytest.fixture(scope="module")
def official():
    """The package's own module, imported the ordinary way under a stand-in that belongs to this
    test."""
    registry = "bfcl_eval.constants.model_config"
    before = set(sys.modules) | {registry}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, registry, ModuleType(registry))
        sys.modules[registry].MODEL_CONFIG_MAPPING = {
            "reference": SimpleNamespace(underscore_to_dot=False)
        }
        module = importlib.import_module("bfcl_eval.eval_checker.ast_eval.ast_checker")
        yield module
        for name in set(sys.modules) - before:
            if name.startswith("bfcl_eval"):
                del sys.modules[name]


@pytest.mark.parametrize("category", ORACLE)
def test_the_oracle_scores_what_it_is_known_to_score(questions, category):
    correct, total = ORACLE[category]
    verdicts = [
        bfcl.check_calls(bfcl.reference_calls(q.ground_truth), q, q.ground_truth, category)
        for q in questions[category]
    ]
    assert (sum(v.correct for v in verdicts), len(verdicts)) == (correct, total)
    assert all(v.correct != bool(v.reason) for v in verdicts)


@pytest.mark.parametrize(
    "category, count",
    [
        ("irrelevance", 240),
        ("live_irrelevance", 884),
        ("live_relevance", 16),
        ("simple_java", 100),
        ("simple_javascript", 50),
    ],
)
def test_the_other_single_turn_categories(category, count):
    loaded = bfcl.load_category(category)
    assert len(loaded) == count == len({q.id for q in loaded})
    question, call = loaded[0], [{"name": "f", "arguments": {}}]
    verdicts = [
        bfcl.check_calls(calls, question, question.ground_truth, category).correct
        for calls in ([], call)
    ]
    expected = {
        "irrelevance": [True, False],
        "live_irrelevance": [True, False],
        "live_relevance": [False, True],
    }
    assert verdicts == expected.get(category, [False, False])


def test_java_questions_take_source_text():
    question = bfcl.load_category("simple_java")[0]
    right = {
        "name": "GeometryPresentation.createPresentation",
        "arguments": {"controller": "mapController", "parent": "mapArea"},
    }
    assert bfcl.check_calls([right], question, question.ground_truth, "simple_java").correct
    right["arguments"]["parent"] = 3
    assert (
        "type_error:java"
        in bfcl.check_calls([right], question, question.ground_truth, "simple_java").reason
    )


# -- mutations: each takes calls, question and a random generator, changes the calls in place or
# returns others ----------


def _arguments(calls, kind=object):
    """Places (arguments, key) whose value is of exactly this type, or any."""
    return [
        (c["arguments"], k)
        for c in calls
        for k, v in c["arguments"].items()
        if kind is object or type(v) is kind
    ]


def _change(kind, new):
    def mutate(calls, question, rng):
        places = _arguments(calls, kind)
        if places:
            arguments, key = rng.choice(places)
            arguments[key] = new(arguments[key])
        return calls

    return mutate


def _drop(required):
    def mutate(calls, question, rng):
        wanted = {f["name"]: set(f["parameters"].get("required", ())) for f in question.functions}
        places = [
            (c["arguments"], k)
            for c in calls
            for k in c["arguments"]
            if (k in wanted.get(c["name"], ())) == required
        ]
        if places:
            arguments, key = rng.choice(places)
            del arguments[key]
        return calls

    return mutate


def _extra(calls, question, rng):
    rng.choice(calls)["arguments"]["surplus"] = 1
    return calls


def _add_optional(calls, question, rng):
    call = rng.choice(calls)
    known = next(
        (f["parameters"]["properties"] for f in question.functions if f["name"] == call["name"]), {}
    )
    missing = sorted(set(known) - set(call["arguments"]))
    if missing:
        call["arguments"][rng.choice(missing)] = rng.choice(["x", 1, True, [], {}])
    return calls


def _rename(calls, question, rng):
    rng.choice(calls)["name"] = rng.choice(
        [*(f["name"] for f in question.functions), "no_such_function"]
    )
    return calls


def _rename_parameter(calls, question, rng):
    places = _arguments(calls)
    if places:
        arguments, key = rng.choice(places)
        arguments[key.upper()] = arguments.pop(key)
    return calls


def _underscores(calls, question, rng):
    for call in calls:
        call["name"] = call["name"].replace(".", "_")
    return calls


MUTATIONS = {
    "untouched": lambda calls, question, rng: calls,
    "extra argument": _extra,
    "int to float": _change(int, float),
    "float to int": _change(float, int),
    "bool for int": _change(int, bool),
    "string for int": _change(int, str),
    "int for bool": _change(bool, int),
    "other number": _change(int, lambda value: value + 1),
    "upper case": _change(str, str.upper),
    "punctuation": _change(str, lambda value: f" {value}, -"),
    "other text": _change(str, lambda value: value + "x"),
    "null": _change(object, lambda value: None),
    "wrapped in a list": _change(object, lambda value: [value]),
    "reversed list": _change(list, lambda value: value[::-1]),
    "dict with a further key": _change(dict, lambda value: value | {"surplus": 1}),
    "emptied dict": _change(dict, lambda value: {}),
    "dropped optional": _drop(False),
    "dropped required": _drop(True),
    "invented optional": _add_optional,
    "swapped calls": lambda calls, question, rng: calls[::-1],
    "duplicated call": lambda calls, question, rng: calls + [copy.deepcopy(rng.choice(calls))],
    "dropped call": lambda calls, question, rng: calls[1:],
    "wrong name": _rename,
    "wrong parameter name": _rename_parameter,
    "dots as underscores": _underscores,
}


def test_verdicts_on_mutated_predictions_are_the_official_ones(questions, official):
    assert len(MUTATIONS) >= 19
    verdicts = {kind: set() for kind in MUTATIONS}
    for category, items in questions.items():
        for question in items:
            reference = json.dumps(bfcl.reference_calls(question.ground_truth))
            truth = list(question.ground_truth)
            for kind, mutate in MUTATIONS.items():
                calls = mutate(
                    json.loads(reference), question, random.Random(f"{question.id} {kind}")
                )
                ours = bfcl.check_calls(calls, question, question.ground_truth, category).correct
                try:
                    expected = official.ast_checker(
                        list(question.functions),
                        [{c["name"]: c["arguments"]} for c in calls],
                        truth,
                        official.Language.PYTHON,
                        category,
                        "reference",
                    )["valid"]
                except (AttributeError, IndexError, KeyError, TypeError):
                    expected = False  # the official run would end here: a wrong answer
                assert ours == expected, f"{question.id}, {kind}: {calls}"
                verdicts[kind].add(ours)
    assert all(False in seen for seen in verdicts.values()), (
        "every kind of mutation makes some prediction wrong"
    )
    for kind in ("float to int", "upper case", "punctuation", "swapped calls", "dropped optional"):
        assert True in verdicts[kind], f"{kind} is forgiven at least once"


@pytest.mark.parametrize(
    "calls",
    [
        None,
        1,
        "text",
        [1],
        [None],
        [[]],
        [{}],
        [{"name": 3, "arguments": {}}],
        {"name": "f"},
        [{"name": "f"}],
        [{"name": "f", "arguments": None}],
        [{"name": "f", "arguments": "{}"}],
        [{"name": "f", "arguments": [1]}],
    ],
)
@pytest.mark.parametrize("category", ["simple_python", "parallel", "irrelevance", "live_relevance"])
def test_malformed_calls_are_wrong_with_a_reason(questions, calls, category):
    question = questions["simple_python"][0]
    verdict = bfcl.check_calls(calls, question, question.ground_truth, category)
    assert not verdict.correct and verdict.reason


def test_the_stand_in_leaves_nothing_behind(questions, monkeypatch):
    registry, question = "bfcl_eval.constants.model_config", questions["simple_python"][0]
    calls = bfcl.reference_calls(question.ground_truth)
    for present in (None, ModuleType(registry)):
        monkeypatch.setitem(sys.modules, registry, present)
        if present is None:
            monkeypatch.delitem(sys.modules, registry)
        bfcl._official.cache_clear()
        assert bfcl.check_calls(calls, question, question.ground_truth, "simple_python").correct
        assert sys.modules.get(registry) is present
    assert not any(name.startswith("bfcl_eval.model_handler") for name in sys.modules)


def test_unknown_categories_and_a_missing_package_say_what_to_do(monkeypatch):
    with pytest.raises(ValueError, match="simple_python"):
        bfcl.load_category("simple")
    monkeypatch.setattr(bfcl.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="--no-deps"):
        bfcl.load_category("simple_python")


def test_accuracy_is_given_per_category_and_as_their_unweighted_mean():
    results = pd.DataFrame(
        {"category": ["a"] * 80 + ["b"] * 20, "correct": [True] * 60 + [False] * 20 + [True] * 20}
    )
    table = accuracy_table(results).set_index("category")
    assert list(table.index) == ["a", "b", "macro"] and "overall" not in table.to_string()
    assert (
        table.loc["a", "accuracy"] == 0.75
        and table.loc["b", "accuracy"] == 1.0
        and table.loc["macro", "accuracy"] == 0.875
    )
    spread = np.sqrt(0.75 * 0.25 / 80) / 2  # b does not vary
    assert table.loc["macro", "accuracy_high"] - 0.875 == pytest.approx(1.96 * spread, rel=0.2)
    with pytest.raises(ValueError, match="no results"):
        accuracy_table(results[:0])

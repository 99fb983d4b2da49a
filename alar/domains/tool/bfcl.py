"""The Berkeley Function Calling Leaderboard (BFCL v4): its single-turn questions and its official
checker, unchanged.

Both come from the package `bfcl_eval`, which is installed without its dependencies: their pins
conflict with everything here, and neither the data nor the AST checker needs them. One thing stands
in the way: the checker's module imports `bfcl_eval.constants.model_config`, a registry that imports
every vendor's client, to look up one flag per model (`underscore_to_dot`: whether that vendor's API
forbids dots in function names). `_official` is the one place that deals with this: while a private
copy of the checker's module is executed, a stand-in with that flag set to False is found under the
registry's name; afterwards nothing of it is left behind in `sys.modules`.

What the checker cannot digest (it raises on a few malformed predictions) is a wrong answer, never
an exception.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd

from alar.evaluate.intervals import estimate, resampled_sums, wilson

PACKAGE = "bfcl_eval==2026.3.23"
AST_CATEGORIES = (
    "simple_python",
    "multiple",
    "parallel",
    "parallel_multiple",
    "live_simple",
    "live_multiple",
    "live_parallel",
    "live_parallel_multiple",
)
PAPER_CATEGORIES = AST_CATEGORIES[:4]  # what ALAR reports the mean of
NO_CALL_CATEGORIES = ("irrelevance", "live_irrelevance")  # right is to call nothing
ANY_CALL_CATEGORIES = ("live_relevance",)  # right is to call anything
LANGUAGES = {
    "simple_java": "java",
    "simple_javascript": "javascript",
}  # every other category is Python
ASKED_CATEGORIES = (
    *AST_CATEGORIES,
    *NO_CALL_CATEGORIES,
    *ANY_CALL_CATEGORIES,
)  # what a model can be evaluated on here
CATEGORIES = (*ASKED_CATEGORIES, *LANGUAGES)
LONGEST_REASON = 1000  # characters
_MODEL = "alar"  # the name under which the stand-in registry knows us; must hold no underscore

Call = Mapping[str, Any]  # {"name": str, "arguments": dict}


@dataclass(frozen=True)
class BFCLQuestion:
    """One question. `functions` are in BFCL's own type names; `ground_truth` has one {function:
    {parameter: [accepted …]}} per call, `""` among the accepted values saying that the parameter
    may be left out; None where no call is right or any.
    """

    id: str
    category: str
    messages: tuple[dict, ...]
    functions: tuple[dict, ...]
    ground_truth: tuple[dict, ...] | None


@dataclass(frozen=True)
class CheckResult:
    """`reason` says why a prediction is wrong, in the checker's words; empty when it is correct."""

    correct: bool
    reason: str = ""


def load_category(name: str) -> list[BFCLQuestion]:
    """All questions of one single-turn category, in the file's order.

    Raises ValueError for an unknown category or files that do not belong together,
    ModuleNotFoundError without the package.
    """
    if name not in CATEGORIES:
        raise ValueError(f"unknown BFCL category {name!r}: expected one of {', '.join(CATEGORIES)}")
    folder = _package() / "data"
    questions = _json_lines(folder / f"BFCL_v4_{name}.json")
    answered = name not in NO_CALL_CATEGORIES + ANY_CALL_CATEGORIES
    answers = (
        _json_lines(folder / "possible_answer" / f"BFCL_v4_{name}.json")
        if answered
        else [None] * len(questions)
    )
    if len(answers) != len(questions):
        raise ValueError(
            f"BFCL {name}: {len(questions)} questions and {len(answers)} answers; reinstall"
            f" {PACKAGE}"
        )
    loaded = []
    for question, answer in zip(questions, answers):
        if answer is not None and answer["id"] != question["id"]:
            raise ValueError(
                f"BFCL {name}: question {question['id']} stands beside answer {answer['id']};"
                f" reinstall {PACKAGE}"
            )
        truth = None if answer is None else tuple(answer["ground_truth"])
        loaded.append(
            BFCLQuestion(
                question["id"],
                name,
                tuple(question["question"][0]),
                tuple(question["function"]),
                truth,
            )
        )
    return loaded


def check_calls(
    calls: Any, question: BFCLQuestion | Any, ground_truth: Sequence[dict] | None, category: str
) -> CheckResult:
    """The official verdict on the calls of one turn: [{"name": str, "arguments": dict}, …]. Never
    raises for odd calls.

    `question` lends its `.functions`. `category` decides the comparison as in BFCL: names with
    "parallel" compare in any order, the irrelevance categories want no call at all,
    "live_relevance" wants any.
    """
    problem = _shape_problem(calls)
    if problem:
        return _wrong(problem)
    if "irrelevance" in category:
        return CheckResult(not calls, "" if not calls else "no call was right, but one was made")
    if category in ANY_CALL_CATEGORIES:
        return CheckResult(bool(calls), "" if calls else "a call was right, but none was made")
    predicted = [{call["name"]: call["arguments"]} for call in calls]
    checker, languages = _official()
    language = languages[LANGUAGES.get(category, "python").upper()]
    try:
        verdict = checker(
            list(question.functions), predicted, list(ground_truth), language, category, _MODEL
        )
    except (
        Exception
    ) as error:  # the checker assumes values of plausible shapes; others are wrong answers
        return _wrong(f"the checker cannot read these arguments ({type(error).__name__}: {error})")
    if verdict["valid"]:
        return CheckResult(True)
    return _wrong(f"{verdict['error_type']}: {'; '.join(map(str, verdict['error']))}")


def _wrong(reason: str) -> CheckResult:
    """Reasons quote predictions, which may be long and hold what is no Unicode; tables must be able
    to hold them."""
    reason = reason.encode("utf-8", "backslashreplace").decode("utf-8")
    return CheckResult(
        False, reason if len(reason) <= LONGEST_REASON else f"{reason[:LONGEST_REASON]}…"
    )


def reference_calls(ground_truth: Iterable[dict]) -> list[dict]:
    """The calls that an answer file describes: the first non-empty accepted value of every
    parameter, dicts inside values resolved alike, optional parameters left out whose only accepted
    value is ""."""
    calls = []
    for expected in ground_truth:
        ((name, parameters),) = expected.items()
        values = {key: _first(accepted) for key, accepted in parameters.items()}
        calls.append(
            {
                "name": name,
                "arguments": {key: value for key, value in values.items() if value is not _ABSENT},
            }
        )
    return calls


def accuracy_table(
    results: pd.DataFrame, *, resamples: int = 10_000, seed: int = 0
) -> pd.DataFrame:
    """Accuracy per category with Wilson intervals, and their unweighted mean, the row "macro".

    `results` has the columns `category` and `correct`. The mean's interval resamples questions
    within each category. There is no "overall" row: BFCL's overall score needs its multi-turn and
    agentic parts, which are not run here.
    """
    rows, means, draws = [], [], []
    for number, (category, part) in enumerate(results.groupby("category", sort=False)):
        correct = part["correct"].to_numpy(dtype=float)
        rows.append(
            {"category": category, "questions": len(part)}
            | wilson(correct.sum(), len(part)).columns("accuracy")
        )
        means.append(correct.mean())
        draws.append(resampled_sums(correct[:, None], resamples, seed + number)[:, 0] / len(part))
    if not rows:
        raise ValueError("no results: a table of accuracies needs at least one question")
    macro = estimate(float(np.mean(means)), np.mean(draws, axis=0))
    rows.append({"category": "macro", "questions": len(results)} | macro.columns("accuracy"))
    return pd.DataFrame(rows)


_ABSENT = object()


def _first(accepted: Any) -> Any:
    """First non-empty accepted value; `_ABSENT` where there is none."""
    for value in accepted:
        if value != "":
            return _resolved(value)
    return _ABSENT


def _resolved(value: Any) -> Any:
    """Accepted values inside a dict are lists of their own, except in a few deeply nested ones,
    which stand for themselves."""
    if isinstance(value, dict):
        chosen = {
            key: _first(a) if isinstance(a, list) else _resolved(a) for key, a in value.items()
        }
        return {key: inner for key, inner in chosen.items() if inner is not _ABSENT}
    if isinstance(value, list):
        return [_resolved(item) for item in value]
    return value


def _shape_problem(calls: Any) -> str:
    if not isinstance(calls, (list, tuple)):
        return f"the calls are {type(calls).__name__}, not a list"
    for call in calls:
        if not isinstance(call, Mapping):
            return f"a call is {type(call).__name__}, not an object with name and arguments"
        if not isinstance(call.get("name"), str):
            return "a call has no name"
        if not isinstance(call.get("arguments"), dict):
            return (
                f"the arguments of {call['name']} are {type(call.get('arguments')).__name__}, not"
                " an object"
            )
    return ""


def _package() -> Path:
    specification = importlib.util.find_spec("bfcl_eval")
    if specification is None:
        raise ModuleNotFoundError(
            "bfcl_eval is not installed: run `python run_all.py --install core`, or `pip install"
            f" --no-deps {PACKAGE}`"
        )
    return Path(next(iter(specification.submodule_search_locations)))


def _json_lines(path: Path) -> list[dict]:
    """BFCL's files end without a newline, so `alar.files` would take them for cut off."""
    return [
        json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()
    ]


_LOADING = threading.Lock()


@cache
def _official():
    """(ast_checker, Language) of the installed package; see the module's text for the stand-in."""
    _package()
    registry = "bfcl_eval.constants.model_config"
    stand_in = ModuleType(registry)
    stand_in.MODEL_CONFIG_MAPPING = {_MODEL: SimpleNamespace(underscore_to_dot=False)}
    specification = importlib.util.find_spec("bfcl_eval.eval_checker.ast_eval.ast_checker")
    module = importlib.util.module_from_spec(specification)
    with _LOADING:
        present = sys.modules.get(registry)
        sys.modules[registry] = stand_in
        try:
            specification.loader.exec_module(module)
        finally:
            if present is None:
                del sys.modules[registry]
            else:
                sys.modules[registry] = present
    return module.ast_checker, module.Language

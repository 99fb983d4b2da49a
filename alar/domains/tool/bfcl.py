"""The Berkeley Function Calling Leaderboard (BFCL v4): single-turn questions and official checker.

Both come from the package `bfcl_eval`, which is installed without its dependencies: their pins
conflict with everything here, and neither the data nor the AST checker needs them. One thing stands
in the way. The checker's module imports `bfcl_eval.constants.model_config`, a registry that imports
every vendor's client. All it needs there is one flag per model (`underscore_to_dot`: whether that
vendor's API forbids dots in function names). `_official` is the one place that deals with this. It
puts a stand-in for the registry, with that flag set to False, into `sys.modules`, executes a
private copy of the checker's module, and removes the stand-in again.

The checker raises on a few malformed predictions; here they are wrong answers.
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
PAPER_CATEGORIES = AST_CATEGORIES[:4]  # the paper reports their mean
NO_CALL_CATEGORIES = ("irrelevance", "live_irrelevance")  # the right answer calls nothing
ANY_CALL_CATEGORIES = ("live_relevance",)  # any call is right
# Every other category is Python.
LANGUAGES = {"simple_java": "java", "simple_javascript": "javascript"}
# What a model can be evaluated on here.
ASKED_CATEGORIES = (*AST_CATEGORIES, *NO_CALL_CATEGORIES, *ANY_CALL_CATEGORIES)
CATEGORIES = (*ASKED_CATEGORIES, *LANGUAGES)
LONGEST_REASON = 1000  # characters; tables hold reasons
_MODEL = "alar"  # our name in the stand-in registry; the checker rewrites names with underscores


@dataclass(frozen=True)
class BFCLQuestion:
    """One question. `functions` have BFCL's own type names.

    `ground_truth` has one {function: {parameter: [accepted …]}} per call. "" among the accepted
    values means that the parameter may be left out. It is None where no call is right, or any call.
    """

    id: str
    category: str
    messages: tuple[dict, ...]
    functions: tuple[dict, ...]
    ground_truth: tuple[dict, ...] | None


@dataclass(frozen=True)
class CheckResult:
    """`reason` says in the checker's words why a prediction is wrong. It is empty if correct."""

    correct: bool
    reason: str = ""


def load_category(name: str) -> list[BFCLQuestion]:
    """All questions of one single-turn category, in the file's order.

    Raises ValueError for an unknown category or for files that do not belong together, and
    ModuleNotFoundError without the package.
    """
    if name not in CATEGORIES:
        raise ValueError(f"unknown BFCL category {name!r}: expected one of {', '.join(CATEGORIES)}")
    folder = _package() / "data"
    questions = _json_lines(folder / f"BFCL_v4_{name}.json")
    if name in NO_CALL_CATEGORIES + ANY_CALL_CATEGORIES:
        answers = [None] * len(questions)  # BFCL has no answer files for these
    else:
        answers = _json_lines(folder / "possible_answer" / f"BFCL_v4_{name}.json")
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
        messages = tuple(question["question"][0])  # one list per turn; here there is one turn
        functions = tuple(question["function"])
        loaded.append(BFCLQuestion(question["id"], name, messages, functions, truth))
    return loaded


def check_calls(
    calls: Any, question: BFCLQuestion | Any, ground_truth: Sequence[dict] | None, category: str
) -> CheckResult:
    """The official verdict on the calls of one turn: [{"name": str, "arguments": dict}, …].

    Only the `.functions` of `question` are used. `category` decides the comparison, as in BFCL: a
    name with "parallel" allows any order, the irrelevance categories want no call at all, and
    "live_relevance" wants any call. Odd calls never make it raise.
    """
    problem = _shape_problem(calls)
    if problem:
        return _wrong(problem)
    # The AST checker knows neither of these two kinds of categories.
    if "irrelevance" in category:
        return CheckResult(not calls, "" if not calls else "no call was right, but one was made")
    if category in ANY_CALL_CATEGORIES:
        return CheckResult(bool(calls), "" if calls else "a call was right, but none was made")
    predicted = [{call["name"]: call["arguments"]} for call in calls]  # BFCL's form of a call
    functions, accepted = list(question.functions), list(ground_truth)
    checker, languages = _official()
    language = languages[LANGUAGES.get(category, "python").upper()]
    try:
        verdict = checker(functions, predicted, accepted, language, category, _MODEL)
    except Exception as error:
        # The checker assumes values of plausible shapes; others are wrong answers.
        return _wrong(f"the checker cannot read these arguments ({type(error).__name__}: {error})")
    if verdict["valid"]:
        return CheckResult(True)
    return _wrong(f"{verdict['error_type']}: {'; '.join(map(str, verdict['error']))}")


def _wrong(reason: str) -> CheckResult:
    """A result that a table can hold: a reason may quote long predictions and invalid Unicode."""
    reason = reason.encode("utf-8", "backslashreplace").decode("utf-8")
    if len(reason) > LONGEST_REASON:
        reason = f"{reason[:LONGEST_REASON]}…"
    return CheckResult(False, reason)


def reference_calls(ground_truth: Iterable[dict]) -> list[dict]:
    """The calls that an answer file describes.

    Every parameter gets its first non-empty accepted value, and so does every key of a dict inside
    a value. Parameters and keys whose only accepted value is "" are left out.
    """
    calls = []
    for expected in ground_truth:
        ((name, parameters),) = expected.items()  # one function per call
        calls.append({"name": name, "arguments": _first_values(parameters)})
    return calls


def _first_values(accepted: Mapping[str, Any]) -> dict:
    """The first non-empty accepted value of every key that has one."""
    chosen = {}
    for key, values in accepted.items():
        if not isinstance(values, list):  # a few deeply nested values stand for themselves
            chosen[key] = _resolved(values)
            continue
        found = [value for value in values if value != ""]
        if found:
            chosen[key] = _resolved(found[0])
    return chosen


def _resolved(value: Any) -> Any:
    if isinstance(value, dict):
        return _first_values(value)
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
        arguments = call.get("arguments")
        if not isinstance(arguments, dict):
            kind = type(arguments).__name__
            return f"the arguments of {call['name']} are {kind}, not an object"
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
    """The rows of a file. BFCL's end without a newline; `alar.files` would call them cut off."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.strip()]


_LOADING = threading.Lock()  # `sys.modules` belongs to all threads


@cache
def _official():
    """(ast_checker, Language) of the installed package. The top of this module says how."""
    _package()  # raises the error that says how to install it
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
            # Whoever has the true registry loaded gets it back.
            if present is None:
                del sys.modules[registry]
            else:
                sys.modules[registry] = present
    return module.ast_checker, module.Language

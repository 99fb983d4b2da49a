"""BFCL as the paper's numbers were made: the check of the released evaluation, which is no BFCL's.

The official checker (`alar.domains.tool.bfcl`) alone rewards and decides. This verdict stands
beside it in tables of BFCL's questions, so that published accuracies have a counterpart. The rules
are those of `tool/evaluate_vllm.py` in the released ALAR code:

- Only the calls count, whatever is written around them, and their order is free in every category.
- Arguments that the answer does not know are ignored; official: wrong.
- Numbers compare by value, so 5.0 passes for 5 (official: wrong), and lists in any order.
- Texts must be equal but for blanks at their ends; official: case and punctuation are forgiven.
- A dict must equal the answer's, which holds lists of accepted values where a call has the values.
  So every right dict argument is rejected, but an empty one.
- A parameter for which no value is listed has to be given, with any value.

It crashes on a call that is no object, such as `[1]` or `null`, and on odd arguments; here such an
answer is wrong. It also counts calls inside a reasoning block, which no record of ours holds apart.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import Any

from alar.domains.tool.protocol import CALL_CLOSE, CALL_OPEN
from alar.domains.tool.requests import request_of
from alar.records import Trajectory

_CALL = re.compile(f"{CALL_OPEN}(.*?){CALL_CLOSE}", re.DOTALL)
_TRIED = 6  # up to so many calls every order is tried; with more, each answer takes the first match


def published_verdict(trajectory: Trajectory) -> bool | None:
    """Whether the calls of the one turn are right by the released check. Never raises on odd calls.

    None where that check was never used: questions that are not BFCL's, and its categories in which
    no call, or any call, is right.
    """
    question = trajectory.question
    truth = request_of(question).truth if question.world == "bfcl" else None
    if truth is None:
        return None
    if not trajectory.turns:
        return False
    # A turn that was cut, or has text around its calls, still has them in its argument.
    calls = _written_calls(trajectory.turns[0].argument)
    try:
        return calls is not None and published_match(calls, truth[0])
    except (OverflowError, RecursionError):  # an integer beyond any float; nested too deeply
        return False


def published_match(calls: Sequence[Mapping[str, Any]], accepted: Sequence[dict]) -> bool:
    """The released verdict on calls, {"name", "arguments"} each, against BFCL's ground truth.

    `accepted` has one {function: {parameter: [accepted …]}} for each expected call.
    """
    if len(calls) != len(accepted):
        return False
    # fits[i][j]: call i matches answer j
    fits = [[_matches(call, answer) for answer in accepted] for call in calls]
    places = range(len(calls))
    if len(calls) <= _TRIED:
        return any(all(fits[i][j] for i, j in zip(places, order)) for order in permutations(places))
    free = list(places)
    for answer in places:
        taken = next((call for call in free if fits[call][answer]), None)
        if taken is None:
            return False
        free.remove(taken)
    return True


def _written_calls(text: str) -> list[dict] | None:
    """The calls in a text; one that is not JSON has no name. None where the released code stops."""
    calls = []
    for body in _CALL.findall(text):
        try:
            call = json.loads(body)
        except (ValueError, RecursionError):
            call = {}
        if not isinstance(call, dict):
            return None
        calls.append({"name": call.get("name"), "arguments": call.get("arguments")})
    return calls


def _matches(call: Mapping[str, Any], answer: dict) -> bool:
    ((name, parameters),) = answer.items()  # one function per call
    if call["name"] != name:
        return False
    # Missing arguments and null count as none.
    given = call["arguments"] if isinstance(call["arguments"], dict) else {}
    for key, values in parameters.items():
        if key not in given and "" not in values:  # "" among the accepted: may be left out
            return False
        if key in given and values and not _among(given[key], values):
            return False
    return True


def _among(value: Any, accepted: Sequence[Any]) -> bool:
    plain = _plain(value)
    for candidate in accepted:
        if candidate == "":  # the mark of an optional parameter, not a value
            continue
        if _plain(candidate) == plain:
            return True
        if isinstance(candidate, list) and isinstance(value, list):
            if _sorted(candidate) is not None and _sorted(candidate) == _sorted(value):
                return True
    return False


def _plain(value: Any) -> tuple:
    """The value with its kind, so that True is not 1 but 5.0 is 5."""
    if isinstance(value, bool):
        return "bool", value
    if isinstance(value, int | float):
        return "number", float(value)
    if isinstance(value, str):
        return "text", value.strip()
    if isinstance(value, list):
        return "list", [_plain(item) for item in value]
    if isinstance(value, dict):
        return "dict", {key: _plain(item) for key, item in value.items()}
    return ("null",)


def _sorted(values: list) -> list | None:
    """Plain values in order; None where they have none, as dicts."""
    try:
        return sorted(_plain(value) for value in values)
    except TypeError:
        return None

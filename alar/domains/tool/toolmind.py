"""ToolMind (`Nanbeige/ToolMind` on the hub): rows of {conversations, tools} as requests.

The published rows have some habits:

- Rows are prefixes of one another, one per assistant turn. So splits keep all rows of one (first
  user message, tools) together.
- Functions come wrapped once or twice ({"type": "function", "function": {…}}), with `arguments` for
  `parameters`, with the types `str`, `int` and `dict`, and with spaces in their names, which a call
  cannot have.
- `tool_calls` are {"function": {"name", "arguments"}}. The arguments are an object or JSON text.
- Several responses may follow one turn of calls. All of them are kept.
- A conversation may end in calls that nobody answered. They are what its last turn should make.

A row becomes one request: its history up to the last turn of calls, and those calls as the truth.
With `whole` it becomes its last episode instead: the history up to the last user message, and all
turns of calls that follow, with their responses. Rows that cannot be read are counted by reason.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from alar.domains.tool.protocol import calls_text, responses_text
from alar.domains.tool.requests import ToolRequest

SUCCESS = 1.5  # `dense_score` of a full match; teacher rollouts below it are dropped
SPLITS = (("test", 0.05), ("validation", 0.05))  # shares; the rest is for training


class UnreadableRow(ValueError):
    """A row that is not a conversation with functions and calls. The text says why."""


@dataclass(frozen=True)
class ToolMindRow:
    """One row. A split keeps rows of one `group` together; `expected` are the last turn's calls.

    `responses` are (call, response) of the request's own turns of calls, if somebody answered them.
    Only whole episodes have any.
    """

    id: str  # hash of history and functions
    group: str  # hash of first user message and functions
    request: ToolRequest
    expected: tuple[dict, ...]
    responses: tuple[tuple[dict, str], ...] = ()


@dataclass
class Loaded:
    rows: list[ToolMindRow] = field(default_factory=list)
    skipped: Counter = field(default_factory=Counter)  # reason → rows


def load_rows(
    records: Iterable[dict],
    *,
    whole: bool = False,
    wanted: Callable[[ToolMindRow], bool] = lambda row: True,
) -> Loaded:
    """The wanted requests of all rows that can be read.

    Of rows that ask for the same thing after the same history, it keeps one: the first, or of whole
    episodes the longest.
    """
    kept: dict[str, ToolMindRow] = {}  # row id → row
    skipped: Counter = Counter()
    for record in records:
        try:
            row = read_row(record, whole=whole)
        except UnreadableRow as problem:
            skipped[str(problem)] += 1
            continue
        except RecursionError:  # one odd row must not end the reading of all others
            skipped["nested too deeply"] += 1
            continue
        if not wanted(row):
            continue
        # Without `whole`, all rows of one id have the same size, so the first one stays.
        if row.id in kept:
            skipped["the same request as another row"] += 1
        if row.id not in kept or _size(row) > _size(kept[row.id]):
            kept[row.id] = row
    return Loaded(list(kept.values()), skipped)


def _size(row: ToolMindRow) -> tuple[int, int]:
    return len(row.request.truth), len(row.responses)  # turns of calls, responses


def read_row(record: dict, *, whole: bool = False) -> ToolMindRow:
    """The request of one record. Raises UnreadableRow."""
    functions = tuple(read_function(tool) for tool in _list(record.get("tools"), "tools"))
    messages = _list(record.get("conversations"), "conversations")
    if not functions:
        raise UnreadableRow("no functions")
    turns = []  # places of the messages that call
    for place, message in enumerate(messages):
        if _role(message) == "assistant" and message.get("tool_calls"):
            turns.append(place)
    if not turns:
        raise UnreadableRow("no calls")
    names = {function["name"] for function in functions}
    if len(names) < len(functions):
        raise UnreadableRow("two functions with one name")
    # places of user messages
    asked = [n for n in range(turns[-1]) if messages[n]["role"] == "user"]
    if not asked:
        raise UnreadableRow("no user message")
    # those that the request is about
    turns = [n for n in turns if n > asked[-1]] if whole else turns[-1:]
    expected = [tuple(_calls(messages[n])) for n in turns]
    if not all(expected):
        raise UnreadableRow("no calls")
    if {call["name"] for turn in expected for call in turn} - names:
        raise UnreadableRow("a call of a function that is not offered")
    end = asked[-1] + 1 if whole else turns[0]  # the history ends before this message
    history = tuple(_history(messages[:end]))
    first = next(message["content"] for message in history if message["role"] == "user")
    truth = tuple(tuple(map(_truth, turn)) for turn in expected)
    if len(truth) > 1:
        category = "multi_turn"
    else:
        category = "multiple" if len(truth[0]) == 1 else "parallel_multiple"  # BFCL's names
    _digest(expected)  # raises for text that cannot be stored
    request = ToolRequest(history, functions, truth, category)
    responses = _responses(messages, turns, expected) if whole else ()
    identity, group = _digest([history, functions]), _digest([first, functions])
    return ToolMindRow(identity, group, request, expected[-1], responses)


def read_function(tool: Any) -> dict:
    """The function in BFCL's form, unwrapped, with a usable name. Raises UnreadableRow."""
    for _ in range(2):  # some are wrapped twice
        if isinstance(tool, dict) and isinstance(tool.get("function"), dict):
            tool = tool["function"]
    name = tool.get("name") if isinstance(tool, dict) else None
    name = usable_name(name) if isinstance(name, str) else ""
    if not name:
        raise UnreadableRow("a function without a name")
    given = tool.get("parameters", tool.get("arguments"))
    given = given if isinstance(given, dict) else {}
    if "properties" not in given and all(isinstance(value, dict) for value in given.values()):
        given = {"properties": given}  # the parameters came without a schema around them
    properties, required = given.get("properties"), given.get("required")
    if not isinstance(properties, dict):
        properties = {}
    if not isinstance(required, list):
        required = []
    parameters = {
        "type": "dict",
        "properties": {key: _schema(value) for key, value in properties.items()},
        "required": [key for key in properties if key in required],
    }
    description = str(tool.get("description") or "")
    return {"name": name, "description": description, "parameters": parameters}


def usable_name(name: str) -> str:
    """A name that a call can have: "Get weather (v2)" becomes "Get_weather_v2"."""
    return re.sub(r"[^\w.-]+", "_", name.strip()).strip("_")


def split_of_row(row: ToolMindRow) -> str:
    """The split of a row: "train", "validation" or "test". Rows of one group have the same."""
    # The group is a hash. Its first 8 digits are a place in [0, 1) that never changes.
    place, edge = int(row.group[:8], 16) / 16**8, 0.0
    for name, share in SPLITS:
        edge += share
        if place < edge:
            return name
    return "train"


def dense_score(calls: Sequence[dict], expected: Sequence[dict]) -> float:
    """ToolMind's score of a teacher's turn, from −0.2 to 1.5.

    It is correct calls over expected ones, plus 0.5 if all match, minus 0.2 otherwise. So 1.5 is a
    full match. Calls match in any order, each at most once. A call matches when it has the expected
    name and every expected argument with the same value after `coerced`. Further arguments do not
    count against it. If no call is expected, no call is right.
    """
    if not expected:
        return 1.5 if not calls else -0.2
    # Greedy: each expected call takes the first one left that matches.
    left, matched = list(calls), 0
    for wanted in expected:
        found = next((n for n, call in enumerate(left) if _matches(call, wanted)), None)
        if found is not None:
            left.pop(found)
            matched += 1
    complete = matched == len(expected) == len(calls)
    return matched / len(expected) + (0.5 if complete else -0.2)


def coerced(value: Any) -> Any:
    """The same value for all values that JSON writers mix up. Upper and lower case stay different.

    5.0, "5" and 5 become equal, and so do "true" and True, '["a"]' and ["a"].
    """
    if isinstance(value, str):
        try:
            inner = json.loads(value)
        except (ValueError, RecursionError):
            return value.strip()  # plain text
        return inner.strip() if isinstance(inner, str) else coerced(inner)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: coerced(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [coerced(inner) for inner in value]
    return value


def _matches(call: dict, wanted: dict) -> bool:
    if not isinstance(call, dict) or call.get("name") != wanted["name"]:
        return False
    arguments = call.get("arguments")
    if not isinstance(arguments, dict):
        return False
    for key, value in wanted["arguments"].items():
        if key not in arguments or not _same(arguments[key], value):
            return False
    return True


def _same(a: Any, b: Any) -> bool:
    """Equality of the JSON texts, where True is not 1. False for values nested too deeply."""
    try:
        return json.dumps(coerced(a), sort_keys=True) == json.dumps(coerced(b), sort_keys=True)
    except RecursionError:
        return False


def _truth(call: dict) -> dict:
    """A call as BFCL's ground truth has it: every argument with one accepted value."""
    return {call["name"]: {key: [_accepted(value)] for key, value in call["arguments"].items()}}


def expected_calls(truth: Sequence[dict]) -> list[dict]:
    """The calls from which `_truth` made the ground truth of a row.

    `bfcl.reference_calls` would take a list among the arguments for a list of choices.
    """
    calls = []
    for call in truth:
        for name, arguments in call.items():
            plain = {key: _plain(values[0]) for key, values in arguments.items()}
            calls.append({"name": name, "arguments": plain})
    return calls


def _plain(value: Any) -> Any:
    """The inverse of `_accepted`."""
    if isinstance(value, dict):
        return {key: "" if inner == [" "] else inner[0] for key, inner in value.items()}
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return [_plain(item) for item in value]
    return value


def _accepted(value: Any) -> Any:
    """An accepted value as BFCL writes it.

    Inside a dict, or a list of dicts, every value is again a list of accepted values. There an
    empty text would mean that the key may be left out. So a blank stands for it: the checker
    compares texts without blanks, and a blank equals an empty text.
    """
    if isinstance(value, dict):
        return {key: [" "] if inner == "" else [inner] for key, inner in value.items()}
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return [_accepted(item) for item in value]
    return value


def _schema(schema: Any) -> dict:
    if not isinstance(schema, dict):
        return {"type": "string"}
    # What BFCL's schemas have; everything else would only lengthen the prompt.
    kept = ("type", "description", "enum", "default", "items", "properties")
    fixed = {key: schema[key] for key in kept if key in schema}
    kind = fixed.get("type")
    fixed["type"] = _TYPES.get(kind, "string") if isinstance(kind, str) else "string"
    if fixed["type"] == "array":
        fixed["items"] = _schema(fixed.get("items"))  # a list that does not say has texts
    if isinstance(fixed.get("properties"), dict):
        fixed["properties"] = {key: _schema(value) for key, value in fixed["properties"].items()}
    return fixed


# The type names that BFCL's checker knows, each with ToolMind's names that mean the same.
_NAMES = {
    "string": "string str",
    "integer": "integer int",
    "float": "float number double",
    "boolean": "boolean bool",
    "array": "array list tuple set",
    "dict": "dict object",
    "any": "any",
}
# ToolMind's name → BFCL's
_TYPES = {name: kind for kind, names in _NAMES.items() for name in names.split()}


def _history(messages: Sequence[dict]) -> Iterable[dict]:
    """Messages as the template writes them.

    Earlier calls become text, and all responses to one turn become one user message.
    """
    responses: list[str] = []  # those of the turn of calls that was read last
    for message in messages:
        role = _role(message)
        if role != "tool" and responses:
            yield {"role": "user", "content": responses_text(responses)}
            responses = []
        if role == "tool":
            responses.append(_content(message))
        elif role == "assistant" and message.get("tool_calls"):
            parts = [_content(message), calls_text(_calls(message))]
            yield {"role": "assistant", "content": "\n".join(filter(None, parts))}
        else:
            yield {"role": role, "content": _content(message)}
    if responses:  # the history may end in responses
        yield {"role": "user", "content": responses_text(responses)}


def _responses(
    messages: Sequence[dict], turns: Sequence[int], calls: Sequence[Sequence[dict]]
) -> tuple[tuple[dict, str], ...]:
    """(call, response) of all turns of calls. Nobody may have answered the last turn.

    Raises UnreadableRow if it is not clear which response belongs to which call.
    """
    answered: dict[str, tuple[dict, str]] = {}  # call key → (call, response)
    for turn, made in zip(turns, calls):
        following = takewhile(lambda message: message["role"] == "tool", messages[turn + 1 :])
        texts = [_content(message) for message in following]
        if len(texts) != len(made) and (texts or turn != turns[-1]):
            raise UnreadableRow("not as many responses as calls in a turn")
        for call, text in zip(made, texts):
            if answered.setdefault(call_key(call), (call, text))[1] != text:
                raise UnreadableRow("one call with two different responses")
    return tuple(answered.values())


def call_key(call: dict) -> str:
    """A text that is equal for calls of one function with the same arguments after `coerced`."""
    return json.dumps([call["name"], coerced(call["arguments"])], sort_keys=True)


def _calls(message: dict) -> list[dict]:
    calls = []
    for entry in _list(message["tool_calls"], "tool_calls"):
        call = entry.get("function", entry) if isinstance(entry, dict) else None
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise UnreadableRow("a call without a name")
        arguments = call.get("arguments")
        if isinstance(arguments, str):
            arguments = _json(arguments, "arguments of a call")
        if not isinstance(arguments, dict):
            raise UnreadableRow("arguments of a call are no object")
        calls.append({"name": usable_name(call["name"]), "arguments": arguments})
    return calls


def _role(message: Any) -> str:
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("system", "user", "assistant", "tool"):
        raise UnreadableRow("a message without a known role")
    return role


def _content(message: dict) -> str:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""  # None beside tool calls
    return json.dumps(content, ensure_ascii=False)


def _list(value: Any, name: str) -> list:
    # some lists are written as JSON text
    value = _json(value, name) if isinstance(value, str) else value
    if not isinstance(value, list):
        raise UnreadableRow(f"{name} are no list")
    return value


def _json(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise UnreadableRow(f"{name}: not JSON") from None


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    try:
        return hashlib.sha256(text.encode()).hexdigest()[:16]
    except UnicodeEncodeError:  # JSON can escape half of a surrogate pair; no tokenizer reads it
        raise UnreadableRow("text that is no Unicode") from None

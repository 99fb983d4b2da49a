"""ToolMind (`Nanbeige/ToolMind` on the hub): rows of {conversations, tools} as requests of the tool
domain.

What the published rows need, and get here:

- rows are prefixes of one another, one per assistant turn, so splits keep (first user message,
tools) together; - functions come wrapped once or twice ({"type": "function", "function": {…}}),
with `arguments` for `parameters`, with the
  types `str`, `int` and `dict`, and with spaces in their names, which a call cannot have;
- `tool_calls` are {"function": {"name", "arguments"}} with arguments as an object or as JSON text;
- several responses may follow one turn of calls: all are kept;
- a conversation may end in calls that nobody answered: they are what its last turn should call.

A row becomes one request: its history up to the last turn of calls, and those calls as the truth.
With `whole` it becomes its last episode instead: the history up to the last user message, and all
turns of calls that follow, with their responses. Rows that cannot be read are counted by reason,
never guessed at.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from alar.domains.tool.protocol import calls_text, responses_text
from alar.domains.tool.requests import ToolRequest

SUCCESS = 1.5  # teacher rollouts with at least this score are kept
SPLITS = (("test", 0.05), ("validation", 0.05))  # shares; the rest is for training


class UnreadableRow(ValueError):
    """A row that is no conversation with functions and calls; the text says why."""


@dataclass(frozen=True)
class ToolMindRow:
    """`group` is what a split must keep together; `expected` are the calls that the last turn
    should make.

    `responses` are (call, response) of the request's own turns of calls, those with an answer; only
    whole episodes have any.
    """

    id: str
    group: str
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
    """The wanted requests of all rows that can be read. Of rows that ask for the same thing after
    the same history, one is kept: the first, or the longest of whole episodes."""
    kept: dict[str, ToolMindRow] = {}
    skipped: Counter = Counter()
    for record in records:
        try:
            row = read_row(record, whole=whole)
        except (UnreadableRow, RecursionError) as problem:
            skipped[
                "nested too deeply" if isinstance(problem, RecursionError) else str(problem)
            ] += 1
            continue
        if not wanted(row):
            continue
        if row.id in kept:
            skipped["the same request as another row"] += 1
        if row.id not in kept or _size(row) > _size(kept[row.id]):
            kept[row.id] = row
    return Loaded(list(kept.values()), skipped)


def _size(row: ToolMindRow) -> tuple[int, int]:
    return len(row.request.truth), len(row.responses)


def read_row(record: dict, *, whole: bool = False) -> ToolMindRow:
    """One row. Raises UnreadableRow."""
    functions = tuple(read_function(tool) for tool in _list(record.get("tools"), "tools"))
    messages = _list(record.get("conversations"), "conversations")
    if not functions:
        raise UnreadableRow("no functions")
    turns = [
        n
        for n, message in enumerate(messages)
        if _role(message) == "assistant" and message.get("tool_calls")
    ]
    if not turns:
        raise UnreadableRow("no calls")
    names = {function["name"] for function in functions}
    if len(names) < len(functions):
        raise UnreadableRow("two functions with one name")
    asked = [n for n in range(turns[-1]) if messages[n]["role"] == "user"]
    if not asked:
        raise UnreadableRow("no user message")
    turns = [n for n in turns if n > asked[-1]] if whole else turns[-1:]
    expected = [tuple(_calls(messages[n])) for n in turns]
    if not all(expected):
        raise UnreadableRow("no calls")
    if {call["name"] for turn in expected for call in turn} - names:
        raise UnreadableRow("a call of a function that is not offered")
    history = tuple(_history(messages[: asked[-1] + 1 if whole else turns[0]]))
    first = next(message["content"] for message in history if message["role"] == "user")
    truth = tuple(tuple(_truth(call) for call in turn) for turn in expected)
    category = (
        "multi_turn"
        if len(truth) > 1
        else "multiple"
        if len(truth[0]) == 1
        else "parallel_multiple"
    )
    _digest(expected)  # of text, as all that is stored
    request = ToolRequest(history, functions, truth, category)
    responses = _responses(messages, turns, expected) if whole else ()
    return ToolMindRow(
        _digest([history, functions]), _digest([first, functions]), request, expected[-1], responses
    )


def read_function(tool: Any) -> dict:
    """A function in BFCL's form, unwrapped, with a usable name, `parameters`, `properties` and
    `required`."""
    for _ in range(2):
        if isinstance(tool, dict) and isinstance(tool.get("function"), dict):
            tool = tool["function"]
    if (
        not isinstance(tool, dict)
        or not isinstance(tool.get("name"), str)
        or not usable_name(tool["name"])
    ):
        raise UnreadableRow("a function without a name")
    parameters = tool.get("parameters", tool.get("arguments"))
    parameters = parameters if isinstance(parameters, dict) else {}
    if "properties" not in parameters and all(
        isinstance(value, dict) for value in parameters.values()
    ):
        parameters = {
            "properties": parameters
        }  # the parameters themselves, without a schema around them
    properties = parameters.get("properties")
    properties = (
        {k: _schema(v) for k, v in properties.items()} if isinstance(properties, dict) else {}
    )
    required = parameters.get("required")
    required = (
        [name for name in properties if name in required] if isinstance(required, list) else []
    )
    return {
        "name": usable_name(tool["name"]),
        "description": str(tool.get("description") or ""),
        "parameters": {"type": "dict", "properties": properties, "required": required},
    }


def usable_name(name: str) -> str:
    """Names that a call can have: "Get weather (v2)" becomes "Get_weather_v2"."""
    return re.sub(r"[^\w.-]+", "_", name.strip()).strip("_")


def split_of_row(row: ToolMindRow) -> str:
    """ "train", "validation" or "test", the same for all rows of one (first user message,
    functions)."""
    place, edge = int(row.group[:8], 16) / 16**8, 0.0
    for name, share in SPLITS:
        edge += share
        if place < edge:
            return name
    return "train"


def dense_score(calls: Sequence[dict], expected: Sequence[dict]) -> float:
    """ToolMind's score of a teacher's turn: correct calls over expected ones, + 0.5 if all match, −
    0.2 otherwise.

    Calls match in any order, each at most once. A call matches when it has the expected name and
    every expected argument with the same value after `coerced`; further arguments do not count
    against it. 1.5 is a full match. Without expected calls, none is right.
    """
    if not expected:
        return 1.5 if not calls else -0.2
    left, matched = list(calls), 0
    for wanted in expected:
        found = next((n for n, call in enumerate(left) if _matches(call, wanted)), None)
        if found is not None:
            left.pop(found)
            matched += 1
    complete = matched == len(expected) == len(calls)
    return matched / len(expected) + (0.5 if complete else -0.2)


def coerced(value: Any) -> Any:
    """Values that JSON writers mix up become equal: 5.0 and "5" and 5, "true" and True, '["a"]' and
    ["a"]; case is kept."""
    if isinstance(value, str):
        try:
            inner = json.loads(value)
        except (ValueError, RecursionError):
            return value.strip()
        return coerced(inner) if not isinstance(inner, str) else inner.strip()
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: coerced(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [coerced(inner) for inner in value]
    return value


def _matches(call: dict, wanted: dict) -> bool:
    if (
        not isinstance(call, dict)
        or call.get("name") != wanted["name"]
        or not isinstance(call.get("arguments"), dict)
    ):
        return False
    arguments = call["arguments"]
    return all(
        key in arguments and _same(arguments[key], value)
        for key, value in wanted["arguments"].items()
    )


def _same(a: Any, b: Any) -> bool:
    """Equality by JSON text, for which True is not 1; False for what is nested too deeply."""
    try:
        return json.dumps(coerced(a), sort_keys=True) == json.dumps(coerced(b), sort_keys=True)
    except RecursionError:
        return False


def _truth(call: dict) -> dict:
    """A call as BFCL's ground truth has it."""
    return {call["name"]: {key: [_accepted(value)] for key, value in call["arguments"].items()}}


def expected_calls(truth: Sequence[dict]) -> list[dict]:
    """The calls behind the ground truth of a row; `bfcl.reference_calls` would take lists that they
    hold for lists of choices."""
    return [{"name": name, "arguments": {key: _plain(values[0]) for key, values in arguments.items()}}
            for call in truth for name, arguments in call.items()]  # fmt: skip


def _plain(value: Any) -> Any:
    """What `_accepted` was made of."""
    if isinstance(value, dict):
        return {key: "" if inner == [" "] else inner[0] for key, inner in value.items()}
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return [_plain(item) for item in value]
    return value


def _accepted(value: Any) -> Any:
    """An accepted value as BFCL writes it: inside a dict, or a list of dicts, every value is a list
    of accepted ones again.

    There an empty text would say that the key may be left out; a blank does not, and equals it:
    texts compare without blanks.
    """
    if isinstance(value, dict):
        return {key: [" "] if inner == "" else [inner] for key, inner in value.items()}
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return [_accepted(item) for item in value]
    return value


def _schema(schema: Any) -> dict:
    if not isinstance(schema, dict):
        return {"type": "string"}
    kept = ("type", "description", "enum", "default", "items", "properties")
    fixed = {key: schema[key] for key in kept if key in schema}
    kind = fixed.get("type")
    fixed["type"] = _TYPES.get(kind, kind) if isinstance(kind, str) else "string"
    if fixed["type"] not in _TYPES.values():
        fixed["type"] = "string"
    if fixed["type"] == "array":
        fixed["items"] = _schema(fixed.get("items"))
    if isinstance(fixed.get("properties"), dict):
        fixed["properties"] = {key: _schema(value) for key, value in fixed["properties"].items()}
    return fixed


# To BFCL's names, which its checker knows.
_TYPES = {
    "str": "string",
    "string": "string",
    "int": "integer",
    "integer": "integer",
    "float": "float",
    "number": "float",
    "double": "float",
    "bool": "boolean",
    "boolean": "boolean",
    "list": "array",
    "array": "array",
    "tuple": "array",
    "set": "array",
    "dict": "dict",
    "object": "dict",
    "any": "any",
}


def _history(messages: Sequence[dict]) -> Iterable[dict]:
    """Messages as the template writes them: earlier calls as text, all responses to one turn as one
    user message."""
    responses: list[str] = []
    for message in messages:
        role = _role(message)
        if role != "tool" and responses:
            yield {"role": "user", "content": responses_text(responses)}
            responses = []
        if role == "tool":
            responses.append(_content(message))
        elif role == "assistant" and message.get("tool_calls"):
            calls = calls_text(_calls(message))
            yield {
                "role": "assistant",
                "content": "\n".join(filter(None, [_content(message), calls])),
            }
        else:
            yield {"role": role, "content": _content(message)}
    if responses:
        yield {"role": "user", "content": responses_text(responses)}


def _responses(
    messages: Sequence[dict], turns: Sequence[int], calls: Sequence[Sequence[dict]]
) -> tuple[tuple[dict, str], ...]:
    """(call, response) of each turn of calls; the last turn may be unanswered. Raises UnreadableRow
    where one cannot tell."""
    answered: dict[str, tuple[dict, str]] = {}
    for turn, made in zip(turns, calls):
        texts = []
        while (
            turn + 1 + len(texts) < len(messages)
            and messages[turn + 1 + len(texts)]["role"] == "tool"
        ):
            texts.append(_content(messages[turn + 1 + len(texts)]))
        if len(texts) != len(made) and (texts or turn != turns[-1]):
            raise UnreadableRow("not as many responses as calls in a turn")
        for call, text in zip(made, texts):
            if answered.setdefault(call_key(call), (call, text))[1] != text:
                raise UnreadableRow("one call with two different responses")
    return tuple(answered.values())


def call_key(call: dict) -> str:
    """Equal for calls of one function with the same arguments after `coerced`."""
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
    return (
        content
        if isinstance(content, str)
        else ""
        if content is None
        else json.dumps(content, ensure_ascii=False)
    )


def _list(value: Any, name: str) -> list:
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
    except UnicodeEncodeError:  # JSON may escape half of a surrogate pair, which no tokenizer takes
        raise UnreadableRow("text that is no Unicode") from None

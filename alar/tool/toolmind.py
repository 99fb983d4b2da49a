"""ToolMind (`Nanbeige/ToolMind` on the hub): rows of {conversations, tools} as requests of the tool domain.

What the published rows need, and get here:

- rows are prefixes of one another, one per assistant turn, so splits keep (first user message, tools) together;
- functions come wrapped once or twice ({"type": "function", "function": {…}}), with `arguments` for `parameters`, with the
  types `str`, `int` and `dict`, and with spaces in their names, which a call cannot have;
- `tool_calls` are {"function": {"name", "arguments"}} with arguments as an object or as JSON text;
- several responses may follow one turn of calls: all are kept;
- a conversation may end in calls that nobody answered: they are what its last turn should call.

A row becomes one request: its history up to the last turn of calls, and those calls as the truth. Rows that cannot be read are
counted by reason, never guessed at.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Iterable, Sequence

from alar.jsonl import read_jsonl
from alar.records import Question
from alar.tool.protocol import calls_text, responses_text
from alar.tool.requests import Request

SUCCESS = 1.5  # teacher rollouts with at least this score are kept
SPLITS = (("test", 0.05), ("validation", 0.05))  # shares; the rest is for training


class UnreadableRow(ValueError):
    """A row that is no conversation with functions and calls; the text says why."""


@dataclass(frozen=True)
class ToolMindRow:
    """`group` is what a split must keep together; `expected` are the calls that the last turn should make."""

    id: str
    group: str
    request: Request
    expected: tuple[dict, ...]


@dataclass
class Loaded:
    rows: list[ToolMindRow] = field(default_factory=list)
    skipped: Counter = field(default_factory=Counter)  # reason → rows


def load_rows(records: Iterable[dict]) -> Loaded:
    """Requests of all rows that can be read. Of rows that ask for the same thing after the same history, one is kept."""
    loaded, seen = Loaded(), set()
    for record in records:
        try:
            row = read_row(record)
        except UnreadableRow as problem:
            loaded.skipped[str(problem)] += 1
            continue
        if row.id in seen:
            loaded.skipped["the same request as another row"] += 1
            continue
        seen.add(row.id)
        loaded.rows.append(row)
    return loaded


def load_questions(path: str | Path) -> list[Question]:
    """The requests of a JSON lines file's training split. Raises ValueError for a file without any."""
    loaded = load_rows(read_jsonl(path))
    found = [row.request.question(row.id, world="toolmind") for row in loaded.rows if split_of(row) == "train"]
    if not found:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in loaded.skipped.most_common(3))
        raise ValueError(f"{path}: no request to train on; {len(loaded.rows)} rows could be read ({reasons or 'none was skipped'})")
    return found


def read_row(record: dict) -> ToolMindRow:
    """One row. Raises UnreadableRow."""
    functions = tuple(read_function(tool) for tool in _list(record.get("tools"), "tools"))
    messages = _list(record.get("conversations"), "conversations")
    if not functions:
        raise UnreadableRow("no functions")
    turns = [n for n, message in enumerate(messages) if _role(message) == "assistant" and message.get("tool_calls")]
    if not turns:
        raise UnreadableRow("no calls")
    names = {function["name"] for function in functions}
    expected = tuple(_calls(messages[turns[-1]]))
    unknown = {call["name"] for call in expected} - names
    if unknown:
        raise UnreadableRow("a call of a function that is not offered")
    history = tuple(_history(messages[: turns[-1]]))
    if not any(message["role"] == "user" for message in history):
        raise UnreadableRow("no user message")
    first = next(message["content"] for message in history if message["role"] == "user")
    truth = (tuple({call["name"]: {k: [_accepted(v)] for k, v in call["arguments"].items()}} for call in expected),)
    category = "multiple" if len(expected) == 1 else "parallel_multiple"
    request = Request(history, functions, truth, category)
    return ToolMindRow(_digest([history, functions]), _digest([first, functions]), request, expected)


def read_function(tool: Any) -> dict:
    """A function in BFCL's form, unwrapped, with a usable name, `parameters`, `properties` and `required`."""
    for _ in range(2):
        if isinstance(tool, dict) and isinstance(tool.get("function"), dict):
            tool = tool["function"]
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str) or not tool["name"].strip():
        raise UnreadableRow("a function without a name")
    parameters = tool.get("parameters", tool.get("arguments"))
    parameters = parameters if isinstance(parameters, dict) else {}
    if "properties" not in parameters and all(isinstance(value, dict) for value in parameters.values()):
        parameters = {"properties": parameters}  # the parameters themselves, without a schema around them
    properties = parameters.get("properties")
    properties = {k: _schema(v) for k, v in properties.items()} if isinstance(properties, dict) else {}
    required = [name for name in parameters.get("required") or [] if name in properties]
    return {
        "name": usable_name(tool["name"]),
        "description": str(tool.get("description") or ""),
        "parameters": {"type": "dict", "properties": properties, "required": required},
    }


def usable_name(name: str) -> str:
    """Names that a call can have: "Get weather (v2)" becomes "Get_weather_v2"."""
    return re.sub(r"[^\w.-]+", "_", name.strip()).strip("_")


def split_of(row: ToolMindRow) -> str:
    """"train", "validation" or "test", the same for all rows of one (first user message, functions)."""
    place, edge = int(row.group[:8], 16) / 16**8, 0.0
    for name, share in SPLITS:
        edge += share
        if place < edge:
            return name
    return "train"


def dense_score(calls: Sequence[dict], expected: Sequence[dict]) -> float:
    """ToolMind's score of a teacher's turn: correct calls over expected ones, + 0.5 if all match, − 0.2 otherwise.

    Calls match in any order, each at most once. A call matches when it has the expected name and every expected argument with
    the same value after `coerced`; further arguments do not count against it. 1.5 is a full match. Without expected calls, none
    is right.
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
    """Values that JSON writers mix up become equal: 5.0 and "5" and 5, "true" and True, '["a"]' and ["a"]; case is kept."""
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
    if not isinstance(call, dict) or call.get("name") != wanted["name"] or not isinstance(call.get("arguments"), dict):
        return False
    arguments = call["arguments"]
    return all(key in arguments and _same(arguments[key], value) for key, value in wanted["arguments"].items())


def _same(a: Any, b: Any) -> bool:
    """Equality by JSON text, for which True is not 1."""
    return json.dumps(coerced(a), sort_keys=True) == json.dumps(coerced(b), sort_keys=True)


def _accepted(value: Any) -> Any:
    """An accepted value as BFCL writes it: inside a dict, or a list of dicts, every value is a list of accepted ones again."""
    if isinstance(value, dict):
        return {key: [inner] for key, inner in value.items()}
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
    "str": "string", "string": "string", "int": "integer", "integer": "integer",
    "float": "float", "number": "float", "double": "float",
    "bool": "boolean", "boolean": "boolean", "list": "array", "array": "array", "tuple": "array", "set": "array", "dict": "dict",
    "object": "dict", "any": "any",
}


def _history(messages: Sequence[dict]) -> Iterable[dict]:
    """Messages as the template writes them: earlier calls as text, all responses to one turn as one user message."""
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
            yield {"role": "assistant", "content": "\n".join(filter(None, [_content(message), calls]))}
        else:
            yield {"role": role, "content": _content(message)}
    if responses:
        yield {"role": "user", "content": responses_text(responses)}


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
    return content if isinstance(content, str) else "" if content is None else json.dumps(content, ensure_ascii=False)


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
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:16]

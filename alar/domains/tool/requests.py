"""A request of the tool domain: messages, the functions on offer, and the calls that are right,
turn by turn.

It travels inside `alar.records.Question`: the user's words as `text`, the category as `type`,
accepted final answers as `answers`, and everything else as JSON in `details`, so that one agent
loop, one trajectory file and one evaluation serve both domains.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from alar.domains.tool.bfcl import BFCLQuestion
from alar.records import Question

# BFCL's type names, and those of other data sets, as JSON schema has them.
SCHEMA_TYPES = {
    "integer": "integer",
    "int": "integer",
    "long": "integer",
    "short": "integer",
    "byte": "integer",
    "Bigint": "integer",
    "float": "number",
    "number": "number",
    "double": "number",
    "boolean": "boolean",
    "bool": "boolean",
    "string": "string",
    "str": "string",
    "String": "string",
    "char": "string",
    "any": "string",
    "Any": "string",
    "array": "array",
    "list": "array",
    "tuple": "array",
    "Array": "array",
    "ArrayList": "array",
    "Queue": "array",
    "Stack": "array",
    "set": "array",
    "object": "object",
    "dict": "object",
    "HashMap": "object",
    "Hashtable": "object",
}


@dataclass(frozen=True)
class ToolRequest:
    """`truth` has BFCL's ground truth for every turn of calls: () means that no call is right; None
    that the calls of the one turn are judged by the category alone."""

    messages: tuple[dict, ...]
    functions: tuple[dict, ...]
    truth: tuple[tuple[dict, ...], ...] | None
    category: str

    def question(
        self,
        identity: str,
        *,
        answers: Sequence[str] = (),
        hard_turns: Sequence[int] = (),
        world: str = "",
    ) -> Question:
        details = {"messages": self.messages, "functions": self.functions, "truth": self.truth}
        text = next((m["content"] for m in reversed(self.messages) if m["role"] == "user"), "")
        return Question(
            identity,
            text,
            tuple(answers),
            self.category,
            tuple(hard_turns),
            world,
            json.dumps(details, ensure_ascii=False, separators=(",", ":")),
        )


def request_of(question: Question) -> Request:
    """The request inside a question. Raises ValueError for a question of another domain."""
    if not question.details:
        raise ValueError(f"{question.id}: a question without details is none of the tool domain")
    return _parsed(question.details, question.type)


@lru_cache(maxsize=4096)
def _parsed(details: str, category: str) -> Request:
    fields = json.loads(details)
    truth = fields["truth"]
    return ToolRequest(
        tuple(fields["messages"]),
        tuple(fields["functions"]),
        None if truth is None else tuple(tuple(turn) for turn in truth),
        category,
    )


def bfcl_request(question: BFCLQuestion) -> Request:
    truth = None if question.ground_truth is None else (question.ground_truth,)
    return ToolRequest(question.messages, question.functions, truth, question.category)


def json_schema(schema: dict) -> dict:
    """A parameter description in JSON schema's type names, at every depth; other fields stay as
    they are."""
    converted = dict(schema)
    kind = schema.get("type")
    if isinstance(kind, str):
        converted["type"] = SCHEMA_TYPES.get(kind, "string")
    if isinstance(schema.get("properties"), dict):
        converted["properties"] = {
            key: json_schema(value) for key, value in schema["properties"].items()
        }
    if isinstance(schema.get("items"), dict):
        converted["items"] = json_schema(schema["items"])
    return converted


def openai_tool(function: dict) -> dict:
    """A function in BFCL's form as chat templates want it."""
    shown = {key: function[key] for key in ("name", "description") if key in function}
    return {
        "type": "function",
        "function": shown | {"parameters": json_schema(function.get("parameters", {}))},
    }

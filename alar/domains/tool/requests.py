"""A request of the tool domain: messages, the functions on offer, and the right calls of each turn.

It travels inside `alar.records.Question`: the user's words as `text`, the category as `type`,
accepted final answers as `answers`, and everything else as JSON in `details`. So one agent loop,
one trajectory file and one evaluation serve both domains.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from alar.domains.tool.bfcl import BFCLQuestion
from alar.records import Question

# JSON schema's type names, each with the names of BFCL and other data sets that mean the same.
_TYPES = {
    "integer": "integer int long short byte Bigint",
    "number": "number float double",
    "boolean": "boolean bool",
    "string": "string str String char any Any",
    "array": "array list tuple Array ArrayList Queue Stack set",
    "object": "object dict HashMap Hashtable",
}
# "dict" → "object"
SCHEMA_TYPES = {name: kind for kind, names in _TYPES.items() for name in names.split()}


@dataclass(frozen=True)
class ToolRequest:
    """What is asked, with which functions, and what is right.

    `truth` has BFCL's ground truth for every turn of calls. () means that no call is right. None
    means that the category alone judges the calls of the one turn.
    """

    messages: tuple[dict, ...]  # {"role", "content"} each
    functions: tuple[dict, ...]  # in BFCL's form
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
        # Everything that `Question` has no field for; `_parsed` reads it back.
        details = {"messages": self.messages, "functions": self.functions, "truth": self.truth}
        written = json.dumps(details, ensure_ascii=False, separators=(",", ":"))
        said = [message["content"] for message in self.messages if message["role"] == "user"]
        return Question(
            identity,
            said[-1] if said else "",  # the words that await an answer
            tuple(answers),
            self.category,
            tuple(hard_turns),
            world,
            written,
        )


def request_of(question: Question) -> ToolRequest:
    """The request inside a question. Raises ValueError for a question of another domain."""
    if not question.details:
        raise ValueError(f"{question.id}: a question without details is not of the tool domain")
    return _parsed(question.details, question.type)


@lru_cache(maxsize=4096)
def _parsed(details: str, category: str) -> ToolRequest:
    fields = json.loads(details)
    truth = fields["truth"]
    # JSON has turned the tuples into lists; a frozen request has tuples.
    if truth is not None:
        truth = tuple(tuple(turn) for turn in truth)
    return ToolRequest(tuple(fields["messages"]), tuple(fields["functions"]), truth, category)


def bfcl_request(question: BFCLQuestion) -> ToolRequest:
    truth = None if question.ground_truth is None else (question.ground_truth,)
    return ToolRequest(question.messages, question.functions, truth, question.category)


def json_schema(schema: dict) -> dict:
    """A parameter description in JSON schema's type names, at every depth."""
    converted = dict(schema)
    kind, properties = schema.get("type"), schema.get("properties")
    if isinstance(kind, str):
        # an unknown type counts as text
        converted["type"] = SCHEMA_TYPES.get(kind, "string")
    if isinstance(properties, dict):
        converted["properties"] = {name: json_schema(each) for name, each in properties.items()}
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

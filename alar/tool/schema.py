"""How a function of the tool world is described: a name, a sentence, parameters with types and bounds, and what runs.

Two schemas follow from one description. The one that is *shown* (BFCL's form) has types, choices, defaults and required names,
short enough for a small model's prompt. The one that is *enforced* before anything runs adds bounds: no integer, text or list
beyond them reaches a function, so that none can be made to work for long.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Callable

MAX_TEXT, MAX_ITEMS = 200, 50
_NUMERIC_LIMIT = 10**9


@dataclass(frozen=True)
class Parameter:
    """`kind` is BFCL's type name. `default` is None for a required parameter. `bounds` are enforced, not shown."""

    kind: str
    bounds: tuple[tuple[str, Any], ...] = ()
    description: str = ""
    choices: tuple = ()
    items: str = ""
    default: Any = None

    def shown(self) -> dict:
        schema: dict[str, Any] = {"type": self.kind}
        if self.items:
            schema["items"] = {"type": self.items}
        if self.description:
            schema["description"] = self.description
        if self.choices:
            schema["enum"] = list(self.choices)
        if self.default is not None:
            schema["default"] = self.default
        return schema

    def enforced(self) -> dict:
        types = {"float": "number"}
        schema = {"type": types.get(self.kind, self.kind), **dict(self.bounds)}
        if self.items:
            schema["items"] = {"type": types.get(self.items, self.items), "minimum": -_NUMERIC_LIMIT, "maximum": _NUMERIC_LIMIT}
        if self.choices:
            schema["enum"] = list(self.choices)
        return schema


@dataclass(frozen=True)
class Tool:
    name: str
    description: str
    parameters: dict[str, Parameter]
    run: Callable[..., Any]

    def function(self) -> dict:
        """The description that is shown, in BFCL's form."""
        return {
            "name": self.name,
            "description": self.description,
            "parameters": {
                "type": "dict",
                "properties": {name: parameter.shown() for name, parameter in self.parameters.items()},
                "required": [name for name, parameter in self.parameters.items() if parameter.default is None],
            },
        }

    def problem(self, arguments: dict) -> str:
        """What is wrong with these arguments; "" if the function may run with them."""
        errors = sorted(self._validator.iter_errors(arguments), key=lambda error: list(map(str, error.path)))
        if not errors:
            return ""
        where = ".".join(map(str, errors[0].path))
        return f"{where}: {errors[0].message}"[:200] if where else errors[0].message[:200]

    @cached_property
    def _validator(self):
        return _strict()(
            {
                "type": "object",
                "properties": {name: parameter.enforced() for name, parameter in self.parameters.items()},
                "required": self.function()["parameters"]["required"],
                "additionalProperties": False,
            }
        )


@cache
def _strict():
    """A validator for which 5.0 is no integer and True no number, as in BFCL's checker, and NaN and infinities no numbers.

    Imported on use: the process that runs the functions has no need of it.
    """
    import jsonschema

    types = jsonschema.Draft202012Validator.TYPE_CHECKER.redefine_many(
        {
            "integer": lambda _, value: type(value) is int,
            "number": lambda _, value: type(value) is int or type(value) is float and math.isfinite(value),
        }
    )
    return jsonschema.validators.extend(jsonschema.Draft202012Validator, type_checker=types)


def integer(low: int = -_NUMERIC_LIMIT, high: int = _NUMERIC_LIMIT, description: str = "", default: int | None = None) -> Parameter:
    return Parameter("integer", (("minimum", low), ("maximum", high)), description, default=default)


def number(low: float = -_NUMERIC_LIMIT, high: float = _NUMERIC_LIMIT, description: str = "", default: float | None = None):
    return Parameter("float", (("minimum", low), ("maximum", high)), description, default=default)


def text(description: str = "", longest: int = MAX_TEXT, default: str | None = None) -> Parameter:
    return Parameter("string", (("maxLength", longest),), description, default=default)


def choice(*choices: str, default: str | None = None) -> Parameter:
    return Parameter("string", choices=choices, default=default)


def boolean(default: bool | None = None) -> Parameter:
    return Parameter("boolean", default=default)


def numbers(kind: str = "float") -> Parameter:
    return Parameter("array", (("minItems", 1), ("maxItems", MAX_ITEMS)), items=kind)


def table(*tools: Tool) -> dict[str, Tool]:
    """Name → tool. ValueError for a name that two tools share."""
    found = {tool.name: tool for tool in tools}
    if len(found) < len(tools):
        raise ValueError("two functions share a name")
    return found

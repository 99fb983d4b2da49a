"""The description of a function of the tool world: name, sentence, parameters, and what runs.

Two schemas follow from one description. The one that is *shown* (BFCL's form) has types, choices,
defaults and required names. It is short enough for a small model's prompt. The one that is
*enforced* before anything runs adds bounds. No integer, text or list beyond them reaches a
function, so nobody can make a function work for long.

pydantic is imported where it is used: the process that runs the functions starts without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

MAX_TEXT, MAX_ITEMS = 200, 50  # characters of a text, items of a list
_LARGEST = 10**9  # of any number, unless a parameter says otherwise
_LIMITS = {"ge": -_LARGEST, "le": _LARGEST}  # for the items of a list; pydantic's names


@dataclass(frozen=True)
class Parameter:
    """One parameter. `kind` is BFCL's type name, and `items` that of a list's items.

    `default` is None for a required parameter. `bounds` are enforced, not shown.
    """

    kind: str
    bounds: tuple[tuple[str, Any], ...] = ()  # pydantic's, such as ("ge", 0); hashable
    description: str = ""
    choices: tuple = ()  # the only values allowed; empty: any
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

    def enforced(self) -> Any:
        """The type, with its bounds, that pydantic holds an argument to."""
        from pydantic import Field

        if self.choices:
            return Literal[self.choices]
        if self.items:
            # `bounds` are those of the length, `_LIMITS` those of each item.
            return Annotated[list[_bounded(self.items, _LIMITS)], Field(**dict(self.bounds))]
        return _bounded(self.kind, dict(self.bounds))


def _bounded(kind: str, bounds: dict) -> Any:
    from pydantic import Field

    types = {"integer": int, "float": float, "string": str, "boolean": bool}
    if kind == "float":
        bounds = bounds | {"allow_inf_nan": False}  # JSON has no NaN
    return Annotated[types[kind], Field(**bounds)]


@dataclass(frozen=True)
class Tool:
    name: str
    description: str
    parameters: dict[str, Parameter]
    run: Callable[..., Any]  # takes arguments by the names of `parameters`

    def function(self) -> dict:
        """The description that is shown, in BFCL's form."""
        properties, required = {}, []
        for name, parameter in self.parameters.items():
            properties[name] = parameter.shown()
            if parameter.default is None:
                required.append(name)
        # "dict" is BFCL's word; `requests.openai_tool` turns it into "object".
        parameters = {"type": "dict", "properties": properties, "required": required}
        return {"name": self.name, "description": self.description, "parameters": parameters}

    def problem(self, arguments: dict) -> str:
        """What is wrong with these arguments; "" if the function may run with them."""
        from pydantic import ValidationError

        try:
            self._model.model_validate(arguments)
        except ValidationError as failed:
            # The model reads one short sentence, so the first error has to do.
            first = failed.errors(include_url=False, include_context=False)[0]
            where = ".".join(map(str, first["loc"]))  # ("values", 2) → values.2
            problem = f"{where}: {first['msg']}" if where else first["msg"]
            return problem[:200]
        return ""

    @cached_property
    def _model(self):
        """The enforced schema. Unknown names are errors.

        It is as strict as BFCL's checker: 5.0 is not an integer and True is not a number.
        """
        from pydantic import ConfigDict, create_model

        fields = {}
        for name, parameter in self.parameters.items():
            # ... is pydantic's "required"
            default = ... if parameter.default is None else parameter.default
            fields[name] = (parameter.enforced(), default)
        return create_model(self.name, __config__=ConfigDict(strict=True, extra="forbid"), **fields)


def tool(name: str, description: str, run: Callable[..., Any], **parameters: Parameter) -> Tool:
    """A tool whose `run` takes arguments by these names.

    Most functions of the standard library take no names or other names, hence the many lambdas.
    """
    return Tool(name, description, parameters, run)


def integer(
    low: int = -_LARGEST, high: int = _LARGEST, description: str = "", default: int | None = None
) -> Parameter:
    return Parameter("integer", (("ge", low), ("le", high)), description, default=default)


def decimal(
    low: float = -_LARGEST,
    high: float = _LARGEST,
    description: str = "",
    default: float | None = None,
) -> Parameter:
    return Parameter("float", (("ge", low), ("le", high)), description, default=default)


def text(description: str = "", longest: int = MAX_TEXT, default: str | None = None) -> Parameter:
    return Parameter("string", (("max_length", longest),), description, default=default)


def choice(*choices: str, default: str | None = None) -> Parameter:
    return Parameter("string", choices=choices, default=default)


def boolean(default: bool | None = None) -> Parameter:
    return Parameter("boolean", default=default)


def numbers(kind: str = "float") -> Parameter:
    return Parameter("array", (("min_length", 1), ("max_length", MAX_ITEMS)), items=kind)


def tools_by_name(*tools: Tool) -> dict[str, Tool]:
    """Name → tool. Raises ValueError for a name that two tools share."""
    found = {tool.name: tool for tool in tools}
    if len(found) < len(tools):
        raise ValueError("two functions share a name")
    return found

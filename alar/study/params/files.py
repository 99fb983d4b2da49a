"""Reads one parameter file, in a stricter YAML.

A file is a mapping of sections. It may also hold `extends`, `only` and `variants`. A variant is
again a mapping of sections and may have an `only` of its own.
"""

import difflib
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

FolderName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
StageNumber = Annotated[str, Field(pattern=r"^\d\d")]  # "03", in quotes


class ParameterError(ValueError):
    """One or more problems of a parameter file, one line each."""

    def __init__(self, problems: str | Iterable[str]):
        self.problems = [problems] if isinstance(problems, str) else list(dict.fromkeys(problems))
        super().__init__("\n".join(self.problems))


class Variant(BaseModel):
    """Sections, and in `only` the stages to run ([] = all). Sections are checked after merging."""

    model_config = ConfigDict(extra="allow", strict=True)
    only: list[StageNumber] = []

    @property
    def sections(self) -> dict[str, Any]:
        return dict(self.model_extra)


class Document(Variant):
    extends: str = ""  # file name
    variants: dict[FolderName, Variant] = {}


class Loader(yaml.SafeLoader):
    """YAML 1.1 that reads 1e-3 as a number and refuses a key that is given twice."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key_node, _ in node.value:  # PyYAML itself would let the last one win
            key = self.construct_object(key_node, deep=True)
            problem = ""
            # YAML reads a key such as on or 2024 as a bool or a number.
            if not isinstance(key, str):
                problem = f"the key {key!r} is not a text; put it in quotes"
            elif key in seen:
                problem = f"{key} is given twice; keep one"
            if problem:
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


# YAML 1.1 demands a dot and a signed exponent in a float, so it reads 1e-3 as a text.
Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),  # the first characters for which PyYAML tries it
)


def parse_value(text: str) -> Any:
    """The value after `--set section.key=`. Raises yaml.YAMLError."""
    return yaml.load(text, Loader)


def read_document(path: Path) -> Document:
    """Read one parameter file. Raises ParameterError if it cannot be read or has a wrong form."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        others = sorted(other.name for other in path.parent.glob("*.yaml"))
        raise ParameterError(
            f"{path}: no such parameter file{did_you_mean(path.name, others)}; "
            f"{path.parent} has {', '.join(others) or 'none'}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(f"{path}: cannot be read as text: {error}") from None
    try:
        content = yaml.load(text, Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        # PyYAML counts from 0.
        line = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ParameterError(f"{path}: {line}{getattr(error, 'problem', None) or error}") from None
    if content is None:  # an empty file: the defaults
        content = {}
    if not isinstance(content, dict):
        raise ParameterError(
            f"{path}: holds a {type(content).__name__}, but a parameter file maps sections to"
            " their keys and values"
        )
    if content.get("variants", {}) is None:  # all of them are commented out
        del content["variants"]
    try:
        return Document.model_validate(content)
    except ValidationError as error:
        raise ParameterError(problem_lines(error, lambda section, key: path)) from None


def problem_lines(
    error: ValidationError,
    place: Callable[[str, str], Any],
    hint: Callable[[str, str], str] = lambda section, key: "",
) -> list[str]:
    """pydantic's errors as lines "where it stands: section.key: value: what it should be".

    `place(section, key)` says where a value stands. `hint(section, key)` says what an unknown key
    may mean.
    """
    lines = []
    for detail in error.errors():
        loc = [str(part) for part in detail["loc"]]
        section, key = loc[0], loc[1] if len(loc) > 1 else ""  # loc: section, key, place in a list
        if detail["type"] == "extra_forbidden":
            problem = f"unknown parameter{hint(section, key)}"
        else:
            problem = f"{detail['input']!r}: {detail['msg'].replace('Input should', 'it should')}"
            if detail["type"] == "string_type" and isinstance(detail["input"], int | float):
                problem += "; put it in quotes"
            if detail["type"] == "string_pattern_mismatch":
                problem += "; use letters, digits, '.', '_', '-'; begin with one of the first two"
            if detail["type"] == "literal_error":  # one of a few texts was expected
                choices = re.findall(r"'([^']+)'", detail["ctx"]["expected"])
                problem += did_you_mean(str(detail["input"]), choices)
        lines.append(f"{place(section, key)}: {'.'.join(loc)}: {problem}")
    return lines


def shown_path(path: str | Path) -> Path:
    """A path as a user would write it: relative if it lies inside the current folder."""
    path = Path(path)
    inside = path.is_absolute() and path.is_relative_to(Path.cwd())
    return path.relative_to(Path.cwd()) if inside else path


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """ ", did you mean learning_rate?", or "" if nothing is close."""
    # `cutoff` is the least similarity, from 0 to 1.
    close = difflib.get_close_matches(word, list(words), n=1, cutoff=0.6)
    return f", did you mean {close[0]}?" if close else ""

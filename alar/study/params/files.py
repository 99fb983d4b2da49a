"""Reads one parameter file: a stricter YAML, and what a file holds beside its sections.

A file is a mapping of sections. Beside them it may hold `extends`, `only` and `variants`; a variant
is again a mapping of sections, and may have an `only` of its own.
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
    """Sections, and the stages that are run. Sections are checked when all layers are merged."""

    model_config = ConfigDict(extra="allow", strict=True)
    only: list[StageNumber] = []

    @property
    def sections(self) -> dict[str, Any]:
        return dict(self.model_extra)


class Document(Variant):
    extends: str = ""
    variants: dict[FolderName, Variant] = {}


class Loader(yaml.SafeLoader):
    """YAML 1.1 that reads 1e-3 as a number and refuses a key that is given twice."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            problem = ""
            if not isinstance(key, str):
                problem = f"the key {key!r} is not a text; put it in quotes"
            elif key in seen:
                problem = f"{key} is given twice; keep one"
            if problem:
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


# YAML 1.1 wants a dot and a signed exponent, and takes 1e-3 for a text.
Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def parse_value(text: str) -> Any:
    """The value behind `--set section.key=`. Raises yaml.YAMLError."""
    return yaml.load(text, Loader)


def read_document(path: Path) -> Document:
    """One parameter file. Raises ParameterError where it cannot be read or is built wrongly."""
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
        line = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ParameterError(f"{path}: {line}{getattr(error, 'problem', None) or error}") from None
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise ParameterError(
            f"{path}: holds a {type(content).__name__}, but a parameter file maps sections to"
            " their keys and values"
        )
    try:
        return Document.model_validate(content)
    except ValidationError as error:
        raise ParameterError(problem_lines(error, lambda section, key: path)) from None


def problem_lines(
    error: ValidationError,
    place: Callable[[str, str], Any],
    hint: Callable[[str, str], str] = lambda section, key: "",
) -> list[str]:
    """pydantic's errors, each as "where it stands: section.key: value: what it should be".

    `place(section, key)` says where a value stands, `hint(section, key)` what an unknown key
    may mean.
    """
    lines = []
    for detail in error.errors():
        loc = [str(part) for part in detail["loc"]]
        section, key = loc[0], loc[1] if len(loc) > 1 else ""
        if detail["type"] == "extra_forbidden":
            problem = f"unknown parameter{hint(section, key)}"
        else:
            problem = f"{detail['input']!r}: {detail['msg'].replace('Input should', 'it should')}"
            if detail["type"] == "literal_error":
                choices = re.findall(r"'([^']+)'", detail["ctx"]["expected"])
                problem += did_you_mean(str(detail["input"]), choices)
        lines.append(f"{place(section, key)}: {'.'.join(loc)}: {problem}")
    return lines


def shown_path(path: str | Path) -> Path:
    """A path as a user would write it: relative to the current folder if it lies inside."""
    path = Path(path)
    inside = path.is_absolute() and path.is_relative_to(Path.cwd())
    return path.relative_to(Path.cwd()) if inside else path


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """ ", did you mean learning_rate?", or "" if nothing is close."""
    close = difflib.get_close_matches(word, list(words), n=1, cutoff=0.6)
    return f", did you mean {close[0]}?" if close else ""

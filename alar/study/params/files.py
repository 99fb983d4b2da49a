"""Reading one parameter file: YAML that is stricter than YAML, and the words for what is wrong with
it."""

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml


class ParameterError(ValueError):
    """One or more problems of a parameter file, one line each."""

    def __init__(self, problems: str | Iterable[str]):
        self.problems = [problems] if isinstance(problems, str) else list(dict.fromkeys(problems))
        super().__init__("\n".join(self.problems))


class Loader(yaml.SafeLoader):
    """YAML with exponents read as numbers (YAML 1.1 reads 1e-3 as text) and repeated keys refused."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(
                    None,
                    None,
                    f"the key {key!r} is not a text; put it in quotes",
                    key_node.start_mark,
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key} is given twice; keep one", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def parse_value(text: str) -> Any:
    """The value after `--set section.key=`. Raises yaml.YAMLError."""
    return yaml.load(text, Loader)


def read_document(path: Path) -> tuple[dict, dict, str]:
    """A file's (sections, variants, extends); the sections may hold `only`, the stages that the
    file is about."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        others = sorted(p.name for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        raise ParameterError(
            f"{path}: no such parameter file{did_you_mean(path.name, others)}; "
            f"{path.parent} has {', '.join(others) or 'none'}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(f"{path}: cannot be read as text: {error}") from None
    try:
        document = yaml.load(text, Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ParameterError(f"{path}: {line}{getattr(error, 'problem', None) or error}") from None
    if document is None:
        document = {}
    if not isinstance(document, dict):
        raise ParameterError(
            f"{path}: holds {kind_of(document)}, not a mapping of sections such as\n"
            "    aasd:\n      learning_rate: 0.001"
        )
    variants = document.pop("variants", None) or {}
    if not isinstance(variants, dict) or not all(isinstance(v, dict) for v in variants.values()):
        raise ParameterError(
            f"{path}: variants: must map each variant's name to the sections that differ"
        )
    for name in variants:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise ParameterError(
                f"{path}: variants: {name!r} cannot name a folder; use letters, digits, '.',"
                " '_', '-'"
            )
    extends = document.pop("extends", "")
    if not isinstance(extends, str):
        raise ParameterError(f"{path}: extends: must name one parameter file, not {extends!r}")
    return document, variants, extends


def shown_path(path: str | Path) -> Path:
    """Relative to the current folder if inside it, as a user would write it."""
    path = Path(path)
    return (
        path.relative_to(Path.cwd())
        if path.is_absolute() and path.is_relative_to(Path.cwd())
        else path
    )


def did_you_mean(word: str, words: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(words), n=1, cutoff=0.6)
    return f", did you mean {close[0]}?" if close else ""


def kind_of(value: Any) -> str:
    names = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "a text",
        list: "a list",
        dict: "a mapping",
        type(None): "empty",
    }
    return names.get(type(value), f"a {type(value).__name__}")

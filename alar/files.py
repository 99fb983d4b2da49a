"""JSON lines, read strictly and written so that a kill leaves either the old file or the new one.

`append_jsonl` is the exception: a growing log may end in half a line after a kill. Reading such a
file is an error that names the line; a trainer that resumes calls `rewind_jsonl` first, which drops
the tail on purpose.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any


class TruncatedFile(ValueError):
    """A file that ends in the middle of a record, or holds something that is no record."""


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """Every line of the file. Raises TruncatedFile with file and line number for anything but whole
    records."""
    path = Path(path)
    rows = []
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.endswith(b"\n"):
                raise TruncatedFile(
                    f"{path}, line {number}: the last line is cut off; the program that wrote it"
                    " was stopped. Delete the file and run the stage that writes it again"
                )
            try:
                rows.append(json.loads(line))
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise TruncatedFile(
                    f"{path}, line {number}: is not JSON ({error}); write the file again"
                ) from None
    return rows


def append_jsonl(path: str | Path, row: dict[str, Any]) -> None:
    """Add one record as one line, in a single write."""
    with Path(path).open("ab") as stream:
        stream.write(_line(row))


def write_jsonl(path: str | Path, rows: Iterable[dict[str, Any]]) -> int:
    """Write the whole file atomically; returns how many records it holds."""
    count = 0
    with replacing(path) as aside, aside.open("wb") as stream:
        for row in rows:
            stream.write(_line(row))
            count += 1
    return count


def rewind_jsonl(path: str | Path, keep: Callable[[dict[str, Any]], bool]) -> int:
    """Before resuming: keep the leading whole records for which `keep` holds; returns how many
    remain.

    >>> rewind_jsonl("metrics.jsonl", keep=lambda row: row["step"] <= 40)  # doctest: +SKIP
    """
    path, kept = Path(path), []
    if path.exists():
        for line in path.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n") or not keep(row := json.loads(line)):
                break
            kept.append(row)
    return write_jsonl(path, kept)


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A path beside `path` to write to; on success it takes its place in one step, on failure it is
    removed."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield aside
        with aside.open("rb") as stream:
            os.fsync(stream.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def write_json(path: str | Path, value: Any) -> None:
    """Write one indented JSON document atomically."""
    with replacing(path) as aside:
        aside.write_text(
            json.dumps(value, indent=2, ensure_ascii=False, default=_plain) + "\n", encoding="utf-8"
        )


def _line(row: dict[str, Any]) -> bytes:
    return (json.dumps(row, ensure_ascii=False, default=_plain) + "\n").encode()


def _plain(value: Any) -> Any:
    """NumPy and torch scalars and arrays as plain Python."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON: {value!r}")

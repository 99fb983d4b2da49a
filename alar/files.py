"""Files in the form of JSON lines, and writing that leaves either the old file or the new one.

A program may be killed at any moment. Whole files are therefore written beside the old one, which
they then replace in one step. A log that grows (`append_jsonl`) may end in half a line after a
kill: reading it is an error that names the line. A trainer that resumes calls `rewind_jsonl` first,
which drops that tail on purpose.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any


class TruncatedFile(ValueError):
    """A file that ends in the middle of a row, or holds something that is not JSON."""


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """The rows of the file. TruncatedFile names the line that is not a whole one."""
    return list(iterate_jsonl(path))


def iterate_jsonl(path: str | Path) -> Iterator[dict[str, Any]]:
    """As `read_jsonl`, one row at a time: a file of traces may not fit in memory."""
    path = Path(path)
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.endswith(b"\n"):
                raise TruncatedFile(
                    f"{path}, line {number}: the last line is cut off; the program that wrote it"
                    " was stopped. Delete the file and run the stage that writes it again"
                )
            try:
                row = json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise TruncatedFile(
                    f"{path}, line {number}: is not JSON ({error}); write the file again"
                ) from None
            yield row


def append_jsonl(path: str | Path, row: dict[str, Any]) -> None:
    """Add one row, in a single write."""
    with Path(path).open("ab") as stream:
        stream.write(_line(row))


def write_jsonl(path: str | Path, rows: Iterable[dict[str, Any]]) -> int:
    """Write the whole file in one step; returns how many rows it has."""
    count = 0
    with replacing(path) as aside, aside.open("wb") as stream:
        for row in rows:
            stream.write(_line(row))
            count += 1
    return count


def rewind_jsonl(path: str | Path, keep: Callable[[dict[str, Any]], bool]) -> int:
    """Cut a log before resuming, at the first row that is not whole or that `keep` refuses; returns
    how many rows remain.

    >>> rewind_jsonl("metrics.jsonl", keep=lambda row: row["step"] <= 40)  # doctest: +SKIP
    """
    path, kept = Path(path), []
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for line in lines:
        if not line.endswith(b"\n"):
            break
        row = json.loads(line)
        if not keep(row):
            break
        kept.append(row)
    return write_jsonl(path, kept)


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A path to write to, beside `path`. What is written there replaces `path` at the end of the
    block, or is removed if the block fails."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield aside
        with aside.open("rb") as stream:
            os.fsync(stream.fileno())  # on the disk before it gets its name
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def write_json(path: str | Path, value: Any) -> None:
    """Write one indented JSON document in one step."""
    text = json.dumps(value, indent=2, ensure_ascii=False, default=_plain) + "\n"
    with replacing(path) as aside:
        aside.write_text(text, encoding="utf-8")


def _line(row: dict[str, Any]) -> bytes:
    return (json.dumps(row, ensure_ascii=False, default=_plain) + "\n").encode()


def _plain(value: Any) -> Any:
    """NumPy and torch scalars and arrays as plain Python."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON: {value!r}")

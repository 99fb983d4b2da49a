"""Passages, in memory or on disk, and the error that all of retrieval raises.

A passage is stored as Search-R1 stores it (wiki-18): a JSON line `{"id": ..., "contents":
"\"Title\"\ntext"}`. The row of a passage in a FAISS index is its line in the corpus. wiki-18 has 21
million lines. So `Corpus` keeps only the byte offset of each line, and parses a line when it is
asked for. The offsets are memory-mapped from a small file that is written beside the corpus.
"""

import contextlib
import json
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from alar.files import replacing


class RetrievalError(RuntimeError):
    """A corpus, an index or a server is missing, broken or does not fit the others."""


@dataclass(frozen=True)
class Passage:
    """A titled text; `contents` is its Search-R1 form."""

    id: str
    title: str
    text: str

    @property
    def contents(self) -> str:
        return f'"{self.title}"\n{self.text}' if self.title else self.text

    @classmethod
    def from_contents(cls, id: str, contents: str) -> "Passage":
        """Split `contents` into title and text. Without a quoted first line, all of it is text."""
        first, newline, rest = contents.partition("\n")
        if newline and len(first) >= 2 and first[0] == first[-1] == '"':
            return cls(str(id), first[1:-1], rest)
        return cls(str(id), "", contents)


@dataclass(frozen=True)
class Hit:
    """A retrieved passage and its inner product with the query (higher is better)."""

    passage: Passage
    score: float


class Corpus(Sequence[Passage]):
    """A corpus on disk as a sequence of passages; row i is line i of the file, counted from 0.

    The offsets of the lines are written beside the corpus (`<corpus>.offsets.npy`), so that only
    the first opening reads the whole file. They are made anew when the corpus has changed. Opening
    raises RetrievalError for a missing, empty or cut-off file. Reading a broken line raises one
    that names the line.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.is_file():
            raise RetrievalError(
                f"{self.path}: no such corpus; give the path of a JSONL file with id and contents"
            )
        if self.path.stat().st_size == 0:
            raise RetrievalError(f"{self.path}: the corpus is empty; download it again")
        with self.path.open("rb") as file:
            if file.read(2) == b"\x1f\x8b":  # the magic number of gzip
                raise RetrievalError(
                    f"{self.path}: the corpus is compressed; unpack it first (gunzip)"
                )
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        # The byte where each line starts, then the end of the file.
        self._offsets = self._open_offsets()  # (lines + 1,)
        self[-1]  # parsed now: a download that was cut off shows in the last line

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, row: int | slice) -> Passage | list[Passage]:
        if isinstance(row, slice):
            return [self[i] for i in range(*row.indices(len(self)))]
        row = int(row) + (len(self) if row < 0 else 0)
        if not 0 <= row < len(self):
            raise IndexError(f"{self.path}: row {row} of {len(self)}")
        return self._parse(row, self._bytes[int(self._offsets[row]) : int(self._offsets[row + 1])])

    def _parse(self, row: int, line: bytes) -> Passage:
        where = f"{self.path}:{row + 1}"
        try:
            record = json.loads(line)
        except ValueError as error:
            end = " (the last line: was the download cut off?)" if row == len(self) - 1 else ""
            raise RetrievalError(
                f"{where}: not a JSON object: {error}{end}; repair the line or fetch it again"
            ) from error
        contents = record.get("contents") if isinstance(record, dict) else None
        if not isinstance(contents, str) or "id" not in record:
            raise RetrievalError(
                f'{where}: a passage needs "id" and "contents" (a string), got {line[:80]!r}'
            )
        return Passage.from_contents(record["id"], contents)

    def _open_offsets(self) -> np.ndarray:
        # (lines + 1,): read from the file beside the corpus, which is written if need be.
        cache = self.path.with_name(self.path.name + ".offsets.npy")
        if cache.exists() and cache.stat().st_mtime_ns >= self.path.stat().st_mtime_ns:
            # A damaged file raises one of these and is made anew.
            with contextlib.suppress(ValueError, EOFError, IndexError):
                offsets = np.load(cache, mmap_mode="r")
                # The last offset is the size of the corpus that it was made for.
                if offsets.dtype == np.int64 and offsets[-1] == len(self._bytes):
                    return offsets
        offsets = self._scan()
        # In a folder that cannot be written, the offsets stay in memory.
        with contextlib.suppress(OSError), replacing(cache) as aside:
            with aside.open("wb") as file:
                np.save(file, offsets)
        return offsets

    def _scan(self, chunk: int = 1 << 24) -> np.ndarray:
        """Offsets (lines + 1,) of all lines, found in pieces of `chunk` bytes (16 MB)."""
        starts = [np.zeros(1, dtype=np.int64)]
        for begin in range(0, len(self._bytes), chunk):
            block = np.frombuffer(self._bytes[begin : begin + chunk], dtype=np.uint8)
            starts.append(np.flatnonzero(block == ord("\n")) + begin + 1)
        offsets = np.concatenate(starts)
        if offsets[-1] != len(self._bytes):  # the last line has no newline
            offsets = np.append(offsets, len(self._bytes))
        return offsets


def refuse_duplicate_ids(passages: Sequence[Passage]) -> None:
    """Raise RetrievalError that names the first two passages with one id."""
    first: dict[str, int] = {}  # id → row
    for row, passage in enumerate(passages):
        if passage.id in first:
            raise RetrievalError(
                f"passages {first[passage.id]} and {row} (counted from 0) have the same id"
                f" {passage.id!r}: ids must be unique"
            )
        first[passage.id] = row

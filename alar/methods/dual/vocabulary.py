"""`DualVocab`: what a dual checkpoint says about itself, in `dual_vocab_meta.json`; and the phase
of a turn.

The think tags may be single tokens of the vocabulary or ordinary text of several pieces (in Qwen2.5
`</think>` is `</`, `think`, `>`): `think_start_ids` and `think_end_ids` hold their ids. One rule
serves both. Inside the think phase all visible ids are forbidden but EOS and the *first* piece of
`</think>`; once that is written, only its next piece may follow. A visible first piece can
therefore mean nothing but the end of the phase, while the same text inside a thought is spelled in
mirrors. A turn has one think phase; after it, everything is visible.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path

from alar import protocol

META = "dual_vocab_meta.json"
MODES = ("full_copy", "subset", "custom")
THINK_MADE = ("present", "literal", "add", "clone_eos")


class NoMirror(ValueError):
    """A chain of thought uses a token that has no latent mirror."""


@dataclass(frozen=True)
class DualVocab:
    """V visible ids and L mirrors; mirror V + j stands for `source_ids[j]`.

    `think_made`: the tags were "present" as single tokens, are "literal" text of several pieces, or
    were added with small random rows ("add") or with rows cloned from `cloned_from` ("clone_eos").
    `think_end_bias` is added to the logit of `</think>` in the think phase. Raises ValueError that
    names the field.
    """

    base_model: str
    V: int
    L: int
    mode: str
    source_ids: tuple[int, ...]
    think_start_token: str
    think_start_ids: tuple[int, ...]
    think_end_token: str
    think_end_ids: tuple[int, ...]
    think_made: str
    cloned_from: str = ""
    think_end_bias: float = 5.0

    def __post_init__(self):
        for name, problem in self._problems():
            raise ValueError(f"{name}: {problem}")

    def _problems(self):
        for name in ("V", "L"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                yield name, f"{value!r} is not a positive number of ids"
        for name in ("source_ids", "think_start_ids", "think_end_ids"):
            ids = getattr(self, name)
            if not ids or any(not isinstance(i, int) or not 0 <= i < self.V for i in ids):
                yield name, f"expected ids in [0, V) with V = {self.V}"
        if len(self.source_ids) != self.L:
            yield "source_ids", f"{len(self.source_ids)} sources for L = {self.L} mirrors"
        if len(set(self.source_ids)) < self.L:
            yield "source_ids", "a source has more than one mirror"
        for name, choices in (("mode", MODES), ("think_made", THINK_MADE)):
            if getattr(self, name) not in choices:
                yield name, f"{getattr(self, name)!r} is not one of {', '.join(choices)}"
        if self.mode == "full_copy" and self.source_ids != tuple(range(self.V)):
            yield "source_ids", "mode full_copy mirrors every visible id, in order"
        for name, tag in (
            ("think_start_token", protocol.THINK_OPEN),
            ("think_end_token", protocol.THINK_CLOSE),
        ):
            if getattr(self, name) != tag:
                yield name, f"{getattr(self, name)!r}: the protocol's tag is {tag}"
        if not isinstance(self.think_end_bias, (int, float)):
            yield "think_end_bias", f"{self.think_end_bias!r} is not a number"

    @cached_property
    def mirror_of(self) -> dict[int, int]:
        return {source: self.V + j for j, source in enumerate(self.source_ids)}

    def is_mirror(self, token: int) -> bool:
        return self.V <= token < self.V + self.L

    def to_mirrors(self, ids: Sequence[int]) -> list[int]:
        """Visible ids → their mirrors. Raises NoMirror for the first one that has none."""
        try:
            return [self.mirror_of[token] for token in ids]
        except KeyError as error:
            raise NoMirror(
                f"id {error} has no mirror among the {self.L} of this {self.mode} vocabulary"
            ) from None

    def to_source(self, ids: Sequence[int]) -> list[int]:
        """Mirrors → their sources; visible ids stay."""
        return [
            self.source_ids[token - self.V] if self.is_mirror(token) else token for token in ids
        ]

    def write(self, folder: str | Path) -> Path:
        path = Path(folder) / META
        path.write_text(json.dumps(asdict(self), indent=None) + "\n", encoding="utf-8")
        return path

    @classmethod
    def read(cls, folder: str | Path) -> DualVocab:
        """Raises FileNotFoundError, or ValueError that names the file and the field: the meta
        file's own, or `vocab_size` of config.json where the two disagree."""
        path = Path(folder) / META
        if not path.exists():
            raise FileNotFoundError(
                f"{path}: no such file, so this is no dual checkpoint; alar.methods.dual.build"
                " makes one"
            )
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: not JSON ({error}); build the checkpoint again") from error
        if not isinstance(record, dict):
            raise ValueError(f"{path}: holds no fields; build the checkpoint again")
        names = {field.name for field in fields(cls)}
        for name in [f.name for f in fields(cls) if f.name not in record] + [
            key for key in record if key not in names
        ]:
            raise ValueError(
                f"{path}: {name}: {'missing' if name in names else 'unknown field'}; build the"
                " checkpoint again"
            )
        try:
            dual = cls(
                **{
                    key: tuple(value) if isinstance(value, list) else value
                    for key, value in record.items()
                }
            )
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error
        config = Path(folder) / "config.json"
        found = (
            json.loads(config.read_text(encoding="utf-8")).get("vocab_size")
            if config.exists()
            else None
        )
        if found != dual.V + dual.L:
            raise ValueError(
                f"{config}: vocab_size is {found}, but {META} has V + L = {dual.V + dual.L}"
            )
        return dual


def find(folder: str | Path) -> DualVocab | None:
    """The dual vocabulary of a checkpoint folder, None for an ordinary checkpoint or a name on the
    hub."""
    return DualVocab.read(folder) if (Path(folder) / META).exists() else None


class ThinkPhase:
    """Where a turn stands, as a row of the constraint's table: 0 visible, 1 thinking, 1 + n after n
    pieces of `</think>`."""

    def __init__(self, close: Sequence[int]):
        self.close, self.row, self.over = tuple(close), 0, False

    def push(self, token: int, inside: bool) -> None:
        """A token was written; `inside` says whether the turn's visible text now stands in a think
        block."""
        if not inside or self.over:
            self.over |= self.row > 0
            self.row = 0
        elif self.row == 0:
            self.row = 1
        else:
            self.row = self.row + 1 if token == self.close[self.row - 1] else 1

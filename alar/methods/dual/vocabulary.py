"""`DualVocab`: what a dual checkpoint says about itself, in its config.json.

The think tags may be single tokens of the vocabulary or ordinary text of several pieces (in Qwen2.5
`</think>` is `</`, `think`, `>`): `think_start_ids` and `think_end_ids` hold their ids. One rule
serves both. Inside the think phase all visible ids are forbidden but EOS and the *first* piece of
`</think>`; once that is written, only its next piece may follow. So a visible first piece can only
mean the end of the phase, while the same text inside a thought is spelled in mirrors. A turn has
one think phase; after it, everything is visible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from transformers import AutoConfig, PretrainedConfig

FIELD = "dual_vocabulary"  # of config.json
CODEC = "alar.methods.dual.codec.DualCodec"
MODES = ("full_copy", "subset", "custom")
THINK_MADE = ("present", "literal", "add", "clone_eos")


class NoMirror(ValueError):
    """A chain of thought uses a token that has no latent mirror."""


@dataclass(frozen=True)
class DualVocab:
    """V visible ids and L mirrors; mirror V + j stands for `source_ids[j]`.

    `think_made` says how the tags came: "present" as single tokens, "literal" text of several
    pieces, added with small random rows ("add"), or with rows cloned from `cloned_from`
    ("clone_eos"). `think_end_bias` is added to the logit of `</think>` in the think phase. Raises
    ValueError that names the field.
    """

    base_model: str
    V: int
    L: int
    mode: str
    source_ids: tuple[int, ...]
    think_start_ids: tuple[int, ...]
    think_end_ids: tuple[int, ...]
    think_made: str
    cloned_from: str = ""
    think_end_bias: float = 5.0

    def __post_init__(self):
        def require(holds: bool, name: str, problem: str) -> None:
            if not holds:
                raise ValueError(f"{name}: {problem}")

        for name in ("V", "L"):
            value = getattr(self, name)
            require(
                isinstance(value, int) and value > 0,
                name,
                f"{value!r} is not a positive number of ids",
            )
        for name in ("source_ids", "think_start_ids", "think_end_ids"):
            ids = getattr(self, name)
            inside = all(isinstance(token, int) and 0 <= token < self.V for token in ids)
            require(bool(ids) and inside, name, f"expected ids in [0, V) with V = {self.V}")
        count = len(self.source_ids)
        require(count == self.L, "source_ids", f"{count} sources for L = {self.L} mirrors")
        require(
            len(set(self.source_ids)) == self.L, "source_ids", "a source has more than one mirror"
        )
        for name, choices in (("mode", MODES), ("think_made", THINK_MADE)):
            value = getattr(self, name)
            require(value in choices, name, f"{value!r} is not one of {', '.join(choices)}")
        require(
            self.mode != "full_copy" or self.source_ids == tuple(range(self.V)),
            "source_ids",
            "mode full_copy mirrors every visible id, in order",
        )
        bias = self.think_end_bias
        require(isinstance(bias, (int, float)), "think_end_bias", f"{bias!r} is not a number")

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

    def describe(self, config: PretrainedConfig) -> None:
        """Write it into a model's config, which is saved with the weights. `codec_class` tells the
        engines how to write turns, `added_rows` the trainer which rows are new."""
        record = asdict(self)
        if self.mode == "full_copy":
            del record["source_ids"]  # all ids, in order
        setattr(config, FIELD, record)
        config.codec_class = CODEC
        config.added_rows = [self.V, self.V + self.L]

    @classmethod
    def of(cls, config: PretrainedConfig) -> DualVocab:
        """The vocabulary that a config describes. Raises ValueError that names the field."""
        record = getattr(config, FIELD, None)
        if not isinstance(record, dict):
            raise ValueError(
                f"{FIELD}: missing, so this is no dual checkpoint; alar.methods.dual.build makes"
                " one"
            )
        values = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in record.items()
        }
        if values.get("mode") == "full_copy" and isinstance(values.get("V"), int):
            values.setdefault("source_ids", tuple(range(values["V"])))
        try:
            dual = cls(**values)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{FIELD}: {error}; build the checkpoint again") from error
        if config.vocab_size != dual.V + dual.L:
            raise ValueError(
                f"vocab_size: {config.vocab_size}, but V + L = {dual.V + dual.L}; build the"
                " checkpoint again"
            )
        return dual

    @classmethod
    def read(cls, folder: str | Path) -> DualVocab:
        """That of a checkpoint folder. Raises ValueError that names the file and the field."""
        config = AutoConfig.from_pretrained(folder)
        try:
            return cls.of(config)
        except ValueError as error:
            raise ValueError(f"{Path(folder) / 'config.json'}: {error}") from error

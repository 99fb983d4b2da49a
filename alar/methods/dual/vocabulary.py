"""`DualVocab`: what a dual checkpoint says about itself, in its config.json.

The think tags may be single tokens of the vocabulary or ordinary text of several pieces (in Qwen2.5
`</think>` is `</`, `think`, `>`): `think_start_ids` and `think_end_ids` hold their ids. One rule
serves both. Inside the think phase EOS and the *first* piece of `</think>` are the only visible ids
that are allowed. Once that piece is written, only its next piece may follow. So a visible first
piece always means the end of the phase; the same text inside a thought is spelled in mirrors. A
turn has one think phase; after it, everything is visible.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, model_validator
from transformers import AutoConfig, PretrainedConfig

FIELD = "dual_vocabulary"  # of config.json
CODEC = "alar.methods.dual.codec.DualCodec"
Mode = Literal["full_copy", "subset", "custom"]
MODES = get_args(Mode)


class NoMirror(ValueError):
    """A chain of thought uses a token that has no latent mirror."""


class DualVocab(BaseModel):
    """V visible ids and L mirrors; mirror V + j stands for `source_ids[j]`.

    `think_made` says how the tags came: "present" as single tokens, "literal" text of several
    pieces, added with small random rows ("add"), or with rows cloned from `cloned_from`
    ("clone_eos"). `think_end_bias` is added to the logit of `</think>` in the think phase. A wrong
    field is a ValueError that names it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    base_model: str
    V: PositiveInt  # rows of the base, spare ones included
    L: PositiveInt  # mirrors
    mode: Mode
    source_ids: tuple[NonNegativeInt, ...]  # entry j: what id V + j mirrors
    think_start_ids: tuple[NonNegativeInt, ...]
    think_end_ids: tuple[NonNegativeInt, ...]
    think_made: Literal["present", "literal", "add", "clone_eos"]
    cloned_from: str = ""  # a token, for think_made "clone_eos"
    think_end_bias: float = 5.0

    @model_validator(mode="after")
    def _consistent(self) -> DualVocab:
        for name in ("source_ids", "think_start_ids", "think_end_ids"):
            ids = getattr(self, name)
            if not ids or max(ids) >= self.V:
                raise ValueError(f"{name}: expected ids in [0, V) with V = {self.V}")
        if not len(set(self.source_ids)) == len(self.source_ids) == self.L:
            raise ValueError(f"source_ids: expected L = {self.L} different sources")
        if self.mode == "full_copy" and self.source_ids != tuple(range(self.V)):
            raise ValueError("source_ids: mode full_copy mirrors every visible id, in order")
        return self

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
        """Write the vocabulary into a model's config, which is saved with the weights.

        `codec_class` tells the engines how to write turns, `added_rows` tells the trainer which
        rows are new.
        """
        # A full copy's sources are all ids, in order: 150,000 numbers that nobody needs.
        omitted = {"source_ids"} if self.mode == "full_copy" else None
        setattr(config, FIELD, self.model_dump(mode="json", exclude=omitted))
        config.codec_class = CODEC
        config.added_rows = [self.V, self.V + self.L]  # end excluded

    @classmethod
    def of(cls, config: PretrainedConfig) -> DualVocab:
        """The vocabulary that a config describes. Raises ValueError that names the field."""
        fields = getattr(config, FIELD, None)
        if fields is None:
            raise ValueError(
                f"{FIELD}: missing, so this is no dual checkpoint; alar.methods.dual.build makes"
                " one"
            )
        if fields.get("mode") == "full_copy":
            # Left out by describe: it follows from V.
            fields = {"source_ids": list(range(fields.get("V", 0))), **fields}
        try:
            dual = cls(**fields)
        except ValueError as error:
            raise ValueError(f"{FIELD}: {error}\nBuild the checkpoint again") from error
        if config.vocab_size != dual.V + dual.L:
            raise ValueError(
                f"vocab_size: {config.vocab_size}, but V + L = {dual.V + dual.L}; build the"
                " checkpoint again"
            )
        return dual

    @classmethod
    def read(cls, folder: str | Path) -> DualVocab:
        """The vocabulary of a checkpoint folder.

        Raises ValueError that names the file and the field.
        """
        config = AutoConfig.from_pretrained(folder)
        try:
            return cls.of(config)
        except ValueError as error:
            raise ValueError(f"{Path(folder) / 'config.json'}: {error}") from error

"""The codec of a dual checkpoint: it writes thoughts in mirrors.

A constraint keeps mirrors apart from visible text. `build` names this class in config.json, so
every engine finds it.
"""

from __future__ import annotations

from collections.abc import Sequence

from alar import protocol
from alar.methods.dual.constraint import PhaseConstraint
from alar.methods.dual.phases import ThinkPhase
from alar.methods.dual.vocabulary import DualVocab
from alar.rollout.codec import Codec


class DualCodec(Codec):
    """`Codec` with a `dual` vocabulary and no latent blocks."""

    def __init__(self, tokenizer, dual: DualVocab, form: protocol.Form = protocol.SEARCH):
        super().__init__(tokenizer, form=form)
        self.dual = dual

    @classmethod
    def from_config(cls, config, tokenizer, form: protocol.Form = protocol.SEARCH) -> DualCodec:
        return cls(tokenizer, DualVocab.of(config), form)

    def constraint(self, device="cpu") -> PhaseConstraint:
        return PhaseConstraint(self.tokenizer, self.dual, device)

    def turn_phase(self, in_think: bool) -> ThinkPhase:
        return ThinkPhase(self.dual.think_end_ids, in_think)

    def is_latent(self, token: int) -> bool:
        return self.dual.is_mirror(token)  # shown as latent, though it is an id like any other

    def thought_and_action(self, thought: str, acting: str) -> list[int]:
        """Raises NoMirror, a ValueError, for a thought with a token that has no mirror."""
        # Encoded apart from the tags: no piece may span the end of the thought.
        mirrors = self.dual.to_mirrors(self.untrusted(thought))  # one per token of the thought
        block = [*self.dual.think_start_ids, *mirrors, *self.dual.think_end_ids]
        return block + self.untrusted(acting)

    def text(self, ids: Sequence[int]) -> str:
        """Decode for people and for parsing: mirrors appear as the text of their sources."""
        return super().text(self.dual.to_source(ids))

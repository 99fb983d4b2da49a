"""Constrained decoding: which tokens a policy may write next, as values to add to the logits.

A codec may bring a constraint (`Codec.constraint`). Every engine adds the same values before the
temperature, so a recorded log-prob is that of the constrained distribution.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor


class TurnPhase(ABC):
    """Where one turn stands, for a constraint: `row` of its table holds for the next token."""

    row: int

    @abstractmethod
    def push(self, token: int, in_think: bool) -> None:
        """`token` was written; `in_think` says whether the text now stands in a think block."""


class TokenConstraint(ABC):
    """A table with one row per phase: 0 where a token is allowed, −∞ where not, else a bias."""

    @abstractmethod
    def rows(self, phases: Sequence[int] | Tensor) -> Float[Tensor, "n vocabulary"]:
        """What to add to the logits of tokens that are written in these phases."""

    def __call__(
        self, logits: Float[Tensor, "n vocabulary"], phases: Sequence[int] | Tensor
    ) -> Float[Tensor, "n vocabulary"]:
        return logits + self.rows(phases)

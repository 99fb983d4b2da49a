"""AR-GRPO on a dual vocabulary: rollouts and log-probs under its constraint.

The log-probs of the ratio are those of the constrained distribution, in sampling and in the update
alike. So every token needs its phase: the row of `PhaseConstraint` under which it was written. The
loss may be restricted to mirrors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor

from alar.methods.dual.phases import phases_of
from alar.methods.dual.vocabulary import DualVocab
from alar.records import Trajectory
from alar.rl.config import RLConfig
from alar.rl.trainer import ARGRPO, Batch, is_sampled, padded


class DualRLConfig(RLConfig):
    """`rows` trains the mirrors' embeddings. `latent_only`: only mirrors carry loss."""

    trainable: Literal["lora", "full", "rows", "lora+rows"] = "lora+rows"
    latent_only: bool = False


@dataclass
class DualBatch(Batch):
    phases: Int[Tensor, "batch time"]  # rows of the constraint's table, 0 in the padding


class DualARGRPO(ARGRPO):
    """`ARGRPO`, for a model with a dual vocabulary and a `DualRLConfig`."""

    def __init__(self, model, tokenizer, *args, **kwargs):
        self.dual = DualVocab.of(model.config)  # ValueError for another model
        super().__init__(model, tokenizer, *args, **kwargs)

    def carries_loss(self, trajectory: Trajectory) -> list[bool]:
        sampled = is_sampled(trajectory)
        if not self.config.latent_only:
            return sampled
        return [s and self.dual.is_mirror(i) for s, i in zip(sampled, trajectory.ids)]

    def batch(
        self, trajectories: Sequence[Trajectory], advantages: Sequence[Sequence[float]]
    ) -> DualBatch:
        phases = [phases_of(t, self.engine.codec) for t in trajectories]
        ordinary = super().batch(trajectories, advantages)
        return DualBatch(**vars(ordinary), phases=padded(phases, 0, torch.long))

    def constrained(self, logits, batch):
        chosen = batch.mask[:, 1:]  # (B, T − 1): the tokens that logits (n, V + L) predict
        return self.engine.constraint(logits, batch.phases[:, 1:][chosen])

"""Do the latent vectors carry anything? The always-latent system with its z replaced.

table = answers_with_tampered_latents(engine, environment, questions, intact, **settings)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch

from alar.evaluate.systems import evaluate, question_table
from alar.records import Environment, Question, Trajectory
from alar.rollout.hf import HFEngine

CONTROLS = ("zeroed", "mean", "noise", "shuffled")  # from nothing to another turn's z


class TamperedProjector(torch.nn.Module):
    """Replaces every z by something else of the same shape.

    `kind` says by what. zeroed: 0. mean: the bank's mean for this step. noise: a random direction
    with z's own norm. shuffled: the z that a random block of the bank has at this step. `bank`
    (blocks, K, H) holds intact z.
    """

    def __init__(self, projector: torch.nn.Module, kind: str, bank: torch.Tensor, seed: int = 0):
        super().__init__()
        if kind not in CONTROLS:
            raise ValueError(f"control {kind!r}: expected one of {', '.join(CONTROLS)}")
        self.projector, self.kind, self.bank = projector, kind, bank
        self.generator = torch.Generator().manual_seed(seed)

    def forward(self, hidden: torch.Tensor, step: int) -> torch.Tensor:
        z = self.projector(hidden, step)  # (rows, H)
        if self.kind == "zeroed":
            return torch.zeros_like(z)
        if self.kind == "mean":
            return self.bank[:, step].mean(0).to(z).expand_as(z)
        if self.kind == "noise":
            # Drawn on the CPU, so that every device gets the same noise.
            noise = torch.randn(z.shape, generator=self.generator).to(z)  # (rows, H)
            return noise * z.norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True)
        chosen = torch.randint(len(self.bank), (len(z),), generator=self.generator)  # (rows,)
        return self.bank[chosen, step].to(z)


def latent_bank(trajectories: Sequence[Trajectory], num_latent: int) -> torch.Tensor:
    """All z of some trajectories as (blocks, K, H). ValueError if there are none."""
    found = []
    for trajectory in trajectories:
        if len(trajectory.latents):
            width = trajectory.latents.shape[1]
            # (N, H) → (N / K, K, H): a trajectory holds whole blocks only.
            found.append(trajectory.latents.reshape(-1, num_latent, width))
    if not found:
        raise ValueError(
            "no latent block in these trajectories: controls need the z of an always-latent run"
        )
    return torch.as_tensor(np.concatenate(found))


def answers_with_tampered_latents(
    engine: HFEngine,
    environment: Environment,
    questions: Sequence[Question],
    intact: Sequence[Trajectory],
    **settings,
) -> pd.DataFrame:
    """`tables.CONTROL_QUESTIONS`: one row per question and control, with the intact answers first.

    `intact` are the always-latent answers to `questions`; their z make the bank. `settings` are
    those of `evaluate`.
    """
    model = engine.model
    projector = model.model.projector
    bank = latent_bank(intact, model.config.num_latent)
    tables = [question_table(intact, "intact")]
    for kind in CONTROLS:
        model.model.projector = TamperedProjector(projector, kind, bank)
        engine.reset()  # cached prefixes hold z of another kind
        try:
            trajectories = evaluate(engine, environment, questions, mode="latent", **settings)
        finally:  # also after an error: the caller's model must stay intact
            model.model.projector = projector
        tables.append(question_table(trajectories, kind))
    engine.reset()
    return pd.concat(tables, ignore_index=True)

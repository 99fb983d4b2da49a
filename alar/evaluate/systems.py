"""Evaluation: rollouts of a system on questions, the tables drawn from them, controls on z, and the
oracle router.

A *system* is a model with a mode policy ("base" explicit, "alar" free, "alar-think" forced …).
Tables have one row per question or per turn; intervals are computed from them by
`alar.evaluate.statistics`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pandas as pd
import torch

from alar.records import Environment, Question, Trajectory
from alar.rollout.codec import Codec
from alar.rollout.engine import Engine, Sampling
from alar.rollout.loop import run
from alar.rollout.modes import latent_probabilities

CONTROLS = ("zeroed", "mean", "noise", "shuffled")


def think_tokens(trajectory: Trajectory) -> int:
    """Generated tokens of the turns that reasoned in text."""
    return sum(turn.end - turn.start for turn in trajectory.turns if turn.mode == "think")


def question_table(trajectories: Sequence[Trajectory], system: str) -> pd.DataFrame:
    """One row per question."""
    return pd.DataFrame(
        {
            "system": system,
            "question_id": [t.question.id for t in trajectories],
            "question_type": [t.question.type for t in trajectories],
            "correct": [t.correct for t in trajectories],
            "generated_tokens": [t.generated_tokens for t in trajectories],
            "think_tokens": [think_tokens(t) for t in trajectories],
            "think_length": [t.think_length for t in trajectories],
            "turns": [len(t.turns) for t in trajectories],
            "latent_turns": [t.num_latent_turns for t in trajectories],
            "think_turns": [t.num_think_turns for t in trajectories],
            "well_formed": [t.well_formed for t in trajectories],
            "prediction": [t.prediction for t in trajectories],
        }
    )


def turn_table(
    trajectories: Sequence[Trajectory],
    system: str,
    p_latent: Sequence[Sequence[float]] | None = None,
):
    """One row per turn; `p_latent` from `alar.rollout.modes.latent_probabilities`, NaN without it."""
    rows = []
    for number, trajectory in enumerate(trajectories):
        for index, turn in enumerate(trajectory.turns):
            rows.append(
                {
                    "system": system,
                    "question_id": trajectory.question.id,
                    "question_type": trajectory.question.type,
                    "turn": index + 1,
                    "hard": index in trajectory.question.hard_turns,
                    "mode": turn.mode,
                    "tokens": turn.end - turn.start,
                    "p_latent": p_latent[number][index] if p_latent is not None else float("nan"),
                }
            )
    return pd.DataFrame(rows)


def evaluate(
    engine: Engine,
    environment: Environment,
    questions: Sequence[Question],
    *,
    mode: str,
    max_new_tokens: int,
    max_turns: int,
    batch_size: int,
    progress: Callable[[Iterable], Iterable] = iter,
) -> list[Trajectory]:
    """Greedy rollouts of one system."""
    return run(
        questions,
        engine,
        environment,
        Sampling(max_new_tokens, 0.0, stop=environment.stop),
        modes=mode,
        max_turns=max_turns,
        batch_size=batch_size,
        progress=progress,
    )


def mode_scores(engine, trajectories: Sequence[Trajectory]) -> list[list[float]]:
    """Exact p(latent | state) at every turn of in-process trajectories."""
    return latent_probabilities(engine.model, engine.codec, trajectories)


class TamperedProjector(torch.nn.Module):
    """Replaces every z by something else of the same shape; `bank` (rows, K, H) holds intact z of
    other turns.

    zeroed: 0 · mean: the bank's mean for this step · noise: a random direction with z's own norm ·
    shuffled: the z of a random turn of the bank at this step.
    """

    def __init__(self, projector: torch.nn.Module, kind: str, bank: torch.Tensor, seed: int = 0):
        super().__init__()
        if kind not in CONTROLS:
            raise ValueError(f"control {kind!r}: expected one of {', '.join(CONTROLS)}")
        self.projector, self.kind, self.bank = projector, kind, bank
        self.generator = torch.Generator().manual_seed(seed)

    def forward(self, hidden: torch.Tensor, step: int) -> torch.Tensor:
        z = self.projector(hidden, step)
        if self.kind == "zeroed":
            return torch.zeros_like(z)
        if self.kind == "mean":
            return self.bank[:, step].mean(0).to(z).expand_as(z)
        if self.kind == "noise":
            noise = torch.randn(z.shape, generator=self.generator).to(z)
            return noise * z.norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True)
        chosen = torch.randint(len(self.bank), (len(z),), generator=self.generator)
        return self.bank[chosen, step].to(z)


def latent_bank(trajectories: Sequence[Trajectory], num_latent: int) -> torch.Tensor:
    """All z of some trajectories as (blocks, K, H)."""
    found = [
        t.latents.reshape(-1, num_latent, t.latents.shape[1])
        for t in trajectories
        if len(t.latents)
    ]
    if not found:
        raise ValueError(
            "no latent block in these trajectories: controls need the z of an always-latent run"
        )
    return torch.as_tensor(np.concatenate(found))


def controls(
    engine, environment, questions, intact: Sequence[Trajectory], **settings
) -> pd.DataFrame:
    """The always-latent system with tampered z, beside the intact one; one row per question and
    control."""
    model = engine.model
    bank = latent_bank(intact, model.config.num_latent)
    tables = [question_table(intact, "intact")]
    projector = model.model.projector
    for kind in CONTROLS:
        model.model.projector = TamperedProjector(projector, kind, bank)
        engine.reset()
        try:
            trajectories = evaluate(engine, environment, questions, mode="latent", **settings)
        finally:
            model.model.projector = projector
        tables.append(question_table(trajectories, kind))
    engine.reset()
    return pd.concat(tables, ignore_index=True)


def oracle_router(
    engine, environment, questions: Sequence[Question], *, max_routed_turns: int = 3, **settings
):
    """For every question the cheapest correct choice of modes, found by trying all of them.

    All 2^T assignments to the first `max_routed_turns` turns are rolled out (later turns think).
    Where none is correct, the always-think trajectory counts. Returns one trajectory per question.
    """
    best: dict[str, Trajectory] = {}
    fallback: dict[str, Trajectory] = {}
    max_new_tokens, max_turns = settings["max_new_tokens"], settings["max_turns"]
    for assignment in itertools.product(("think", "latent"), repeat=max_routed_turns):
        trajectories = run(
            questions,
            engine,
            environment,
            Sampling(max_new_tokens, 0.0, stop=environment.stop),
            modes=lambda row, turn, a=assignment: a[turn] if turn < len(a) else "think",
            max_turns=max_turns,
            batch_size=settings["batch_size"],
        )
        for t in trajectories:
            key = t.question.id
            if all(mode == "think" for mode in assignment):
                fallback[key] = t
            if t.correct and (key not in best or t.generated_tokens < best[key].generated_tokens):
                best[key] = t
    return [best.get(q.id, fallback[q.id]) for q in questions]


def example_turns(codec: Codec, trajectories: dict[str, Trajectory]) -> pd.DataFrame:
    """Turn by turn, one question as several systems answered it."""
    rows = []
    for system, trajectory in trajectories.items():
        for index, turn in enumerate(trajectory.turns):
            rows.append(
                {
                    "system": system,
                    "question": trajectory.question.text,
                    "turn": index + 1,
                    "mode": turn.mode,
                    "tokens": turn.end - turn.start,
                    "hard": index in trajectory.question.hard_turns,
                    "text": codec.text(trajectory.ids[turn.start : turn.end]).strip(),
                }
            )
    return pd.DataFrame(rows)

"""The shape of the latent thoughts: principal components, step sizes, and the policy's choice of
mode along a trajectory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from alar.evaluate.systems import mode_scores
from alar.inspector.blocks import Site
from alar.records import Trajectory


def _columns(site: Site, p_latent: float) -> dict:
    question, turn = site.trajectory.question, site.block.turn
    forced = bool(site.trajectory.turns[turn].forced_mode)
    own = (
        "latent"
        if not forced
        else "unknown"
        if np.isnan(p_latent)
        else "latent"
        if p_latent >= 0.5
        else "think"
    )
    return {
        "question_id": question.id,
        "type": question.type,
        "turn": turn + 1,
        "hard": turn in question.hard_turns,
        "correct": bool(site.trajectory.correct),
        "forced": forced,
        "mode": own,
        "p_latent": p_latent,
    }


def step_table(
    sites: Sequence[Site], p_latent: dict[Site, float] | None = None
) -> tuple[pd.DataFrame, np.ndarray]:
    """One row per latent step with the columns by which views are coloured, and z (N, H) in the
    same order.

    `mode` is the one that the policy chooses in this state: "latent" for a turn of its own choice;
    for a forced turn the likelier one by `p_latent`, "unknown" without it.
    """
    rows, vectors = [], []
    for site in sites:
        about = _columns(site, float("nan") if p_latent is None else p_latent[site])
        for step, z in enumerate(site.z, start=1):
            rows.append(about | {"step": step})
            vectors.append(z)
    return pd.DataFrame(rows), np.asarray(vectors)


def principal_components(
    table: pd.DataFrame, z: np.ndarray, components: int = 2
) -> tuple[pd.DataFrame, np.ndarray]:
    """`table` with columns pc1, pc2, …, and the share of variance that each explains.

    Centred, not scaled; the sign of a component is fixed by its largest loading being positive.
    ValueError for fewer than two z.
    """
    if len(z) < 2:
        raise ValueError(f"{len(z)} latent steps: principal components need at least two")
    centred = z.astype(np.float64) - z.mean(0, dtype=np.float64)
    _, scales, axes = np.linalg.svd(centred, full_matrices=False)
    axes = axes[:components]
    axes = axes * np.sign(axes[np.arange(len(axes)), np.abs(axes).argmax(1)])[:, None]
    projected = centred @ axes.T  # (N, components)
    named = {f"pc{number}": projected[:, number - 1] for number in range(1, len(axes) + 1)}
    return (
        table.assign(**named),
        (scales**2 / max((scales**2).sum(), np.finfo(float).tiny))[: len(axes)],
    )


def step_sizes(sites: Sequence[Site]) -> pd.DataFrame:
    """One row per pair of steps k, k + 1: ‖z_{k+1} − z_k‖, the same over ‖z_k‖, their cosine;
    `step` is k (from 1)."""
    rows = []
    for site in sites:
        z, about = site.z.astype(np.float64), _columns(site, float("nan"))
        norms = np.linalg.norm(z, axis=1)
        for k in range(len(z) - 1):
            size = np.linalg.norm(z[k + 1] - z[k])
            cosine = z[k] @ z[k + 1] / max(norms[k] * norms[k + 1], np.finfo(float).tiny)
            rows.append(
                {key: about[key] for key in ("question_id", "type", "turn", "hard", "correct")}
                | {
                    "step": k + 1,
                    "size": size,
                    "relative_size": size / max(norms[k], np.finfo(float).tiny),
                    "cosine": cosine,
                }
            )
    return pd.DataFrame(rows)


def mode_path(engine, trajectories: Sequence[Trajectory]) -> pd.DataFrame:
    """p(latent | state) at every turn of every trajectory, by teacher forcing of both open tags
    (`alar.rollout.modes`)."""
    rows = []
    for trajectory, scores in zip(trajectories, mode_scores(engine, trajectories)):
        for number, (turn, p) in enumerate(zip(trajectory.turns, scores)):
            rows.append(
                {
                    "question_id": trajectory.question.id,
                    "type": trajectory.question.type,
                    "turn": number + 1,
                    "hard": number in trajectory.question.hard_turns,
                    "mode": turn.mode,
                    "forced": bool(turn.forced_mode),
                    "p_latent": p,
                }
            )
    return pd.DataFrame(rows)


def site_probabilities(engine, sites: Sequence[Site]) -> dict[Site, float]:
    """p(latent | state) before the block of each site."""
    trajectories = list({id(site.trajectory): site.trajectory for site in sites}.values())
    scores = dict(zip(map(id, trajectories), mode_scores(engine, trajectories)))
    return {site: scores[id(site.trajectory)][site.block.turn] for site in sites}

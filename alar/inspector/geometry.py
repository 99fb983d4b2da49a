"""The shape of the latent thoughts: principal components, step sizes, and the policy's choice of
mode along a trajectory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from jaxtyping import Float

from alar.evaluate.systems import mode_scores, turn_table
from alar.inspector.blocks import Site
from alar.records import Trajectory

_TINY = np.finfo(float).tiny  # in place of a zero that would divide


def _about(site: Site) -> dict:
    question, turn = site.trajectory.question, site.block.turn
    return {
        "question_id": question.id,
        "type": question.type,
        "turn": turn + 1,
        "hard": turn in question.hard_turns,
        "correct": bool(site.trajectory.correct),
    }


def step_table(
    sites: Sequence[Site], p_latent: dict[Site, float] | None = None
) -> tuple[pd.DataFrame, Float[np.ndarray, "N H"]]:
    """One row per latent step with the columns that colour the views, and z in the same order.

    `mode` is what the policy chooses in this state: "latent" for a turn of its own choice; for a
    forced turn the likelier mode by `p_latent`, or "unknown" without it.
    """
    rows = []
    for site in sites:
        chance = float("nan") if p_latent is None else p_latent[site]
        forced = bool(site.trajectory.turns[site.block.turn].forced_mode)
        mode = "latent"
        if forced and np.isnan(chance):
            mode = "unknown"
        elif forced and chance < 0.5:
            mode = "think"
        about = _about(site) | {"forced": forced, "mode": mode, "p_latent": chance}
        rows += [about | {"step": step} for step in range(1, 1 + len(site.block))]
    return pd.DataFrame(rows), np.concatenate([site.z for site in sites])


def principal_components(
    table: pd.DataFrame, z: Float[np.ndarray, "N H"], components: int = 2
) -> tuple[pd.DataFrame, Float[np.ndarray, " components"]]:
    """`table` with columns pc1, pc2, …, and the share of variance that each explains.

    z is centred and not scaled. Each component is turned so that its largest loading is positive.
    ValueError for fewer than two z.
    """
    if len(z) < 2:
        raise ValueError(f"{len(z)} latent steps: principal components need at least two")
    centred = z.astype(np.float64) - z.mean(0, dtype=np.float64)
    _, scales, axes = np.linalg.svd(centred, full_matrices=False)  # axes: (min(N, H), H)
    axes = axes[:components]  # (components, H)
    largest = axes[np.arange(len(axes)), np.abs(axes).argmax(1)]
    projected = centred @ (axes * np.sign(largest)[:, None]).T  # (N, components)
    named = {f"pc{number}": column for number, column in enumerate(projected.T, start=1)}
    variance = scales**2  # of all components, up to the factor N − 1 that cancels below
    return table.assign(**named), (variance / max(variance.sum(), _TINY))[: len(axes)]


def step_sizes(sites: Sequence[Site]) -> pd.DataFrame:
    """One row per pair of steps k, k + 1: `size` ‖z_{k+1} − z_k‖, `relative_size` (over ‖z_k‖) and
    `cosine`. `step` is k (from 1)."""
    rows = []
    for site in sites:
        # In float64, since neighbours may be nearly equal.
        z, about = site.z.astype(np.float64), _about(site)
        norms = np.linalg.norm(z, axis=1)  # (K,)
        for k in range(len(z) - 1):
            size = np.linalg.norm(z[k + 1] - z[k])
            sizes = {
                "step": k + 1,
                "size": size,
                "relative_size": size / max(norms[k], _TINY),
                "cosine": z[k] @ z[k + 1] / max(norms[k] * norms[k + 1], _TINY),
            }
            rows.append(about | sizes)
    return pd.DataFrame(rows)


def mode_path(engine, trajectories: Sequence[Trajectory]) -> pd.DataFrame:
    """p(latent | state) at every turn of every trajectory, by teacher forcing of both open tags
    (`alar.rollout.modes`)."""
    return turn_table(trajectories, "inspected", mode_scores(engine, trajectories))


def site_probabilities(engine, sites: Sequence[Site]) -> dict[Site, float]:
    """p(latent | state) before the block of each site."""
    # A trajectory with several sites is scored once.
    trajectories = list({id(site.trajectory): site.trajectory for site in sites}.values())
    scores = dict(zip(map(id, trajectories), mode_scores(engine, trajectories)))
    return {site: scores[id(site.trajectory)][site.block.turn] for site in sites}

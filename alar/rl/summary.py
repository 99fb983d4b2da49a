"""Summaries of one step's trajectories, and the metrics that both trainers log.

A `TrajectorySummary` is all that rewards, credit and metrics need to know of a trajectory. It holds
no tokens or tensors, so it can travel between the processes of a distributed job.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from alar.records import Trajectory
from alar.rl.objective import mode_information
from alar.rl.reward import Outcome, diversity_weight
from alar.rollout.codec import Codec
from alar.rollout.modes import block_start


@dataclass(frozen=True)
class TrajectorySummary:
    """Counts of one trajectory and, turn by turn, `modes`, `tags` and `hard`.

    A mode is True for a latent block, False for text and None for a turn without a block. A tag is
    the span of the turn's open tag among the trajectory's ids. The span is empty where the tag was
    written in other pieces. `explorer`: the policy did not choose every mode itself. `score` comes
    from the reward's own scorer (`Reward.scorer`) and is NaN without one. `grade` is that of
    `Outcome`.
    """

    correct: bool
    well_formed: bool
    n_latent: int
    n_think: int
    think_length: int  # characters
    generated_tokens: int
    modes: tuple[bool | None, ...]  # one per turn, as tags and hard
    tags: tuple[tuple[int, int], ...]  # (begin, end) in ids, end excluded
    hard: tuple[bool, ...]  # something must be computed in this turn
    explorer: bool
    question: str = ""  # its id
    score: float = float("nan")
    grade: float | None = None

    @classmethod
    def of(
        cls,
        trajectory: Trajectory,
        codec: Codec,
        score: float = float("nan"),
        *,
        explorer: bool = False,
    ) -> TrajectorySummary:
        latent_of = {"latent": True, "think": False}  # "none" is in neither: its mode is None
        modes = tuple(latent_of.get(turn.mode) for turn in trajectory.turns)
        return cls(
            correct=trajectory.correct,
            well_formed=trajectory.well_formed,
            n_latent=trajectory.num_latent_turns,
            n_think=trajectory.num_think_turns,
            think_length=trajectory.think_length,
            generated_tokens=trajectory.generated_tokens,
            modes=modes,
            tags=tuple(_tag(trajectory, number, mode, codec) for number, mode in enumerate(modes)),
            hard=tuple(number in trajectory.question.hard_turns for number in range(len(modes))),
            explorer=explorer,
            question=trajectory.question.id,
            score=score,
            grade=trajectory.grade,
        )


def _tag(trajectory: Trajectory, turn: int, latent: bool | None, codec: Codec) -> tuple[int, int]:
    begin = block_start(trajectory, turn, codec)
    tag = codec.latent_open if latent else codec.think_open
    # The same text in other pieces is not the choice that p(latent) describes.
    written = latent is not None and trajectory.ids[begin : begin + len(tag)] == tag
    return begin, begin + len(tag) if written else begin


def own_choices(summaries: Sequence[TrajectorySummary]) -> list[int]:
    """Rows of the trajectories that chose all their modes themselves; all rows where none did."""
    # Forced modes say nothing about the policy.
    free = [row for row, summary in enumerate(summaries) if not summary.explorer]
    return free or list(range(len(summaries)))


def outcomes_of(
    summaries: Sequence[TrajectorySummary], groups: Sequence[Hashable]
) -> list[Outcome]:
    return [
        Outcome(group, s.correct, s.well_formed, s.n_latent, s.n_think, s.think_length, s.grade)
        for s, group in zip(summaries, groups, strict=True)
    ]


def rollout_metrics(
    summaries: Sequence[TrajectorySummary],
    p_latent: Sequence[Sequence[float]],
    rewards: Sequence[float],
    groups: Sequence[Hashable],
    trained: Sequence[bool],
    *,
    step: int,
    total_steps: int,
) -> dict[str, float]:
    """Metrics of one step, counted from 1; `trained` says which trajectories carry loss.

    The metrics of behaviour describe the trajectories whose modes the policy chose itself, if there
    are any. `p_latent` holds for each of these the probability of the latent mode in every state
    that it visited.
    """
    chosen = [summaries[row] for row in own_choices(summaries)]
    # Of every turn: (latent, hard).
    turns = [(mode is True, hard) for s in chosen for mode, hard in zip(s.modes, s.hard)]
    entropy, given_state, information = mode_information(
        torch.tensor([p for row in p_latent for p in row])  # (states,)
    )
    by_group = defaultdict(list)  # group → its rewards
    for reward, group in zip(rewards, groups, strict=True):
        by_group[group].append(reward)
    # Such a group has no advantage to learn from; 1e-9 absorbs rounding.
    equal = [max(group) - min(group) < 1e-9 for group in by_group.values()]
    return {
        "step": step,
        "reward": sum(rewards) / len(rewards),
        "accuracy": _share([s.correct for s in chosen]),
        "well_formed": _share([s.well_formed for s in chosen]),
        "generated_tokens": sum(s.generated_tokens for s in chosen) / len(chosen),
        "latent_share": _share([latent for latent, _ in turns]),
        "latent_share_hard": _share([latent for latent, hard in turns if hard]),
        "latent_share_easy": _share([latent for latent, hard in turns if not hard]),
        "mode_entropy": float(entropy),
        "mode_entropy_given_state": float(given_state),
        "mutual_information": float(information),
        "zero_variance_share": _share(equal),
        "trained_share": _share(trained),
        "diversity_weight": diversity_weight(step, total_steps),
    }


def validation_metrics(
    summaries: Sequence[TrajectorySummary], rewards: Sequence[float]
) -> dict[str, float]:
    """Metrics of greedy trajectories, one per question; `rewards` come from `Reward.validation`."""
    count = len(summaries)
    turns = sum(len(s.modes) for s in summaries)
    return {
        "validation_reward": sum(rewards) / count,
        "validation_accuracy": sum(s.correct for s in summaries) / count,
        "validation_tokens": sum(s.generated_tokens for s in summaries) / count,
        "validation_latent_share": sum(s.n_latent for s in summaries) / max(1, turns),
    }


def _share(wanted: Sequence[bool]) -> float:
    return sum(wanted) / len(wanted) if wanted else float("nan")  # NaN: there was nothing to count

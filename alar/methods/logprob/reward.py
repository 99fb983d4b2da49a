"""The log-prob reward, beside binary exact match.

    r = (1 − w) · EM + w · ŝ,    ŝ = (s − mean_G s) / std_G s

with s the score of `alar.methods.logprob.scoring` and G the rollouts of one prompt. w = 0 is exact
match alone, w = 1 LatentReasoning's continuous reward.

The published OPEN = −2 is not a floor. Reasoning that closes on a wrong answer scores −5 … −25, so
in a group of wrong rollouts one that never closes is the best. Repaired, it counts as the lowest of
its group.

Deliberate: INVALID scores say nothing about a policy, so they take no part in a group and earn 0
there. Validation is greedy and has one rollout per prompt, so exact match judges it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from alar.methods.logprob.scoring import INVALID, OPEN, LogProbScorer
from alar.rl.config import RLConfig
from alar.rl.objective import group_advantages
from alar.rl.strategy import Reward, Strategy, grpo

VARIANTS = ("published", "repaired")


@dataclass(frozen=True)
class LogProbReward(Reward):
    """`weight` is w. `normalise=False` uses s itself as ŝ. The trainer's frozen start scores."""

    weight: float = 0.5
    normalise: bool = True
    variant: Literal["published", "repaired"] = "published"

    def __post_init__(self):
        if self.variant not in VARIANTS:
            raise ValueError(f"variant is {self.variant!r}: expected one of {', '.join(VARIANTS)}")
        if not 0 <= self.weight <= 1:
            raise ValueError(f"weight is {self.weight}: expected a share, 0 for exact match alone")

    def rewards(self, summaries, groups, step, total_steps):
        scores, correct = [s.score for s in summaries], [s.correct for s in summaries]
        return mixed_rewards(scores, correct, groups, self)

    def scorer(self, reference, tokenizer, form):
        if self.weight == 0:  # exact match alone: save the forward passes
            return None
        scorer = LogProbScorer(reference, tokenizer, form)
        return lambda trajectories: [score.value for score in scorer.score(trajectories)]


def logprob_grpo(reward: LogProbReward, config: RLConfig, seed: int = 0) -> Strategy:
    """What trains with the log-prob reward: GRPO without AR-GRPO's terms."""
    return grpo(config, reward, seed)


def mixed_rewards(
    scores: Sequence[float],
    correct: Sequence[bool],
    groups: Sequence[Hashable],
    settings: LogProbReward,
) -> list[float]:
    """The reward of every rollout, in their order.

    Raises ValueError for a score that is NaN, because nothing scored that rollout.
    """
    if settings.weight == 0:
        return [float(right) for right in correct]
    if any(math.isnan(score) for score in scores):
        raise ValueError(
            "a rollout has no log-prob score: the trainer's scorer must score all of them"
        )
    if settings.variant == "repaired":
        scores = open_as_lowest(scores, groups)
    if settings.normalise:
        support = group_normalised(scores, groups)  # ŝ
    else:
        support = [0.0 if score == INVALID else score for score in scores]  # ŝ
    return [
        (1 - settings.weight) * right + settings.weight * value
        for right, value in zip(correct, support, strict=True)
    ]


def open_as_lowest(values: Sequence[float], groups: Sequence[Hashable]) -> list[float]:
    """The scores with OPEN replaced by the lowest of its group, if that is lower."""
    lowest: dict[Hashable, float] = {}  # group → its lowest valid score, OPEN included
    for value, group in zip(values, groups, strict=True):
        if value != INVALID:
            lowest[group] = min(value, lowest.get(group, value))
    return [lowest[group] if value == OPEN else value for value, group in zip(values, groups)]


def group_normalised(values: Sequence[float], groups: Sequence[Hashable]) -> list[float]:
    """(value − mean) / std over the values of its group.

    A group of one keeps its value. INVALID values take no part, and get 0.
    """
    # Group → 0, 1, … for a tensor.
    numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    # Rows of the others keep 0.
    valid = [row for row, value in enumerate(values) if value != INVALID]
    normalised = [0.0] * len(values)
    if valid:
        members = torch.tensor([numbers[groups[row]] for row in valid])
        found = group_advantages(
            torch.tensor([values[row] for row in valid], dtype=torch.float64), members
        )
        for row, value in zip(valid, found.tolist()):
            normalised[row] = value
    return normalised

"""What a method of reinforcement learning chooses: its reward, credit, sampler and loss.

    Sampler   which questions a step asks, which modes it draws, which groups are trained on
    Reward    one number for each trajectory of the step, and what validation counts
    Credit    the advantage of every token
    Loss      the mean loss of the sampled tokens, from their advantages and log-probs

A `Strategy` holds one of each, and both trainers take it whole. `Reward`, `Credit` and `Loss` are
interfaces. `Sampler`, `GroupCredit` and `ClippedLoss` are GRPO's; `ShapedReward`, `TurnCredit` and
`ExploringSampler` are AR-GRPO's. `grpo` and `ar_grpo` put them together as an `RLConfig` asks.
Another method is a small class that overrides what it changes: see `alar.methods.length_rewards`.

Every part is a frozen dataclass whose fields are plain JSON values. So a strategy can be written
as its classes and their settings (`to_json`). In this form it reaches the processes of verl, and a
resumed training checks that it goes on with the same strategy.
"""

from __future__ import annotations

import importlib
import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from alar.protocol import Form
from alar.records import Environment, Question, Trajectory
from alar.rl.config import RLConfig
from alar.rl.objective import group_advantages, informative_groups, mode_advantages, policy_loss
from alar.rl.reward import diversity_weight, shaped_rewards
from alar.rl.summary import TrajectorySummary, outcomes_of
from alar.rollout.loop import ModePlan

TrajectoryScorer = Callable[[Sequence[Trajectory]], list[float]]  # trajectories → one score each


class Reward(ABC):
    """What a trajectory is worth.

    `modes`: "free" where the policy chooses between text and latent blocks, "off" where it reasons
    in text only. `selects`: whether its validation can say which weights are best; otherwise the
    last ones are returned. A reward that compares samples of one prompt cannot judge greedy
    answers, so it does not select.
    """

    modes: ClassVar[Literal["free", "off"]] = "free"
    selects: ClassVar[bool] = False

    @abstractmethod
    def rewards(
        self,
        summaries: Sequence[TrajectorySummary],
        groups: Sequence[Hashable],
        step: int,
        total_steps: int,
    ) -> list[float]:
        """One number per trajectory. Those with equal `groups` answer the same prompt; steps are
        counted from 1."""

    def validation(self, summaries: Sequence[TrajectorySummary], total_steps: int) -> list[float]:
        """The rewards of greedy trajectories, one per question: by default 1 for a right answer."""
        return [float(summary.correct) for summary in summaries]

    def environment(self, environment: Environment) -> Environment:
        """The environment as the policy meets it; a reward may change the prompt."""
        return environment

    def require(self, questions: Sequence[Question]) -> None:  # noqa: B027  most need nothing
        """Raise ValueError if these questions cannot be rewarded. Called before anything runs."""

    def scorer(self, reference, tokenizer, form: Form) -> TrajectoryScorer | None:
        """What gives each trajectory its `score`, for a reward that needs more than summaries.

        `reference` is the frozen start of the training. Only the trainer in this process calls it.
        """
        return None


class Credit(ABC):
    @abstractmethod
    def advantages(
        self,
        summaries: Sequence[TrajectorySummary],
        lengths: Sequence[int],
        rewards: Sequence[float],
        groups: Sequence[Hashable],
        step: int,
        total_steps: int,
    ) -> list[list[float]]:
        """For every trajectory one advantage per token; it has `lengths` tokens."""


@dataclass(frozen=True)
class Sampler:
    """Each question once per epoch, no mode forced.

    All draws depend on the seed and the step alone, so a resumed training goes on as if it had not
    stopped. `writer`: whose trajectories are trained on, the policy's or those of the frozen
    reference (off-policy).
    """

    prompts_per_step: int
    group_size: int
    seed: int = 0
    kept_variance: float = 1.0  # 1 keeps every group
    writer: Literal["policy", "reference"] = "policy"

    def prompts(self, questions: Sequence[Question], step: int) -> list[Question]:
        """The questions of a step. Raises ValueError where there are fewer than one step needs."""
        size = self.prompts_per_step
        per_epoch = len(questions) // size  # steps; a remainder smaller than a step is left out
        if not per_epoch:
            raise ValueError(f"{len(questions)} training questions, fewer than rl.prompts_per_step")
        # The seed names the epoch, so any step finds its order without the steps before it.
        order = list(range(len(questions)))
        random.Random(f"prompts {self.seed} {(step - 1) // per_epoch}").shuffle(order)
        first = (step - 1) % per_epoch * size  # steps count from 1
        return [questions[i] for i in order[first : first + size]]

    def rollout_seed(self, step: int) -> int:
        return self.seed * 1_000_003 + step  # a large prime keeps the steps of two seeds apart

    def explores(self, row: int) -> bool:
        """Whether some mode of this row of the step is drawn at random."""
        return False

    def modes(self, step: int) -> str | ModePlan:
        """The modes of the step's rows, for `alar.rollout.loop.run`."""
        return "free"

    def kept(self, rewards: Sequence[float], groups: Sequence[Hashable]) -> list[bool]:
        """Which trajectories carry loss.

        With `kept_variance` below 1, those of the groups that hold this share of the rewards'
        variance (RAGEN).
        """
        if self.kept_variance == 1:
            return [True] * len(groups)
        kept = informative_groups(rewards, groups, self.kept_variance)
        return [group in kept for group in groups]


class Loss(ABC):
    @abstractmethod
    def __call__(
        self,
        log_probs: Float[Tensor, " tokens"],
        behaviour: Float[Tensor, " tokens"],
        advantages: Float[Tensor, " tokens"],
    ) -> tuple[Float[Tensor, ""], float]:
        """(mean loss over the tokens, share of tokens that are clipped).

        `behaviour` holds the log-probs at the time of sampling.
        """


# The choices of GRPO and AR-GRPO.


@dataclass(frozen=True)
class ShapedReward(Reward):
    """`alar.rl.reward`: right, well formed, brief, and latent where that works."""

    alpha: float = 0.3
    length_tolerance: float = 400.0
    diversity: float = 1.0
    variant: Literal["published", "repaired"] = "repaired"

    selects: ClassVar[bool] = True

    def rewards(self, summaries, groups, step, total_steps):
        return shaped_rewards(
            outcomes_of(summaries, groups), step=step, total_steps=total_steps, **asdict(self)
        )

    def validation(self, summaries, total_steps):
        """The rewards of the last step, where diversity no longer pays."""
        # Each greedy trajectory is a group of its own.
        return self.rewards(summaries, range(len(summaries)), total_steps, total_steps)


@dataclass(frozen=True)
class GroupCredit(Credit):
    """Every token of a trajectory has the trajectory's advantage within its group (GRPO)."""

    norm_by_std: bool = True

    def of_trajectories(self, rewards: Sequence[float], groups: Sequence[Hashable]) -> list[float]:
        # Group → 0, 1, …, because a tensor holds no strings.
        numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
        return group_advantages(
            torch.tensor(rewards),
            torch.tensor([numbers[group] for group in groups]),
            norm_by_std=self.norm_by_std,
        ).tolist()

    def advantages(self, summaries, lengths, rewards, groups, step, total_steps):
        whole = self.of_trajectories(rewards, groups)  # one advantage per trajectory
        return [[value] * length for value, length in zip(whole, lengths, strict=True)]


@dataclass(frozen=True)
class TurnCredit(GroupCredit):
    """GRPO's advantages, but a turn's open tag carries the credit of the mode chosen there.

    The credit (`mode_advantages`) times `mode_weight` replaces the trajectory's advantage on the
    pieces of the tag. Its baseline falls from `mode_baseline` to 0, as the diversity bonus does.
    """

    mode_weight: float = 1.0
    mode_baseline: float = 0.0

    def advantages(self, summaries, lengths, rewards, groups, step, total_steps):
        tokens = super().advantages(summaries, lengths, rewards, groups, step, total_steps)
        credits = mode_advantages(
            [summary.modes for summary in summaries],
            self.of_trajectories(rewards, groups),
            list(groups),
            baseline=self.mode_baseline * diversity_weight(step, total_steps),
        )
        # The tag is where the mode is chosen. An empty span (no clear tag) changes nothing.
        for row, (summary, of_turns) in enumerate(zip(summaries, credits)):
            for (begin, end), credit in zip(summary.tags, of_turns):
                tokens[row][begin:end] = [self.mode_weight * credit] * (end - begin)
        return tokens


@dataclass(frozen=True)
class ExploringSampler(Sampler):
    """In the last `explore_fraction` of every group the mode of one turn is drawn at random.

    Without this, a policy that prefers one mode would leave nothing to compare it with.
    """

    explore_fraction: float = 0.5

    def explores(self, row):
        explorers = round(self.explore_fraction * self.group_size)  # per group
        return row % self.group_size >= self.group_size - explorers  # rows of a group are adjacent

    def modes(self, step):
        """The turn is the first with probability ½, else the second with ½, and so on. All other
        modes are free, so that a turn is explored where the policy itself goes."""

        def plan(row: int, turn: int) -> str:
            if not self.explores(row):
                return "free"
            # Seeded by row: every turn of it sees the same plan.
            draw = random.Random(f"explore {self.seed} {step} {row}")
            mode = draw.choice(("think", "latent"))
            # Turn t with probability ½^(t+1).
            explored = next(number for number in itertools.count() if draw.random() < 0.5)
            return mode if turn == explored else "free"

        return plan


@dataclass(frozen=True)
class ClippedLoss(Loss):
    """PPO's, with dual clip."""

    clip_low: float = 0.2
    clip_high: float = 0.2

    def __call__(self, log_probs, behaviour, advantages):
        everywhere = torch.ones_like(log_probs, dtype=torch.bool)[None]  # (1, tokens)
        # policy_loss wants (B, T): one row of all tokens.
        loss, details = policy_loss(
            log_probs[None], behaviour[None], advantages[None], everywhere, **asdict(self)
        )
        return loss, details["clip_fraction"]


@dataclass(frozen=True)
class Strategy:
    reward: Reward
    credit: Credit
    sampler: Sampler
    loss: Loss

    def to_json(self) -> dict[str, dict[str, Any]]:
        """Part → its class, as `module:name`, and its settings."""
        described = {}
        for part in fields(self):
            chosen = getattr(self, part.name)
            kind = type(chosen)
            described[part.name] = {"class": f"{kind.__module__}:{kind.__qualname__}"}
            described[part.name] |= asdict(chosen)
        return described

    @classmethod
    def from_json(cls, described: Mapping[str, Mapping[str, Any]]) -> Strategy:
        parts = {}
        for name, settings in described.items():
            settings = dict(settings)
            module, _, kind = settings.pop("class").partition(":")
            parts[name] = getattr(importlib.import_module(module), kind)(**settings)
        return cls(**parts)


def ar_grpo(config: RLConfig, seed: int = 0) -> Strategy:
    """AR-GRPO as these parameters ask for it; GRPO where `credit` is "trajectory" and nothing
    explores."""
    if config.credit == "turn":
        credit = TurnCredit(config.norm_adv_by_std, config.mode_weight, config.mode_baseline)
    else:
        credit = GroupCredit(config.norm_adv_by_std)
    return Strategy(
        reward=ShapedReward(
            config.alpha, config.length_tolerance, config.diversity, config.variant
        ),
        credit=credit,
        sampler=ExploringSampler(
            prompts_per_step=config.prompts_per_step,
            group_size=config.group_size,
            seed=seed,
            kept_variance=config.kept_variance,
            explore_fraction=config.explore_fraction,
        ),
        loss=ClippedLoss(config.clip_low, config.clip_high),
    )


def grpo(config: RLConfig, reward: Reward, seed: int = 0, **sampler: Any) -> Strategy:
    """GRPO with another reward: one advantage for all tokens of a trajectory, no mode forced."""
    return Strategy(
        reward,
        GroupCredit(config.norm_adv_by_std),
        Sampler(config.prompts_per_step, config.group_size, seed, config.kept_variance, **sampler),
        ClippedLoss(config.clip_low, config.clip_high),
    )

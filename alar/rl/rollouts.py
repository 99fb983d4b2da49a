"""What AR-GRPO makes of one step's rollouts: rewards, advantages and metrics, the same for both
trainers.

A `Summary` says of a trajectory what these need, without tokens or tensors, so that it can travel
between the processes of a distributed job as well as stay in one.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from alar.methods.length_rewards import Sample, length_rewards
from alar.methods.logprob.reward import mixed_rewards
from alar.records import Question, Trajectory
from alar.rl.config import RLConfig
from alar.rl.objective import (
    group_advantages,
    informative_groups,
    mode_advantages,
    mode_information,
)
from alar.rl.reward import Outcome, diversity_weight, shaped_rewards
from alar.rollout.codec import Codec
from alar.rollout.loop import ModePlan
from alar.rollout.modes import block_start


@dataclass(frozen=True)
class Summary:
    """Per turn: `modes` (latent, text, None without a block), `tags` (span of the open tag among
    the trajectory's ids, empty where it was written in other pieces), and `hard`. The modes of an
    `explorer` were not all the policy's own choice. `score` is that of the log-prob reward, NaN
    without one."""

    correct: bool
    well_formed: bool
    n_latent: int
    n_think: int
    think_length: int
    generated_tokens: int
    modes: tuple[bool | None, ...]
    tags: tuple[tuple[int, int], ...]
    hard: tuple[bool, ...]
    explorer: bool
    question: str = ""
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
    ) -> Summary:
        latent_of = {"latent": True, "think": False}
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
    written = latent is not None and trajectory.ids[begin : begin + len(tag)] == tag
    return begin, begin + len(tag) if written else begin


def prompts_of_step(questions: Sequence[Question], config: RLConfig, step: int) -> list[Question]:
    """The questions of a step, counted from 1: a function of the seed and the step alone, so that a
    resumed run goes on alike; each question comes once per epoch. ValueError where there are fewer
    than one step needs.
    """
    size = config.prompts_per_step
    per_epoch = len(questions) // size
    if not per_epoch:
        raise ValueError(f"{len(questions)} training questions, fewer than rl.prompts_per_step")
    order = list(range(len(questions)))
    random.Random(f"prompts {config.seed} {(step - 1) // per_epoch}").shuffle(order)
    first = (step - 1) % per_epoch * size
    return [questions[i] for i in order[first : first + size]]


def explores(config: RLConfig, row: int) -> bool:
    """Whether a rollout is one of the last `explore_fraction` of its group."""
    return row % config.group_size >= config.group_size - round(
        config.explore_fraction * config.group_size
    )


def own_choices(summaries: Sequence[Summary]) -> list[int]:
    """The rollouts that chose all their modes themselves; every one where none did."""
    return [row for row, summary in enumerate(summaries) if not summary.explorer] or list(
        range(len(summaries))
    )


def mode_plan(config: RLConfig, step: int) -> ModePlan:
    """An explorer's mode is drawn at random in one turn: in the first with probability ½, else in
    the second with ½, and so on. All other modes are free, so that a turn is explored where the
    policy itself goes. Under a length reward there are no modes: `<latent>` is plain text."""
    if config.length_reward:
        return lambda row, turn: "off"

    def plan(row: int, turn: int) -> str:
        if not explores(config, row):
            return "free"
        draw = random.Random(f"explore {config.seed} {step} {row}")
        mode = draw.choice(("think", "latent"))
        explored = next(number for number in itertools.count() if draw.random() < 0.5)
        return mode if turn == explored else "free"

    return plan


def validation_mode(config: RLConfig) -> str:
    return "off" if config.length_reward else "free"


def rollout_seed(config: RLConfig, step: int) -> int:
    return config.seed * 1_000_003 + step


def outcomes_of(summaries: Sequence[Summary], groups: Sequence[Hashable]) -> list[Outcome]:
    return [
        Outcome(group, s.correct, s.well_formed, s.n_latent, s.n_think, s.think_length, s.grade)
        for s, group in zip(summaries, groups, strict=True)
    ]


def rewards_of(
    summaries: Sequence[Summary], groups: Sequence[Hashable], config: RLConfig, step: int
) -> list[float]:
    """The rewards at a step of the trainer, in the order of the summaries."""
    if config.length_reward:
        samples = [
            Sample(g, s.correct, s.generated_tokens, s.question)
            for s, g in zip(summaries, groups, strict=True)
        ]
        return length_rewards(samples, config.length_reward)
    if config.logprob_reward:
        return mixed_rewards(
            [s.score for s in summaries],
            [s.correct for s in summaries],
            groups,
            config.logprob_reward,
        )
    return shaped_rewards(
        outcomes_of(summaries, groups),
        step=step,
        total_steps=config.steps,
        alpha=config.alpha,
        length_tolerance=config.length_tolerance,
        diversity=config.diversity,
        variant=config.variant,
    )


def trained_rows(
    rewards: Sequence[float], groups: Sequence[Hashable], config: RLConfig
) -> list[bool]:
    """Which rollouts carry loss: all, or with `kept_variance` below 1 those of informative groups."""
    if config.kept_variance == 1:
        return [True] * len(groups)
    kept = informative_groups(rewards, groups, config.kept_variance)
    return [group in kept for group in groups]


def token_advantages(
    summaries: Sequence[Summary],
    lengths: Sequence[int],
    rewards: Sequence[float],
    groups: Sequence[Hashable],
    config: RLConfig,
    step: int,
) -> tuple[list[list[float]], list[float]]:
    """Advantage of every token, and of every trajectory, `lengths` tokens long, at a step of the
    trainer. With `credit="turn"` the pieces of a turn's open tag carry the credit of the mode
    chosen there, times `mode_weight`, instead of the trajectory's advantage; its baseline falls
    from `mode_baseline` to 0 as the diversity bonus does."""
    numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    if config.length_reward and config.length_reward.is_advantage:
        whole = list(rewards)
    else:
        whole = group_advantages(
            torch.tensor(rewards),
            torch.tensor([numbers[group] for group in groups]),
            norm_by_std=config.norm_adv_by_std,
        ).tolist()
    tokens = [[value] * length for value, length in zip(whole, lengths, strict=True)]
    if config.credit == "turn":
        baseline = config.mode_baseline * diversity_weight(step, config.steps)
        credits = mode_advantages(
            [s.modes for s in summaries], whole, list(groups), baseline=baseline
        )
        for row, (summary, credited) in enumerate(zip(summaries, credits)):
            for (begin, end), credit in zip(summary.tags, credited):
                tokens[row][begin:end] = [config.mode_weight * credit] * (end - begin)
    return tokens, whole


def rollout_metrics(
    summaries: Sequence[Summary],
    p_latent: Sequence[Sequence[float]],
    rewards: Sequence[float],
    groups: Sequence[Hashable],
    config: RLConfig,
    step: int,
) -> dict[str, float]:
    """Metrics of one step. Those of behaviour describe the trajectories whose modes the policy
    chose itself, if there are any; `p_latent` are the probabilities of the latent mode in the
    states that these visited, trajectory by trajectory.
    """
    chosen = [summaries[row] for row in own_choices(summaries)]
    turns = [(mode is True, hard) for s in chosen for mode, hard in zip(s.modes, s.hard)]
    entropy, given_state, information = mode_information(
        torch.tensor([p for row in p_latent for p in row])
    )
    by_group = defaultdict(list)
    for reward, group in zip(rewards, groups, strict=True):
        by_group[group].append(reward)
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
        "zero_variance_share": _share(
            [max(group) - min(group) < 1e-9 for group in by_group.values()]
        ),
        "trained_share": _share(trained_rows(rewards, groups, config)),
        "diversity_weight": diversity_weight(step, config.steps),
    }


def validation_metrics(summaries: Sequence[Summary], config: RLConfig) -> dict[str, float]:
    """Of greedy rollouts, one per question; their reward is that of the last step, where diversity
    no longer pays. Under a length or log-prob reward, which compare samples of one prompt, it is
    the accuracy."""
    if config.length_reward or config.logprob_reward:
        rewards = [float(s.correct) for s in summaries]
    else:
        rewards = rewards_of(summaries, range(len(summaries)), config, config.steps)
    count = len(summaries)
    return {
        "validation_reward": sum(rewards) / count,
        "validation_accuracy": sum(s.correct for s in summaries) / count,
        "validation_tokens": sum(s.generated_tokens for s in summaries) / count,
        "validation_latent_share": (
            sum(s.n_latent for s in summaries) / max(1, sum(len(s.modes) for s in summaries))
        ),
    }


def _share(wanted: Sequence[bool]) -> float:
    return sum(wanted) / len(wanted) if wanted else float("nan")

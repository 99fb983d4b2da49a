"""The parameters of AR-GRPO, the same for both trainers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from alar.methods.length_rewards import LengthReward
from alar.methods.logprob.reward import LogProbReward


@dataclass(frozen=True)
class RLConfig:
    """Published values as defaults where there are any (group 8, lr 1e-6, KL 1e-3, α 0.3, L 400
    characters)."""

    steps: int = 100
    prompts_per_step: int = 16
    group_size: int = 8
    learning_rate: float = 1e-6
    schedule: str = "constant"  # "constant" | "linear" (to zero over all steps)
    warmup_ratio: float = 0.0  # of the steps: the rate rises linearly to learning_rate
    temperature: float = 1.0
    kl_coefficient: float = 1e-3
    clip_low: float = 0.2
    clip_high: float = 0.2
    alpha: float = 0.3
    length_tolerance: float = 400.0
    diversity: float = 1.0  # weight of the diversity bonus
    variant: str = "repaired"
    norm_adv_by_std: bool = True  # False: advantages keep the rewards' scale (Dr. GRPO)
    credit: str = "turn"
    mode_weight: float = 1.0
    mode_baseline: float = (
        0.0  # share of the mean effect of a latent turn that is taken off each, times d_t
    )
    explore_fraction: float = 0.5
    kept_variance: float = (
        1.0  # below 1: train on the groups that hold this share of the rewards' variance (RAGEN)
    )
    latents: str = "recomputed"
    trainable: str = "lora"
    lora_rank: int = 16
    lora_alpha: int = 32
    train_projector: bool = False
    latent_only: bool = False  # of a dual vocabulary: the loss on mirrors alone
    gradient_accumulation: int = 4
    max_turns: int = 6
    max_new_tokens: int = 256
    rollout_batch: int = 256
    validation_every: int = 10
    checkpoint_every: int = 10
    select: str = (
        "best"  # "best" | "last": which weights are returned, by reward on the validation questions
    )
    length_reward: LengthReward | None = (
        None  # in place of AR-GRPO's reward: a compared method, on explicit reasoning
    )
    logprob_reward: LogProbReward | None = (
        None  # in place of AR-GRPO's reward: exact match and the golds' log-probability
    )
    seed: int = 0

    def __post_init__(self):
        if isinstance(self.length_reward, Mapping):  # from a file
            object.__setattr__(self, "length_reward", LengthReward(**self.length_reward))
        if isinstance(self.logprob_reward, Mapping):
            object.__setattr__(self, "logprob_reward", LogProbReward(**self.logprob_reward))
        if self.length_reward and self.logprob_reward:
            raise ValueError(
                "rl.length_reward and rl.logprob_reward both replace AR-GRPO's reward: choose one"
            )
        choices = {
            "variant": ("published", "repaired"),
            "credit": ("trajectory", "turn"),
            "schedule": ("constant", "linear"),
            "latents": ("recomputed", "cached"),
            "trainable": ("lora", "full", "rows", "lora+rows"),
            "select": ("best", "last"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"rl.{name} is {getattr(self, name)!r}: expected one of {', '.join(allowed)}"
                )
        if self.latents == "cached" and self.train_projector:
            raise ValueError(
                "rl.latents: cached gives the projector no gradient; use recomputed, or freeze it"
            )
        if not 0 < self.kept_variance <= 1:
            raise ValueError(
                f"rl.kept_variance is {self.kept_variance}: expected a share above 0, 1 for no"
                " filter"
            )
        if self.length_reward:
            for name, needed in {
                "credit": "trajectory",
                "explore_fraction": 0.0,
                "select": "last",
            }.items():
                if getattr(self, name) != needed:
                    raise ValueError(
                        f"rl.{name} is {getattr(self, name)!r}: a length reward knows no modes, and"
                        " compares samples of one prompt, which greedy validation lacks; set it to"
                        f" {needed!r}"
                    )


def learning_rate_at(done: int, config: RLConfig) -> float:
    """Rate of the step that follows `done` finished ones."""
    rising = min(1.0, (done + 1) / max(1.0, config.warmup_ratio * config.steps))
    remaining = 1 - done / config.steps if config.schedule == "linear" else 1.0
    return config.learning_rate * rising * remaining

"""The parameters of AR-GRPO: section `rl` of a parameter file, and what both trainers take."""

from typing import Annotated, Literal

from pydantic import Field

from alar.parameters import Count, CountOrNone, Rate, Section, Share


class RLConfig(Section):
    """Notebook 05. The defaults are those of the laptop study.

    Published (search): rate 1e-6, KL 1e-3, α 0.3, L 400 characters, LoRA, cached latents.
    """

    steps: Count = 44
    prompts_per_step: Count = 8
    group_size: Annotated[int, Field(ge=2)] = 8
    gradient_accumulation: Count = 4
    learning_rate: Rate = 5e-4
    schedule: Literal["constant", "linear"] = "linear"  # linear: to zero over all steps
    warmup_ratio: Share = 0.1  # of the steps: the rate rises linearly to learning_rate
    weight_decay: Annotated[float, Field(ge=0)] = 0.0  # of AdamW
    temperature: Annotated[float, Field(gt=0)] = 1.0
    # Pulls back to the start, against mode_weight: notebook 05 says how they balance.
    kl_coefficient: Annotated[float, Field(ge=0)] = 2.0
    clip_low: Share = 0.2
    clip_high: Share = 0.2
    alpha: Annotated[float, Field(ge=0)] = 0.15  # published: 0.3
    # L in characters; 0 = the base's median think length, which notebook 05 fills in.
    length_tolerance: Annotated[float, Field(ge=0)] = 0.0
    diversity: Annotated[float, Field(ge=0)] = 1.0  # weight of the diversity bonus; 0 = none
    variant: Literal["published", "repaired"] = "repaired"
    # For the tool domain. "toolmind": its dense score is the reward.
    judge: Literal["official", "toolmind"] = "official"
    # Published: True. With False, a latent turn is worth α in every group.
    norm_adv_by_std: bool = False
    credit: Literal["trajectory", "turn"] = "turn"
    # Share of each group's rollouts in which the mode of one turn is drawn at random.
    explore_fraction: Share = 0.75
    # Of a tag's credit. Large, because the advantages of the many text tokens are mostly noise.
    mode_weight: Annotated[float, Field(ge=0)] = 48.0
    # Share of the mean effect of latent turns that is taken off each, at the start; it falls to 0.
    # So the policy first learns which turns to make latent, and later how many.
    mode_baseline: Share = 1.0
    # Below 1: train on the groups that hold this share of the rewards' variance (RAGEN).
    kept_variance: Annotated[float, Field(gt=0, le=1)] = 1.0
    latents: Literal["recomputed", "cached"] = "recomputed"
    trainable: Literal["lora", "full"] = "full"
    lora_rank: Count = 16
    lora_alpha: Count = 32
    train_projector: bool = False
    worlds: Count = 24
    # Question types of the embedded prompts, in turn. A type named twice comes twice as often;
    # [] = all.
    types: list[str] = []
    validation_every: CountOrNone = 11  # 0 = never
    validation_questions: Count = 128
    # "best" on validation, where there is one and the reward can judge it; else the last.
    returned_weights: Literal["best", "last"] = "best"
    checkpoint_every: Count = 10
    trainer: Literal["single", "verl"] = "single"
    nodes: Count = 1  # for verl; it takes all GPUs of each
    tensor_parallel: Count = 1  # for verl with rollout.engine vllm: GPUs that share one model

    def inconsistencies(self):
        found = []
        explored = self.group_size * self.explore_fraction
        if 0 < explored < 1:
            problem = (
                f"{self.explore_fraction} of a group of {self.group_size} is less than one"
                f" rollout; use 0, or at least {1 / self.group_size:.3g}"
            )
            found.append(("explore_fraction", problem))
        if self.train_projector and self.latents == "cached":
            problem = (
                "cached latents carry no gradient to the projector; set rl.latents: recomputed"
            )
            found.append(("train_projector", problem))
        return found

    def refuse_inconsistencies(self) -> None:
        """Raise ValueError for values that cannot be trained with together."""
        for key, problem in self.inconsistencies():
            raise ValueError(f"rl.{key}: {problem}")


def learning_rate_at(done: int, config: RLConfig) -> float:
    """Rate of the step that follows `done` finished ones."""
    # From a fraction of the rate to all of it over the warm-up, at least one step.
    rising = min(1.0, (done + 1) / max(1.0, config.warmup_ratio * config.steps))
    remaining = 1 - done / config.steps if config.schedule == "linear" else 1.0
    return config.learning_rate * rising * remaining

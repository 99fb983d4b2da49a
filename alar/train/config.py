"""The parameters of the training stages: ranges and the defaults of the laptop study.

config = Aasd.of(globals())          # in notebook 03, from its `parameters` cell
train(model, examples, tokenizer.pad_token_id, config, seed=seed)
"""

from typing import Annotated, Literal

from pydantic import Field

from alar.parameters import Count, CountOrNone, Rate, Section, Share

PARTS = 4  # of a pretraining batch: see `alar.train.pretrain`


class Supervised(Section):
    """What AASD, the mode warm-up and the supervised methods share.

    Published: rate 1e-4, batch 16 per device, one epoch, LoRA of rank 16 and alpha 32. The
    laptop's model is small enough to train whole.
    """

    learning_rate: Rate = 5e-4
    epochs: Annotated[float, Field(gt=0)] = 1.5
    max_steps: CountOrNone = 0  # instead of so many epochs; 0 = as the epochs say
    batch_size: Count = 16  # of one process
    gradient_accumulation: Count = 1  # batches of a step; several processes share them
    warmup_ratio: Share = 0.03  # of the steps, in which the rate rises
    schedule: Literal["cosine", "linear", "constant"] = "cosine"  # of the rate after them
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    latent_gradient: Literal["published", "full", "projector_only"] = "published"
    trainable: Literal["lora", "full"] = "full"
    lora_rank: Count = 16
    lora_alpha: Count = 32
    # q, k, v and o as published, or those and the MLP's; never head and projector.
    lora_targets: Literal["attention", "all-linear"] = "attention"
    # Activations are computed again in the backward pass: less memory, more time. Released: True.
    gradient_checkpointing: bool = False
    # Examples of similar shape are put together among so many batches; 1 = batches as they come.
    batch_pool: Count = 16
    max_examples: CountOrNone = 0  # 0 = all

    def optimiser_steps(self, examples: int, processes: int = 1) -> int:
        """Optimiser steps: `max_steps`, or those of the epochs, at least one."""
        if self.max_steps:
            return self.max_steps
        per_step = self.batch_size * self.gradient_accumulation * processes
        return max(1, round(self.epochs * examples / per_step))


class Aasd(Supervised):
    """Notebook 03: every chain of thought becomes a latent block."""

    # "constant": K learned vectors instead of thoughts, the pause-token control
    kind: Literal["latent", "constant"] = "latent"
    # What a thought is told to hold: nothing, as published, or what a step of the text that it
    # replaces concludes. In the second case notebook 04 tells the latent turns of its mix as well.
    supervision: Literal["none", "labels"] = "none"


class Warmup(Supervised):
    """Notebook 04: a coin per turn decides between the latent block and the teacher's text."""

    latent_probability: Share = 0.5
    epochs: Annotated[float, Field(ge=0)] = 1.25  # 0 = no warm-up: stage 1's model goes on as it is


class Pretrain(Section):
    """Notebook 01, where `model.base` is "scratch"."""

    steps: CountOrNone = 3300
    batch_size: Annotated[int, Field(ge=PARTS, multiple_of=PARTS)] = 32
    learning_rate: Rate = 3e-3
    questions_per_world: Count = 1536
    hidden_size: Annotated[int, Field(ge=32, multiple_of=32)] = 128
    layers: Count = 4
    vocabulary: Annotated[int, Field(ge=512)] = 3072

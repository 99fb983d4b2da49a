"""The parameters of supervised training, which AASD, the mode warm-up and others share."""

from typing import Annotated, Literal

from pydantic import Field

from alar.parameters import Count, CountOrNone, Rate, Section, Share


class Supervised(Section):
    """Published: rate 1e-4, batch 16 per device, one epoch, LoRA of rank 16 and alpha 32.

    The defaults are those of the laptop study, whose model is small enough to train whole.
    """

    learning_rate: Rate = 5e-4
    epochs: Annotated[float, Field(gt=0)] = 1.5
    batch_size: Count = 16
    gradient_accumulation: Count = 1
    warmup_ratio: Share = 0.03
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    latent_gradient: Literal["published", "full", "projector_only"] = "published"
    trainable: Literal["lora", "full"] = "full"
    lora_rank: Count = 16
    lora_alpha: Count = 32
    # Batches among which examples of similar shape are put together; 1 = batches as they come.
    batch_pool: Count = 16
    max_examples: CountOrNone = 0  # 0 = all

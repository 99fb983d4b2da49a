"""What the sections of a parameter file are made of: types with ranges, and the sections that others extend."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

# A file or folder. `alar.params` checks that it exists and the stage cache follows its content, not its name.
Location = Annotated[str, "location"]
# A file or folder if it looks like one ("./x", "/x", "x.jsonl", "a/b" that exists), else a name on the hub or a keyword.
LocationOrName = Annotated[str, "location or name"]

Share = Annotated[float, Field(ge=0, le=1)]
Rate = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]
CountOrNone = Annotated[int, Field(ge=0)]


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )

    def inconsistencies(self) -> list[tuple[str, str]]:
        """(key, what is wrong) for values that are valid one by one but not together."""
        return []


class Supervised(Section):
    """What AASD and mode warm-up share."""

    learning_rate: Rate = 5e-4
    epochs: Annotated[float, Field(gt=0)] = 1.5
    batch_size: Count = 16
    gradient_accumulation: Count = 1
    warmup_ratio: Share = 0.03
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    latent_gradient: Literal["published", "full", "projector_only"] = "published"
    trainable: Literal["lora", "full"] = "full"  # the embedded model is small enough
    lora_rank: Count = 16
    lora_alpha: Count = 32
    batch_pool: Count = 16  # batches among which examples of similar shape are put together; 1 = batches as they come
    max_examples: CountOrNone = 0  # 0 = all

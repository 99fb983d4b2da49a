"""The latent model: the recurrence, the projector, the model families, checkpoints, and the
embedded base models.

Start with `alar.model.recurrence`. Importing this package registers `latent_qwen2`, `latent_qwen3`
and `latent_llama` with transformers' Auto classes.
"""

from alar.model.checkpoints import embedded, from_base, load, load_base, resolve, save
from alar.model.dtype import resolved_dtype, stored_dtype
from alar.model.families import (
    LatentLlamaConfig,
    LatentLlamaForCausalLM,
    LatentQwen2Config,
    LatentQwen2ForCausalLM,
    LatentQwen3Config,
    LatentQwen3ForCausalLM,
)
from alar.model.recurrence import LatentStates, plain_latent_states

__all__ = [
    "LatentLlamaConfig",
    "LatentLlamaForCausalLM",
    "LatentQwen2Config",
    "LatentQwen2ForCausalLM",
    "LatentQwen3Config",
    "LatentQwen3ForCausalLM",
    "LatentStates",
    "embedded",
    "from_base",
    "load",
    "load_base",
    "plain_latent_states",
    "resolve",
    "resolved_dtype",
    "save",
    "stored_dtype",
]

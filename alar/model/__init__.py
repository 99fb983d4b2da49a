"""The latent model: projector, Qwen2/Qwen3 with latent blocks, checkpoints, the embedded base
models.

Importing this package registers `latent_qwen2` and `latent_qwen3` with transformers' Auto classes.
"""

from alar.model.checkpoints import embedded, from_base, load, load_base, resolve, save
from alar.model.latent import (
    LATENT_GRADIENTS,
    LatentQwen2Config,
    LatentQwen2ForCausalLM,
    LatentQwen3Config,
    LatentQwen3ForCausalLM,
    LatentStates,
)

__all__ = [
    "LATENT_GRADIENTS",
    "LatentQwen2Config",
    "LatentQwen2ForCausalLM",
    "LatentQwen3Config",
    "LatentQwen3ForCausalLM",
    "LatentStates",
    "embedded",
    "from_base",
    "load",
    "load_base",
    "resolve",
    "save",
]

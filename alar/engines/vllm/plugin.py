"""vLLM's `general_plugins` entry point: runs in every process of an engine, before the
configuration is read."""

from __future__ import annotations

ARCHITECTURES = ("LatentQwen2ForCausalLM", "LatentQwen3ForCausalLM")


def register(*, imported: bool = False) -> None:
    """Make vLLM know ALAR's config classes (through transformers) and model classes. May run more
    than once.

    By name, vLLM imports the model classes when a checkpoint needs them, and inspects them in a
    process of its own, so that this one can still fork without a CUDA context. `imported` gives it
    the classes themselves: no second process, right where an ALAR checkpoint is about to be started
    on a CPU.
    """
    from vllm import ModelRegistry

    import alar.model  # noqa: F401  registers latent_qwen2 and latent_qwen3 with AutoConfig

    known = ModelRegistry.get_supported_archs()
    for name in ARCHITECTURES:
        if name not in known:
            ModelRegistry.register_model(
                name, _model_class(name) if imported else f"alar.engines.vllm.models:{name}"
            )


def _model_class(name: str) -> type:
    from alar.engines.vllm import models

    return getattr(models, name)

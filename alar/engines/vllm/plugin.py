"""vLLM's `general_plugins` entry point: runs in every process of an engine, before the
configuration is read."""

from __future__ import annotations


def register(*, imported: bool = False) -> None:
    """Make vLLM know ALAR's config classes (through transformers) and model classes. May run more
    than once.

    By name, vLLM imports the model classes when a checkpoint needs them, and inspects them in a
    process of its own, so that this one can still fork without a CUDA context. `imported` gives it
    the classes themselves. That saves the second process, and is right where an ALAR checkpoint is
    about to be started on a CPU.
    """
    from vllm import ModelRegistry

    from alar.model.families import FAMILIES  # registers the config classes with AutoConfig

    known = ModelRegistry.get_supported_archs()
    for _, model_class in FAMILIES.values():
        name = model_class.__name__
        if name not in known:
            found = _model_class(name) if imported else f"alar.engines.vllm.models:{name}"
            ModelRegistry.register_model(name, found)


def _model_class(name: str) -> type:
    from alar.engines.vllm import models

    return getattr(models, name)

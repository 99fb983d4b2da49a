"""vLLM's `general_plugins` entry point. It runs in every process of an engine, before vLLM reads
the configuration."""

from __future__ import annotations


def register(*, imported: bool = False) -> None:
    """Tell vLLM about ALAR's config classes (through transformers) and model classes.

    It may run more than once. By default vLLM gets the names of the model classes. It imports them
    when a checkpoint needs them, and inspects them in another process, so that this one can still
    fork without a CUDA context. With `imported` vLLM gets the classes themselves. That saves the
    other process, and is right where an ALAR checkpoint is about to start on a CPU.
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

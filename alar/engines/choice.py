"""Which engine writes the turns: the parameter `rollout.engine`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alar.model import load
from alar.rollout.cache import give_memory_back
from alar.rollout.engine import Engine
from alar.rollout.hf import HFEngine

ENGINES = ("hf", "vllm")


@contextmanager
def opened_engine(folder: str | Path, kind: str = "hf", **arguments) -> Iterator[Engine]:
    """The engine of a checkpoint folder, latent or not. At the end it frees what it holds.

    An `HFEngine` then has no model any more, and `VLLMEngine` has ended vLLM's processes. vLLM asks
    for a share of the whole GPU (0.92), so no other model may be there when it opens: drop or close
    it first. What has been dropped is given back here.

    "hf" runs transformers in this process. "vllm" needs `python run_all.py --install engines`. Both
    write the same turns. `arguments` go to `VLLMEngine`. Raises ValueError for another kind, and
    EngineRefused if vLLM is missing.
    """
    give_memory_back()
    if kind == "hf":
        with HFEngine(*load(folder)) as engine:
            yield engine
    elif kind == "vllm":
        from alar.engines.vllm import VLLMEngine  # here, because it needs vLLM

        with VLLMEngine(folder, **arguments) as engine:
            yield engine
    else:
        raise ValueError(f"rollout.engine {kind!r}: expected one of {', '.join(ENGINES)}")

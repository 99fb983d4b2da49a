"""ALAR checkpoints on vLLM: latent blocks at serving speed, exact in every situation.

z is a pure function of the weights and the token ids before it. So vLLM's prefix cache, keyed by
token ids, stays valid, and a context is recomputed exactly if every known latent position is the
first token of its prefill chunk. Four parts, none of which patches vLLM:

    models      out-of-tree model classes: keep one hidden state per KV block, feed z = f(h) at latent positions
    scheduler   a scheduler class that cuts prefill chunks before every known latent position, ends turns and judges blocks
    forcing     a logits processor for the whole batch: opens and closes blocks by the rule of `TurnWriter`
    engine      `VLLMEngine`, with the interface and the results of `alar.rollout.hf.HFEngine`

`plugin.register` is vLLM's `general_plugins` entry point; `checks` refuses what could not be exact.
Importing this package does not import vLLM.
"""

from alar.engines.vllm.checks import TESTED_VLLM, engine_arguments, require_vllm

__all__ = ["TESTED_VLLM", "VLLMEngine", "engine_arguments", "require_vllm"]


def __getattr__(name: str):
    if name == "VLLMEngine":
        require_vllm()
        from alar.engines.vllm.engine import VLLMEngine

        return VLLMEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

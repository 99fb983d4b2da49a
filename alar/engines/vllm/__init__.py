"""ALAR checkpoints on vLLM: latent blocks at serving speed, exact in every situation.

z depends on the weights and on the token ids before it, and on nothing else. So vLLM's prefix
cache, whose keys are token ids, stays valid. A context is recomputed exactly if every known latent
position is the first token of its prefill chunk. Four parts do this; none of them patches vLLM:

    models      model classes: keep one hidden state per KV block, feed z = f(h) at latent positions
    scheduler   cuts prefill chunks before every known latent position, ends turns, checks blocks
    forcing     a logits processor: opens and closes blocks by the rule of `TurnWriter`
    engine      `VLLMEngine`, with the interface and the results of `alar.rollout.hf.HFEngine`

`plugin.register` is vLLM's `general_plugins` entry point. `checks` refuses every setting under
which z could be inexact. Importing this package does not import vLLM.
"""

from alar.engines.vllm.checks import TESTED_VLLM, engine_arguments, require_vllm

__all__ = ["TESTED_VLLM", "VLLMEngine", "engine_arguments", "require_vllm"]


def __getattr__(name: str):
    if name == "VLLMEngine":  # imported on first use, because its module needs vLLM
        require_vllm()
        from alar.engines.vllm.engine import VLLMEngine

        return VLLMEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Worker extension: methods that vLLM's workers gain, called through `collective_rpc` by name."""

from __future__ import annotations

import json
from pathlib import Path

from alar.rollout.vllm.records import shared

# What two checkpoints must share for one to take the other's place in a running engine.
SHAPE = (
    "model_type", "num_latent", "latent_token_id", "projector_kind", "projector_size", "projector_layer_norm",
    "projector_residual", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "vocab_size", "tie_word_embeddings",
)


class LatentWorker:
    def latent_records(self, keys: list[str]) -> list[dict | None]:
        """Fetch and forget what was recorded under these keys, see `Record.fetch`."""
        store = shared(self.vllm_config).store
        return [store.take(key) for key in keys]

    def latent_reload(self, folder: str) -> int:
        """Load trunk and projector of another checkpoint of the same shape in place; returns the number of tensors.

        Raises ValueError if its architecture, K, latent id or projector differ. The caller resets the prefix cache.
        """
        from safetensors import safe_open
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        ours = self.vllm_config.model_config.hf_config
        for name in SHAPE:
            if name in config and config[name] != getattr(ours, name, None):
                raise ValueError(
                    f"{folder}: {name} is {config[name]}, the engine was started with {getattr(ours, name, None)}; start a new one"
                )

        def weights():
            for path in sorted(Path(folder).glob("*.safetensors")):
                with safe_open(path, "pt") as tensors:
                    for key in tensors.keys():
                        yield key, tensors.get_tensor(key)

        model = self.get_model()
        loaded = model.load_weights(weights())
        process_weights_after_loading(model, self.vllm_config.model_config, self.device)
        return len(loaded)

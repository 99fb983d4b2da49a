"""Worker extension: methods that vLLM adds to its workers. `collective_rpc` calls them by name."""

from __future__ import annotations

import json
from pathlib import Path

from alar.engines.vllm.notes import shared

# What two checkpoints must share, so that one can replace the other in a running engine.
SHAPE = (
    "model_type",
    "num_latent",
    "latent_token_id",
    "projector_kind",
    "projector_size",
    "projector_layer_norm",
    "projector_residual",
    "codec_class",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "tie_word_embeddings",
)


class LatentWorker:
    def latent_records(self, keys: list[str]) -> list[dict | None]:
        """What was noted under these keys (`Notes.fetch`), which is forgotten then."""
        store = shared(self.vllm_config).store
        return [store.take(key) for key in keys]

    def latent_reload(self, folder: str) -> int:
        """Load trunk and projector of another checkpoint in place. Returns the number of tensors.

        Raises ValueError if the architecture, K, latent id or projector differ, or if a tensor is
        missing, unknown or of another shape. Nothing has been loaded then. The caller resets the
        prefix cache, whose keys and values belong to the old weights.
        """
        from safetensors import safe_open
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        ours = self.vllm_config.model_config.hf_config
        for name in SHAPE:
            if name in config and config[name] != getattr(ours, name, None):
                raise ValueError(
                    f"{folder}: {name} is {config[name]}, the engine was started with"
                    f" {getattr(ours, name, None)}; start a new one"
                )

        files = sorted(Path(folder).glob("*.safetensors"))
        _require_whole(folder, files)  # before the first tensor is overwritten

        def weights():  # one tensor in memory at a time
            for path in files:
                with safe_open(path, "pt") as tensors:
                    for key in tensors.keys():
                        yield key, tensors.get_tensor(key)

        model = self.get_model()
        loaded = model.load_weights(weights())
        # On a CPU this packs matrices again, see `LatentModel._unpack`.
        process_weights_after_loading(model, self.vllm_config.model_config, self.device)
        return len(loaded)


def _require_whole(folder: str, files: list[Path]) -> None:
    """Raise ValueError unless the files hold exactly the tensors that the config describes."""
    import torch
    from safetensors import SafetensorError, safe_open
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):  # shapes without memory
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    expected = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    # A tied head is the embedding table, so a checkpoint need not hold it again.
    optional = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    found = {}  # name → shape, read from the files' headers
    for path in files:
        try:
            with safe_open(path, "pt") as tensors:
                for name in tensors.keys():
                    found[name] = tensors.get_slice(name).get_shape()
        except SafetensorError as error:
            raise ValueError(
                f"{path} cannot be read ({error}); write the checkpoint again"
            ) from None
    wrong = [f"{name} is missing" for name in sorted(expected.keys() - found.keys() - optional)]
    wrong += [f"{name} is unknown" for name in sorted(found.keys() - expected.keys())]
    for name, shape in expected.items():
        if found.get(name, shape) != shape:
            wrong.append(f"{name} has shape {found[name]} in place of {shape}")
    if wrong:
        others = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(f"{folder}: {'; '.join(wrong[:3])}{others}: no whole checkpoint")

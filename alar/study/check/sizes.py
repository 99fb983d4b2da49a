"""How large a model is, before it is there: its architecture on the meta device, from the numbers
of its config.

The config comes from a local folder or the hub's cache; for the published bases that are in
neither, from `PUBLISHED`, the `config.json` of the models' hub pages. Everything else (parameters,
LoRA, KV cache, activations) is counted on the modules that the study itself would build, so that a
number here cannot differ from the model there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from huggingface_hub import try_to_load_from_cache

from alar.model.checkpoints import FAMILIES, resolve
from alar.study.params.sections import Experiment
from alar.train.pretrain import build_model
from alar.train.supervised import LORA_TARGETS

_QWEN25_3B = {
    "model_type": "qwen2",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
}
_QWEN25_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
}
_QWEN3_4B_2507 = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 262144,
}
# Search-R1's checkpoints are trained Qwen2.5 bases of the same shape, and so is the
# instruction-tuned one.
PUBLISHED = {
    "Qwen/Qwen2.5-3B": _QWEN25_3B,
    "Qwen/Qwen2.5-3B-Instruct": _QWEN25_3B,
    "Qwen/Qwen2.5-7B": _QWEN25_7B,
    "Qwen/Qwen3-4B-Thinking-2507": _QWEN3_4B_2507,
    "PeterJinGo/SearchR1-nq_hotpotqa_train-qwen2.5-3b-em-ppo-v0.3": _QWEN25_3B,
    "PeterJinGo/SearchR1-nq_hotpotqa_train-qwen2.5-7b-em-ppo-v0.3": _QWEN25_7B,
}


@dataclass(frozen=True)
class Size:
    """Counts of one latent model. `kv_values`, `activation_values`: numbers kept per token, over
    all layers."""

    source: str  # where the config is from
    base: int  # parameters without the projector, tied weights once
    projector: int
    lora_per_rank: int  # adapter parameters for r = 1
    vocabulary: int
    positions: int
    kv_values: int
    activation_values: int  # estimate, without gradient checkpointing: see `measure`
    checkpointed_values: int  # with it: the input of every layer, and all of one

    @property
    def parameters(self) -> int:
        return self.base + self.projector

    def trainable(self, kind: str, lora_rank: int, *, projector: bool = True) -> int:
        """Parameters that train: "full" or "lora" of that rank, and the projector or not."""
        return (self.base if kind == "full" else lora_rank * self.lora_per_rank) + (
            self.projector if projector else 0
        )


def known_config(base: str, domain: str) -> tuple[dict, str] | None:
    """(config.json, where it is from) of `model.base`; None for a hub model that is neither cached
    nor published here."""
    folder = Path(resolve(base, domain))
    cached = None if folder.is_dir() else try_to_load_from_cache(base, "config.json")
    path = (
        folder / "config.json"
        if folder.is_dir()
        else Path(cached)
        if isinstance(cached, str)
        else None
    )
    if path is not None:
        return json.loads(path.read_text(encoding="utf-8")), "its config.json"
    if base in PUBLISHED:
        return PUBLISHED[base], "the published config"
    return None


def size_of(experiment: Experiment, domain: str) -> Size | None:
    """Size of the latent model of an experiment; None where nothing is known of its base.

    Raises ValueError for an architecture without a latent version, and OSError or ValueError for a
    folder without a config.
    """
    if experiment.model.base == "scratch":
        with torch.device("meta"):
            config = build_model(
                experiment.pretrain, SimpleNamespace(eos_token_id=0, pad_token_id=0)
            ).config.to_dict()
        source = "pretrain"
    else:
        found = known_config(experiment.model.base, domain)
        if found is None:
            return None
        config, source = found
    return measure(meta_model(config, experiment), source)


def meta_model(config: dict, experiment: Experiment) -> torch.nn.Module:
    """The latent model that `from_base` would make of a base with this config, without memory for
    its weights."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(
            f"architecture {family!r} has no latent version; supported: {', '.join(FAMILIES)}"
        )
    config_class, model_class = FAMILIES[family]
    kept = {
        key: value
        for key, value in config.items()
        if key not in ("model_type", "architectures", "transformers_version")
    }
    wanted = experiment.model
    options = {
        "num_latent": wanted.num_latent,
        "latent_token_id": config["vocab_size"] - 1,
        "projector_kind": {"latent": "mlp", "constant": "constant"}[experiment.aasd.kind],
        "projector_size": wanted.projector_size,
        "projector_layer_norm": wanted.projector_layer_norm,
    }
    with torch.device("meta"):
        return model_class(config_class(**kept | options))


def measure(model: torch.nn.Module, source: str = "") -> Size:
    """Counts of a latent model, on whatever device it is.

    Activations per token and layer, in values: 6 h around the two norms and the residual stream, 3
    q + 2 kv in attention (queries, expanded keys and values count as queries', output), 4 i in the
    MLP; h hidden, q query, kv key and i inner width.
    """
    config = model.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    queries, keys = head * config.num_attention_heads, head * config.num_key_value_heads
    projector = sum(p.numel() for p in model.model.projector.parameters())
    adapted = [
        m
        for name, m in model.model.layers.named_modules()
        if name.rsplit(".", 1)[-1] in LORA_TARGETS
    ]
    per_layer = 6 * config.hidden_size + 3 * queries + 2 * keys + 4 * config.intermediate_size
    return Size(
        source=source,
        base=sum(p.numel() for p in model.parameters()) - projector,
        projector=projector,
        lora_per_rank=sum(m.in_features + m.out_features for m in adapted),
        vocabulary=config.vocab_size,
        positions=config.max_position_embeddings,
        kv_values=2 * config.num_hidden_layers * keys,
        activation_values=config.num_hidden_layers * per_layer,
        checkpointed_values=config.num_hidden_layers * config.hidden_size + per_layer,
    )

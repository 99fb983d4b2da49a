"""How large a model is, before its weights are there: we build it on the meta device and count.

The config comes from a local folder or from the hub's cache. For published bases that are in
neither it comes from `PUBLISHED`, which repeats the `config.json` of the models' hub pages. The
counts are taken on the modules that the study itself would build, so they are the model's own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch

from alar.model.checkpoints import FAMILIES, resolve
from alar.study.check.data import hub_folder
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
# Instruct models and Search-R1's checkpoints have the shape of their Qwen2.5 base.
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
    """Counts of one latent model, and the config that `alar.study.check.steps` builds it from."""

    source: str  # where the config is from
    base: int  # parameters without the projector, tied weights once
    projector: int
    lora_per_rank: int  # adapter parameters for r = 1
    vocabulary: int
    positions: int
    kv_values: int  # keys and values of one token, over all layers
    kv_heads: int
    family: str  # of the base, such as "qwen2"
    config: str  # of the latent model, as JSON

    @property
    def parameters(self) -> int:
        return self.base + self.projector

    def trainable(self, kind: str, lora_rank: int, *, projector: bool = True) -> int:
        """How many parameters train: kind "full" or "lora" (of that rank), plus the projector if
        `projector`."""
        # LoRA leaves the base as it is.
        count = self.base if kind == "full" else lora_rank * self.lora_per_rank
        return count + self.projector if projector else count


def known_config(base: str, domain: str) -> tuple[dict, str] | None:
    """(content of config.json, where it is from) of `model.base`; None for an unknown hub model."""
    named = Path(resolve(base, domain))
    folder = named if named.is_dir() else hub_folder(base)
    if folder is not None and (named.is_dir() or (folder / "config.json").exists()):
        return json.loads((folder / "config.json").read_text(encoding="utf-8")), "its config.json"
    if base in PUBLISHED:
        return PUBLISHED[base], "the published config"
    return None


def size_of(experiment: Experiment, domain: str) -> Size | None:
    """Size of the latent model of an experiment; None if nothing is known about its base.

    Raises ValueError for an architecture without a latent version, and OSError or ValueError for a
    folder without a config.
    """
    if experiment.model.base == "scratch":
        with torch.device("meta"):
            # It stands for the tokenizer; which ids it has does not matter here.
            tokens = SimpleNamespace(eos_token_id=0, pad_token_id=0)
            config = build_model(experiment.pretrain, tokens).config.to_dict()
        return size_of_model(meta_model(config, experiment), "pretrain")
    found = known_config(experiment.model.base, domain)
    if found is None:
        return None
    config, source = found
    return size_of_model(meta_model(config, experiment), source)


def meta_model(config: dict, experiment: Experiment) -> torch.nn.Module:
    """The latent model that `from_base` would make from this base, without memory for its
    weights."""
    family = config.get("model_type")  # such as "qwen2"
    if family not in FAMILIES:
        raise ValueError(
            f"architecture {family!r} has no latent version; supported: {', '.join(FAMILIES)}"
        )
    config_class, model_class = FAMILIES[family]
    # The latent config has its own values of these.
    dropped = ("model_type", "architectures", "transformers_version")
    kept = {key: value for key, value in config.items() if key not in dropped}
    wanted = experiment.model
    options = {
        "num_latent": wanted.num_latent,
        "latent_token_id": config["vocab_size"] - 1,  # any id will do to count
        "projector_kind": {"latent": "mlp", "constant": "constant"}[experiment.aasd.kind],
        "projector_size": wanted.projector_size,
        "projector_layer_norm": wanted.projector_layer_norm,
    }
    with torch.device("meta"):
        return model_class(config_class(**kept | options))  # tensors with shapes and no memory


def size_of_model(model: torch.nn.Module, source: str = "") -> Size:
    """Counts of a latent model on any device."""
    config = model.config
    # Qwen3 states the width of a head; else it is hidden size / heads.
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    keys = head * config.num_key_value_heads  # width of all key heads
    projector = sum(p.numel() for p in model.model.projector.parameters())
    adapters = 0
    for name, module in model.model.layers.named_modules():
        if name.rsplit(".", 1)[-1] in LORA_TARGETS:
            adapters += module.in_features + module.out_features  # A (r, in) and B (out, r)
    return Size(
        source=source,
        # `parameters` gives tied weights once.
        base=sum(p.numel() for p in model.parameters()) - projector,
        projector=projector,
        lora_per_rank=adapters,
        vocabulary=config.vocab_size,
        positions=config.max_position_embeddings,
        kv_values=2 * config.num_hidden_layers * keys,  # keys and values
        kv_heads=config.num_key_value_heads,
        family=config.model_type.removeprefix("latent_"),
        config=config.to_json_string(),
    )

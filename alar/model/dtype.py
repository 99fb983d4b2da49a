"""In what a model is stored and computed: one parameter where it is made, then the checkpoint.

`model.dtype` says in what notebook 01 stores the base and the latent model. From there on the
checkpoint itself says it: `load`, the in-process engine, vLLM and verl compute in the dtype that
they find, and training hands the model back in it. So no two stages can disagree.

Always in float32, whatever the dtype: the projector, LoRA's adapters, the weights that an optimiser
steps on (`alar.train.masters`), and logits before a softmax.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

DTYPES = ("auto", "float32", "bfloat16")


def resolved_dtype(name: str) -> torch.dtype:
    """What `model.dtype` means here: "auto" is bfloat16 where there is a GPU, else float32.

    A CPU computes bfloat16 many times slower than float32. Raises ValueError for another name.
    """
    if name not in DTYPES:
        raise ValueError(f"model.dtype {name!r}: expected one of {', '.join(DTYPES)}")
    if name == "auto":
        name = "bfloat16" if torch.cuda.is_available() else "float32"
    return getattr(torch, name)


def stored_dtype(folder: str | Path) -> str:
    """The dtype of a checkpoint's trunk, as its config names it: "float32", "bfloat16", …

    "auto" for a name on the hub, or a config that names none.
    """
    config = Path(folder) / "config.json"
    if not config.exists():
        return "auto"
    found = json.loads(config.read_text(encoding="utf-8"))
    return found.get("dtype") or found.get("torch_dtype") or "auto"  # torch_dtype: older configs

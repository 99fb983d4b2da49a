"""A checkpoint without its weights, for many processes that train one model.

Each of them needs the modules, and of every weight only the rows that are its own. `outline` gives
the modules; `StoredWeights` reads the rows (`alar.train.distributed`).
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from alar.model.checkpoints import check_folder, check_num_latent, missing_weights


class StoredWeights:
    """The weights of a checkpoint folder, read in parts. `names` maps a parameter of the outline to
    its name in the files."""

    def __init__(self, folder: Path):
        index = folder / "model.safetensors.index.json"  # where they are in several files
        if index.exists():
            self.files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        else:
            with safe_open(folder / "model.safetensors", "pt") as file:
                self.files = dict.fromkeys(file.keys(), "model.safetensors")
        self.folder = folder
        self.names: dict[torch.nn.Parameter, str] = {}

    def rows(self, parameter: torch.nn.Parameter, begin: int, end: int) -> Tensor:
        """Rows `begin` … `end` − 1 of a parameter, on the CPU, in the stored dtype."""
        return self._read(self.names[parameter], slice(begin, end))

    def stand_in(self, name: str, shape: torch.Size) -> torch.nn.Parameter:
        """A parameter with the stored dtype and the memory of one number. It is on the CPU and not
        on the meta device, because peft puts the values of its adapters where the weights are."""
        number = torch.zeros((), dtype=self._read(name, slice(0, 0)).dtype)
        found = torch.nn.Parameter(number.expand(shape))
        self.names[found] = name
        return found

    def _read(self, name: str, rows: slice) -> Tensor:
        # Opened anew for each: what has been read of an open file stays in the process's memory.
        with safe_open(self.folder / self.files[name], "pt") as file:
            return file.get_slice(name)[rows].clone()


def outline(
    folder: str | Path, *, num_latent: int | None = None
) -> tuple[torch.nn.Module, PreTrainedTokenizerBase, StoredWeights]:
    """(model, tokenizer, weights) of a checkpoint folder. The model's parameters have shape and
    dtype as stored, and no values; its buffers are real.

    Raises what `load` raises: FileNotFoundError without a checkpoint, and ValueError for another K
    than `num_latent` or missing weights.
    """
    folder = check_folder(folder)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    model.tie_weights()
    check_num_latent(model, num_latent, folder)
    weights = StoredWeights(folder)
    missing = [name for name, _ in model.named_parameters() if name not in weights.files]
    if missing:
        raise missing_weights(folder, missing)
    stand_ins = {}
    for name, parameter in model.named_parameters():
        stand_ins[parameter] = weights.stand_in(name, parameter.shape)
    # Tied weights have several names and stay one parameter.
    named = model.named_parameters(remove_duplicate=False)
    values = {name: stand_ins[parameter] for name, parameter in named}
    model.load_state_dict(values, strict=False, assign=True)  # not strict: buffers stay as they are
    return model.eval(), AutoTokenizer.from_pretrained(folder), weights

"""One model over several processes: FSDP2, with or without LoRA.

    torchrun --nproc-per-node 8 -m alar.study.train_stage 03_aasd -f
    runs/paper/search/executed/03_aasd.params.yaml

Every decoder layer is a unit whose weights are gathered when it is called; embedding, norm and head
belong to the root. The projector is a unit of its own, in float32 even if the trunk computes in
bfloat16. `alar.model.latent` makes sure that all ranks make the same calls.
"""

from __future__ import annotations

import copy
import os

import torch
import torch.distributed as dist
from peft import PeftModel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor


def num_processes() -> int:
    """How many processes torchrun has started, 1 without it."""
    return int(os.environ.get("WORLD_SIZE", 1))


def rank() -> int:
    """The number of this process, from 0."""
    return int(os.environ.get("RANK", 0))


def shard(model, device: torch.device | str, compute_dtype: torch.dtype | None = None):
    """Shard a latent model, wrapped by peft or not, over all processes, in place.

    All processes must hold the same weights before. The shards move to `device`. `compute_dtype`
    (None: as stored) is what the trunk computes in; the shards that are optimised keep their dtype.
    Afterwards call the model itself, with labels: outside such a call its parts have no weights.
    """
    # One dimension: every process.
    mesh = init_device_mesh(torch.device(device).type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype)
    trunk = (model.get_base_model() if isinstance(model, PeftModel) else model).model
    for layer in trunk.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    # Small, and called K times per block: its weights stay gathered.
    fully_shard(trunk.projector, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def sharded_copy(model, device: torch.device | str):
    """A sharded copy to train; `collect` brings its weights back to the original on the CPU.

    It computes in the dtype of the model's trunk. Its shards are float32: they are the master
    weights (`alar.train.masters`), and a unit of FSDP must have one dtype, LoRA's adapters among
    its weights.
    """
    compute_dtype = model.get_input_embeddings().weight.dtype
    copied = shard(copy.deepcopy(model).float(), device, compute_dtype)
    copied._is_accelerate_prepared = True  # accelerate would wrap it once more, in DDP
    return copied


def collect(sharded, model) -> None:
    """Copy the weights of `sharded` into the plain `model`, in every process.

    One parameter at a time, so that no process holds all of them twice.
    """
    targets = dict(model.named_parameters())  # name → the whole tensor
    for name, parameter in sharded.named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        targets[name].data.copy_(whole)

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
import sys

import torch
import torch.distributed as dist
from peft import PeftModel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from alar.model.outline import StoredWeights


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


def sharded_copy(model, device: torch.device | str, weights: StoredWeights | None = None):
    """A sharded copy to train; `collect` brings its weights back to the original.

    All processes call it with equal models. No process ever holds the copy whole: each takes the
    rows that are its own, from `weights` where the model is an outline, else from the model.

    The copy computes in the dtype of the model's trunk. Its shards are float32: they are the master
    weights (`alar.train.masters`), and a unit of FSDP must have one dtype, LoRA's adapters among
    its weights.
    """
    compute_dtype = model.get_input_embeddings().weight.dtype
    # `deepcopy` takes what it finds under the id of an object for the copy of that object.
    empty = {}
    for parameter in model.parameters():
        meta = torch.empty(parameter.shape, dtype=torch.float32, device="meta")
        empty[id(parameter)] = torch.nn.Parameter(meta, parameter.requires_grad)
    copied = shard(copy.deepcopy(model, empty), device, compute_dtype)
    originals = dict(model.named_parameters())
    filled = {}
    for name, parameter in copied.named_parameters():
        filled[parameter] = _own_part(parameter, originals[name], device, weights)
    # Tied weights have several names and stay one parameter.
    named = copied.named_parameters(remove_duplicate=False)
    values = {name: filled[parameter] for name, parameter in named}
    copied.load_state_dict(values, strict=False, assign=True)  # not strict: buffers are there
    copied._is_accelerate_prepared = True  # accelerate would wrap it once more, in DDP
    return copied


def _own_part(
    parameter: DTensor, original: torch.nn.Parameter, device, weights: StoredWeights | None
) -> torch.nn.Parameter:
    """A sharded parameter (on the meta device) with the values of the original."""
    part = -(-len(parameter) // dist.get_world_size())  # rows of one process, rounded up
    begin = min(dist.get_rank() * part, len(parameter))
    end = min(begin + part, len(parameter))
    if weights is not None and original in weights.names:
        rows = weights.rows(original, begin, end)
    else:
        rows = original.detach()[begin:end].clone()
    local = rows.to(device, parameter.dtype)
    whole = {"shape": parameter.shape, "stride": parameter.stride()}
    shared = DTensor.from_local(local, parameter.device_mesh, parameter.placements, **whole)
    return torch.nn.Parameter(shared, parameter.requires_grad)


def collect(sharded, model) -> None:
    """Give the plain `model` of the first process the weights of `sharded`, on the CPU. All
    processes call it; the models of the others stay as they are.

    One parameter at a time, so that no process holds all of them twice.
    """
    targets = dict(model.named_parameters())
    for name, parameter in sharded.named_parameters():
        whole = parameter.full_tensor()  # every process takes part
        if rank() == 0:
            targets[name].data = whole.detach().to("cpu", targets[name].dtype)


def leave(code: int) -> None:
    """End a process of torchrun that has done its work and left the process group.

    A thread of PyTorch may still be alive. If it asks for the interpreter while that shuts down,
    the process aborts, and torchrun calls the whole training a failure. So nothing is shut down.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

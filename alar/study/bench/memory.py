"""Peak memory of one run, above what is held before it (weights, batches), in MiB.

On a GPU we read the allocator's statistics. On the CPU PyTorch keeps none, and the resident size of
the process hides reuse. So we watch every operation, also those of the backward pass, and add up
the tensors that are alive. Memory that a kernel allocates and frees within one operation is not
counted; two contestants with the same kernels still compare fairly.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class AliveTensors(TorchDispatchMode):
    """Bytes of the tensors made inside the block and still alive (`held`), and their `peak`."""

    def __init__(self):
        super().__init__()
        self.held = self.peak = 0
        self._known: set[int] = set()  # addresses of live storages, counted or from before

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        for tensor in _tensors((args, kwargs)):
            self._note(tensor, 0)  # an unknown argument was made before the block: counts 0
        result = operation(*args, **(kwargs or {}))  # the operation itself, unchanged
        for tensor in _tensors(result):
            self._note(tensor, tensor.untyped_storage().nbytes())
        self.peak = max(self.peak, self.held)
        return result

    def _note(self, tensor: torch.Tensor, size: int) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata  # views share a storage, which counts once
        if address not in self._known:
            self._known.add(address)
            self.held += size
            # Take the bytes off when the storage dies, but not when the interpreter ends.
            weakref.finalize(storage, self._forget, address, size).atexit = False

    def _forget(self, address: int, size: int) -> None:
        self._known.discard(address)
        self.held -= size


def peak_memory(run: Callable[[], object], device: torch.device) -> float:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)  # bytes of weights and batches
        run()
        torch.cuda.synchronize(device)
        return (torch.cuda.max_memory_allocated(device) - before) / 2**20
    with AliveTensors() as alive:
        run()
    return alive.peak / 2**20  # bytes → MiB


def _tensors(tree) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]

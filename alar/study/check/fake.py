"""Fake tensors: a step runs at its true shapes and dtypes, and PyTorch's tracker counts its memory.

    with fake_tensors():
        model = …                     # of any size; its weights have shapes and no memory
        peak = PeakTracker(model)
        with peak:
            model(input_ids=…, labels=…).loss.backward()
        peak.bytes

Which calls our model makes depends on ids and labels. So integers and booleans stay real, and only
numbers with a fraction are fake. Where code asks for the value of one of these, such as a loss that
it writes down, it gets 0.

The device is the CPU: PyTorch without CUDA cannot run a backward pass on fake CUDA tensors. What
operations keep and return is the same on both, attention included: its fused kernels keep the
output and one number for each query, never the scores. What differs is temporary: workspaces of
kernels, rounding by the allocator, NCCL's buffers. `alar.study.check.memory` allows for that.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten
INDEXING = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)


class RealIntegers(TorchDispatchMode):
    """Inside `fake`: operations on real integers and booleans stay real."""

    def __init__(self, fake: FakeTensorMode):
        super().__init__()
        self.fake = fake

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor comes back with the tensors that it holds
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return self._mixed(operation, args, kwargs)
        if not tensors:  # something new: its dtype decides
            result = operation(*args, **kwargs)
            if not isinstance(result, Tensor) or result.is_floating_point():
                return result
        with unset_fake_temporarily():
            result = operation(*args, **kwargs)
        return tree_map_only(Tensor, self._kept, result)

    def _mixed(self, operation, args, kwargs):
        """An operation with at least one fake tensor."""
        if operation is aten._local_scalar_dense.default:  # `.item()`
            return 0.0 if args[0].is_floating_point() else 0
        if operation in INDEXING:
            args = (args[0], self._places(args[1]), *args[2:])
        return operation(*args, **kwargs)

    def _places(self, indices: list) -> list:
        """A real mask as the numbers of its true places, so that the result has a known shape."""
        found = []
        for index in indices:
            if isinstance(index, Tensor) and index.dtype == torch.bool:
                with unset_fake_temporarily():
                    found += index.nonzero().unbind(1)
            else:
                found.append(index)
        return found

    def _kept(self, tensor: Tensor) -> Tensor:
        """Single numbers stay real too: optimisers count their steps in them."""
        if tensor.is_floating_point() and tensor.numel() > 1:
            return self.fake.from_tensor(tensor)
        return tensor


@contextmanager
def fake_tensors() -> Iterator[None]:
    """A block in which new tensors are fake, but for integers and booleans."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    # It would remember new tensors by weak references, and a module cannot then move to another
    # dtype: `Module.to` swaps its parameters, which must have none.
    fake.fake_tensor_converter.set_tensor_memo = lambda *_: None
    with fake, RealIntegers(fake), warnings.catch_warnings():
        # Libraries compare addresses of tensors here and there; those of fake ones are all 0.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        yield


class PeakTracker(MemTracker):
    """Most bytes that tensors held at once inside the block, those of `held` included.

    PyTorch's tracker without its notes on every module. They allow a module to run once, and the
    trunk runs once for every call of a pass.
    """

    def __init__(self, *held: nn.Module):
        super().__init__()
        self.track_external(*held)

    def _no_note(self, *_) -> None:
        pass

    _pre_fw_hook = _post_fw_hook = _pre_bw_hook = _post_bw_hook = _no_note

    @property
    def bytes(self) -> int:
        """Of the last block."""
        return sum(kinds["Total"] for kinds in self.get_tracker_snapshot("peak").values())

    @property
    def held(self) -> int:
        """Bytes held now."""
        return sum(kinds["Total"] for kinds in self.get_tracker_snapshot().values())


@contextmanager
def fake_processes(count: int) -> Iterator[None]:
    """A block in which this process is the first of `count`; nothing is ever sent."""
    found = ShardingPropagator._propagate_tensor_meta_non_cached

    def unseen(*args, **kwargs):
        # DTensor tries each operation on whole fake tensors, which exist on no device.
        with _disable_current_modes():
            return found(*args, **kwargs)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        with patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", unseen):
            yield
    finally:
        dist.destroy_process_group()

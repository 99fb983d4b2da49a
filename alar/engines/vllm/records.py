"""What the model class, the logits processor and the worker extension of one process share.

`Step` holds what the forward pass says about the step under way; `RecordStore` keeps log-probs and
z of the requests that ask for them, on the device, until they are fetched.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

KEPT, KEPT_BYTES = 16384, 2**30  # records, and their z; a cancelled request never fetches its own


class Step:
    """Per batch row: z (R, H) if the row's chunk opened with a latent position, and whether its
    chunk broke the rules."""

    def __init__(self, rows: int, hidden_size: int, dtype: torch.dtype, device: torch.device):
        self.latents = torch.zeros(rows, hidden_size, dtype=dtype, device=device)
        self.violated = torch.zeros(rows, dtype=torch.bool, device=device)


class Record:
    """By output index: the log-prob of the chosen token as (tensor, row), z (H,) of a latent
    position; which were forced."""

    __slots__ = ("logprobs", "latents", "forced", "bytes", "dropped")

    def __init__(self):
        self.logprobs: dict[int, tuple[Tensor, int]] = {}
        self.latents: dict[int, Tensor] = {}
        self.forced: set[int] = set()
        self.bytes, self.dropped = 0, False

    def fetch(self) -> dict:
        """Plain values: {"logprobs": [float], "forced": [int], "positions": [int], "latents":
        float32 bytes, row-major}."""
        written, positions = sorted(self.logprobs), sorted(self.latents)
        return {
            "logprobs": (
                _gather([tensor[row] for tensor, row in map(self.logprobs.get, written)]).tolist()
            ),
            "forced": sorted(self.forced),
            "positions": positions,
            "latents": _gather([self.latents[index] for index in positions]).numpy().tobytes(),
        }


def _gather(values: list[Tensor]) -> Tensor:
    return torch.stack(values).float().cpu() if values else torch.empty(0)


class RecordStore:
    """Records by key, the oldest dropped beyond `KEPT` of them or `KEPT_BYTES` of z."""

    def __init__(self):
        self.records: OrderedDict[str, Record] = OrderedDict()
        self.bytes = 0

    def of(self, key: str, *, anew: bool) -> Record:
        """The record of a request: a new one for a request that begins, its own for one that goes
        on after preemption."""
        if anew or key not in self.records:
            self._drop(key)
            self.records[key] = Record()
            while len(self.records) > KEPT:
                self._drop(next(iter(self.records)))
        return self.records[key]

    def keep(self, record: Record, index: int, z: Tensor) -> None:
        """Note z (H,) of a record's output `index`; the tensor is kept, not a copy. Nothing of a
        record that was dropped."""
        if record.dropped:
            return
        added = 0 if index in record.latents else z.nbytes
        record.latents[index] = z
        record.bytes += added
        self.bytes += added
        while self.bytes > KEPT_BYTES and len(self.records) > 1:
            self._drop(next(iter(self.records)))

    def take(self, key: str) -> dict | None:
        record = self._drop(key)
        return None if record is None else record.fetch()

    def _drop(self, key: str) -> Record | None:
        record = self.records.pop(key, None)
        if record is not None:
            self.bytes -= record.bytes
            record.dropped = True
        return record


class Shared:
    """One per engine and process."""

    def __init__(self):
        self.step: Step | None = None
        self.store = RecordStore()


_SHARED: OrderedDict[str, Shared] = OrderedDict()


def shared(vllm_config) -> Shared:
    """The shared state of the engine with this configuration; engines that ended are forgotten
    after some others."""
    key = vllm_config.instance_id
    if key not in _SHARED:
        _SHARED[key] = Shared()
        while len(_SHARED) > 4:
            _SHARED.popitem(last=False)
    return _SHARED[key]

"""What the model class, the logits processor and the worker extension of one process share.

`Step` holds what the forward pass says about the step under way; `RecordStore` keeps log-probs and z of the requests that
ask for them, on the device, until they are fetched.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

KEPT = 16384  # records; a cancelled request never fetches its own


class Step:
    """Per batch row: z (R, H) if the row's chunk opened with a latent position, and whether its chunk broke the rules."""

    def __init__(self, rows: int, hidden_size: int, dtype: torch.dtype, device: torch.device):
        self.latents = torch.zeros(rows, hidden_size, dtype=dtype, device=device)
        self.violated = torch.zeros(rows, dtype=torch.bool, device=device)


class Record:
    """By output index: (tensor, row) of the log-prob of the chosen token, and of z of a latent position; which were forced."""

    __slots__ = ("logprobs", "latents", "forced")

    def __init__(self):
        self.logprobs: dict[int, tuple[Tensor, int]] = {}
        self.latents: dict[int, tuple[Tensor, int]] = {}
        self.forced: set[int] = set()

    def fetch(self) -> dict:
        """Plain values: {"logprobs": [float], "forced": [int], "positions": [int], "latents": float32 bytes, row-major}."""
        logprobs = _gather([self.logprobs[index] for index in sorted(self.logprobs)])
        positions = sorted(self.latents)
        latents = _gather([self.latents[index] for index in positions])
        return {
            "logprobs": [] if logprobs is None else logprobs.tolist(),
            "forced": sorted(self.forced),
            "positions": positions,
            "latents": b"" if latents is None else latents.numpy().tobytes(),
        }


def _gather(places: list[tuple[Tensor, int]]) -> Tensor | None:
    return torch.stack([tensor[row] for tensor, row in places]).float().cpu() if places else None


class RecordStore:
    """Records by key, the oldest dropped beyond `KEPT`."""

    def __init__(self):
        self.records: OrderedDict[str, Record] = OrderedDict()

    def of(self, key: str, *, anew: bool) -> Record:
        """The record of a request: a new one for a request that begins, its own for one that goes on after preemption."""
        if anew or key not in self.records:
            self.records.pop(key, None)
            self.records[key] = Record()
            while len(self.records) > KEPT:
                self.records.popitem(last=False)
        return self.records[key]

    def take(self, key: str) -> dict | None:
        record = self.records.pop(key, None)
        return None if record is None else record.fetch()


class Shared:
    """One per engine and process."""

    def __init__(self):
        self.step: Step | None = None
        self.store = RecordStore()


_SHARED: OrderedDict[str, Shared] = OrderedDict()


def shared(vllm_config) -> Shared:
    """The shared state of the engine with this configuration; engines that ended are forgotten after some others."""
    key = vllm_config.instance_id
    if key not in _SHARED:
        _SHARED[key] = Shared()
        while len(_SHARED) > 4:
            _SHARED.popitem(last=False)
    return _SHARED[key]

"""What the model class, the logits processor and the worker extension of one process share.

`StepLatents` holds what the forward pass says about the step under way. `NoteStore` keeps log-probs
and z of the requests that ask for them, on the device, until they are fetched.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import torch
from torch import Tensor

# Limits for notes and for their z: a cancelled request never fetches its own.
KEPT, KEPT_BYTES = 16384, 2**30


class StepLatents:
    """Per batch row: z (R, H) if the row's chunk opened with a latent position, and whether its
    chunk broke the rules (R,)."""

    def __init__(self, rows: int, hidden_size: int, dtype: torch.dtype, device: torch.device):
        self.latents = torch.zeros(rows, hidden_size, dtype=dtype, device=device)
        self.violated = torch.zeros(rows, dtype=torch.bool, device=device)


@dataclass(eq=False, slots=True)
class Notes:
    """Of one request, by output index: the log-prob of the chosen token as (tensor, place in it), z
    (H,) of a latent position, and which tokens were forced."""

    logprobs: dict[int, tuple[Tensor, int]] = field(default_factory=dict)
    latents: dict[int, Tensor] = field(default_factory=dict)
    forced: set[int] = field(default_factory=set)
    bytes: int = 0  # of z
    dropped: bool = False

    def fetch(self) -> dict:
        """Plain values: {"logprobs": [float], "forced": [int], "positions": [int], "latents":
        float32 bytes, row-major}."""
        written = [self.logprobs[index] for index in sorted(self.logprobs)]
        positions = sorted(self.latents)
        return {
            "logprobs": _gather([tensor[place] for tensor, place in written]).tolist(),
            "forced": sorted(self.forced),
            "positions": positions,
            "latents": _gather([self.latents[index] for index in positions]).numpy().tobytes(),
        }


def _gather(values: list[Tensor]) -> Tensor:
    """One copy from the device for all values."""
    return torch.stack(values).float().cpu() if values else torch.empty(0)


class NoteStore:
    """Notes by key; the oldest are dropped beyond `KEPT` of them or `KEPT_BYTES` of z."""

    def __init__(self):
        self.notes: OrderedDict[str, Notes] = OrderedDict()
        self.bytes = 0

    def of(self, key: str, *, anew: bool) -> Notes:
        """The notes of a request: new ones for a request that begins, its own for one that goes on
        after preemption."""
        if anew or key not in self.notes:
            self._drop(key)
            self.notes[key] = Notes()
            while len(self.notes) > KEPT:
                self._drop(next(iter(self.notes)))
        return self.notes[key]

    def keep(self, notes: Notes, index: int, z: Tensor) -> None:
        """Note z (H,) of output `index`. The tensor is kept, not a copy; for dropped notes nothing
        is."""
        if notes.dropped:
            return
        added = 0 if index in notes.latents else z.nbytes
        notes.latents[index] = z
        notes.bytes += added
        self.bytes += added
        while self.bytes > KEPT_BYTES and len(self.notes) > 1:
            self._drop(next(iter(self.notes)))

    def take(self, key: str) -> dict | None:
        """Fetch and forget."""
        notes = self._drop(key)
        return None if notes is None else notes.fetch()

    def _drop(self, key: str) -> Notes | None:
        notes = self.notes.pop(key, None)
        if notes is not None:
            self.bytes -= notes.bytes
            notes.dropped = True
        return notes


class Shared:
    """One per engine and process. `step` is None where the model is not latent."""

    def __init__(self):
        self.step: StepLatents | None = None
        self.store = NoteStore()


_SHARED: OrderedDict[str, Shared] = OrderedDict()


def shared(vllm_config) -> Shared:
    """The shared state of the engine with this configuration. Only the last few engines of a
    process are remembered."""
    key = vllm_config.instance_id
    if key not in _SHARED:
        _SHARED[key] = Shared()
        while len(_SHARED) > 4:
            _SHARED.popitem(last=False)
    return _SHARED[key]

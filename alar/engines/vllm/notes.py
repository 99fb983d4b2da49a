"""What the model class, the logits processor and the worker extension of one process share.

`StepLatents` holds what the forward pass found in the current step. `NoteStore` keeps the log-probs
and z of the requests that ask for them. They stay on the device until someone fetches them.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import torch
from torch import Tensor

# Nobody fetches the notes of a cancelled request. Without limits the memory would fill up.
KEPT, KEPT_BYTES = 16384, 2**30  # requests; bytes of z


class StepLatents:
    """For each batch row, z (R, H) if its chunk opened with a latent position, and whether the
    chunk broke the rules (R,)."""

    def __init__(self, rows: int, hidden_size: int, dtype: torch.dtype, device: torch.device):
        # Made once and written in place: CUDA graphs need fixed addresses.
        self.latents = torch.zeros(rows, hidden_size, dtype=dtype, device=device)
        self.violated = torch.zeros(rows, dtype=torch.bool, device=device)


@dataclass(eq=False, slots=True)
class Notes:
    """The notes of one request. All indices count its output tokens from 0."""

    # Index → (log-probs (n,) of the rows decided in a step, place of this request among them).
    logprobs: dict[int, tuple[Tensor, int]] = field(default_factory=dict)
    latents: dict[int, Tensor] = field(default_factory=dict)  # index → z (H,)
    forced: set[int] = field(default_factory=set)  # indices
    bytes: int = 0  # of z
    dropped: bool = False  # no longer in the store, so nothing more is kept

    def fetch(self) -> dict:
        """The notes as plain values, which can travel between processes.

        {"logprobs": [float], "forced": [int], "positions": [int], "latents": bytes}, the last being
        z (positions, H) as float32 in row-major order.
        """
        written = [self.logprobs[index] for index in sorted(self.logprobs)]
        positions = sorted(self.latents)
        return {
            "logprobs": _gather([tensor[place] for tensor, place in written]).tolist(),
            "forced": sorted(self.forced),
            "positions": positions,
            "latents": _gather([self.latents[index] for index in positions]).numpy().tobytes(),
        }


def _gather(values: list[Tensor]) -> Tensor:
    """Stack the values in one copy from the device, because every copy waits for it."""
    return torch.stack(values).float().cpu() if values else torch.empty(0)


class NoteStore:
    """Notes by key. Beyond `KEPT` of them, or `KEPT_BYTES` of z, the oldest are dropped."""

    def __init__(self):
        self.notes: OrderedDict[str, Notes] = OrderedDict()
        self.bytes = 0  # of z, over all notes

    def of(self, key: str, *, anew: bool) -> Notes:
        """The notes of a request: new ones if it begins (`anew`), the old ones after preemption."""
        if anew or key not in self.notes:
            self._drop(key)
            self.notes[key] = Notes()
            while len(self.notes) > KEPT:
                self._drop(next(iter(self.notes)))
        return self.notes[key]

    def keep(self, notes: Notes, index: int, z: Tensor) -> None:
        """Keep z (H,) of output `index`, not a copy of it. Does nothing for dropped notes."""
        if notes.dropped:
            return
        # A context that is computed again after preemption brings the same z again.
        added = 0 if index in notes.latents else z.nbytes
        notes.latents[index] = z
        notes.bytes += added
        self.bytes += added
        while self.bytes > KEPT_BYTES and len(self.notes) > 1:
            self._drop(next(iter(self.notes)))

    def take(self, key: str) -> dict | None:
        """The fetched notes of a key, which are forgotten then. None for an unknown key."""
        notes = self._drop(key)
        return None if notes is None else notes.fetch()

    def _drop(self, key: str) -> Notes | None:
        notes = self.notes.pop(key, None)
        if notes is not None:
            self.bytes -= notes.bytes
            notes.dropped = True
        return notes


class Shared:
    """The shared state of one engine in one process. `step` is None for an ordinary model."""

    def __init__(self):
        self.step: StepLatents | None = None
        self.store = NoteStore()


_SHARED: OrderedDict[str, Shared] = OrderedDict()  # vLLM's instance id → state


def shared(vllm_config) -> Shared:
    """The shared state of the engine with this configuration.

    A process remembers its last four engines.
    """
    key = vllm_config.instance_id
    if key not in _SHARED:
        _SHARED[key] = Shared()
        while len(_SHARED) > 4:
            _SHARED.popitem(last=False)
    return _SHARED[key]

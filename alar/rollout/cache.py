"""Keys and values of many trajectories, and the attention that reads them in place.

A trajectory lives in a slot, where key j is that of the token at position j. So trajectories of
different lengths share a batch without padding, and a slot survives from turn to turn. Slots stand
on shelves by capacity (128, 256, … keys), so that a short context never pays for a long neighbour;
a trajectory that outgrows its shelf is copied to another. A slot that nobody owns keeps its keys
until it is reused, so that a later context with the same beginning can copy them.

All shelves together stay within a budget of bytes. Slots that nobody owns go first. Where that is
not enough, the engine lets go of a session, and computes its keys again when its turn comes.

All tokens of a step go through the model as one packed sequence (1, N, H): one token of each
trajectory that is writing, many of each that is being prefilled. Only attention tells them apart.
"""

from __future__ import annotations

import gc
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface

SLOT_ATTENTION = "slots"  # its name in transformers
SHELF = 128  # capacities are multiples of this
CUDA_SHARE = 0.8  # of the free memory; logits, activations and masks need the rest
HOST_BUDGET = 8 * 2**30  # bytes; free memory of a computer that other programs use says little


def cache_budget(device: torch.device) -> int:
    """Bytes that the keys and values of one engine may take by default.

    On a GPU a share of what is free now. What PyTorch holds for later is free too. Elsewhere a
    fixed number. Not yet run on a GPU.
    """
    if device.type != "cuda":
        return HOST_BUDGET
    free, _ = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(CUDA_SHARE * (free + kept))


def give_memory_back() -> None:
    """Let other programs and engines have the GPU memory of what has been dropped: objects that
    know each other live until they are collected, and PyTorch keeps freed memory for itself."""
    gc.collect()
    torch.cuda.empty_cache()  # nothing without a GPU


def _capacity(length: int) -> int:
    """Keys in a slot for `length` of them."""
    return SHELF * -(-length // SHELF)  # rounded up


@dataclass(eq=False)
class Slot:
    """A place for one trajectory, and the ids and z (H,) whose keys and values it holds."""

    shelf: Shelf
    index: int
    ids: list[int] = field(default_factory=list)
    latents: list[np.ndarray] = field(default_factory=list)
    owned: bool = False

    def shared(
        self,
        ids: Sequence[int],
        latents: Sequence[np.ndarray],
        reserved: int | None,
        least: int = 0,
    ) -> int:
        """How many leading tokens, z included, this slot has in common with a context; 0 if not
        more than `least`. `reserved` is the latent id."""
        length = min(len(self.ids), len(ids))
        if length <= least or self.ids[: least + 1] != ids[: least + 1]:
            return 0
        if self.ids[:length] != ids[:length]:  # compared in C first; most are equal
            length = next(j for j in range(least, length) if self.ids[j] != ids[j])
        if self.latents:
            places = [j for j in range(length) if ids[j] == reserved]
            for j, ours, theirs in zip(places, self.latents, latents):
                if ours is not theirs and not np.array_equal(ours, theirs):
                    length = j
                    break
        return length if length > least else 0

    def keep(self, length: int, reserved: int | None) -> None:
        """Forget everything from position `length` on."""
        self.ids = self.ids[:length]
        self.latents = self.latents[: self.ids.count(reserved)] if self.latents else []


class Shelf:
    """Slots of one capacity. `data` has (2, slots, kv heads, capacity, D) for each layer, where the
    2 are keys and values."""

    def __init__(
        self, shape: tuple[int, int, int], capacity: int, dtype: torch.dtype, device: torch.device
    ):
        layers, heads, width = shape
        empty = torch.zeros((2, 0, heads, capacity, width), dtype=dtype, device=device)
        self.data = [empty] * layers
        self.capacity = capacity
        self.slots: list[Slot] = []

    def unowned(self) -> Slot | None:
        return next((slot for slot in self.slots if not slot.owned), None)

    def resize(self, count: int) -> None:
        """Have `count` slots. The first ones stay, the others are forgotten."""
        # One layer after the other, so that there are two copies of one layer and not of all.
        for layer, old in enumerate(self.data):
            new = old.new_zeros((2, count, *old.shape[2:]))
            kept = min(count, old.shape[1])
            new[:, :kept] = old[:, :kept]
            self.data[layer] = new
        self.slots = self.slots[:count]
        self.slots += [Slot(self, index) for index in range(len(self.slots), count)]

    def grow(self, wanted: int, most: int) -> Slot:
        """Have `wanted` slots, at most `most` of them new; returns the first new one."""
        count = len(self.slots)
        self.resize(min(wanted, count + most))
        return self.slots[count]

    def swap(self, one: int, other: int) -> None:
        """Exchange two slots with what they hold."""
        first, second = self.slots[one], self.slots[other]
        length = max(len(first.ids), len(second.ids))
        for data in self.data:
            left, right = (data[:, index, :, :length] for index in (one, other))
            aside = left.clone()
            left.copy_(right)
            right.copy_(aside)
        self.slots[one], self.slots[other], first.index, second.index = second, first, other, one

    def bring_forward(self, chosen: Container[Slot]) -> int:
        """Reorder so that the chosen slots come first, with as few copies as possible; returns how
        many they are. A batch can then read them as one slice."""
        places = [index for index, slot in enumerate(self.slots) if slot in chosen]
        count = len(places)
        gaps = sorted(set(range(count)) - set(places))
        behind = [index for index in places if index >= count]
        for gap, index in zip(gaps, behind):
            self.swap(gap, index)
        return count


class SlotCache:
    """All shelves of one model, in at most `budget` bytes; None: `cache_budget`, taken anew
    whenever the cache is empty."""

    def __init__(self, config, dtype: torch.dtype, device: torch.device, budget: int | None = None):
        width = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        self.shape = (config.num_hidden_layers, config.num_key_value_heads, width)
        self.dtype, self.device, self.budget = dtype, device, budget
        self.clear()

    def clear(self) -> None:
        self.shelves: dict[int, Shelf] = {}  # capacity → shelf
        self._limit: int | None = None

    @property
    def limit(self) -> int:
        """Bytes that all slots may take: the budget without the one layer that `Shelf.resize` holds
        twice."""
        if self._limit is None:
            budget = cache_budget(self.device) if self.budget is None else self.budget
            layers = self.shape[0]
            self._limit = budget * layers // (layers + 1)
        return self._limit

    @property
    def allocated(self) -> int:
        """Bytes of all slots, owned or not."""
        shelves = self.shelves.values()
        return sum(len(shelf.slots) * self.slot_bytes(shelf.capacity) for shelf in shelves)

    def slot_bytes(self, length: int) -> int:
        """Bytes of a slot for `length` keys."""
        layers, heads, width = self.shape
        return layers * 2 * heads * _capacity(length) * width * self.dtype.itemsize

    def bytes_of(self, slots: Iterable[Slot]) -> int:
        return sum(self.slot_bytes(slot.shelf.capacity) for slot in slots)

    def take(self, length: int, share: float = 1.0, spared: Slot | None = None) -> Slot | None:
        """An owned slot with room for `length` keys; what an earlier owner left there still stands
        in `ids`.

        None where owned slots leave too little of `share` · `limit`. Slots that nobody owns are
        forgotten if their memory is needed, all but `spared`.
        """
        capacity, needed = _capacity(length), self.slot_bytes(length)
        if capacity not in self.shelves:
            self.shelves[capacity] = Shelf(self.shape, capacity, self.dtype, self.device)
        shelf = self.shelves[capacity]
        slot = shelf.unowned()
        room = int(share * self.limit) - self.allocated
        if slot is None and room >= needed:
            slot = shelf.grow(max(8, 2 * len(shelf.slots)), room // needed)
        if slot is None:  # a longer one costs nothing: it is there already
            longer = sorted(size for size in self.shelves if size > capacity)
            found = (self.shelves[size].unowned() for size in longer)
            slot = next((one for one in found if one is not None and one is not spared), None)
        if slot is None:
            kept = {one for one in self.slots() if one.owned or one is spared}
            room = int(share * self.limit) - self.bytes_of(kept)
            if room < needed:
                return None
            for one in self.shelves.values():
                if not kept.issuperset(one.slots):
                    one.resize(one.bring_forward(kept))
            # Memory is short, so a shelf grows by little: another one may be the next to ask.
            slot = shelf.grow(len(shelf.slots) * 9 // 8 + 1, room // needed)
        slot.owned = True
        return slot

    def copy(self, source: Slot, target: Slot, length: int, reserved: int | None) -> None:
        """Give `target` the first `length` keys and values of `source`."""
        for theirs, ours in zip(source.shelf.data, target.shelf.data):
            ours[:, target.index, :, :length] = theirs[:, source.index, :, :length]
        target.ids, target.latents = list(source.ids), list(source.latents)
        target.keep(length, reserved)

    def slots(self) -> Iterator[Slot]:
        """Every slot, owned or not."""
        return (slot for shelf in self.shelves.values() for slot in shelf.slots)


@dataclass
class _Span:
    """Neighbouring tokens of the packed sequence that attend in one call: the single tokens of
    `rows` neighbouring slots, or a chunk of one slot."""

    tokens: slice  # of the packed sequence
    shelf: Shelf
    rows: slice  # slots of the shelf
    length: int  # keys that are read, T
    mask: Tensor  # singles (rows, 1, 1, T), chunk (group · count, T)
    write: Tensor | None  # singles: where their keys go (rows · kv heads,); None for a chunk


class StepLayout:
    """Where the N tokens of one step come from and what each may see.

    `entries` are (slot, count) in the order of the packed sequence: first the single tokens, where
    those of each shelf fill its first slots in order, then longer chunks. `positions` (1, N) go to
    the model. `group` is how many query heads share a kv head.
    """

    def __init__(
        self,
        entries: Sequence[tuple[Slot, int]],
        group: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.group = group
        places = []
        for slot, count in entries:
            places += range(len(slot.ids), len(slot.ids) + count)
        self.positions = torch.tensor([places], device=device)
        self.spans: list[_Span] = []
        begin = first = 0
        while first < len(entries):
            slot, count = entries[first]
            last = first + 1
            if count == 1:  # single tokens of neighbouring slots go together
                neighbours = slot.shelf.slots[slot.index + 1 :]
                for neighbour, entry in zip(neighbours, entries[last:]):
                    if entry != (neighbour, 1):
                        break
                    last += 1
            end = begin + count * (last - first)
            longest = max(len(slot.ids) for slot, _ in entries[first:last]) + count
            rows = slice(slot.index, slot.index + last - first)
            self.spans.append(self._span(slice(begin, end), slot.shelf, rows, longest, dtype))
            begin, first = end, last

    def _span(
        self, tokens: slice, shelf: Shelf, rows: slice, length: int, dtype: torch.dtype
    ) -> _Span:
        positions = self.positions[0, tokens]
        device = positions.device
        visible = torch.arange(length, device=device) <= positions[:, None]  # (tokens, T)
        mask = torch.zeros(visible.shape, dtype=dtype, device=device)
        mask = mask.masked_fill_(~visible, float("-inf"))
        if rows.stop - rows.start < tokens.stop - tokens.start:  # a chunk
            return _Span(tokens, shelf, rows, length, mask.repeat(self.group, 1), None)
        # With slots, kv heads and keys as one axis, the new key of slot s and head h stands at
        # (s · heads + h) · capacity + position: one indexed write then serves all slots.
        heads = shelf.data[0].shape[2]
        slots = torch.arange(rows.start, rows.stop, device=device)[:, None]
        lines = slots * heads + torch.arange(heads, device=device)  # (rows, kv heads)
        write = (lines * shelf.capacity + positions[:, None]).reshape(-1)
        return _Span(tokens, shelf, rows, length, mask[:, None, None], write)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """query (1, heads, N, D), key and value (1, kv heads, N, D) of the packed tokens → (1, N,
        heads, D)."""
        _, heads, total, width = query.shape
        output = query.new_empty(total, heads, width)
        for span in self.spans:
            keys, values = span.shelf.data[layer]  # (slots, kv heads, capacity, D)
            tokens, kv_heads = span.tokens.stop - span.tokens.start, keys.shape[1]
            asked = query[0, :, span.tokens]  # (heads, tokens, D)
            # The query heads of a group stand beside each other as further queries of their kv
            # head: `folded` is (batch, kv heads, queries, D).
            if span.write is None:
                chunk = slice(span.length - tokens, span.length)
                keys[span.rows, :, chunk] = key[:, :, span.tokens]
                values[span.rows, :, chunk] = value[:, :, span.tokens]
                folded = asked.reshape(1, kv_heads, self.group * tokens, width)
            else:
                for store, new in ((keys, key), (values, value)):
                    written = new[0, :, span.tokens].transpose(0, 1).reshape(-1, width)
                    store.view(-1, width).index_copy_(0, span.write, written)
                folded = asked.transpose(0, 1).reshape(tokens, kv_heads, self.group, width)
            attended = torch.nn.functional.scaled_dot_product_attention(
                folded,
                keys[span.rows, :, : span.length],
                values[span.rows, :, : span.length],
                attn_mask=span.mask,
                scale=scale,
            )
            if span.write is None:
                output[span.tokens] = attended.reshape(heads, tokens, width).transpose(0, 1)
            else:
                output[span.tokens] = attended.reshape(tokens, heads, width)
        return output[None]


def slot_attention(
    module, query, key, value, attention_mask, scaling=None, *, layout: StepLayout, **kwargs
):
    """The function registered with transformers: (1, heads, N, D) → (1, N, heads, D)."""
    return layout.attend(module.layer_idx, query, key, value, scaling), None


AttentionInterface.register(SLOT_ATTENTION, slot_attention)

"""Keys and values of many trajectories, and the attention that reads them in place.

A trajectory lives in a slot, where key j is the token at position j: rows of different lengths
share a batch without padding, and a slot survives from turn to turn. Slots stand on shelves by
length (128, 256, … keys), so that a short context never pays for a long neighbour; a row that
outgrows its shelf is copied to the next one. All tokens of a step, one per row that is writing and
many per row that is being prefilled, go through the model as one packed (1, N, H) sequence: only
attention knows rows. A slot that nobody owns keeps its keys until it is reused, so that a later
context with the same beginning can copy them.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface

SLOT_ATTENTION = "slots"  # its name in transformers
SHELF = 128  # keys by which the shelves differ


@dataclass(eq=False)
class Slot:
    """A place for one trajectory, and the ids and z whose keys and values it holds."""

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
        more than `least`."""
        length = min(len(self.ids), len(ids))
        if length <= least or self.ids[: least + 1] != ids[: least + 1]:
            return 0
        if self.ids[:length] != ids[:length]:
            length = next(j for j in range(least, length) if self.ids[j] != ids[j])
        if self.latents:
            thoughts = (
                [j for j in range(length) if ids[j] == reserved]
                if reserved in self.ids[:length]
                else []
            )
            for j, one, other in zip(thoughts, self.latents, latents):
                if one is not other and not np.array_equal(one, other):
                    length = j
                    break
        return length if length > least else 0

    def keep(self, length: int, reserved: int | None) -> None:
        """Forget everything from position `length` on."""
        self.ids = self.ids[:length]
        self.latents = self.latents[: self.ids.count(reserved)] if self.latents else []


class Shelf:
    """Slots of one capacity: `data` (layers, keys and values, slots, kv heads, capacity, D)."""

    def __init__(
        self, shape: tuple[int, int, int], capacity: int, dtype: torch.dtype, device: torch.device
    ):
        layers, heads, width = shape
        self.data = torch.zeros((layers, 2, 0, heads, capacity, width), dtype=dtype, device=device)
        self.slots: list[Slot] = []

    @property
    def capacity(self) -> int:
        return self.data.shape[4]

    def free(self) -> Slot:
        """A slot that nobody owns; twice as many slots are made when there is none."""
        for slot in self.slots:
            if not slot.owned:
                return slot
        layers, _, count, heads, capacity, width = self.data.shape
        grown = self.data.new_zeros((layers, 2, max(8, 2 * count), heads, capacity, width))
        grown[:, :, :count] = self.data
        self.data = grown
        self.slots += [Slot(self, index) for index in range(count, grown.shape[2])]
        return self.slots[count]

    def swap(self, one: int, other: int) -> None:
        first, second = self.slots[one], self.slots[other]
        length = max(len(first.ids), len(second.ids))
        left, right = (self.data[:, :, index, :, :length] for index in (one, other))
        aside = left.clone()
        left.copy_(right)
        right.copy_(aside)
        self.slots[one], self.slots[other], first.index, second.index = second, first, other, one

    def bring_forward(self, chosen: Container[Slot]) -> int:
        """Reorder so that the chosen slots come first, with as few copies as can be; returns how
        many there are."""
        places = [index for index, slot in enumerate(self.slots) if slot in chosen]
        count = len(places)
        if places and places[-1] >= count:
            taken = set(places)
            gaps = (index for index in range(count) if index not in taken)
            for gap, index in zip(gaps, (index for index in places if index >= count)):
                self.swap(gap, index)
        return count


class SlotCache:
    """All shelves of one model. Capacities are multiples of `SHELF`."""

    def __init__(self, config, dtype: torch.dtype, device: torch.device):
        width = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        self.shape = (config.num_hidden_layers, config.num_key_value_heads, width)
        self.dtype, self.device = dtype, device
        self.shelves: dict[int, Shelf] = {}  # capacity → shelf

    def take(self, length: int) -> Slot:
        """An owned slot with room for `length` keys; what an earlier owner left there still stands
        in `ids`."""
        capacity = SHELF * -(-length // SHELF)
        if capacity not in self.shelves:
            self.shelves[capacity] = Shelf(self.shape, capacity, self.dtype, self.device)
        slot = self.shelves[capacity].free()
        slot.owned = True
        return slot

    def copy(self, source: Slot, target: Slot, length: int, reserved: int | None) -> None:
        """Give `target` the first `length` keys and values of `source`."""
        target.shelf.data[:, :, target.index, :, :length] = source.shelf.data[
            :, :, source.index, :, :length
        ]
        target.ids, target.latents = list(source.ids), list(source.latents)
        target.keep(length, reserved)

    def slots(self) -> Iterator[Slot]:
        """Every slot, owned or not."""
        return (slot for shelf in self.shelves.values() for slot in shelf.slots)

    def clear(self) -> None:
        self.shelves.clear()


class StepLayout:
    """Where the N tokens of one step come from and what each may see.

    `entries` are (slot, count) in the order of the packed sequence: first the single tokens, in
    which the entries of each shelf fill its first slots in order, then longer chunks. `positions`
    (1, N) go to the model.
    """

    def __init__(
        self,
        entries: Sequence[tuple[Slot, int]],
        group: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.group = group  # query heads per kv head
        starts = [len(slot.ids) for slot, _ in entries]
        places = [
            start + offset for start, (_, count) in zip(starts, entries) for offset in range(count)
        ]
        self.positions = torch.tensor([places], device=device)
        self.batches: list[tuple[slice, Shelf, slice, int, Tensor, Tensor | None]] = []
        begin = first = 0
        while first < len(entries):
            slot, count = entries[first]
            last, end = first + 1, begin + count
            neighbours = slot.shelf.slots[slot.index + 1 :] if count == 1 else []
            for neighbour, entry in zip(neighbours, entries[last:]):
                if entry != (neighbour, 1):
                    break
                last, end = last + 1, end + 1
            length = max(starts[first:last]) + count
            positions = self.positions[0, begin:end]
            visible = torch.arange(length, device=device) <= positions[:, None]  # (tokens, T)
            mask = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(
                ~visible, float("-inf")
            )
            rows = slice(slot.index, slot.index + last - first)
            if count == 1:
                mask = mask[:, None, None]  # (rows, 1, 1, T)
                heads = slot.shelf.data.shape[3]
                base = torch.arange(rows.start, rows.stop, device=device)[
                    :, None
                ] * heads + torch.arange(heads, device=device)
                write = (base * slot.shelf.capacity + positions[:, None]).reshape(
                    -1
                )  # (rows · kv heads)
            else:
                mask, write = mask.repeat(group, 1), None  # (group · count, T)
            self.batches.append((slice(begin, end), slot.shelf, rows, length, mask, write))
            begin, first = end, last

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """query (1, heads, N, D), key and value (1, kv heads, N, D) of the packed tokens → (1, N,
        heads, D)."""
        _, heads, total, width = query.shape
        output = query.new_empty(total, heads, width)
        for span, shelf, rows, length, mask, write in self.batches:
            keys, values = shelf.data[layer]  # (slots, kv heads, capacity, D)
            kv_heads, tokens = keys.shape[1], span.stop - span.start
            if write is None:
                start = length - tokens
                keys[rows, :, start:length], values[rows, :, start:length] = (
                    key[:, :, span],
                    value[:, :, span],
                )
                folded = query[:, :, span].reshape(1, kv_heads, self.group * tokens, width)
            else:
                for store, new in ((keys, key), (values, value)):
                    store.view(-1, width).index_copy_(
                        0, write, new[0, :, span].transpose(0, 1).reshape(-1, width)
                    )
                folded = (
                    query[0, :, span].transpose(0, 1).reshape(tokens, kv_heads, self.group, width)
                )
            attended = torch.nn.functional.scaled_dot_product_attention(
                folded,
                keys[rows, :, :length],
                values[rows, :, :length],
                attn_mask=mask,
                scale=scale,
            )
            if write is None:
                output[span] = attended.reshape(heads, tokens, width).transpose(0, 1)
            else:
                output[span] = attended.reshape(tokens, heads, width)
        return output[None]


def slot_attention(
    module, query, key, value, attention_mask, scaling=None, *, layout: StepLayout, **kwargs
):
    """The function registered with transformers: (1, heads, N, D) → (1, N, heads, D)."""
    return layout.attend(module.layer_idx, query, key, value, scaling), None


AttentionInterface.register(SLOT_ATTENTION, slot_attention)

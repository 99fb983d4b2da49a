"""Keys and values of many trajectories, and the attention that reads them in place.

A trajectory lives in a slot, where key j is that of the token at position j. So trajectories of
different lengths share a batch without padding, and a slot survives from turn to turn. Slots stand
on shelves by capacity (128, 256, … keys), so that a short context never pays for a long neighbour;
a trajectory that outgrows its shelf is copied to another. A slot that nobody owns keeps its keys
until it is reused, so that a later context with the same beginning can copy them.

All tokens of a step go through the model as one packed sequence (1, N, H): one token of each
trajectory that is writing, many of each that is being prefilled. Only attention tells them apart.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface

SLOT_ATTENTION = "slots"  # its name in transformers
SHELF = 128  # capacities are multiples of this


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
    """Slots of one capacity. `data` is (layers, 2, slots, kv heads, capacity, D), where the 2 are
    keys and values."""

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
        """A slot that nobody owns. When there is none, the number of slots is doubled."""
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
        """Exchange two slots with what they hold."""
        first, second = self.slots[one], self.slots[other]
        length = max(len(first.ids), len(second.ids))
        left, right = (self.data[:, :, index, :, :length] for index in (one, other))
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
    """All shelves of one model."""

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
        capacity = SHELF * -(-length // SHELF)  # rounded up
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
        heads = shelf.data.shape[3]
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

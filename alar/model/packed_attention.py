"""Attention `packed`: calls of a `Packing` over keys and values that earlier calls of the same pass
have stored.

Queries, keys and values arrive packed, (1, heads, N, D). Text is attended row by row, causally
after the row's past; a latent step, one query per row, in one batched attention. Keys and values
are written once, into a preallocated store per layer, and read as views: nothing is concatenated or
copied as the rows grow.

Autograd cannot follow writes into a shared store, so `_StoredAttention` states the gradient itself:
backward, the calls run in reverse order and add the gradients of the keys that they read to a
second store, from which the call that wrote a key takes it. `links`, empty tensors passed from call
to call, give autograd that order.

Gradient checkpointing runs a layer's call again during backward. The past is then still in the
store and the call writes the same values to the same places once more, so the recomputation sees
exactly what the forward saw. (A cache handed over as `past_key_values` would not be there:
transformers drops it from checkpointed layers.)
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.utils import is_flash_attn_2_available

from alar.model.packing import Call, Packing

PACKED = "packed"


class Store:
    """Keys and values of one layer, (rows, kv heads, longest row, D), and their gradients once
    backward begins."""

    def __init__(self, like: Tensor, rows: int, longest: int):
        self.shape = (rows, like.shape[1], longest, like.shape[3])
        self.keys, self.values = (
            torch.zeros(self.shape, dtype=like.dtype, device=like.device) for _ in range(2)
        )
        self.key_gradients: Tensor | None = None
        self.value_gradients: Tensor | None = None

    def gradients(self) -> tuple[Tensor, Tensor]:
        if self.key_gradients is None:
            self.key_gradients, self.value_gradients = (
                torch.zeros_like(self.keys),
                torch.zeros_like(self.values),
            )
        return self.key_gradients, self.value_gradients


def write(call: Call, table: Tensor, own: Float[Tensor, "1 kv N D"]) -> None:
    """Put this call's own keys or values in their places."""
    if call.step is not None:
        table[list(call.rows), :, list(call.starts)] = own[0].transpose(0, 1)
        return
    for row, start, end, piece in zip(
        call.rows, call.starts, call.ends, own[0].split(call.lengths, dim=1)
    ):
        table[row, :, start:end] = piece


def take(call: Call, table: Tensor) -> Float[Tensor, "1 kv N D"]:
    """Take what stands in this call's own places, and leave zeros there."""
    if call.step is not None:
        places = (list(call.rows), slice(None), list(call.starts))
        own = table[places].transpose(0, 1)[None]
        table[places] = 0
        return own
    pieces = [
        table[row, :, start:end] for row, start, end in zip(call.rows, call.starts, call.ends)
    ]
    own = torch.cat(pieces, dim=1)[None]
    for piece in pieces:
        piece.zero_()
    return own


def seen_parts(call: Call, store: Tensor) -> list[Tensor]:
    """Views of the store that this call attends to: one per row for text, one for all rows of a
    latent step."""
    if call.step is not None:
        return [store[: len(call.rows), :, : max(call.ends)]]
    return [store[row : row + 1, :, :end] for row, end in zip(call.rows, call.ends)]


class PackedPass:
    """What the attention of one pass over a batch shares: the schedule's current call, the stores,
    the links.

    A plain class on purpose: FSDP copies dataclasses that it finds among a layer's arguments.
    """

    def __init__(self, packing: Packing, kind: str, checkpointed: bool):
        self.packing, self.kind, self.checkpointed = packing, kind, checkpointed
        self.stores: dict[int, Store] = {}
        self.links: dict[int, Tensor | None] = {}

    def store(self, layer: int, like: Tensor) -> Store:
        if layer not in self.stores:
            self.stores[layer] = Store(like, self.packing.num_rows, self.packing.longest)
        return self.stores[layer]


class PackedCall:
    """One call of a pass, as it is handed through the model to the attention of every layer."""

    def __init__(self, shared: PackedPass, call: Call, device: torch.device):
        self.shared, self.call = shared, call
        self.checkpointed = shared.checkpointed and call.step is None
        self.linked: dict[
            int, bool
        ] = {}  # layer → does its past carry gradients; known once the forward ran
        self.masks = masks(call, device)


def masks(call: Call, device: torch.device) -> list[Tensor | str | None]:
    """What each part of `seen_parts` may see: everything (None), "causal", a boolean mask, or a
    lower-right bias."""
    if call.step is not None:
        if len(set(call.starts)) == 1:
            return [None]
        ends = torch.tensor(call.ends, device=device)
        return [
            (torch.arange(max(call.ends), device=device)[None] < ends[:, None])[:, None, None]
        ]  # (n, 1, 1, T)
    found: list[Tensor | str | None] = []
    for start, length, end in zip(call.starts, call.lengths, call.ends):
        if length == 1:
            found.append(None)
        elif start == 0:
            found.append("causal")
        elif (
            device.type == "cuda"
        ):  # its flash kernel knows this bias; a mask would send grouped heads to the slow one
            found.append(causal_lower_right(length, end))
        else:
            found.append(torch.ones(length, end, dtype=torch.bool, device=device).tril(start))
    return found


def attention_sdpa(query: Tensor, key: Tensor, value: Tensor, mask, scale: float) -> Tensor:
    """(n, heads, L, D) over (n, kv heads, T, D); `mask` as in `masks`."""
    if query.shape[2] == 1:  # the heads of a group are queries on the same keys: no grouping needed
        folded = query.view(len(query), key.shape[1], -1, query.shape[3])
        return scaled_dot_product_attention(
            folded, key, value, attn_mask=mask, scale=scale
        ).view_as(query)
    causal = isinstance(mask, str)
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=None if causal else mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def attention_eager(query: Tensor, key: Tensor, value: Tensor, mask, scale: float) -> Tensor:
    """The same, written out: the slow twin."""
    group = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(group, 1).transpose(2, 3) * scale
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            length, total = scores.shape[2:]
            mask = torch.ones(length, total, dtype=torch.bool, device=scores.device).tril(
                total - length
            )
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ value.repeat_interleave(
        group, 1
    )


def attention_flash(
    call: Call, query: Tensor, keys: list[Tensor], values: list[Tensor], scale: float
) -> Tensor:
    """All rows of a text call in one kernel of the flash-attn package: half precision on CUDA only."""
    from flash_attn import flash_attn_varlen_func

    def bounds(lengths: tuple[int, ...]) -> Tensor:
        return torch.tensor((0, *lengths), device=query.device).cumsum(0, dtype=torch.int32)

    key, value = (
        torch.cat([part[0].transpose(0, 1) for part in parts]) for parts in (keys, values)
    )  # (T, kv heads, D)
    output = flash_attn_varlen_func(
        query[0].transpose(0, 1),  # (N, heads, D)
        key,
        value,
        bounds(call.lengths),
        bounds(call.ends),
        max(call.lengths),
        max(call.ends),
        softmax_scale=scale,
        causal=True,  # aligned to the lower right
    )
    return output.transpose(0, 1)[None]


def attend(
    packed: PackedCall, query: Tensor, keys: list[Tensor], values: list[Tensor], scale: float
) -> Float[Tensor, "1 heads N D"]:
    """Attention of one call; `keys` and `values` are its `seen_parts`."""
    call, kind = packed.call, packed.shared.kind
    if kind == "flash" and call.step is None:
        return attention_flash(call, query, keys, values, scale)
    function = attention_eager if kind == "eager" else attention_sdpa
    if call.step is not None:
        output = function(
            query[0].transpose(0, 1)[:, :, None], keys[0], values[0], packed.masks[0], scale
        )
        return output[:, :, 0].transpose(0, 1)[None]
    parts = query.split(call.lengths, dim=2)
    return torch.cat(
        [function(*row, scale) for row in zip(parts, keys, values, packed.masks)], dim=2
    )


def attend_alone(
    packed: PackedCall, query: Tensor, key: Tensor, value: Tensor, scale: float
) -> Tensor:
    """The only call of a pass: every row's keys are its own, and plain autograd serves."""
    lengths = packed.call.lengths
    if (
        len(set(lengths)) == 1 and packed.shared.kind == "sdpa"
    ):  # a full table: one batched attention
        tables = [
            x[0].unflatten(1, (len(lengths), lengths[0])).transpose(0, 1)
            for x in (query, key, value)
        ]
        return attention_sdpa(*tables, packed.masks[0], scale).transpose(0, 1).flatten(1, 2)[None]
    return attend(packed, query, list(key.split(lengths, 2)), list(value.split(lengths, 2)), scale)


class _StoredAttention(torch.autograd.Function):
    """(query, key, value, link of the past) → (output, link). Backward differentiates `attend` on
    the store's views.

    The inner graph of the forward is kept for that, except under checkpointing, where backward
    builds it again from the query, the one saved tensor. The store is reached through `.data`,
    whose versions autograd does not count: what is written later are other places than those that
    were read.
    """

    @staticmethod
    def forward(ctx, query, key, value, link, packed: PackedCall, store: Store, scale: float):
        call = packed.call
        write(call, store.keys, key)
        write(call, store.values, value)
        ctx.packed, ctx.layer_store, ctx.scale, ctx.tape = packed, store, scale, None
        ctx.save_for_backward(query)
        if packed.checkpointed or not any(ctx.needs_input_grad):
            output = attend(
                packed, query, seen_parts(call, store.keys), seen_parts(call, store.values), scale
            )
        else:
            ctx.tape = _tape(packed, query, store, scale)
            output = ctx.tape[0].detach()
        return output, query.new_zeros(())

    @staticmethod
    def backward(ctx, output_gradient, _):
        (query,) = ctx.saved_tensors
        call, store = ctx.packed.call, ctx.layer_store
        output, leaves = ctx.tape or _tape(ctx.packed, query, store, ctx.scale)
        ctx.tape = None
        query_gradient, *gradients = torch.autograd.grad(output, leaves, output_gradient)
        own = []
        for table, seen in zip(
            store.gradients(), (gradients[: len(gradients) // 2], gradients[len(gradients) // 2 :])
        ):
            for place, gradient in zip(seen_parts(call, table), seen):
                place += gradient
            own.append(
                take(call, table)
            )  # leaving zeros: a second backward through the same graph starts from nothing
        link_gradient = output_gradient.new_zeros(()) if ctx.needs_input_grad[3] else None
        return query_gradient, *own, link_gradient, None, None, None


def _tape(
    packed: PackedCall, query: Tensor, store: Store, scale: float
) -> tuple[Tensor, list[Tensor]]:
    """`attend` with a graph of its own: its output, and the leaves query, keys, values."""
    with torch.enable_grad():
        leaf = query.detach().requires_grad_()
        keys, values = (
            [part.detach().requires_grad_() for part in seen_parts(packed.call, table.data)]
            for table in (store.keys, store.values)
        )
        return attend(packed, leaf, keys, values, scale), [leaf, *keys, *values]


def packed_attention(
    module,
    query,
    key,
    value,
    attention_mask,
    scaling=None,
    dropout=0.0,
    *,
    packed: PackedCall,
    **kwargs,
):
    """The function registered with transformers: (1, heads, N, D) → (1, N, heads, D)."""
    if dropout:
        raise ValueError(
            "attention_dropout must be 0: latents are the same vectors in training and in decoding"
        )
    if torch.is_autocast_enabled(query.device.type):
        query, key, value = (
            x.to(torch.get_autocast_dtype(query.device.type)) for x in (query, key, value)
        )
    shared, layer = packed.shared, module.layer_idx
    if len(shared.packing.calls) == 1:
        return attend_alone(packed, query, key, value, scaling).transpose(1, 2), None
    recomputing = layer in packed.linked
    if (
        recomputing
        # by checkpointing, during backward: only what is saved matters, the links have done their
        # work
    ):
        link = query.new_zeros(()).requires_grad_() if packed.linked[layer] else None
    else:
        link = shared.links.get(layer)
        packed.linked[layer] = link is not None and link.requires_grad
    output, link = _StoredAttention.apply(
        query, key, value, link, packed, shared.store(layer, key), scaling
    )
    if not recomputing:
        shared.links[layer] = link
    return output.transpose(1, 2), None


AttentionInterface.register(
    PACKED, packed_attention
)  # without a mask function: transformers then builds no mask


def attention_kind(config, weight: Tensor) -> str:
    """ "eager" if the model asks for it, "flash" where the package and the weights allow it, else
    "sdpa"."""
    if config._attn_implementation == "eager":
        return "eager"
    half = weight.dtype in (torch.float16, torch.bfloat16)
    return "flash" if half and weight.is_cuda and is_flash_attn_2_available() else "sdpa"

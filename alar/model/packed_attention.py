"""Attention `packed`: the calls of one pass over keys and values that earlier calls have stored.

Queries, keys and values arrive packed, (1, heads, N, D): the tokens of all rows, one row after the
other. Text attends row by row, causally, to the row's past and itself. A latent step has one query
for each row and is one batched attention. Each layer has one preallocated store. A call writes its
own keys and values there once, and reads views: nothing is concatenated or copied as rows grow.

Autograd cannot follow writes into a shared store, so `_StoredAttention` states the gradient itself.
In backward the calls run in reverse order. Each adds the gradients of the keys that it read to a
second store; the call that wrote a key takes its gradient from there. `links`, empty tensors that
are passed from call to call, make autograd keep that order.

Gradient checkpointing runs a layer's call again during backward. The past is then still in the
store, and the call writes the same values to the same places once more, so it sees exactly what its
forward saw. (A cache in `past_key_values` would not be there: transformers drops it from
checkpointed layers.)
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.utils import is_flash_attn_2_available

from alar.model.packing import Packing, TrunkCall

PACKED = "packed"


class PackedPass:
    """What all calls of one pass over a batch share: for each layer a store and a link.

    A plain class on purpose: FSDP copies dataclasses that it finds among a layer's arguments.
    """

    def __init__(self, packing: Packing, kind: str, checkpointed: bool):
        self.packing, self.kind, self.checkpointed = packing, kind, checkpointed
        self.stores: dict[int, KeyValueStore] = {}
        self.links: dict[int, Tensor | None] = {}  # of the latest call

    def __enter__(self) -> PackedPass:
        return self

    def __exit__(self, *error) -> None:
        self.links.clear()  # they would tie the graph to itself

    def store(self, layer: int, like: Float[Tensor, "1 kv N D"]) -> KeyValueStore:
        if layer not in self.stores:
            self.stores[layer] = KeyValueStore(like, self.packing.num_rows, self.packing.longest)
        return self.stores[layer]


class PackedCall:
    """One call of a pass, as the model hands it to the attention of every layer."""

    def __init__(self, shared: PackedPass, call: TrunkCall, device: torch.device):
        self.shared, self.call = shared, call
        self.checkpointed = shared.checkpointed and not call.is_latent
        self.masks = masks(call, device)
        # By layer: does its past carry gradients? Known once the layer's forward ran.
        self.linked: dict[int, bool] = {}


def packed_attention(
    module,
    query: Float[Tensor, "1 heads N D"],
    key: Float[Tensor, "1 kv N D"],
    value: Float[Tensor, "1 kv N D"],
    attention_mask,
    scaling=None,
    dropout=0.0,
    *,
    packed: PackedCall,
    **kwargs,
) -> tuple[Float[Tensor, "1 N heads D"], None]:
    """The function that transformers calls in every layer of a call."""
    if dropout:
        raise ValueError(
            "attention_dropout must be 0: latents are the same vectors in training and in decoding"
        )
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        query, key, value = (x.to(torch.get_autocast_dtype(kind)) for x in (query, key, value))
    shared, layer = packed.shared, module.layer_idx
    if len(shared.packing.calls) == 1:
        return attend_alone(packed, query, key, value, scaling).transpose(1, 2), None
    store = shared.store(layer, key)
    recomputing = layer in packed.linked
    if recomputing:
        # Checkpointing runs this again in backward, for what the graph saves. The order of the
        # calls was settled in the forward; here the link only has to need a gradient or not.
        link = query.new_zeros(()).requires_grad_() if packed.linked[layer] else None
        output, _ = _StoredAttention.apply(query, key, value, link, packed, store, scaling)
    else:
        link = shared.links.get(layer)
        packed.linked[layer] = link is not None and link.requires_grad
        output, shared.links[layer] = _StoredAttention.apply(
            query, key, value, link, packed, store, scaling
        )
    return output.transpose(1, 2), None


# Registered without a mask function: transformers then builds no mask.
AttentionInterface.register(PACKED, packed_attention)


class _StoredAttention(torch.autograd.Function):
    """(query, key, value, link of the past) → (output, link).

    Backward differentiates `attend` on views of the store. The inner graph of the forward is kept
    for that, except under checkpointing, where backward builds it again from the query, the one
    saved tensor.
    """

    @staticmethod
    def forward(ctx, query, key, value, link, packed: PackedCall, store: KeyValueStore, scale):
        store.write(packed.call, key, value)
        ctx.packed, ctx.layer_store, ctx.scale, ctx.inner = packed, store, scale, None
        ctx.save_for_backward(query)
        if packed.checkpointed or not any(ctx.needs_input_grad):
            output = attend(packed, query, *store.seen(packed.call), scale)
        else:
            ctx.inner = _inner_graph(packed, query, store, scale)
            output = ctx.inner[0].detach()
        return output, query.new_zeros(())

    @staticmethod
    def backward(ctx, output_gradient, _):
        (query,) = ctx.saved_tensors
        packed, store = ctx.packed, ctx.layer_store
        output, leaves = ctx.inner or _inner_graph(packed, query, store, ctx.scale)
        ctx.inner = None
        query_gradient, *seen = torch.autograd.grad(output, leaves, output_gradient)
        half = len(seen) // 2  # keys first, then values
        own = store.exchange_gradients(packed.call, seen[:half], seen[half:])
        link_gradient = output_gradient.new_zeros(()) if ctx.needs_input_grad[3] else None
        return query_gradient, *own, link_gradient, None, None, None


def _inner_graph(
    packed: PackedCall, query: Tensor, store: KeyValueStore, scale: float
) -> tuple[Tensor, list[Tensor]]:
    """`attend` with a graph of its own: its output, and the leaves [query, keys …, values …]."""
    with torch.enable_grad():
        leaf = query.detach().requires_grad_()
        seen_keys, seen_values = store.seen(packed.call)
        keys = [part.detach().requires_grad_() for part in seen_keys]
        values = [part.detach().requires_grad_() for part in seen_values]
        return attend(packed, leaf, keys, values, scale), [leaf, *keys, *values]


class KeyValueStore:
    """Keys and values of one layer, (rows, kv, longest, D), and in backward their gradients."""

    def __init__(self, like: Float[Tensor, "1 kv N D"], rows: int, longest: int):
        shape = (rows, like.shape[1], longest, like.shape[3])
        self.keys = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self.values = torch.zeros_like(self.keys)
        self.key_gradients: Tensor | None = None
        self.value_gradients: Tensor | None = None

    def write(
        self, call: TrunkCall, key: Float[Tensor, "1 kv N D"], value: Float[Tensor, "1 kv N D"]
    ) -> None:
        """Put a call's own keys and values in their places."""
        for stored, own in ((self.keys, key), (self.values, value)):
            if call.is_latent:
                stored[list(call.rows), :, list(call.starts)] = own[0].transpose(0, 1)
                continue
            pieces = own[0].split(call.lengths, dim=1)  # (kv, length, D) for each row
            for row, start, end, piece in zip(call.rows, call.starts, call.ends, pieces):
                stored[row, :, start:end] = piece

    def seen(self, call: TrunkCall) -> tuple[list[Tensor], list[Tensor]]:
        """Views of the keys and of the values that a call attends to.

        `.data` has no version that autograd counts: what later calls write are other places.
        """
        return _seen(call, self.keys.data), _seen(call, self.values.data)

    def exchange_gradients(
        self, call: TrunkCall, key_parts: list[Tensor], value_parts: list[Tensor]
    ) -> list[Float[Tensor, "1 kv N D"]]:
        """Add the gradients of what a call has seen; return those of its own keys and values, which
        are complete now, because all later calls have added theirs."""
        if self.key_gradients is None:
            self.key_gradients = torch.zeros_like(self.keys)
            self.value_gradients = torch.zeros_like(self.values)
        own = []
        for gradients, parts in (
            (self.key_gradients, key_parts),
            (self.value_gradients, value_parts),
        ):
            for view, part in zip(_seen(call, gradients), parts):
                view += part
            own.append(_take(call, gradients))
        return own


def _seen(call: TrunkCall, stored: Tensor) -> list[Tensor]:
    """For text one view (1, kv, T, D) for each row; for a latent step one (n, kv, T, D) for all."""
    if call.is_latent:
        return [stored[: len(call.rows), :, : max(call.ends)]]
    return [stored[row : row + 1, :, :end] for row, end in zip(call.rows, call.ends)]


def _take(call: TrunkCall, stored: Tensor) -> Float[Tensor, "1 kv N D"]:
    """What stands in a call's own places. Zeros are left there, so that a second backward through
    the same graph starts from nothing."""
    if call.is_latent:
        places = (list(call.rows), slice(None), list(call.starts))
        own = stored[places].transpose(0, 1)[None]
        stored[places] = 0
        return own
    spans = zip(call.rows, call.starts, call.ends)
    pieces = [stored[row, :, start:end] for row, start, end in spans]
    own = torch.cat(pieces, dim=1)[None]
    for piece in pieces:
        piece.zero_()
    return own


def masks(call: TrunkCall, device: torch.device) -> list[Tensor | str | None]:
    """What the queries may see of each part of `KeyValueStore.seen`: everything (None), "causal", a
    boolean mask, or a bias that is causal from the lower right corner."""
    if call.is_latent:
        if len(set(call.starts)) == 1:
            return [None]
        ends = torch.tensor(call.ends, device=device)
        visible = torch.arange(max(call.ends), device=device)[None] < ends[:, None]  # (n, T)
        return [visible[:, None, None]]  # (n, 1, 1, T)
    found: list[Tensor | str | None] = []
    for start, length, end in zip(call.starts, call.lengths, call.ends):
        if length == 1:
            found.append(None)
        elif start == 0:
            found.append("causal")
        elif device.type == "cuda":
            # The flash kernel takes this bias; with a mask, grouped heads would go to a slow one.
            found.append(causal_lower_right(length, end))
        else:
            found.append(torch.ones(length, end, dtype=torch.bool, device=device).tril(start))
    return found


def attend(
    packed: PackedCall, query: Tensor, keys: list[Tensor], values: list[Tensor], scale: float
) -> Float[Tensor, "1 heads N D"]:
    """Attention of one call over the parts that it sees."""
    call, kind = packed.call, packed.shared.kind
    if kind == "flash" and not call.is_latent:
        return attention_flash(call, query, keys, values, scale)
    attention = attention_eager if kind == "eager" else attention_sdpa
    if call.is_latent:
        queries = query[0].transpose(0, 1)[:, :, None]  # (n, heads, 1, D)
        output = attention(queries, keys[0], values[0], packed.masks[0], scale)
        return output[:, :, 0].transpose(0, 1)[None]
    outputs = []
    for own, key, value, mask in zip(query.split(call.lengths, 2), keys, values, packed.masks):
        outputs.append(attention(own, key, value, mask, scale))  # (1, heads, length, D)
    return torch.cat(outputs, dim=2)


def attend_alone(
    packed: PackedCall, query: Tensor, key: Tensor, value: Tensor, scale: float
) -> Float[Tensor, "1 heads N D"]:
    """The only call of a pass: every row's keys are its own, and plain autograd serves."""
    lengths = packed.call.lengths
    if len(set(lengths)) == 1 and packed.shared.kind == "sdpa":
        # All rows are equally long: one batched attention.
        shape = (len(lengths), lengths[0])
        batched = [x[0].unflatten(1, shape).transpose(0, 1) for x in (query, key, value)]
        output = attention_sdpa(*batched, packed.masks[0], scale)  # (n, heads, L, D)
        return output.transpose(0, 1).flatten(1, 2)[None]
    return attend(packed, query, list(key.split(lengths, 2)), list(value.split(lengths, 2)), scale)


def attention_sdpa(
    query: Float[Tensor, "n heads L D"],
    key: Float[Tensor, "n kv T D"],
    value: Float[Tensor, "n kv T D"],
    mask,
    scale: float,
) -> Float[Tensor, "n heads L D"]:
    """PyTorch's attention; `mask` is one of `masks`."""
    if query.shape[2] == 1:
        # The heads of a group become queries on the same keys, so that no grouping is needed.
        folded = query.view(len(query), key.shape[1], -1, query.shape[3])  # (n, kv, group, D)
        output = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scale)
        return output.view_as(query)
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
    """The same as `attention_sdpa`, written out: the slow twin."""
    group = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(group, 1).transpose(2, 3) * scale  # (n, heads, L, T)
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            length, total = scores.shape[2:]
            visible = torch.ones(length, total, dtype=torch.bool, device=scores.device)
            mask = visible.tril(total - length)
        scores = scores.masked_fill(~mask, float("-inf"))
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    return weights @ value.repeat_interleave(group, 1)


def attention_flash(
    call: TrunkCall, query: Tensor, keys: list[Tensor], values: list[Tensor], scale: float
) -> Tensor:
    """All rows of a text call in one kernel of the flash-attn package (half precision, CUDA)."""
    from flash_attn import flash_attn_varlen_func

    def bounds(lengths: tuple[int, ...]) -> Tensor:
        return torch.tensor((0, *lengths), device=query.device).cumsum(0, dtype=torch.int32)

    def joined(parts: list[Tensor]) -> Float[Tensor, "T kv D"]:
        return torch.cat([part[0].transpose(0, 1) for part in parts])

    output = flash_attn_varlen_func(
        query[0].transpose(0, 1),  # (N, heads, D)
        joined(keys),
        joined(values),
        bounds(call.lengths),
        bounds(call.ends),
        max(call.lengths),
        max(call.ends),
        softmax_scale=scale,
        causal=True,  # from the lower right corner
    )
    return output.transpose(0, 1)[None]


def attention_kind(config, weight: Tensor) -> str:
    """ "eager" if the model asks for it, "flash" where the package and the weights allow it, else
    "sdpa"."""
    if config._attn_implementation == "eager":
        return "eager"
    half = weight.dtype in (torch.float16, torch.bfloat16)
    return "flash" if half and weight.is_cuda and is_flash_attn_2_available() else "sdpa"

"""Attention `packed`: the calls of one pass over keys and values that earlier calls have stored.

Queries, keys and values arrive packed, (1, heads, N, D): the tokens of all rows, one row after the
other. Text attends row by row, causally, to the row's past and itself. A latent step has one query
for each row and is one batched attention. Each layer has one preallocated store. A call writes its
own keys and values there once, and reads views: nothing is concatenated or copied as rows grow.

Text attends in one of two ways with the same result. On the CPU, and in float64, it is one call of
PyTorch's attention for each row: the reference. On CUDA it is one call of a fused kernel for all
rows, PyTorch's flex attention, in float32 as in half precision: the store is one long line of keys
there, every query sees one interval of it, and neither scores nor masks are ever written to memory.
The kernel is compiled once for all lengths, which takes a minute and needs a C compiler. The tests
run flex attention on the CPU; compiled for CUDA it has not yet run on a GPU.

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

from functools import cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from alar.model.packing import Packing, TrunkCall

PACKED = "packed"
BLOCK = 128  # the fused kernel skips blocks of this many queries × keys in which nothing is seen


class PackedPass:
    """What all calls of one pass over a batch share: for each layer a store and a link.

    A plain class on purpose: FSDP copies dataclasses that it finds among a layer's arguments.
    """

    def __init__(self, packing: Packing, fused: bool, checkpointed: bool):
        self.packing, self.fused, self.checkpointed = packing, fused, checkpointed
        self.stores: dict[int, KeyValueStore] = {}
        self.links: dict[int, Tensor | None] = {}  # of the latest call

    def __enter__(self) -> PackedPass:
        return self

    def __exit__(self, *error) -> None:
        self.links.clear()  # they would tie the graph to itself

    def store(self, layer: int, like: Float[Tensor, "1 kv N D"]) -> KeyValueStore:
        if layer not in self.stores:
            rows, longest = self.packing.num_rows, self.packing.longest
            self.stores[layer] = KeyValueStore(like, rows, longest, self.fused)
        return self.stores[layer]


class PackedCall:
    """One call of a pass, as the model hands it to the attention of every layer."""

    def __init__(self, shared: PackedPass, call: TrunkCall, device: torch.device):
        self.shared, self.call = shared, call
        self.checkpointed = shared.checkpointed and not call.is_latent
        if shared.fused and not call.is_latent:
            self.masks = block_mask(shared.packing, call, device)
        else:
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
    """Keys and values of one layer, (rows, kv, longest, D), and in backward their gradients.

    If they are to be read by the fused kernel, they lie in memory as (kv, rows, longest, D).
    """

    def __init__(self, like: Float[Tensor, "1 kv N D"], rows: int, longest: int, fused: bool):
        shape = (rows, like.shape[1], longest, like.shape[3])
        self.fused = fused
        if fused:
            self.keys = like.new_zeros(shape[1], rows, *shape[2:]).transpose(0, 1)
        else:
            self.keys = like.new_zeros(shape)
        self.values = torch.zeros_like(self.keys)  # in the same order
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
        return self._seen(call, self.keys.data), self._seen(call, self.values.data)

    def _seen(self, call: TrunkCall, stored: Tensor) -> list[Tensor]:
        """For a latent step one view (n, kv, T, D) for all rows; for text the whole store in one
        line, (1, kv, rows · longest, D), or one (1, kv, T, D) for each row."""
        if call.is_latent:
            return [stored[: len(call.rows), :, : max(call.ends)]]
        if self.fused:
            return [stored.transpose(0, 1).view(1, stored.shape[1], -1, stored.shape[3])]
        return [stored[row : row + 1, :, :end] for row, end in zip(call.rows, call.ends)]

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
            for view, part in zip(self._seen(call, gradients), parts):
                view += part
            own.append(_take(call, gradients))
        return own


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
    """What the queries may see of each part of `KeyValueStore.seen`: everything (None), "causal" or
    a boolean mask. For latent steps, and for text on the CPU."""
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
        else:
            found.append(torch.ones(length, end, dtype=torch.bool, device=device).tril(start))
    return found


def block_mask(packing: Packing, call: TrunkCall, device: torch.device) -> BlockMask:
    """What the N queries of a text call see of the line of T keys that the fused kernel reads: the
    store of all rows, or, in the only call of a pass, the call's own keys.

    A query sees the keys from the start of its row to itself. A block of keys is left out for a
    block of queries that sees none of it, and needs no mask where all see all of it. Nothing here
    grows with heads, and the largest tensor is N × T/128 booleans.
    """
    lengths = torch.tensor(call.lengths)
    if len(packing.calls) == 1:
        total = call.tokens
        starts = lengths.cumsum(0) - lengths  # (n,) where each row's keys start
    else:
        total = packing.num_rows * packing.longest
        starts = torch.tensor(call.rows) * packing.longest
    first = starts.repeat_interleave(lengths).to(device)  # (N,)
    last = first + call.positions().to(device)  # (N,)

    def sees(batch, head, query, key):
        return (first[query] <= key) & (key <= last[query])

    # At least two blocks each way: a size of 1 would be compiled on its own.
    query_blocks = max(2, -(-call.tokens // BLOCK))
    edges = torch.arange(max(2, -(-total // BLOCK)), device=device) * BLOCK  # first keys of blocks
    missing = (0, query_blocks * BLOCK - call.tokens)  # queries after the last, which see nothing
    begin, end = pad(first, missing)[:, None], pad(last, missing, value=-1)[:, None]
    some = (begin < edges + BLOCK) & (edges <= end)  # (queries, blocks of keys)
    some = some.unflatten(0, (query_blocks, BLOCK)).any(1)  # (blocks of queries, blocks of keys)
    whole = (begin <= edges) & (edges + BLOCK - 1 <= end)
    whole = whole.unflatten(0, (query_blocks, BLOCK)).all(1)
    return BlockMask.from_kv_blocks(
        *_listed(some & ~whole),
        *_listed(whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(call.tokens, total),
    )


def _listed(blocks: Bool[Tensor, "Q K"]) -> tuple[Int[Tensor, "1 1 Q"], Int[Tensor, "1 1 Q K"]]:
    """How many blocks of keys each block of queries has, and their numbers: first those, in order,
    then the others."""
    numbers = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], numbers.int()[None, None]


def attend(
    packed: PackedCall, query: Tensor, keys: list[Tensor], values: list[Tensor], scale: float
) -> Float[Tensor, "1 heads N D"]:
    """Attention of one call over the parts that it sees."""
    call = packed.call
    if call.is_latent:
        queries = query[0].transpose(0, 1)[:, :, None]  # (n, heads, 1, D)
        output = attention_sdpa(queries, keys[0], values[0], packed.masks[0], scale)
        return output[:, :, 0].transpose(0, 1)[None]
    if packed.shared.fused:
        return fused_kernel()(
            query, keys[0], values[0], block_mask=packed.masks, scale=scale, enable_gqa=True
        )
    outputs = []
    for own, key, value, mask in zip(query.split(call.lengths, 2), keys, values, packed.masks):
        outputs.append(attention_sdpa(own, key, value, mask, scale))  # (1, heads, length, D)
    return torch.cat(outputs, dim=2)


def attend_alone(
    packed: PackedCall, query: Tensor, key: Tensor, value: Tensor, scale: float
) -> Float[Tensor, "1 heads N D"]:
    """The only call of a pass: every row's keys are its own, and plain autograd serves."""
    if packed.shared.fused:
        return attend(packed, query, [key], [value], scale)
    lengths = packed.call.lengths
    if len(set(lengths)) == 1:
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


def takes_fused_kernel(hidden: Tensor) -> bool:
    """Whether text attends through the fused kernel: on CUDA, but not in float64, which only checks
    of exactness use."""
    return hidden.is_cuda and hidden.dtype != torch.float64


@cache
def fused_kernel(backend: str = "inductor"):
    """Flex attention, compiled for all lengths; `backend` is one of `torch.compile`.

    Not compiled, it would write all scores to memory, so what cannot be compiled is an error. Other
    heads, another dtype, gradients or none and short calls each take a variant of their own:
    PyTorch's limit of 8 is too low for several models in one process.
    """
    compiled = torch.compile(flex_attention, dynamic=True, fullgraph=True, backend=backend)
    return torch._dynamo.config.patch(recompile_limit=64)(compiled)

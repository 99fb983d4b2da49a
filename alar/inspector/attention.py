"""Attention weights of a few queries, taken during an ordinary forward pass.

All weights of T tokens would be layers × heads × T × T numbers. The inspector needs only the rows
of latent positions and of actions, so `watched_attention` attends as usual and stores the softmax
weights of those rows, averaged over the heads. They equal the weights that
`attn_implementation="eager"` reports.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from alar.model.attention import grouped_sdpa

WATCHED = "watched"


class Watch:
    """Collects the attention weights of `queries` (positions in one sequence), mean over heads."""

    def __init__(self, queries: list[int], layers: int):
        self.queries = torch.tensor(queries, dtype=torch.long)
        self.layers: list[Tensor | None] = [None] * layers  # each (queries, T)

    def take(
        self,
        layer: int,
        query: Float[Tensor, "1 heads T D"],
        key: Float[Tensor, "1 kv T D"],
        scale: float,
    ) -> None:
        places = self.queries.to(query.device)
        chosen = query[0, :, places].float()  # (heads, queries, D)
        groups = query.shape[1] // key.shape[1]  # query heads that share a key head
        keys = key[0].float().repeat_interleave(groups, dim=0)  # (heads, T, D)
        scores = chosen @ keys.transpose(1, 2) * scale  # (heads, queries, T)
        future = torch.arange(key.shape[2], device=query.device) > places[:, None]
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)  # (heads, queries, T)
        self.layers[layer] = weights.mean(0).cpu()

    def weights(self) -> Float[Tensor, "queries layers T"]:
        return torch.stack(self.layers, dim=1)


def watched_attention(
    module, query, key, value, attention_mask, dropout=0.0, scaling=None, *, watch: Watch, **kwargs
):
    """The attention function that transformers calls: (1, heads, T, D) → (1, T, heads, D).

    It serves one causal sequence without padding.
    """
    # The fused kernel returns no weights, so those of a few rows are computed a second time.
    watch.take(module.layer_idx, query, key, scaling)
    return grouped_sdpa(module, query, key, value, attention_mask, dropout, scaling, **kwargs)


AttentionInterface.register(WATCHED, watched_attention)
AttentionMaskInterface.register(WATCHED, sdpa_mask)

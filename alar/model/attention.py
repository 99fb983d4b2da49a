"""Attention `grouped_sdpa`: PyTorch's scaled-dot-product attention over ungrouped keys and values.

transformers' own "sdpa" copies every key and value head once per query head as soon as there is a
mask; with a growing cache that copy costs more than the attention. PyTorch takes grouped heads
directly.
"""

from __future__ import annotations

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

GROUPED_SDPA = "grouped_sdpa"


def grouped_sdpa(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    """query (B, heads, Q, D), key and value (B, kv heads, T, D), boolean mask (B, 1, Q, T) → (B, Q,
    heads, D)."""
    output = torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        scale=scaling,
        is_causal=attention_mask is None and query.shape[2] > 1,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED_SDPA, grouped_sdpa)
AttentionMaskInterface.register(GROUPED_SDPA, sdpa_mask)


class attention_of:
    """Context: the model of `config` runs with this attention implementation. May be entered again
    after it was left."""

    def __init__(self, config, implementation: str):
        self.config, self.implementation = config, implementation

    def __enter__(self):
        self.before = self.config._attn_implementation
        self.config._attn_implementation = self.implementation

    def __exit__(self, *error):
        self.config._attn_implementation = self.before


def grouped_attention(model) -> attention_of:
    """Run `model` with `grouped_sdpa` inside the block, if it uses sdpa; other implementations are
    left alone."""
    implementation = model.config._attn_implementation
    return attention_of(model.config, GROUPED_SDPA if implementation == "sdpa" else implementation)

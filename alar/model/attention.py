"""Attention `grouped_sdpa`: PyTorch's scaled-dot-product attention on grouped heads as they are.

As soon as there is a mask, the "sdpa" of transformers copies every key and value head once for each
query head of its group. With a growing cache that copy costs more than the attention itself.
"""

from __future__ import annotations

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

GROUPED_SDPA = "grouped_sdpa"


def grouped_sdpa(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    """query (B, heads, Q, D), key and value (B, kv heads, T, D), boolean attention_mask
    (B, 1, Q, T) → (B, Q, heads, D)."""
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
    """Context in which the model of `config` runs with this attention implementation.

    A class, because checkpointing enters the same context again after it was left.
    """

    def __init__(self, config, implementation: str):
        self.config, self.implementation = config, implementation

    def __enter__(self):
        self.before = self.config._attn_implementation
        self.config._attn_implementation = self.implementation

    def __exit__(self, *error):
        self.config._attn_implementation = self.before


def grouped_attention(model) -> attention_of:
    """Context in which a `model` that uses sdpa runs with `grouped_sdpa`; another implementation
    stays as it is."""
    implementation = model.config._attn_implementation
    return attention_of(model.config, GROUPED_SDPA if implementation == "sdpa" else implementation)

"""Which ids a phase of a turn allows (`phases`), as rows that are added to the logits.

    phase             allowed
    visible           [0, V)
    thinking          mirrors, EOS, the first piece of `</think>` with its bias
    inside `</think>` its next piece

Mirrors of control tokens are always banned: those of special tokens, of tags that are single
tokens, and of embedding rows without a text. A forced piece of `</think>` has log-prob 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from alar.methods.dual.vocabulary import DualVocab
from alar.rollout.constraint import TokenConstraint


def control_ids(tokenizer: PreTrainedTokenizerBase, dual: DualVocab) -> list[int]:
    """Visible ids whose mirrors must never be written."""
    added = tokenizer.added_tokens_decoder.items()
    special = {token_id for token_id, token in added if token.special}
    tags = {ids[0] for ids in (dual.think_start_ids, dual.think_end_ids) if len(ids) == 1}
    spare = set(range(len(tokenizer), dual.V))
    return sorted(special | set(tokenizer.all_special_ids) | tags | spare)


class PhaseConstraint(TokenConstraint):
    """`table` (phases, V + L): 0 where an id is allowed, −∞ where not, the bias at `</think>`."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        dual: DualVocab,
        device: torch.device | str = "cpu",
    ):
        close = dual.think_end_ids
        table = torch.full((1 + len(close), dual.V + dual.L), float("-inf"))
        table[0, : dual.V] = 0.0  # visible
        table[1, dual.V :] = 0.0  # thinking
        for token in control_ids(tokenizer, dual):
            if token in dual.mirror_of:
                table[1, dual.mirror_of[token]] = float("-inf")
        table[1, tokenizer.eos_token_id] = 0.0
        table[1, close[0]] = dual.think_end_bias
        # After n pieces of `</think>` only the next one may follow.
        for written, piece in enumerate(close[1:], start=1):
            table[1 + written, piece] = 0.0
        self.table = table.to(device)

    def rows(self, phases: Sequence[int] | Tensor) -> Float[Tensor, "n vocabulary"]:
        return self.table[torch.as_tensor(phases, dtype=torch.long, device=self.table.device)]

"""Which ids a phase of a turn allows, as rows that are added to the logits.

    phase             allowed
    visible           [0, V)
    thinking          mirrors, EOS, the first piece of `</think>` with its bias
    inside `</think>` its next piece

Mirrors of control tokens (special tokens, tags that are single tokens, embedding rows without a
text) are banned always. Both engines and the log-prob pass of RL add the same rows, before the
temperature: so a behaviour log-prob is that of the constrained distribution, and forced pieces of
`</think>` have log-prob 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from alar.methods.dual.vocabulary import DualVocab


def control_ids(tokenizer: PreTrainedTokenizerBase, dual: DualVocab) -> list[int]:
    """Visible ids whose mirrors must never be written."""
    special = {
        token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    tags = {ids[0] for ids in (dual.think_start_ids, dual.think_end_ids) if len(ids) == 1}
    return sorted(
        special | set(tokenizer.all_special_ids) | tags | set(range(len(tokenizer), dual.V))
    )


class PhaseConstraint:
    """`table` (phases, V + L): 0 where an id is allowed, −∞ where not, the bias at `</think>`."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        dual: DualVocab,
        device: torch.device | str = "cpu",
    ):
        close, table = (
            dual.think_end_ids,
            torch.full((1 + len(dual.think_end_ids), dual.V + dual.L), float("-inf")),
        )
        table[0, : dual.V] = 0.0
        table[1, dual.V :] = 0.0
        banned = [
            dual.mirror_of[token]
            for token in control_ids(tokenizer, dual)
            if token in dual.mirror_of
        ]
        table[1, banned] = float("-inf")
        table[1, tokenizer.eos_token_id] = 0.0
        table[1, close[0]] = dual.think_end_bias
        for written, piece in enumerate(close[1:], start=1):
            table[1 + written, piece] = 0.0
        self.table = table.to(device)

    def rows(self, phases: Sequence[int] | Tensor) -> Float[Tensor, "n vocabulary"]:
        """What to add to the logits of tokens in these phases."""
        return self.table[torch.as_tensor(phases, dtype=torch.long, device=self.table.device)]

    def __call__(
        self, logits: Float[Tensor, "n vocabulary"], phases: Sequence[int] | Tensor
    ) -> Float[Tensor, "n vocabulary"]:
        return logits + self.rows(phases)

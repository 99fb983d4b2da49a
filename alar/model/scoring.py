"""Log-probs of given tokens, without the logits of all tokens.

Logits (tokens × vocabulary) are the largest tensors of a policy update: 20 k tokens of a vocabulary
of 152 k take 12 GB in float32, and their gradient as much again. Only tokens that carry loss need
any, and here they exist for some of these at a time. The backward pass computes them once more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.utils import ModelOutput

# Logits that exist at once. In float32 they take 512 MiB, and so does each step of the softmax.
# Smaller parts would round the head's gradient more often where it is summed in bfloat16.
LOGITS_AT_ONCE = 2**27
UNSCORED = -100  # a label without a score, as in cross-entropy


@dataclass
class TokenScores(ModelOutput):
    """Float32, (B, T): of the label at each position its log-prob, and of the distribution that
    the label comes from the entropy. 0 where there is no label. `entropy` only if it is asked for.
    """

    log_probs: Tensor | None = None
    entropy: Tensor | None = None


def score_tokens(
    head: Callable[[Tensor], Tensor],
    hidden: Float[Tensor, "B T H"],
    labels: Int[Tensor, "B T"],
    vocabulary: int,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
) -> TokenScores:
    """The scores of `labels`, each under the logits of its own position.

    `head` gives logits (n, V) of hidden states (n, H). The first `vocabulary` of them can be
    chosen, the others have no probability. No label is also fine: the scores are then 0, and
    their gradient reaches `head` as zeros, which FSDP needs.
    """
    scored = labels != UNSCORED  # (B, T)
    rows, targets = hidden[scored], labels[scored]  # (n, H), (n,)

    def scores(rows: Tensor, targets: Tensor) -> Tensor:
        logits = head(rows)[:, :vocabulary].float() / temperature  # (n, V)
        logprobs = torch.log_softmax(logits, dim=-1)
        found = [logprobs.gather(1, targets[:, None])[:, 0]]
        if entropy:
            found.append(-(logprobs.exp() * logprobs).sum(-1))
        return torch.stack(found)  # (1 or 2, n)

    size = max(1, LOGITS_AT_ONCE // vocabulary)  # tokens
    parts = [
        # Nothing in `scores` is random.
        checkpoint(scores, *part, use_reentrant=False, preserve_rng_state=False)
        for part in zip(rows.split(size), targets.split(size))
    ]
    empty = hidden.new_zeros(labels.shape, dtype=torch.float32)
    return TokenScores(*(empty.masked_scatter(scored, one) for one in torch.cat(parts, dim=1)))

"""Reading vectors as tokens: the logit lens, nearest embeddings, norms against the embedding table.

The logit lens (nostalgebraist 2020) applies the model's final norm and its head to the hidden state
of every layer. Layer 0 is the input itself (here z), layer L the model's own output. The latent id
and the spare rows behind it are left out, as in decoding (`alar.rollout.hf.policy_logits`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from alar.rollout.hf import policy_logits


class Lens(NamedTuple):
    """What the lens reads: top ids and probabilities (…, top_k), and entropy in nats (…)."""

    ids: np.ndarray
    probabilities: np.ndarray
    entropy: np.ndarray


def layer_states(model, hidden_states: tuple[Tensor, ...]) -> Float[Tensor, "rows layers H"]:
    """L + 1 hidden states (rows, H) → one table, all after the final norm.

    transformers reports the input, the output of every layer but the last, and the last output
    after the final norm; only the others need the norm here.
    """
    return torch.stack([*map(model.model.norm, hidden_states[:-1]), hidden_states[-1]], dim=1)


def logit_lens(model, states: Float[Tensor, "... H"], top_k: int) -> Lens:
    """What the head reads in states that have passed the final norm."""
    logprobs = torch.log_softmax(policy_logits(model, states), dim=-1)  # (…, V)
    top = logprobs.topk(top_k, dim=-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return Lens(top.indices.cpu().numpy(), top.values.exp().cpu().numpy(), entropy.cpu().numpy())


def token_embeddings(model) -> Float[Tensor, "V H"]:
    """The embeddings of ordinary tokens, without the latent id and the spare rows behind it."""
    return model.get_input_embeddings().weight.detach()[: model.config.latent_token_id].float()


def nearest_tokens(vectors: Float[Tensor, "rows H"], embeddings: Float[Tensor, "V H"], top_k: int):
    """(ids, cosines), each (rows, top_k), of the embeddings with the largest cosine."""
    normal = torch.nn.functional.normalize
    cosines = normal(vectors.float(), dim=-1) @ normal(embeddings, dim=-1).T  # (rows, V)
    top = cosines.topk(top_k, dim=-1)
    return top.indices.cpu().numpy(), top.values.cpu().numpy()


def norm_statistics(vectors: Float[Tensor, "rows H"], embeddings: Float[Tensor, "V H"]):
    """(norms, ratio to the median norm of the embeddings, share of embeddings that are not longer),
    each (rows,)."""
    norms, table = vectors.float().norm(dim=-1), embeddings.norm(dim=-1)  # (rows,), (V,)
    share = (table[None] <= norms[:, None]).float().mean(-1)  # (rows, V) → (rows,)
    return norms.cpu().numpy(), (norms / table.median()).cpu().numpy(), share.cpu().numpy()


def cosine_matrix(vectors: Float[Tensor, "rows H"]) -> np.ndarray:
    """Cosines (rows, rows) between all pairs."""
    unit = torch.nn.functional.normalize(vectors.float(), dim=-1)
    return (unit @ unit.T).cpu().numpy()

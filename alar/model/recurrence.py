"""How the latent vectors z are computed: the plain algorithm, one sequence, one token at a time.

A latent position has no embedding of its own. What is fed there is computed from the hidden state
of the position just before it (arXiv 2606.02871, with f the projector):

    tokens       …  <lat  ent  >    •     •     •     •    </  lat …
    fed          …   e     e   e    z₁    z₂    z₃    z₄    e   e
    hidden state               h₀   h₁    h₂    h₃    h₄

    z₁ = f(h₀),   z_{k+1} = f(h_k),   k = 1 … K − 1

This file is what to read first, and it is what everything else is compared with. Training uses
`LatentCausalLM.latent_states`, which computes the same for a whole batch in few calls; the tests
hold its hidden states, its z and its gradients against `plain_latent_states`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import DynamicCache

LATENT_GRADIENTS = ("published", "full", "projector_only")


@dataclass
class LatentStates:
    """What a pass over token ids found.

    `hidden` (B, T, H), or (T, H) for one sequence: the last hidden state, after the final norm, at
    every position. `latents` (N, H): the z fed at each latent position, in reading order (row by
    row, from left to right).
    """

    hidden: Tensor
    latents: Tensor


def reaches_state(latent_gradient: str, step: int) -> bool:
    """Whether the gradient of z_{k+1} = f(h_k) goes on into h_k, k = `step`; it always reaches f.

    "published" (the released code): into h₀ only, so that z₁ also trains the text before the block.
    "full": into every h_k. "projector_only": into none. Raises ValueError for any other word.
    """
    if latent_gradient not in LATENT_GRADIENTS:
        expected = ", ".join(LATENT_GRADIENTS)
        raise ValueError(f"latent_gradient {latent_gradient!r}: expected one of {expected}")
    return latent_gradient == "full" or (latent_gradient == "published" and step == 0)


def plain_latent_states(
    model, ids: Int[Tensor, " T"], *, latent_gradient: str = "published"
) -> LatentStates:
    """Hidden states and z of one sequence, fed token by token into transformers' own KV cache.

    The model must be in eval mode: in training mode with gradient checkpointing the layers of
    transformers drop the cache, and every token would see itself only.
    """
    trunk, embed, f = model.model, model.get_input_embeddings(), model.model.projector
    cache = DynamicCache(config=model.config)
    hidden, latents = [], []  # of (H,) each
    step = 0  # k, how many latent positions of this block went before
    for token in ids:
        if token == model.config.latent_token_id:
            h = hidden[-1]  # (H,), h_k: the state at the position just before
            if not reaches_state(latent_gradient, step):
                h = h.detach()
            fed = f(h[None], step)  # (1, H), z_{k+1}
            latents.append(fed[0])
            step += 1
        else:
            fed = embed(token[None])  # (1, H)
            step = 0
        output = trunk(inputs_embeds=fed[None], past_key_values=cache, use_cache=True)
        hidden.append(output.last_hidden_state[0, 0])
    no_z = embed.weight.new_zeros(0, model.config.hidden_size)
    return LatentStates(torch.stack(hidden), torch.stack(latents) if latents else no_z)

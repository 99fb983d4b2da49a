"""How the latent vectors z are computed: the plain algorithm, for one sequence.

A latent position has no embedding of its own. What is fed there is computed from the hidden state
of the position just before it (arXiv 2606.02871, with f the projector):

    tokens       …  <lat  ent  >    •     •     •     •    </  lat …
    fed          …   e     e   e    z₁    z₂    z₃    z₄    e   e
    hidden state               h₀   h₁    h₂    h₃    h₄

    z₁ = f(h₀),   z_{k+1} = f(h_k),   k = 1 … K − 1

Read this file of the room first: everything else is compared with it. Training uses
`LatentCausalLM.latent_states`, which computes the same for a whole batch in few calls; the tests
hold its hidden states, its z and its gradients against `plain_latent_states`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
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
    """Hidden states and z of one sequence, with the ordinary KV cache of transformers.

    The model must be in eval mode: in training mode with gradient checkpointing the layers of
    transformers drop the cache, and a position would see nothing of what came before it.
    """
    trunk, embed, f = model.model, model.get_input_embeddings(), model.model.projector
    cache = DynamicCache(config=model.config)
    hidden = []  # of each call of the trunk, (n, H)
    latents = []  # of each latent position, (1, H)

    def feed(inputs: Float[Tensor, "n H"]) -> None:
        output = trunk(inputs_embeds=inputs[None], past_key_values=cache, use_cache=True)
        hidden.append(output.last_hidden_state[0])

    is_latent = ids == model.config.latent_token_id  # (T,)
    _, lengths = torch.unique_consecutive(is_latent, return_counts=True)
    for piece in ids.split(lengths.tolist()):  # text, block, text, block, …
        if piece[0] != model.config.latent_token_id:
            feed(embed(piece))
            continue
        for step in range(len(piece)):  # k
            h = hidden[-1][-1:]  # (1, H), h_k: the state at the position just before
            if not reaches_state(latent_gradient, step):
                h = h.detach()
            z = f(h, step)  # (1, H), z_{k+1}
            latents.append(z)
            feed(z)
    no_z = embed.weight.new_zeros(0, model.config.hidden_size)
    return LatentStates(torch.cat(hidden), torch.cat([no_z, *latents]))

"""The exact probability of the latent mode at every turn: p(latent | state).

Both open tags are scored by teacher forcing at the state before the turn's block, and the two
probabilities are renormalised. One forward pass scores all turns of a trajectory: the pieces of the
tags stand behind the sequence as branches. A branch sees the tokens before its turn and its own
pieces, nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from alar.model.attention import grouped_attention
from alar.records import Trajectory
from alar.rollout.codec import Codec
from alar.rollout.hf import policy_logits


def block_start(trajectory: Trajectory, turn: int, codec: Codec) -> int:
    """Index where the turn's open tag begins: behind the separator that opens the first turn."""
    start = trajectory.turns[turn].start
    skip = len(codec.separator)
    return start + skip if trajectory.ids[start : start + skip] == codec.separator else start


@torch.no_grad()
def latent_probabilities(
    model, codec: Codec, trajectories: Sequence[Trajectory], *, cells: int = 2**21
) -> list[list[float]]:
    """p(latent | state) for every turn of every trajectory; the states are those recorded, with the
    recorded z.

    Trajectories of similar lengths share a forward pass. Its mask (B, T, T) has at most about
    `cells` entries.
    """
    results: list[list[float]] = [[] for _ in trajectories]
    order = sorted(range(len(trajectories)), key=lambda i: len(trajectories[i].ids), reverse=True)
    while order:
        count = max(1, cells // max(1, len(trajectories[order[0]].ids)) ** 2)
        chosen, order = order[:count], order[count:]
        for index, scores in zip(chosen, _score(model, codec, [trajectories[i] for i in chosen])):
            results[index] = scores
    return results


class _Branched:
    """A trajectory with both open tags of every turn behind it, one list entry a token.

    A token sees the trajectory up to `limits`, and the tokens before it in its own `branch` (−1:
    the trajectory itself). `tags` has one entry a turn: the index of the last token before the
    block, and where the branches of the two tags begin.
    """

    def __init__(self, trajectory: Trajectory, codec: Codec, tags: Sequence[Sequence[int]]):
        self.ids = list(trajectory.ids)
        self.main = len(self.ids)  # tokens of the trajectory
        self.positions = list(range(self.main))
        self.limits = list(range(self.main))
        self.branch = [-1] * self.main
        self.tags: list[tuple[int, list[int]]] = []
        for turn in range(len(trajectory.turns)):
            begin = block_start(trajectory, turn, codec)
            firsts = []
            for tag in tags:
                first = len(self.ids)
                firsts.append(first)
                fed = tag[:-1]  # the last piece is scored, never fed
                self.ids += fed
                self.positions += range(begin, begin + len(fed))
                self.limits += [begin - 1] * len(fed)
                self.branch += [first] * len(fed)  # a name of its own
            self.tags.append((begin - 1, firsts))


def _score(model, codec: Codec, batch: Sequence[Trajectory]) -> list[list[float]]:
    tags = (codec.latent_open, codec.think_open)
    device = next(model.parameters()).device
    rows = [_Branched(trajectory, codec, tags) for trajectory in batch]
    width = max(len(row.ids) for row in rows)

    def padded(lists: Sequence[list[int]], fill: int) -> Tensor:
        """(B, T)"""
        filled = [values + [fill] * (width - len(values)) for values in lists]
        return torch.tensor(filled, device=device)

    ids = padded([row.ids for row in rows], 0)
    positions = padded([row.positions for row in rows], 0)
    limits = padded([row.limits for row in rows], -1)
    branch = padded([row.branch for row in rows], -2)
    main = torch.tensor([row.main for row in rows], device=device)  # (B,)

    # mask (B, T, T), query by key. Padding sees itself: attention to nothing would be NaN.
    key = torch.arange(width, device=device)
    context = (key <= limits[:, :, None]) & (key < main[:, None, None])
    own = (branch[:, :, None] == branch[:, None, :]) & (branch[:, :, None] >= 0)
    own = own & (key[None] <= key[:, None])
    mask = context | own | torch.eye(width, dtype=torch.bool, device=device)

    embeddings = model.get_input_embeddings()(ids)  # (B, T, H)
    if codec.latent_token_id is not None:
        where = (ids == codec.latent_token_id).nonzero(as_tuple=True)
        if len(where[0]):
            z = torch.cat([torch.as_tensor(t.latents) for t in batch if len(t.latents)])  # (N, H)
            embeddings = embeddings.index_put(where, z.to(embeddings))
    with grouped_attention(model):
        hidden = model.model(
            inputs_embeds=embeddings,
            attention_mask={"full_attention": mask[:, None]},
            position_ids=positions,
            use_cache=False,
        ).last_hidden_state  # (B, T, H)

    scores = []
    for number, row in enumerate(rows):
        turns = []
        for last, firsts in row.tags:
            totals = []
            for tag, first in zip(tags, firsts):
                # Piece k of a tag is predicted by the token before it: the context's last one, then
                # the branch.
                states = hidden[number, [last, *range(first, first + len(tag) - 1)]]
                logprobs = torch.log_softmax(policy_logits(model, states), dim=-1)  # (pieces, V)
                totals.append(logprobs[range(len(tag)), tag].double().sum())
            turns.append(torch.softmax(torch.stack(totals), 0)[0].item())
        scores.append(turns)
    return scores

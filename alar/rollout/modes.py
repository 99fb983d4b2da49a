"""The exact probability of the latent mode at every turn: p(latent | state).

Both open tags are scored by teacher forcing at the state before the turn's block and renormalised
over the two. One forward pass scores all turns of a trajectory: the tags' pieces stand behind the
sequence as branches, each of which sees the tokens before its turn and its own pieces, nothing
else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

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
    """p(latent | state) for every turn of every trajectory, states as recorded (with their recorded
    z).

    Trajectories of similar lengths share a forward pass whose (B, T, T) mask has about `cells`
    entries at most.
    """
    results: list[list[float]] = [[] for _ in trajectories]
    order = sorted(range(len(trajectories)), key=lambda i: len(trajectories[i].ids), reverse=True)
    while order:
        count = max(1, cells // max(1, len(trajectories[order[0]].ids)) ** 2)
        chosen, order = order[:count], order[count:]
        for index, scores in zip(chosen, _score(model, codec, [trajectories[i] for i in chosen])):
            results[index] = scores
    return results


def _score(model, codec: Codec, batch: Sequence[Trajectory]) -> list[list[float]]:
    tags = (codec.latent_open, codec.think_open)
    device = next(model.parameters()).device
    rows = []
    for trajectory in batch:
        ids = list(trajectory.ids)
        positions, limits, branch = list(range(len(ids))), list(range(len(ids))), [-1] * len(ids)
        places = []  # (turn's last context index, index of each branch's first fed piece)
        for turn in range(len(trajectory.turns)):
            begin = block_start(trajectory, turn, codec)
            firsts = []
            for tag in tags:
                firsts.append(len(ids))
                name = len(ids)
                for offset, piece in enumerate(tag[:-1]):  # the last piece is scored, never fed
                    ids.append(piece)
                    positions.append(begin + offset)
                    limits.append(begin - 1)
                    branch.append(name)
            places.append((begin - 1, firsts))
        rows.append((ids, positions, limits, branch, places, len(trajectory.ids)))
    width = max(len(row[0]) for row in rows)

    def table(column: int, fill: int) -> torch.Tensor:
        return torch.tensor(
            [row[column] + [fill] * (width - len(row[column])) for row in rows], device=device
        )

    ids, positions, limits, branch = table(0, 0), table(1, 0), table(2, -1), table(3, -2)
    index = torch.arange(width, device=device)
    main = torch.tensor([row[5] for row in rows], device=device)
    context = (index[None, None] <= limits[:, :, None]) & (index[None, None] < main[:, None, None])
    same = (
        (branch[:, :, None] == branch[:, None, :])
        & (branch[:, :, None] >= 0)
        & (index[None, None] <= index[None, :, None])
    )
    mask = context | same | torch.eye(width, dtype=torch.bool, device=device)[None]
    embeddings = model.get_input_embeddings()(ids)
    if codec.latent_token_id is not None:
        where = (ids == codec.latent_token_id).nonzero(as_tuple=True)
        if len(where[0]):
            z = torch.cat([torch.as_tensor(t.latents) for t in batch if len(t.latents)])
            embeddings = embeddings.index_put(where, z.to(embeddings))
    with grouped_attention(model):
        hidden = model.model(
            inputs_embeds=embeddings,
            attention_mask={"full_attention": mask[:, None]},
            position_ids=positions,
            use_cache=False,
        ).last_hidden_state
    scores = []
    for row, (_, _, _, _, places, _) in enumerate(rows):
        turns = []
        for last, firsts in places:
            totals = []
            for tag, first in zip(tags, firsts):
                states = hidden[row, [last, *range(first, first + len(tag) - 1)]]
                logprobs = torch.log_softmax(policy_logits(model, states), dim=-1)
                totals.append(logprobs[range(len(tag)), tag].double().sum())
            turns.append(torch.softmax(torch.stack(totals), 0)[0].item())
        scores.append(turns)
    return scores

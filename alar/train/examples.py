"""Trajectories → training examples: ids, the loss mask from token origins, and batches of similar
shape.

AASD (arXiv 2606.02871) replaces every chain of thought of a successful teacher trajectory by a
latent block and keeps the actions; the mode warm-up flips a coin per turn. Only SAMPLED tokens
carry loss: never the prompt, an observation, a latent position or the forced pieces of `</latent>`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from alar.records import Origin, Trajectory
from alar.rollout.codec import Codec


@dataclass(frozen=True)
class Example:
    ids: list[int]
    labels: list[int]  # -100 where there is no loss
    num_blocks: int


def labels_from_origins(ids: Sequence[int], origins: Sequence[int]) -> list[int]:
    return [token if origin == Origin.SAMPLED else -100 for token, origin in zip(ids, origins)]


def rewrite(trajectory: Trajectory, codec: Codec, latent_turns: Sequence[bool]) -> Example:
    """The trajectory with the chain of thought of the marked turns replaced by a latent block."""
    if len(latent_turns) != len(trajectory.turns):
        raise ValueError(
            f"{len(latent_turns)} modes for {len(trajectory.turns)} turns of"
            f" {trajectory.question.id}"
        )
    ids, origins, cursor = [], [], 0
    for number, (turn, latent) in enumerate(zip(trajectory.turns, latent_turns)):
        ids += trajectory.ids[cursor : turn.start]
        origins += trajectory.origins[cursor : turn.start]
        if latent:
            written, marks = codec.latent_turn(turn.action, turn.argument, first=number == 0)
        else:
            written, marks = (
                trajectory.ids[turn.start : turn.end],
                [Origin.SAMPLED] * (turn.end - turn.start),
            )
        ids += written
        origins += marks
        cursor = turn.end
    return Example(ids, labels_from_origins(ids, origins), sum(latent_turns))


def aasd_examples(trajectories: Sequence[Trajectory], codec: Codec) -> list[Example]:
    """Every turn latent."""
    return [rewrite(item, codec, [True] * len(item.turns)) for item in usable(trajectories)]


def warmup_examples(
    trajectories: Sequence[Trajectory], codec: Codec, probability: float, seed: int
) -> list[Example]:
    """Each turn latent with `probability`, else the teacher's text."""
    rng = random.Random(f"mode warm-up {seed}")
    return [
        rewrite(item, codec, [rng.random() < probability for _ in item.turns])
        for item in usable(trajectories)
    ]


def at_most(examples: Sequence[Example], count: int, seed: int) -> list[Example]:
    """`count` of them, drawn at random; all where there are no more, or `count` is 0."""
    return (
        random.Random(seed).sample(examples, count) if 0 < count < len(examples) else list(examples)
    )


def usable(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """The correct, well-formed ones. ValueError if there are none."""
    kept = [item for item in trajectories if item.correct and item.well_formed]
    if not kept:
        raise ValueError(
            f"none of the {len(trajectories)} trajectories is correct and well formed: there is"
            " nothing to imitate; look at the teacher's accuracy in notebook 02"
        )
    return kept


def collate(examples: Sequence[Example], pad_token_id: int) -> dict[str, torch.Tensor]:
    """Right-padded input_ids, attention_mask and labels, each (B, T)."""
    length = max(len(example.ids) for example in examples)
    pad = [length - len(example.ids) for example in examples]
    return {
        "input_ids": torch.tensor([e.ids + [pad_token_id] * n for e, n in zip(examples, pad)]),
        "attention_mask": torch.tensor([[1] * len(e.ids) + [0] * n for e, n in zip(examples, pad)]),
        "labels": torch.tensor([e.labels + [-100] * n for e, n in zip(examples, pad)]),
    }


class SimilarBatches:
    """Batch sampler: shuffled, but each batch holds examples with equally many blocks and similar
    lengths.

    The latent steps of a batch run together, one call for all rows: with equally many blocks none
    of them runs for a few rows only, and similar lengths keep the tables narrow. Similar are the
    examples of one pool, so many batches; with a pool of one they are mixed as they come, and a
    batch is not of one kind where similar examples are.

    Of several processes, each draws the same global batches, `batch_size` times `processes` similar
    examples, and yields every `processes`-th example of them, from number `rank` on: all make the
    same number of steps, on rows that differ little. Where the last examples do not suffice for
    all, a process without one repeats the first.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        batch_size: int,
        seed: int,
        pool: int = 16,
        *,
        rank: int = 0,
        processes: int = 1,
    ):
        self.shapes = [(example.num_blocks, len(example.ids)) for example in examples]
        self.batch_size, self.seed, self.pool, self.epoch = batch_size * processes, seed, pool, 0
        self.rank, self.processes = rank, processes

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-len(self.shapes) // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        rng = random.Random(f"batches {self.seed} {self.epoch}")
        order = list(range(len(self.shapes)))
        rng.shuffle(order)
        batches = []
        for start in range(0, len(order), self.batch_size * self.pool):
            pool = sorted(
                order[start : start + self.batch_size * self.pool], key=self.shapes.__getitem__
            )
            batches += [pool[i : i + self.batch_size] for i in range(0, len(pool), self.batch_size)]
        rng.shuffle(batches)
        self.epoch += 1
        return (batch[self.rank :: self.processes] or batch[:1] for batch in batches)

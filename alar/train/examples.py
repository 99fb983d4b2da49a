"""Trajectories → training examples: token ids, the loss mask, and batches of similar shape.

AASD (arXiv 2606.02871) replaces every chain of thought of a successful teacher trajectory by a
latent block and keeps the actions; the mode warm-up flips a coin per turn. Only SAMPLED tokens
carry loss: never the prompt, an observation or the forced pieces of `</latent>`. Latent positions
carry none as published. With labelled thoughts each has a label, what a step of the replaced text
concludes, though the label is never fed: its input is z.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from alar.records import Origin, Trajectory
from alar.rollout.codec import Codec

NO_LOSS = -100  # the label that PyTorch's cross-entropy leaves out

# A chain of thought → what its steps conclude, in order; see `alar.domains.catalogue.Domain`.
Conclusions = Callable[[str], Sequence[str]]


@dataclass(frozen=True)
class Example:
    """One row to train on. `labels[i]` is `ids[i]` or NO_LOSS; at a latent position it may also be
    the label of the thought. The model shifts them by one."""

    ids: list[int]
    labels: list[int]
    num_blocks: int  # latent blocks


def labels_from_origins(ids: Sequence[int], origins: Sequence[int]) -> list[int]:
    return [token if origin == Origin.SAMPLED else NO_LOSS for token, origin in zip(ids, origins)]


def thought_labels(conclusions: Sequence[str], codec: Codec) -> list[int]:
    """The labels of a block's K thoughts: the first piece of a conclusion each.

    The last conclusion again for the thoughts behind it. If there are more conclusions than
    thoughts, evenly chosen ones, the last among them. NO_LOSS where nothing is concluded.
    """
    num_latent, count = codec.num_latent, len(conclusions)
    if not count:
        return [NO_LOSS] * num_latent
    pieces = [codec.untrusted(text)[0] for text in conclusions]
    if count > num_latent:
        return [pieces[(k + 1) * count // num_latent - 1] for k in range(num_latent)]
    return pieces + pieces[-1:] * (num_latent - count)


def with_latent_turns(
    trajectory: Trajectory,
    codec: Codec,
    latent_turns: Sequence[bool],
    conclusions: Conclusions | None = None,
) -> Example:
    """The trajectory with the chain of thought of the marked turns replaced by a latent block.

    With `conclusions` the thoughts have labels: the LM head reads the label of thought k from the
    state before it, h_{k−1}, the same from which z_k is made. ValueError unless there is one mark
    per turn.
    """
    if len(latent_turns) != len(trajectory.turns):
        raise ValueError(
            f"{len(latent_turns)} modes for {len(trajectory.turns)} turns of"
            f" {trajectory.question.id}"
        )
    ids, origins = [], []
    thoughts = []  # the labels of the latent positions
    copied = 0  # tokens of the trajectory that are already dealt with
    for number, (turn, latent) in enumerate(zip(trajectory.turns, latent_turns)):
        # What the policy read before this turn: the prompt, or the last observation.
        ids += trajectory.ids[copied : turn.start]
        origins += trajectory.origins[copied : turn.start]
        if latent:
            written, marks = codec.latent_turn(turn.action, turn.argument, first=number == 0)
            text = codec.text(trajectory.ids[turn.start : turn.end])
            concluded = conclusions(codec.form.parse(text).reasoning) if conclusions else ()
            thoughts += thought_labels(concluded, codec)
        else:
            # Every token of the teacher's turn is learnt, tags that were forced on it included.
            written = trajectory.ids[turn.start : turn.end]
            marks = [Origin.SAMPLED] * len(written)
        ids += written
        origins += marks
        copied = turn.end
    # Whatever follows the last turn teaches nothing and is left out.
    labels = labels_from_origins(ids, origins)
    positions = [place for place, origin in enumerate(origins) if origin == Origin.LATENT]
    for place, label in zip(positions, thoughts, strict=True):
        labels[place] = label
    return Example(ids, labels, sum(latent_turns))


def aasd_examples(
    trajectories: Sequence[Trajectory], codec: Codec, conclusions: Conclusions | None = None
) -> list[Example]:
    """Examples with every turn latent.

    ValueError if no trajectory is successful, or if `conclusions` finds nothing in any of them.
    """
    examples = [
        with_latent_turns(trajectory, codec, [True] * len(trajectory.turns), conclusions)
        for trajectory in successful(trajectories)
    ]
    if conclusions and codec.num_latent and not any(_labelled_thoughts(e, codec) for e in examples):
        raise ValueError(
            "supervision by labels: none of the chains of thought concludes anything that the"
            " domain's expert can read; labels need a teacher that writes as the expert does, so"
            " set aasd.supervision: none"
        )
    return examples


def _labelled_thoughts(example: Example, codec: Codec) -> int:
    pairs = zip(example.ids, example.labels)
    return sum(codec.is_latent(token) and label != NO_LOSS for token, label in pairs)


def warmup_examples(
    trajectories: Sequence[Trajectory],
    codec: Codec,
    probability: float,
    seed: int,
    conclusions: Conclusions | None = None,
) -> list[Example]:
    """Each turn is latent with `probability`, else it keeps the teacher's text."""
    rng = random.Random(f"mode warm-up {seed}")
    examples = []
    for trajectory in successful(trajectories):
        coins = [rng.random() < probability for _ in trajectory.turns]
        examples.append(with_latent_turns(trajectory, codec, coins, conclusions))
    return examples


def at_most(examples: Sequence[Example], count: int, seed: int) -> list[Example]:
    """`count` of the examples, drawn at random; all if there are no more, or if `count` is 0."""
    if count == 0 or count >= len(examples):
        return list(examples)
    return random.Random(seed).sample(examples, count)


def successful(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """The correct, well-formed ones. ValueError if there are none."""
    found = [item for item in trajectories if item.correct and item.well_formed]
    if not found:
        raise ValueError(
            f"none of the {len(trajectories)} trajectories is correct and well formed: there is"
            " nothing to imitate; look at the teacher's accuracy in notebook 02"
        )
    return found


def collate(examples: Sequence[Example], pad_token_id: int) -> dict[str, torch.Tensor]:
    """Right-padded input_ids, attention_mask and labels, each (B, T)."""
    length = max(len(example.ids) for example in examples)
    ids, mask, labels = [], [], []
    for example in examples:
        missing = length - len(example.ids)
        ids.append(example.ids + [pad_token_id] * missing)
        mask.append([1] * len(example.ids) + [0] * missing)
        labels.append(example.labels + [NO_LOSS] * missing)
    return {
        "input_ids": torch.tensor(ids),
        "attention_mask": torch.tensor(mask),
        "labels": torch.tensor(labels),
    }


class SimilarBatches:
    """Batch sampler: shuffled, but examples of one batch have as many blocks and similar lengths.

    The latent steps of a batch run together, one call for all rows. With equally many blocks no
    call serves a few rows only, and with similar lengths there is little padding.

    Examples are shuffled, cut into pools of `pool` batches, and sorted by shape within each pool;
    then the batches are shuffled. A pool of one batch leaves examples mixed as they come. Use it
    where examples of one shape are all of one kind, because a batch would hold that kind only.

    Several processes draw the same global batches of `batch_size` times `processes` examples. Each
    takes every `processes`-th example, from number `rank` on. So all make the same number of steps,
    on rows that differ little. If the last batch is too small for all processes, a process that
    gets nothing repeats the batch's first example.
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
        self.shapes = [(example.num_blocks, len(example.ids)) for example in examples]  # sort keys
        self.batch_size = batch_size * processes  # of all processes together
        self.seed, self.pool, self.epoch = seed, pool, 0
        self.rank, self.processes = rank, processes

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-len(self.shapes) // self.batch_size)  # rounded up

    def __iter__(self) -> Iterator[list[int]]:
        rng = random.Random(f"batches {self.seed} {self.epoch}")  # equal in every process
        order = list(range(len(self.shapes)))  # numbers of examples
        rng.shuffle(order)
        batches = []
        pool_size = self.batch_size * self.pool
        for start in range(0, len(order), pool_size):
            pool = sorted(order[start : start + pool_size], key=self.shapes.__getitem__)
            batches += [pool[i : i + self.batch_size] for i in range(0, len(pool), self.batch_size)]
        rng.shuffle(batches)  # else every pool would go from short to long
        self.epoch += 1
        return (batch[self.rank :: self.processes] or batch[:1] for batch in batches)

"""Traces as training examples whose chains of thought are mirrors, for the project's supervised
trainer.

Inputs and labels are remapped alike. `latent_only` keeps the loss where the *label* is a mirror:
the position that predicts `</think>` from the last mirror is outside, the one that predicts the
first mirror from `<think>` is inside. (A mask made from the inputs is off by one at both ends.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from alar.methods.dual.vocabulary import DualVocab, NoMirror
from alar.records import Origin, Trajectory
from alar.rollout.codec import Codec
from alar.train.examples import Example, labels_from_origins, successful


def thought_of(trajectory: Trajectory, turn: int, codec: Codec) -> str:
    """The chain of thought of a turn, as text."""
    record = trajectory.turns[turn]
    return codec.form.parse(codec.text(trajectory.ids[record.start : record.end])).reasoning


def thoughts(trajectories: Sequence[Trajectory], codec: Codec) -> list[str]:
    """All chains of thought of the traces that can be learnt from: what a subset vocabulary is made
    of."""
    return [
        thought_of(t, turn, codec) for t in successful(trajectories) for turn in range(len(t.turns))
    ]


def rewrite(trajectory: Trajectory, codec: Codec) -> Example:
    """One trace, encoded anew by `codec`: with a dual vocabulary its thoughts are mirrors, without
    they stay text. The prompt is encoded anew too, because tags may have become single tokens."""
    ids = codec.encode(codec.form.prompt(trajectory.question))
    origins = [Origin.PROMPT] * len(ids)
    for number, turn in enumerate(trajectory.turns):
        if number:
            seen = trajectory.ids[trajectory.turns[number - 1].end : turn.start]
            ids, origins = ids + seen, origins + [Origin.OBSERVATION] * len(seen)
        thought = thought_of(trajectory, number, codec)
        written, marks = codec.think_turn(thought, turn.action, turn.argument, first=number == 0)
        ids, origins = ids + written, origins + marks
    return Example(ids, labels_from_origins(ids, origins), 0)


def latent_only(example: Example, dual: DualVocab) -> Example:
    """The loss on mirrors alone."""
    return replace(
        example, labels=[label if dual.is_mirror(label) else -100 for label in example.labels]
    )


def dual_examples(
    trajectories: Sequence[Trajectory],
    codec: Codec,
    *,
    only_latent: bool = False,
    missing: str = "error",
) -> list[Example]:
    """The correct, well-formed traces as examples. `missing`: a trace with a token that has no
    mirror is an "error", or is left out ("skip")."""
    if missing not in ("error", "skip"):
        raise ValueError(f"missing {missing!r}: expected error or skip")
    examples = []
    for trajectory in successful(trajectories):
        try:
            example = rewrite(trajectory, codec)
        except NoMirror as problem:
            if missing == "error":
                raise NoMirror(
                    f"{trajectory.question.id}: {problem}; build with more mirrors, or leave such"
                    " traces out"
                ) from None
            continue
        examples.append(latent_only(example, codec.dual) if only_latent else example)
    if not examples:
        raise ValueError(
            "every trace has a token without a mirror: build the vocabulary from the traces' own"
            " thoughts"
        )
    return examples

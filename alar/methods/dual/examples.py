"""Traces as training examples whose chains of thought are mirrors, for the supervised trainer.

Inputs and labels are remapped alike. `latent_only` keeps the loss where the *label* is a mirror. So
the position that predicts the first mirror from `<think>` carries loss, and the one that predicts
`</think>` from the last mirror does not. (A mask made from the inputs is off by one at both ends.)
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
    record = trajectory.turns[turn]  # a span of ids
    return codec.form.parse(codec.text(trajectory.ids[record.start : record.end])).reasoning


def thoughts(trajectories: Sequence[Trajectory], codec: Codec) -> list[str]:
    """All chains of thought of the successful traces; a subset vocabulary is made of them."""
    found = []
    for trajectory in successful(trajectories):
        found += [thought_of(trajectory, turn, codec) for turn in range(len(trajectory.turns))]
    return found


def encoded_anew(trajectory: Trajectory, codec: Codec) -> Example:
    """One trace, written again by `codec`: a `DualCodec` turns its thoughts into mirrors.

    The prompt is encoded again too, because tags may have become single tokens.
    """
    ids = codec.encode(codec.form.prompt(trajectory.question))
    origins = [Origin.PROMPT] * len(ids)
    for number, turn in enumerate(trajectory.turns):
        if number:
            # The observation before this turn.
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
    """The correct, well-formed traces as examples.

    `missing` says what happens to a trace with a token that has no mirror: "error" raises NoMirror,
    "skip" leaves the trace out.
    """
    if missing not in ("error", "skip"):
        raise ValueError(f"missing {missing!r}: expected error or skip")
    examples = []  # at most one per successful trace
    for trajectory in successful(trajectories):
        try:
            example = encoded_anew(trajectory, codec)
        except NoMirror as problem:
            if missing == "error":
                raise NoMirror(  # names the question, which the codec does not know
                    f"{trajectory.question.id}: {problem}; build with more mirrors, or skip such"
                    " traces"
                ) from None
            continue  # a subset vocabulary cannot say this thought
        examples.append(latent_only(example, codec.dual) if only_latent else example)
    if not examples:
        raise ValueError(
            "every trace has a token without a mirror: build the vocabulary from the traces' own"
            " thoughts"
        )
    return examples

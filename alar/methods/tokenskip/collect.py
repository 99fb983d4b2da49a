"""Which trajectories have chains of thought to compress, and the thoughts of their turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from alar import protocol
from alar.methods.tokenskip.words import Thought
from alar.records import Trajectory
from alar.rollout.codec import Codec


def compressible(
    trajectories: Sequence[Trajectory], codec: Codec, max_cot_tokens: int
) -> tuple[list[Trajectory], Counter]:
    """(those to compress, how many were left out and why).

    Those to compress are correct, well formed, reason in text in every turn, and have at most
    `max_cot_tokens` tokens of thought. Raises ValueError if nothing is left.
    """
    kept, why = [], Counter()  # why: reason → trajectories left out
    for trajectory in trajectories:
        if not trajectory.correct:
            why["wrong"] += 1
        elif not trajectory.well_formed or any(turn.mode != "think" for turn in trajectory.turns):
            why["malformed"] += 1
        elif cot_tokens(trajectory, codec) > max_cot_tokens:
            why["too long"] += 1
        else:
            kept.append(trajectory)
    if not kept:
        raise ValueError(
            f"none of the {len(trajectories)} trajectories can be compressed ({dict(why)}): ask"
            " more questions, take a better base, or raise tokenskip.max_cot_tokens"
        )
    return kept, why


def cot_tokens(trajectory: Trajectory, codec: Codec) -> int:
    """Tokens of the chains of thought of all turns, without their tags.

    A token that holds a part of a tag and a part of a thought counts.
    """
    reasoned = [turn for turn in trajectory.turns if turn.mode == "think"]
    return sum(_inside(trajectory.ids[turn.start : turn.end], codec) for turn in reasoned)


def _inside(ids: Sequence[int], codec: Codec) -> int:
    # Token by token: a character that several tokens share comes out wrong, but the tags do not.
    pieces = [codec.text([token]) for token in ids]
    ends = list(accumulate(map(len, pieces)))  # character at which each token ends
    text = "".join(pieces)
    first = text.find(protocol.THINK_OPEN) + len(protocol.THINK_OPEN)
    last = text.find(protocol.THINK_CLOSE, first)
    # A token counts if any of its characters lies between the tags.
    return sum(first < end and start < last for start, end in zip([0, *ends], ends))


def thoughts_of(trajectory: Trajectory, codec: Codec) -> list[Thought]:
    """The chain of thought of every turn, with the ids before it and the action after it.

    Raises ValueError for a turn that did not reason in text.
    """
    thoughts = []
    for number, turn in enumerate(trajectory.turns):
        if turn.mode != "think":
            raise ValueError(
                f"{trajectory.question.id}, turn {number + 1} has no chain of thought (its mode is"
                f" {turn.mode!r})"
            )
        parsed = codec.form.parse(codec.text(trajectory.ids[turn.start : turn.end]))
        # What the loop writes before the first block.
        opening = codec.trusted(codec.form.opening) if number == 0 else []
        action = codec.form.action(turn.action, turn.argument) if turn.action else ""
        thoughts.append(
            Thought(parsed.reasoning, (*trajectory.ids[: turn.start], *opening), action)
        )
    return thoughts

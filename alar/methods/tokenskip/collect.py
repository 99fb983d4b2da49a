"""Correct chains of thought: sampled from the base, or taken from the run's teacher traces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate

from alar import protocol
from alar.records import Environment, Question, Trajectory
from alar.rollout.codec import Codec
from alar.rollout.engine import Engine, Sampling
from alar.rollout.loop import run


def sampled(
    questions: Sequence[Question],
    engine: Engine,
    environment: Environment,
    *,
    samples: int,
    temperature: float,
    max_new_tokens: int,
    max_turns: int,
    batch_size: int,
    seed: int = 0,
    progress: Callable[[Iterable], Iterable] = iter,
) -> list[Trajectory]:
    """`samples` trajectories per question, each under an id of its own: `q_s0`, `q_s1`, … One at
    temperature 0 is the paper's."""
    if samples > 1 and temperature == 0:
        raise ValueError(
            f"tokenskip.samples is {samples} at temperature 0: greedy samples are all the same;"
            " use 1"
        )
    asked = [
        replace(question, id=f"{question.id}_s{i}")
        for question in questions
        for i in range(samples)
    ]
    sampling = Sampling(max_new_tokens, temperature, stop=environment.stop)
    return run(
        asked, engine, environment, sampling, modes="off", max_turns=max_turns, batch_size=batch_size, seed=seed,
        progress=progress,
    )  # fmt: skip


def usable(
    trajectories: Sequence[Trajectory], codec: Codec, max_cot_tokens: int
) -> tuple[list[Trajectory], Counter]:
    """(those to compress, how many were left out and why): correct, well formed, all turns in text,
    thoughts not too long.

    Raises ValueError if nothing is left.
    """
    kept, why = [], Counter()
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
    """Tokens of the chains of thought of all turns, tags left out; a token that a tag shares with a
    thought counts."""
    return sum(
        _inside(trajectory.ids[turn.start : turn.end], codec)
        for turn in trajectory.turns
        if turn.mode == "think"
    )


def _inside(ids: Sequence[int], codec: Codec) -> int:
    pieces = [
        codec.text([token]) for token in ids
    ]  # a character in several pieces gets wrong signs, but not the tags
    ends = list(accumulate(map(len, pieces)))
    text = "".join(pieces)
    first = text.find(protocol.THINK_OPEN) + len(protocol.THINK_OPEN)
    last = text.find(protocol.THINK_CLOSE, first)
    return sum(first < end and start < last for start, end in zip([0, *ends], ends))

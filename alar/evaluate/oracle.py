"""The oracle router: it tries all choices of modes for each question and keeps the best."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from alar.records import Environment, Question, Trajectory
from alar.rollout.engine import Engine, Sampling
from alar.rollout.loop import run


def oracle_router(
    engine: Engine,
    environment: Environment,
    questions: Sequence[Question],
    *,
    max_new_tokens: int,
    max_turns: int,
    batch_size: int,
    max_routed_turns: int = 3,
) -> list[Trajectory]:
    """For every question the cheapest correct trajectory, over all choices of modes.

    It tries all 2^T assignments of modes to the first T = `max_routed_turns` turns; later turns
    think. If none is correct, the always-think trajectory counts.
    """
    best: dict[str, Trajectory] = {}  # question id → cheapest correct trajectory
    fallback: dict[str, Trajectory] = {}  # question id → always-think trajectory
    for assignment in itertools.product(("think", "latent"), repeat=max_routed_turns):
        trajectories = run(
            questions,
            engine,
            environment,
            Sampling(max_new_tokens, 0.0, stop=environment.stop),  # temperature 0: greedy
            # `turn` counts from 0. The default binds this assignment, not the loop's last one.
            modes=lambda row, turn, a=assignment: a[turn] if turn < len(a) else "think",
            max_turns=max_turns,
            batch_size=batch_size,
        )
        for found in trajectories:
            name = found.question.id
            if all(mode == "think" for mode in assignment):
                fallback[name] = found
            cheaper = name not in best or found.generated_tokens < best[name].generated_tokens
            if found.correct and cheaper:
                best[name] = found
    return [best.get(question.id, fallback[question.id]) for question in questions]

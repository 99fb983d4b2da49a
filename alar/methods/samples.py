"""Several explicit answers to each question, to select from or to compress."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from alar.records import Environment, Question, Trajectory
from alar.rollout.engine import Engine, Sampling
from alar.rollout.loop import run


def draw_samples(
    questions: Sequence[Question],
    engine: Engine,
    environment: Environment,
    sampling: Sampling,
    *,
    samples: int,
    max_turns: int,
    batch_size: int,
    seed: int = 0,
    progress: Callable[[Iterable], Iterable] = iter,
) -> list[list[Trajectory]]:
    """For each question `samples` rollouts in text, under ids of their own: `q_s0`, `q_s1`, …

    Raises ValueError for several samples at temperature 0, which would all be the same.
    """
    if samples > 1 and sampling.temperature == 0:
        raise ValueError(
            f"{samples} samples at temperature 0: greedy samples are all the same; use 1"
        )
    asked = []  # each question `samples` times, adjacent
    for question in questions:
        asked += [replace(question, id=f"{question.id}_s{i}") for i in range(samples)]
    found = run(
        asked,
        engine,
        environment,
        sampling,
        modes="off",  # explicit reasoning only
        max_turns=max_turns,
        batch_size=batch_size,
        seed=seed,
        progress=progress,
    )
    # Cut into one list per question.
    return [found[start : start + samples] for start in range(0, len(found), samples)]

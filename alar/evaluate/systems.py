"""A system answers questions, and what it did becomes tables.

A *system* is a model with a choice of modes ("base" explicit, "alar" free, "alar-think" forced …).
Tables have one row per question or per turn. `alar.evaluate.statistics` computes means and
intervals from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pandas as pd

from alar.records import Environment, Question, Trajectory
from alar.rollout.codec import Codec
from alar.rollout.engine import Engine, Sampling
from alar.rollout.hf import HFEngine
from alar.rollout.loop import run
from alar.rollout.modes import latent_probabilities


def think_tokens(trajectory: Trajectory) -> int:
    """Generated tokens of the turns that reasoned in text, with tags and actions."""
    return sum(turn.end - turn.start for turn in trajectory.turns if turn.mode == "think")


def question_table(trajectories: Sequence[Trajectory], system: str) -> pd.DataFrame:
    """`tables.QUESTIONS`: one row per question. `think_length` is in characters."""
    return pd.DataFrame(
        {
            "system": system,
            "question_id": [t.question.id for t in trajectories],
            "question_type": [t.question.type for t in trajectories],
            "correct": [t.correct for t in trajectories],
            # All that the policy emitted: tags, latent positions and forced pieces count too.
            "generated_tokens": [t.generated_tokens for t in trajectories],
            "think_tokens": [think_tokens(t) for t in trajectories],
            "think_length": [t.think_length for t in trajectories],
            "turns": [len(t.turns) for t in trajectories],
            "latent_turns": [t.num_latent_turns for t in trajectories],
            "think_turns": [t.num_think_turns for t in trajectories],
            "well_formed": [t.well_formed for t in trajectories],
            "prediction": [t.prediction for t in trajectories],  # None without an answer
        }
    )


def turn_table(
    trajectories: Sequence[Trajectory],
    system: str,
    p_latent: Sequence[Sequence[float]] | None = None,
) -> pd.DataFrame:
    """`tables.TURNS`: one row per turn.

    `p_latent` comes from `mode_scores`, one list per trajectory; without it the column is NaN.
    """
    rows = []
    for number, trajectory in enumerate(trajectories):
        for index, turn in enumerate(trajectory.turns):
            scored = float("nan") if p_latent is None else p_latent[number][index]
            rows.append(
                {
                    "system": system,
                    "question_id": trajectory.question.id,
                    "question_type": trajectory.question.type,
                    "turn": index + 1,  # people count turns from 1
                    "hard": index in trajectory.question.hard_turns,  # counted from 0
                    "mode": turn.mode,
                    "tokens": turn.end - turn.start,  # generated ones, without the observation
                    "p_latent": scored,
                }
            )
    return pd.DataFrame(rows)


def evaluate(
    engine: Engine,
    environment: Environment,
    questions: Sequence[Question],
    *,
    mode: str,
    max_new_tokens: int,
    max_turns: int,
    batch_size: int,
    progress: Callable[[Iterable], Iterable] = iter,
) -> list[Trajectory]:
    """Answers of one system by greedy decoding: one trajectory per question, in their order.

    `mode` is one of `alar.rollout.loop.MODES`; a base has no latent block and takes "off".
    `max_new_tokens` is per turn. `batch_size` questions are worked on at once.
    """
    return run(
        questions,
        engine,
        environment,
        Sampling(max_new_tokens, 0.0, stop=environment.stop),  # temperature 0: greedy
        modes=mode,
        max_turns=max_turns,
        batch_size=batch_size,
        progress=progress,
    )


def mode_scores(engine: HFEngine, trajectories: Sequence[Trajectory]) -> list[list[float]]:
    """Exact p(latent | state) at every turn, as one list per trajectory."""
    return latent_probabilities(engine.model, engine.codec, trajectories)


def example_turns(codec: Codec, trajectories: dict[str, Trajectory]) -> pd.DataFrame:
    """`tables.EXAMPLE_TURNS`: one question as several systems answered it, one row per turn.

    `trajectories` maps a system to its trajectory of that question.
    """
    rows = []
    for system, trajectory in trajectories.items():
        for index, turn in enumerate(trajectory.turns):
            rows.append(
                {
                    "system": system,
                    "question": trajectory.question.text,
                    "turn": index + 1,
                    "mode": turn.mode,
                    "tokens": turn.end - turn.start,
                    "hard": index in trajectory.question.hard_turns,
                    # What the policy wrote, without what the environment answered.
                    "text": codec.text(trajectory.ids[turn.start : turn.end]).strip(),
                }
            )
    return pd.DataFrame(rows)

"""The log-prob reward to look at: a table of scored rollouts, how well it orders them, a figure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from alar.figures.style import BLUE, COLUMN, MEASURED, VERMILLION, footnote, new_figure, styled
from alar.methods.logprob.scoring import Score
from alar.records import Trajectory

_LAST = {"think": "text", "latent": "latent block"}  # what the last turn reasons in


def score_table(trajectories: Sequence[Trajectory], scores: Sequence[Score]) -> pd.DataFrame:
    """One row per rollout: question, mode of each turn, answer, gold, correctness, score."""
    return pd.DataFrame(
        {
            "question_id": [t.question.id for t in trajectories],
            "modes": [" ".join(turn.mode for turn in t.turns) for t in trajectories],
            "last": [
                _LAST.get(t.turns[-1].mode, "no block") if t.turns else "no block"
                for t in trajectories
            ],
            "prediction": [t.prediction or "" for t in trajectories],
            "gold": [score.gold for score in scores],
            "correct": [t.correct for t in trajectories],
            "score": [score.value for score in scores],
            "problem": [score.problem for score in scores],
        }
    )


def ordered_share(table: pd.DataFrame) -> tuple[float, int]:
    """(share of pairs in which the right rollout scores higher, number of pairs).

    A pair is a right and a wrong rollout of one question. Ties count half. (NaN, 0) where no
    question has both.
    """
    won, pairs = 0.0, 0
    for _, rollouts in table.groupby("question_id"):
        right = rollouts.loc[rollouts["correct"], "score"].to_numpy()[:, None]  # (right, 1)
        wrong = rollouts.loc[~rollouts["correct"], "score"].to_numpy()[None]  # (1, wrong)
        # (right, wrong): all pairs at once.
        won += float((right > wrong).sum() + 0.5 * (right == wrong).sum())
        pairs += right.size * wrong.size
    return (won / pairs if pairs else float("nan")), pairs


@styled
def figure(table: pd.DataFrame, *, scale: str = MEASURED) -> tuple[Figure, pd.DataFrame]:
    """Scores of right and wrong rollouts, separated by what their last turn reasoned in.

    Bars are medians.
    """
    canvas = new_figure(COLUMN, 2.4)
    axes = canvas.subplots()
    kinds = [kind for kind in ("text", "latent block", "no block") if (table["last"] == kind).any()]
    jitter = np.random.default_rng(0)  # sideways, so that equal scores stay visible
    for place, kind in enumerate(kinds):
        for shift, correct, colour in ((-0.2, True, BLUE), (0.2, False, VERMILLION)):
            values = table.loc[
                (table["last"] == kind) & (table["correct"] == correct), "score"
            ].to_numpy()
            if len(values):
                x = place + shift + jitter.uniform(-0.12, 0.12, len(values))
                axes.plot(
                    x, values, "o", markersize=1.8, alpha=0.5, color=colour, markeredgewidth=0
                )
                axes.plot(
                    [place + shift - 0.16, place + shift + 0.16],
                    [np.median(values)] * 2,
                    color=colour,
                    linewidth=1.4,
                )
    axes.set_yscale("symlog", linthresh=0.1)  # scores reach from near 0 to −100
    axes.set_xticks(range(len(kinds)), [f"last turn: {kind}" for kind in kinds])
    axes.set_ylabel("mean log P of the best gold (nats)")
    axes.plot([], [], "o", color=BLUE, markersize=3, label="right")
    axes.plot([], [], "o", color=VERMILLION, markersize=3, label="wrong")
    axes.legend(loc="lower left", ncols=2)
    footnote(canvas, scale, f"n = {len(table)} rollouts")
    return canvas, table

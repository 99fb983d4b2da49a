"""The trained model at every ratio: rows of the common comparison, and TokenSkip's own table.

Its columns are those of LatentReasoning's report: accuracy, mean think tokens (inside the blocks,
tags left out), and the mean of all generated tokens over the questions answered correctly. Every
row names the scorer and the kind of model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pandas as pd

from alar.engines.choice import opened_engine
from alar.evaluate import published, statistics, tables
from alar.methods.comparison import Method, MethodComparison
from alar.methods.tokenskip.collect import cot_tokens
from alar.methods.tokenskip.examples import conditioned
from alar.rollout.engine import Engine

# Kind of model → method name in the tables.
NAMES = {"standard": "TokenSkip", "dual": "TokenSkip, dual vocabulary"}


def method_at(ratio: float, checkpoint, scorer: str, kind: str = "standard", **costs) -> Method:
    """The row of one ratio.

    `costs` are training_seconds and training_tokens, the same for all ratios of one training.
    """
    return Method(NAMES[kind], checkpoint, settings={"ratio": ratio, "scorer": scorer}, **costs)


def measure_ratios(
    comparison: MethodComparison,
    ratios: Sequence[float],
    checkpoint,
    scorer: str,
    *,
    kind: str = "standard",
    progress: Callable[[float], Callable[[Iterable], Iterable]] = lambda ratio: iter,
    **costs,
) -> None:
    """Measure `checkpoint` under the condition of every ratio.

    `progress(ratio)` wraps the questions of one ratio.
    """

    def columns(trajectories, engine: Engine) -> dict[str, list]:
        return {"cot_tokens": [cot_tokens(trajectory, engine.codec) for trajectory in trajectories]}

    # One model for all ratios: the condition is in the prompt.
    with opened_engine(checkpoint, comparison.engine) as engine:
        for ratio in ratios:
            comparison.measure(
                method_at(ratio, checkpoint, scorer, kind, **costs),
                engine=engine,
                environment=conditioned(
                    comparison.environment, ratio, engine.codec.tokenizer.eos_token
                ),
                columns=columns,
                progress=progress(ratio),
            )


def ratio_table(
    comparison: MethodComparison, *, resamples: int = 10_000, seed: int = 0
) -> pd.DataFrame:
    """`tables.RATIOS`: every ratio measured in this run, for both kinds of model.

    Intervals are bootstrapped over the questions.
    """
    answers, rows = comparison.answers(), []
    options = {"resamples": resamples, "seed": seed}
    for kind, name in NAMES.items():
        for note in comparison.measured():
            if note["name"] != name:  # another method of the same run
                continue
            # In the order of the ids, so that a seed resamples the same questions in every row.
            found = answers[answers["system"] == note["label"]].sort_values("question_id")
            right = found.loc[found["correct"], "generated_tokens"]  # tokens of the correct answers
            means = {
                "accuracy": statistics.bootstrap_mean(found["correct"].astype(float), **options),
                "think_tokens": statistics.bootstrap_mean(found["cot_tokens"], **options),
                "correct_tokens": statistics.Estimate(
                    *[float("nan")] * 3
                ),  # where no answer is correct
            }
            if len(right):
                means["correct_tokens"] = statistics.bootstrap_mean(right, **options)
            row = {
                "model": kind,
                "scorer": note["settings"]["scorer"],
                "ratio": note["settings"]["ratio"],
                "n": len(found),
            }
            for column, mean in means.items():
                row |= mean.columns(column)
            rows.append(row | {"generated_tokens": found["generated_tokens"].mean()})
    table = pd.DataFrame(rows, columns=list(tables.RATIOS.columns))
    table = table.sort_values(["model", "scorer", "ratio"], ascending=[False, True, False])
    return tables.read(table, tables.RATIOS)


def readable_ratios(table: pd.DataFrame) -> pd.DataFrame:
    """`tables.RATIOS` with the report's column names, each value followed by its interval.

    Beside them stand the report's own numbers, of Qwen3-4B on MATH with LLMLingua-2's scores. Where
    only these are known, the measured columns have "–".
    """
    theirs = published.tokenskip_ratios()
    shown = pd.DataFrame(
        {
            "model": table["model"],
            "scorer": table["scorer"],
            "ratio": table["ratio"],
            "n": table["n"].astype(str),
            "accuracy %": tables.with_intervals(table, "accuracy", 100),
            "think tokens": tables.with_intervals(table, "think_tokens", 1),
            "tokens (correct)": tables.with_intervals(table, "correct_tokens", 1),
        }
    )
    report = pd.DataFrame(
        {
            "model": theirs["model"],
            "ratio": theirs["ratio"],
            "accuracy %, published": theirs["accuracy"].map("{:.1f}".format),
            "think tokens, published": theirs["think_tokens"].map("{:.0f}".format),
            "tokens (correct), published": theirs["correct_tokens"].map("{:.0f}".format),
        }
    )
    together = shown.merge(report, on=["model", "ratio"], how="outer", sort=False)
    # Rows that only the report has are of its scorer.
    together["scorer"] = together["scorer"].fillna("llmlingua2")
    together = together.fillna(published.ABSENT)
    together = together.sort_values(["model", "scorer", "ratio"], ascending=[False, True, False])
    return together.set_index(["model", "scorer", "ratio"])

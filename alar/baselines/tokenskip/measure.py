"""The trained model at every ratio: rows of the common comparison, and TokenSkip's own table and figure.

Its columns are those of LatentReasoning's report: accuracy, mean think tokens (inside the blocks, tags left out), and the
mean of all generated tokens over the questions answered correctly; with the scorer and the kind of model in every row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pandas as pd
from matplotlib.figure import Figure

from alar import statistics, tables
from alar.baselines.comparison import Comparison, Method
from alar.baselines.tokenskip.collect import cot_tokens
from alar.baselines.tokenskip.examples import conditioned
from alar.figures.style import (
    BLACK, BLUE, GREEN, GREY, PAGE, PURPLE, VERMILLION, footnote, interval_bars, new_figure, panel_letter, percent_axis, styled,
)  # fmt: skip
from alar.rollout.engine import Engine
from alar.rollout.engines import opened_engine

NAMES = {"standard": "TokenSkip", "dual": "TokenSkip, dual vocabulary"}
RATIOS = tables.Table(
    "ratios",
    "ratios.csv",
    "12_tokenskip",
    {
        **dict.fromkeys(("model", "scorer"), "text"),
        **dict.fromkeys(("ratio", "n"), "number"),
        **{f"{name}{end}": "number" for name in ("accuracy", "think_tokens", "correct_tokens") for end in ("", "_low", "_high")},
        "generated_tokens": "number",
    },
)


def method_at(ratio: float, checkpoint, scorer: str, kind: str = "standard", **costs) -> Method:
    """The row of one ratio; `costs` are training_seconds and training_tokens, the same for all ratios of one training."""
    return Method(NAMES[kind], checkpoint, settings={"ratio": ratio, "scorer": scorer}, **costs)


def measure(
    comparison: Comparison,
    ratios: Sequence[float],
    checkpoint,
    scorer: str,
    *,
    kind: str = "standard",
    progress: Callable[[float], Callable[[Iterable], Iterable]] = lambda ratio: iter,
    **costs,
) -> None:
    """Measure `checkpoint` under the condition of every ratio. `progress(ratio)` wraps the questions of one."""

    def columns(trajectories, engine: Engine) -> dict[str, list]:
        return {"cot_tokens": [cot_tokens(trajectory, engine.codec) for trajectory in trajectories]}

    with opened_engine(checkpoint, comparison.engine) as engine:
        for ratio in ratios:
            comparison.measure(
                method_at(ratio, checkpoint, scorer, kind, **costs),
                engine=engine,
                environment=conditioned(comparison.environment, ratio, engine.codec.tokenizer.eos_token),
                columns=columns,
                progress=progress(ratio),
            )


def ratio_table(comparison: Comparison, *, resamples: int = 10_000, seed: int = 0) -> pd.DataFrame:
    """`RATIOS`: every ratio measured in this run, of both kinds of model. Intervals are bootstrapped over the questions."""
    answers, rows = comparison.answers(), []
    options = {"resamples": resamples, "seed": seed}
    for kind, name in NAMES.items():
        for record in (record for record in comparison.records() if record["name"] == name):
            found = answers[answers["system"] == record["label"]].sort_values("question_id")
            right = found.loc[found["correct"], "generated_tokens"]
            means = {
                "accuracy": statistics.bootstrap_mean(found["correct"].astype(float), **options),
                "think_tokens": statistics.bootstrap_mean(found["cot_tokens"], **options),
                "correct_tokens": statistics.bootstrap_mean(right, **options) if len(right) else [float("nan")] * 3,
            }
            intervals = {f"{key}{end}": x for key, mean in means.items() for end, x in zip(("", "_low", "_high"), mean)}
            about = {"model": kind, "scorer": record["settings"]["scorer"], "ratio": record["settings"]["ratio"], "n": len(found)}
            rows.append(about | intervals | {"generated_tokens": found["generated_tokens"].mean()})
    table = pd.DataFrame(rows, columns=list(RATIOS.columns))
    return tables.read(table.sort_values(["model", "scorer", "ratio"], ascending=[False, True, False]), RATIOS)


def readable(table: pd.DataFrame) -> pd.DataFrame:
    """`RATIOS` with the report's column names, each value followed by its interval."""

    def cell(name: str, scale: float) -> list[str]:
        values = table[[name, f"{name}_low", f"{name}_high"]] * scale
        return [f"{mean:.1f} [{low:.1f}, {high:.1f}]" for mean, low, high in values.itertuples(index=False)]

    return pd.DataFrame(
        {
            "model": table["model"],
            "scorer": table["scorer"],
            "ratio": table["ratio"],
            "n": table["n"],
            "accuracy %": cell("accuracy", 100),
            "think tokens": cell("think_tokens", 1),
            "tokens (correct)": cell("correct_tokens", 1),
        }
    ).set_index(["model", "scorer", "ratio"])


@styled
def ratios(table: pd.DataFrame, achieved: pd.DataFrame | None = None, *, scale: str = "measured") -> tuple[Figure, pd.DataFrame]:
    """Accuracy and think tokens against the ratio in the prompt; `achieved` adds what the training data hold at each ratio."""
    table = tables.read(table, RATIOS)
    figure = new_figure(PAGE, 2.4)
    left, right = figure.subplots(1, 2)
    looks = zip(table.groupby(["model", "scorer"], sort=False), (BLUE, VERMILLION, GREEN, PURPLE, BLACK) * 2, "osD^v" * 2)
    for ((model, scorer), rows), colour, marker in looks:
        rows = rows.sort_values("ratio")
        label = f"{model}, {scorer}"
        for axes, name in ((left, "accuracy"), (right, "think_tokens")):
            axes.plot(rows["ratio"], rows[name], color=colour, linewidth=0.8)
            interval_bars(axes, rows["ratio"], rows[name], rows[f"{name}_low"], rows[f"{name}_high"], color=colour, marker=marker,
                          label=label)  # fmt: skip
    whole = table.loc[table["ratio"] == table["ratio"].max(), "think_tokens"].mean() / table["ratio"].max()
    right.plot([0, 1], [0, whole], color=GREY, linewidth=0.8, linestyle=(0, (4, 2)), label="in proportion to the ratio")
    if achieved is not None:
        right.plot(achieved["requested"], achieved["tokens_per_sample"], "x", color=GREY, label="training data")
    percent_axis(left.yaxis)
    left.set_ylabel("Accuracy (%)")
    right.set_ylabel("Think tokens per question")
    for index, axes in enumerate((left, right)):
        axes.set_title(f"{panel_letter(index)}")
        axes.set_xlim(0, 1.05)
        axes.set_xlabel("Ratio in the prompt")
    right.set_ylim(bottom=0)
    right.legend(loc="upper left")
    footnote(figure, scale, f"n = {int(table['n'].max())} questions", "bars: 95 % intervals, bootstrap")
    return figure, table

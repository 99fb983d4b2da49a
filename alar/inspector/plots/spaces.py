"""Where latent thoughts lie and what can be read from them: probes, principal components, step
sizes, modes."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from alar.figures.style import (
    BLUE,
    GREEN,
    GREY,
    MEASURED,
    MODE_COLOURS,
    ORANGE,
    PAGE,
    PURPLE,
    SKY,
    VERMILLION,
    footnote,
    interval_bars,
    new_figure,
    panel_letter,
    percent_axis,
    styled,
    type_name,
)

TARGET_NAMES = {
    "type": "Question type",
    "hard": "Hard or easy turn",
    "query_entity": "Next query's entity",
    "function": "Next function",
    "provider": "Next function's provider",
    "bridge_entity": "Bridge entity",
    "number": "Size of the answer",
}
COLOURS = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY, GREY)


@styled
def probes(table: pd.DataFrame, *, scale: str = MEASURED) -> tuple[Figure, pd.DataFrame]:
    """What linear probes read in z_k, per target, turn and step, beside both controls.

    `table` comes from `alar.inspector.probes.probe_table`.
    """
    targets = [name for name in TARGET_NAMES if name in set(table["target"])]
    columns = min(3, len(targets))
    lines = -(-len(targets) // columns)
    figure = new_figure(PAGE, 0.5 + 1.75 * lines)
    panels = figure.subplots(lines, columns, sharey=True, squeeze=False).ravel()
    grid, spare = panels[: len(targets)], panels[len(targets) :]
    series = (
        ("accuracy", "z", BLUE, "o", BLUE, 0.0),
        ("embedding", "words of the question", ORANGE, "s", "white", -0.22),
        ("shuffled", "z, shuffled labels", GREY, "D", "white", 0.22),
    )
    for index, (axes, target) in enumerate(zip(grid, targets, strict=True)):
        rows = table[table["target"] == target].sort_values(["turn", "k"])
        gap = 0.8 * (rows["turn"].rank(method="dense") - 1)
        places = np.arange(len(rows)) + gap.to_numpy()
        for column, name, colour, marker, face, shift in series:
            interval_bars(
                axes,
                places + shift,
                rows[column],
                rows[f"{column}_low"],
                rows[f"{column}_high"],
                marker=marker,
                color=colour,
                markerfacecolor=face,
                markersize=3,
                label=name,
            )
        axes.hlines(
            rows["common"],
            places - 0.4,
            places + 0.4,
            color=VERMILLION,
            linewidth=0.8,
            label="most frequent label",
        )
        axes.set_xticks(places, rows["k"])
        first = rows["k"] == rows["k"].min()
        for place, turn, count in zip(places[first], rows["turn"][first], rows["turns"][first]):
            axes.text(place - 0.4, 1.03, f"turn {turn}, n = {count}", fontsize=5, color=GREY)
        axes.set(
            title=f"{panel_letter(index)}   {TARGET_NAMES[target]}",
            xlabel="Latent step k",
            ylim=(-0.04, 1.1),
        )
        percent_axis(axes.yaxis)
    for axes in panels[::columns]:
        axes.set_ylabel("Accuracy (%)")
    for axes in spare:
        axes.axis("off")
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside upper right", ncols=4)
    footnote(
        figure,
        scale,
        "linear probes, 5 folds by question",
        "bars: 95 % intervals, bootstrap over questions",
    )
    return figure, table


@styled
def components(
    table: pd.DataFrame, explained: np.ndarray, *, scale: str = MEASURED
) -> tuple[Figure, pd.DataFrame]:
    """The first two principal components of z, coloured by mode, step, question type and
    correctness.

    `table` and `explained` come from `alar.inspector.geometry.principal_components`.
    """
    figure = new_figure(PAGE, 2.35)
    grid = figure.subplots(1, 4, sharex=True, sharey=True)
    for index, (axes, column, title) in enumerate(
        zip(
            grid,
            ("mode", "step", "type", "correct"),
            ("Mode of its choice", "Step k", "Question type", "Answer"),
            strict=True,
        )
    ):
        names = {
            "mode": str,
            "step": str,
            "type": type_name,
            "correct": lambda right: "correct" if right else "wrong",
        }[column]
        for number, (value, rows) in enumerate(table.groupby(column)):
            colour = MODE_COLOURS.get(value, COLOURS[number % len(COLOURS)])
            axes.scatter(
                rows["pc1"],
                rows["pc2"],
                s=4,
                alpha=0.6,
                linewidths=0,
                color=colour,
                label=names(value),
            )
        axes.set_title(f"{panel_letter(index)}   {title}")
        axes.set_xlabel(f"PC 1 ({explained[0]:.0%})")
        axes.legend(
            loc="upper center",
            bbox_to_anchor=(0.5, -0.2),
            ncols=2,
            handletextpad=0.1,
            columnspacing=0.6,
        )
    grid[0].set_ylabel(f"PC 2 ({explained[1]:.0%})" if len(explained) > 1 else "PC 2")
    footnote(
        figure,
        scale,
        f"{len(table)} latent steps of {table['question_id'].nunique()} questions, centred",
    )
    return figure, table


@styled
def recurrence(
    steps: pd.DataFrame, modes: pd.DataFrame, *, scale: str = MEASURED
) -> tuple[Figure, pd.DataFrame]:
    """How far each step of the recurrence moves, and p(latent | state) along the turns.

    `steps` comes from `geometry.step_sizes`, `modes` from `geometry.mode_path`. Dots are turns,
    lines their mean.
    """
    figure = new_figure(PAGE, 2.2)
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.5])
    places = sorted(set(steps["step"]))
    groups = [steps.loc[steps["step"] == k, "relative_size"] for k in places]
    left.boxplot(
        groups, positions=places, widths=0.5, showfliers=False, medianprops={"color": BLUE}
    )
    left.set_xticks(places, [f"{k} → {k + 1}" for k in places])
    left.set(title="a   Step sizes", xlabel="Latent step", ylabel="‖z′ − z‖ / ‖z‖", ylim=(0, None))
    jitter = np.random.default_rng(0).uniform(-0.15, 0.15, len(modes))
    for hard, colour, name in ((False, BLUE, "easy turn"), (True, VERMILLION, "hard turn")):
        chosen = (modes["hard"] == hard).to_numpy()
        if chosen.any():
            shown = modes[chosen]
            right.scatter(
                shown["turn"] + jitter[chosen],
                shown["p_latent"],
                s=5,
                alpha=0.5,
                linewidths=0,
                color=colour,
            )
            mean = shown.groupby("turn")["p_latent"].mean()
            right.plot(mean.index, mean.to_numpy(), marker="o", color=colour, label=f"{name}, mean")
    right.set(
        title="b   p(latent | state)", xlabel="Turn", ylabel="Probability (%)", ylim=(-0.03, 1.03)
    )
    percent_axis(right.yaxis)
    right.set_xticks(sorted(set(modes["turn"])))
    right.legend(loc="best")
    footnote(
        figure,
        scale,
        f"{steps['question_id'].nunique()} questions with latent turns · boxes: quartiles,"
        " whiskers: 1.5 IQR",
    )
    moved = steps.groupby("step")[["relative_size", "cosine"]].median()
    chance = modes.groupby(["turn", "hard"])["p_latent"].mean()
    rows = [
        ("relative step size, median", f"{k} → {k + 1}", size)
        for k, size in moved["relative_size"].items()
    ]
    rows += [
        ("cosine of neighbours, median", f"{k} → {k + 1}", cosine)
        for k, cosine in moved["cosine"].items()
    ]
    rows += [
        ("p(latent), mean", f"turn {turn}, {'hard' if hard else 'easy'}", p)
        for (turn, hard), p in chance.items()
    ]
    return figure, pd.DataFrame(rows, columns=["measure", "where", "value"])

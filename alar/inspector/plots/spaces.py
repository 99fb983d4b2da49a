"""Where latent thoughts lie, and what can be read from them: probes, principal components, step
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
from alar.inspector.plots.shared import boxes

TARGET_NAMES = {
    "type": "Question type",
    "hard": "Hard or easy turn",
    "query_entity": "Next query's entity",
    "function": "Next function",
    "provider": "Next function's provider",
    "bridge_entity": "Bridge entity",
    "number": "Size of the answer",
}
_SCORES = (  # column of the probe table, shift from the middle of the step, style
    ("accuracy", 0.0, {"label": "z", "color": BLUE, "marker": "o"}),
    ("embedding", -0.22, {"label": "words of the question", "color": ORANGE, "marker": "s"}),
    ("shuffled", 0.22, {"label": "z, shuffled labels", "color": GREY, "marker": "D"}),
)
# For values that have no colour of their own, such as steps and question types.
_COLOURS = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY, GREY)


@styled
def draw_probes(table: pd.DataFrame, *, scale: str = MEASURED) -> tuple[Figure, pd.DataFrame]:
    """What linear probes read in z_k, per target, turn and step, beside both controls.

    There is one panel per target; the steps of a turn stand side by side. `table` comes from
    `alar.inspector.probes.probe_table`.
    """
    targets = [name for name in TARGET_NAMES if name in set(table["target"])]
    columns = min(3, len(targets))
    lines = -(-len(targets) // columns)  # of panels, rounded up
    figure = new_figure(PAGE, 0.5 + 1.75 * lines)  # inches
    panels = figure.subplots(lines, columns, sharey=True, squeeze=False).ravel()
    for index, (axes, target) in enumerate(zip(panels, targets)):
        rows = table[table["target"] == target].sort_values(["turn", "k"])
        # x of each row: 1 from step to step, and 0.8 more from turn to turn.
        gap = 0.8 * (rows["turn"].rank(method="dense") - 1)
        places = np.arange(len(rows)) + gap.to_numpy()  # (rows,)
        for column, shift, style in _SCORES:
            low, high = rows[f"{column}_low"], rows[f"{column}_high"]
            face = BLUE if column == "accuracy" else "white"  # controls are hollow
            style = style | {"markersize": 3, "markerfacecolor": face}
            interval_bars(axes, places + shift, rows[column], low, high, **style)
        line = {"color": VERMILLION, "linewidth": 0.8, "label": "most frequent label"}
        axes.hlines(rows["common"], places - 0.4, places + 0.4, **line)
        axes.set_xticks(places, rows["k"])
        first = rows["k"] == rows["k"].min()  # one note per turn, above its first step
        for place, turn, count in zip(places[first], rows["turn"][first], rows["turns"][first]):
            axes.text(place - 0.4, 1.03, f"turn {turn}, n = {count}", fontsize=5, color=GREY)
        title = f"{panel_letter(index)}   {TARGET_NAMES[target]}"
        axes.set(title=title, xlabel="Latent step k", ylim=(-0.04, 1.1))
        percent_axis(axes.yaxis)
    for axes in panels[::columns]:
        axes.set_ylabel("Accuracy (%)")
    for axes in panels[len(targets) :]:  # the last line may have panels to spare
        axes.axis("off")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper right", ncols=4)
    footnote(
        figure,
        scale,
        "linear probes, 5 folds by question",
        "bars: 95 % intervals, bootstrap over questions",
    )
    return figure, table


@styled
def draw_components(
    table: pd.DataFrame, explained: np.ndarray, *, scale: str = MEASURED
) -> tuple[Figure, pd.DataFrame]:
    """The first two principal components of z, coloured by mode, step, question type and
    correctness.

    `table` and `explained` come from `alar.inspector.geometry.principal_components`.
    """
    views = (  # column of `table`, title, value → name in the legend
        ("mode", "Mode of its choice", str),
        ("step", "Step k", str),
        ("type", "Question type", type_name),
        ("correct", "Answer", {True: "correct", False: "wrong"}.get),
    )
    figure = new_figure(PAGE, 2.35)
    grid = figure.subplots(1, 4, sharex=True, sharey=True)
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2)}
    dots = {"s": 4, "alpha": 0.6, "linewidths": 0}
    for index, (axes, (column, title, name_of)) in enumerate(zip(grid, views, strict=True)):
        for number, (value, rows) in enumerate(table.groupby(column)):
            # A mode has the same colour in every figure.
            colour = MODE_COLOURS.get(value, _COLOURS[number % len(_COLOURS)])
            axes.scatter(rows["pc1"], rows["pc2"], color=colour, label=name_of(value), **dots)
        axes.set_title(f"{panel_letter(index)}   {title}")
        axes.set_xlabel(f"PC 1 ({explained[0]:.0%})")
        axes.legend(**below, ncols=2, handletextpad=0.1, columnspacing=0.6)
    grid[0].set_ylabel(f"PC 2 ({explained[1]:.0%})")
    questions = table["question_id"].nunique()
    footnote(figure, scale, f"{len(table)} latent steps of {questions} questions, centred")
    return figure, table


@styled
def draw_recurrence(
    steps: pd.DataFrame, modes: pd.DataFrame, *, scale: str = MEASURED
) -> tuple[Figure, pd.DataFrame]:
    """How far each step of the recurrence moves, and p(latent | state) along the turns.

    `steps` comes from `geometry.step_sizes`, `modes` from `geometry.mode_path`. A dot is a turn, a
    line the mean over turns. The table that is returned holds medians and means.
    """
    figure = new_figure(PAGE, 2.2)
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.5])
    places = boxes(left, steps, "relative_size", by="step")
    left.set_xticks(places, [f"{k} → {k + 1}" for k in places])
    left.set(title="a   Step sizes", xlabel="Latent step", ylabel="‖z′ − z‖ / ‖z‖", ylim=(0, None))
    # Without jitter, dots of one turn number would cover each other; the seed is fixed so that the
    # picture stays the same.
    jitter = np.random.default_rng(0).uniform(-0.15, 0.15, len(modes))
    spread = modes.assign(place=modes["turn"] + jitter)
    for hard, colour, name in ((False, BLUE, "easy turn"), (True, VERMILLION, "hard turn")):
        shown = spread[spread["hard"] == hard]
        if len(shown):
            dots = {"s": 5, "alpha": 0.5, "linewidths": 0, "color": colour}
            right.scatter(shown["place"], shown["p_latent"], **dots)
            mean = shown.groupby("turn")["p_latent"].mean()
            right.plot(mean.index, mean.to_numpy(), marker="o", color=colour, label=f"{name}, mean")
    right.set(title="b   p(latent | state)", xlabel="Turn", ylabel="Probability (%)")
    right.set_ylim(-0.03, 1.03)
    percent_axis(right.yaxis)
    right.set_xticks(sorted(set(modes["turn"])))
    right.legend(loc="best")
    questions = f"{steps['question_id'].nunique()} questions with latent turns"
    footnote(figure, scale, questions, "boxes: quartiles, whiskers: 1.5 IQR")
    moved = steps.groupby("step")[["relative_size", "cosine"]].median()  # one row per k
    chance = modes.groupby(["turn", "hard"])["p_latent"].mean()  # (turn, hard) → mean
    rows = []
    for column, name in (
        ("relative_size", "relative step size"),
        ("cosine", "cosine of neighbours"),
    ):
        for k, value in moved[column].items():
            rows.append((f"{name}, median", f"{k} → {k + 1}", value))
    for (turn, hard), value in chance.items():
        rows.append(("p(latent), mean", f"turn {turn}, {'hard' if hard else 'easy'}", value))
    return figure, pd.DataFrame(rows, columns=["measure", "where", "value"])

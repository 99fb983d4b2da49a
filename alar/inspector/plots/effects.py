"""What interventions do, as figures. Every effect stands beside its random control: an equal
distance in a random direction."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from alar.figures.style import (
    BLUE,
    GREY,
    MEASURED,
    PAGE,
    footnote,
    interval_bars,
    new_figure,
    panel_letter,
    percent_axis,
    styled,
)
from alar.inspector.interventions import Effect
from alar.inspector.plots.trajectories import drawable
from alar.inspector.tokens import shortened

KIND_NAMES = {
    "zero": "zeros",
    "mean": "mean thought",
    "noise": "noise of equal norm",
    "shuffle": "steps reordered",
    "patch": "another question's z",
    "drop": "positions dropped",
}
MEASURE_NAMES = {
    "changed": "Action changed (%)",
    "kl": "KL (nats)",
    "to_donor": "Donor's action (%)",
    "correct": "Answer correct (%)",
}
ENOUGH = 10  # questions on which a difference must rest to be pointed out
_BARS = "bars: 95 % intervals, bootstrap over questions"


@styled
def interventions(summary: pd.DataFrame, *, scale: str = MEASURED) -> tuple[Figure, pd.DataFrame]:
    """Effect of replacing whole blocks: one row per kind, one panel per measure; filled: the
    intervention, hollow: its control.

    `summary` comes from `alar.inspector.effects.summarise`.
    """
    shown = summary[(summary["k"] == 0) & summary["measure"].isin(MEASURE_NAMES)]
    shown = shown[(shown["measure"] != "to_donor") | (shown["intervention"] == "patch")]
    kinds = [kind for kind in KIND_NAMES if kind in set(shown["intervention"])]
    measures = [measure for measure in MEASURE_NAMES if measure in set(shown["measure"])]
    figure = new_figure(PAGE, 0.9 + 0.27 * len(kinds))
    grid = figure.subplots(1, len(measures), sharey=True, squeeze=False)[0]
    for index, (axes, measure) in enumerate(zip(grid, measures, strict=True)):
        rows = shown[shown["measure"] == measure]
        places = np.array([kinds.index(kind) for kind in rows["intervention"]])
        interval_bars(
            axes,
            rows["mean"],
            places - 0.12,
            rows["low"],
            rows["high"],
            along="x",
            marker="o",
            color=BLUE,
        )
        interval_bars(
            axes,
            rows["control"],
            places + 0.16,
            rows["control_low"],
            rows["control_high"],
            along="x",
            marker="o",
            color=GREY,
            markerfacecolor="white",
        )
        axes.set_title(f"{panel_letter(index)}   {MEASURE_NAMES[measure]}")
        if measure != "kl":
            axes.set_xlim(-0.04, 1.04)
            percent_axis(axes.xaxis, ticks=4)
    grid[0].set_yticks(range(len(kinds)), [KIND_NAMES[kind] for kind in kinds])
    grid[0].set_ylim(len(kinds) - 0.5, -0.5)
    handles = [
        Line2D([], [], marker="o", color=BLUE, linestyle="none", label="intervention"),
        Line2D(
            [],
            [],
            marker="o",
            color=GREY,
            markerfacecolor="white",
            linestyle="none",
            label="random control",
        ),
    ]
    figure.legend(handles=handles, loc="outside upper right", ncols=2)
    counts = f"{int(shown['turns'].max())} turns of {int(shown['questions'].max())} questions"
    footnote(figure, scale, "KL: intact to replaced, mean over the action's tokens", counts, _BARS)
    return figure, shown.reset_index(drop=True)


@styled
def causal_map(
    table: pd.DataFrame, *, name: str = "KL, nats", scale: str = MEASURED
) -> tuple[Figure, pd.DataFrame]:
    """Where the action depends on z: turn × k, single steps replaced; left the effect, right what
    it exceeds its control by.

    `table` comes from `alar.inspector.effects.causal_map`. An asterisk marks a difference whose
    interval excludes 0, among at least `ENOUGH` questions.
    """
    turns, steps = sorted(set(table["turn"])), sorted(set(table["k"]))
    figure = new_figure(PAGE, 0.95 + 0.3 * len(turns))
    grid = figure.subplots(1, 2, sharey=True)
    reach = float(np.nanmax(np.abs(table[["mean", "difference"]].to_numpy())) or 1.0)
    for axes, column, title in zip(
        grid, ("mean", "difference"), ("a   Effect", "b   Effect − random control"), strict=True
    ):
        cells = (
            table.pivot(index="turn", columns="k", values=column)
            .reindex(index=turns, columns=steps)
            .to_numpy()
        )
        image = axes.imshow(cells, cmap="RdBu_r", vmin=-reach, vmax=reach, aspect="auto")
        for row in table.itertuples():
            clear = row.questions >= ENOUGH and (row.difference_low > 0 or row.difference_high < 0)
            mark = "*" if column == "difference" and clear else ""
            value = getattr(row, column)
            axes.text(
                steps.index(row.k),
                turns.index(row.turn),
                f"{value:.2g}{mark}",
                ha="center",
                va="center",
                fontsize=6,
                color="white" if abs(value) > 0.6 * reach else "black",
            )
        axes.set_xticks(range(len(steps)), steps)
        axes.grid(False)
        axes.set(title=title, xlabel="Latent step k")
    counts = table.groupby("turn")["turns"].max()
    grid[0].set_yticks(range(len(turns)), [f"turn {turn} (n = {counts[turn]})" for turn in turns])
    figure.colorbar(image, ax=grid, label=name, fraction=0.03, pad=0.01)
    footnote(
        figure,
        scale,
        "one z of the block replaced at a time",
        f"* 95 % interval of the difference excludes 0, ≥ {ENOUGH} questions",
    )
    return figure, table


@styled
def panel(effects: Sequence[Effect]) -> tuple[Figure, pd.DataFrame]:
    """One latent turn under several interventions and their controls: the actions that the policy
    writes, as a table."""
    table = effect_table(effects)
    figure = new_figure(PAGE, 0.6 + 0.17 * len(table))
    axes = figure.subplots()
    axes.axis("off")
    axes.set(xlim=(0, 100), ylim=(len(table) + 0.6, -1))
    columns = ((0, "z"), (22, "action"), (78, "KL"), (88, "moved by"))
    for x, name in columns:
        axes.text(x, -0.3, name, fontweight="bold", fontsize=6.2)
    for row, line in enumerate(table.itertuples()):
        ink = GREY if line.control else BLUE if line.changed else "black"
        cells = (line.z, shortened(line.action, 62), f"{line.kl:.3f}", f"{line.distance:.2f}")
        for (x, _), text in zip(columns, cells, strict=True):
            axes.text(
                x,
                row + 0.6,
                drawable(text.replace("nan", "–")),
                fontsize=6,
                color=ink,
                parse_math=False,
            )
    site = effects[0].site
    title = f"{shortened(site.trajectory.question.text, 80)} (turn {site.block.turn + 1})"
    axes.set_title(drawable(title), parse_math=False)
    footnote(
        figure,
        "blue: the action changed · grey: random control · KL in nats per token of the recorded"
        " action",
    )
    return figure, table


def effect_table(effects: Sequence[Effect]) -> pd.DataFrame:
    """The effects on one turn, the intact action first and the donor's recorded one last."""
    rows = [("intact", effects[0].reference, False, False, 0.0, 0.0)]
    for effect in effects:
        change = effect.intervention
        name = "   random control" if change.control else KIND_NAMES.get(change.kind, change.kind)
        rows.append(
            (name, effect.action, change.control, effect.changed, effect.kl, effect.distance)
        )
    donor = next((effect.donor_action for effect in effects if effect.donor_action), "")
    if donor:
        rows.append(("donor's own", donor, False, False, float("nan"), float("nan")))
    return pd.DataFrame(rows, columns=["z", "action", "control", "changed", "kl", "distance"])

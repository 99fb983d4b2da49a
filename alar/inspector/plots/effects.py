"""What interventions do, as figures. Every effect stands beside its random control, which moves z
by the same distance in a random direction."""

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
from alar.inspector.plots.shared import cells, drawable, put_text
from alar.inspector.tokens import one_line

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
ENOUGH = 10  # fewer questions are too few to point out a difference
_MARKS = (  # column of the summary, its name, shift from the middle of the row, style
    ("mean", "intervention", -0.12, {"marker": "o", "color": BLUE}),
    ("control", "random control", 0.16, {"marker": "o", "color": GREY, "markerfacecolor": "white"}),
)


@styled
def draw_interventions(
    summary: pd.DataFrame, *, scale: str = MEASURED
) -> tuple[Figure, pd.DataFrame]:
    """The effect of replacing whole blocks: one row per kind, one panel per measure.

    Filled marks are interventions, hollow ones their controls.

    `summary` comes from `alar.inspector.effects.mean_effects`.
    """
    shown = summary[(summary["k"] == 0) & summary["measure"].isin(MEASURE_NAMES)]
    # Only a patch puts in the donor's z, so only there is the donor's action to be expected.
    shown = shown[(shown["measure"] != "to_donor") | (shown["intervention"] == "patch")]
    kinds = [kind for kind in KIND_NAMES if kind in set(shown["intervention"])]
    measures = [measure for measure in MEASURE_NAMES if measure in set(shown["measure"])]
    figure = new_figure(PAGE, 0.9 + 0.27 * len(kinds))  # inches
    grid = figure.subplots(1, len(measures), sharey=True, squeeze=False)[0]
    for index, (axes, measure) in enumerate(zip(grid, measures, strict=True)):
        rows = shown[shown["measure"] == measure]
        places = np.array([kinds.index(kind) for kind in rows["intervention"]])  # y of each row
        for column, _, shift, style in _MARKS:
            ends = ("low", "high") if column == "mean" else ("control_low", "control_high")
            low, high = rows[ends[0]], rows[ends[1]]
            interval_bars(axes, rows[column], places + shift, low, high, along="x", **style)
        axes.set_title(f"{panel_letter(index)}   {MEASURE_NAMES[measure]}")
        if measure != "kl":  # all others are shares; a KL has no upper end
            axes.set_xlim(-0.04, 1.04)
            percent_axis(axes.xaxis, ticks=4)
    grid[0].set_yticks(range(len(kinds)), [KIND_NAMES[kind] for kind in kinds])
    grid[0].set_ylim(len(kinds) - 0.5, -0.5)  # the first kind on top
    handles = [
        Line2D([], [], linestyle="none", label=name, **style) for _, name, _, style in _MARKS
    ]
    figure.legend(handles=handles, loc="outside upper right", ncols=2)
    footnote(
        figure,
        scale,
        "KL: intact to replaced, mean over the action's tokens",
        f"{int(shown['turns'].max())} turns of {int(shown['questions'].max())} questions",
        "bars: 95 % intervals, bootstrap over questions",
    )
    return figure, shown.reset_index(drop=True)


@styled
def draw_causal_map(table: pd.DataFrame, *, scale: str = MEASURED) -> tuple[Figure, pd.DataFrame]:
    """Where the action depends on z: turn × k, with single steps replaced.

    The left panel shows the effect, the right one how far it exceeds its control. `table` comes
    from `alar.inspector.effects.step_effects`. An asterisk marks a difference whose interval
    excludes 0, from at least `ENOUGH` questions.
    """
    clear = (table["difference_low"] > 0) | (table["difference_high"] < 0)
    stars = np.where(clear & (table["questions"] >= ENOUGH), "*", "")
    places = table.assign(
        mean_text=table["mean"].map("{:.2g}".format),
        difference_text=table["difference"].map("{:.2g}".format) + stars,
    )
    # One row per turn; columns are (column of `table`, k).
    places = places.pivot(index="turn", columns="k").sort_index(axis="columns")
    figure = new_figure(PAGE, 0.95 + 0.3 * len(places))
    grid = figure.subplots(1, 2, sharey=True)
    # One scale for both panels. It needs a width even if all values are 0.
    reach = float(np.nanmax(np.abs(table[["mean", "difference"]].to_numpy())) or 1.0)
    panels = (("mean", "a   Effect"), ("difference", "b   Effect − random control"))
    for axes, (column, title) in zip(grid, panels, strict=True):
        values, texts = places[column], places[f"{column}_text"]  # (turns, K)
        image = cells(axes, values.to_numpy(), texts.to_numpy(), reach, aspect="auto")
        axes.set_xticks(range(values.shape[1]), values.columns)
        axes.set(title=title, xlabel="Latent step k")
    counts = table.groupby("turn")["turns"].max()  # turn number → turns measured
    names = [f"turn {turn} (n = {count})" for turn, count in counts.items()]
    grid[0].set_yticks(range(len(names)), names)
    figure.colorbar(image, ax=grid, label="KL, nats", fraction=0.03, pad=0.01)
    footnote(
        figure,
        scale,
        "one z of the block replaced at a time",
        f"* 95 % interval of the difference excludes 0, ≥ {ENOUGH} questions",
    )
    return figure, table


@styled
def draw_panel(effects: Sequence[Effect]) -> tuple[Figure, pd.DataFrame]:
    """The actions that the policy writes in one latent turn under interventions and their controls.

    The picture is a table with one line per effect.
    """
    table = _effect_table(effects)
    figure = new_figure(PAGE, 0.6 + 0.17 * len(table))
    axes = figure.subplots()
    axes.axis("off")
    axes.set(xlim=(0, 100), ylim=(len(table) + 0.6, -1))  # x in percent of the width, y in lines
    columns = {"z": 0, "action": 22, "KL": 78, "moved by": 88}  # name → where it begins
    for name, x in columns.items():
        axes.text(x, -0.3, name, fontweight="bold", fontsize=6.2)
    for row, line in enumerate(table.itertuples()):
        ink = BLUE if line.changed else "black"
        if line.control:
            ink = GREY
        # NaN: "drop" has no distance, and the donor's own line has no KL.
        numbers = [f"{line.kl:.3f}".replace("nan", "–"), f"{line.distance:.2f}".replace("nan", "–")]
        texts = (line.z, one_line(line.action, 62), *numbers)
        for x, text in zip(columns.values(), texts, strict=True):
            put_text(axes, x, row + 0.6, text, fontsize=6, color=ink)
    site = effects[0].site
    title = f"{one_line(site.trajectory.question.text, 80)} (turn {site.block.turn + 1})"
    axes.set_title(drawable(title), parse_math=False)
    footnote(
        figure,
        "blue: the action changed · grey: random control",
        "KL in nats per token of the recorded action",
    )
    return figure, table


def _effect_table(effects: Sequence[Effect]) -> pd.DataFrame:
    """One row per effect; the intact action stands first, the donor's recorded one last."""
    rows = [("intact", effects[0].reference, False, False, 0.0, 0.0)]
    for effect in effects:
        kind, control = effect.intervention.kind, effect.intervention.control
        name = "   random control" if control else KIND_NAMES.get(kind, kind)
        rows.append((name, effect.action, control, effect.changed, effect.kl, effect.distance))
    donors = [effect.donor_action for effect in effects if effect.donor_action]
    if donors:
        rows.append(("donor's own", donors[0], False, False, float("nan"), float("nan")))
    return pd.DataFrame(rows, columns=["z", "action", "control", "changed", "kl", "distance"])

"""The ablations: what each change does to accuracy, tokens and modes, one line per setting."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from alar.evaluate import tables
from alar.figures.style import (
    GREY,
    MEASURED,
    PAGE,
    Source,
    footnote,
    interval_bars,
    new_figure,
    percent_axis,
    styled,
    system_colour,
    system_name,
)

_PANELS = {
    "accuracy": "Accuracy (%)",
    "tokens": "Tokens per question",
    "mutual_information": "I(X;M) (bit)",
}
_LABEL_LENGTH = 44  # characters


@styled
def ablations(table: Source, *, scale: str = MEASURED) -> tuple[Figure, pd.DataFrame]:
    """Accuracy, tokens and I(X;M) of every setting, in blocks by system; the dashed line is the
    block's first row."""
    table = tables.read(table, tables.ABLATIONS)
    systems = list(dict.fromkeys(table["system"]))
    heights = [int((table["system"] == system).sum()) for system in systems]
    figure = new_figure(PAGE, 0.7 + 0.22 * sum(heights) + 0.25 * len(systems))
    grid = figure.subplots(
        len(systems), len(_PANELS), squeeze=False, sharey="row", sharex="col", height_ratios=heights
    )
    for system, line in zip(systems, grid, strict=True):
        rows = table[table["system"] == system]
        for axes, (name, title) in zip(line, _PANELS.items(), strict=True):
            _draw(axes, rows, name, system_colour(system))
            if system == systems[-1]:
                axes.set_xlabel(title)
            if name == "accuracy":
                percent_axis(axes.xaxis)
        line[0].set_yticks(range(len(rows)), [_label(row) for row in rows.itertuples()])
        line[0].set_ylim(len(rows) - 0.5, -0.5)
        line[0].set_title(system_name(system))
    counts = ", ".join(str(n) for n in dict.fromkeys(int(n) for n in table["n"]))
    footnote(
        figure, scale, f"n = {counts} questions", "bars: 95 % intervals over questions, bootstrap"
    )
    return figure, table


def _draw(axes, rows: pd.DataFrame, name: str, colour: str) -> None:
    axes.axvline(rows[name].iloc[0], color=GREY, linewidth=0.7, linestyle=(0, (4, 2)), zorder=0)
    places = range(len(rows))
    if f"{name}_low" in rows:
        interval_bars(
            axes,
            rows[name],
            places,
            rows[f"{name}_low"],
            rows[f"{name}_high"],
            along="x",
            color=colour,
            marker="o",
        )
    else:
        axes.plot(rows[name], places, "o", color=colour)


def _label(row) -> str:
    label = (
        row.setting if len(row.setting) <= _LABEL_LENGTH else row.setting[: _LABEL_LENGTH - 1] + "…"
    )
    return f"{label} ({row.seeds} seeds)" if row.seeds > 1 else label

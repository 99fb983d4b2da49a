"""The ablations: what each change does to accuracy, tokens and modes. One row per setting."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from alar.evaluate import tables
from alar.evaluate.intervals import Estimate
from alar.figures.style import (
    DASHED,
    GREY,
    MEASURED,
    PAGE,
    TableOrFile,
    estimate_bars,
    footnote,
    horizontal_rows,
    new_figure,
    number_of_questions,
    percent_axis,
    shortened,
    styled,
    system_colour,
    system_name,
)

_PANELS = {  # column of the table → label of its axis
    "accuracy": "Accuracy (%)",
    "tokens": "Tokens per question",
    "mutual_information": "I(X;M) (bit)",
}
_LABEL_LENGTH = 44  # characters


@styled
def ablations_figure(table: TableOrFile, *, scale: str = MEASURED) -> tuple[Figure, pd.DataFrame]:
    """Accuracy, tokens and I(X;M) of every setting, in one block per system.

    A dashed line goes through the first row of a block, with which the others are compared.
    """
    table = tables.read(table, tables.ABLATIONS)
    systems = list(dict.fromkeys(table["system"]))
    heights = [int((table["system"] == system).sum()) for system in systems]  # rows of each block
    # inches: margins, rows, titles
    figure = new_figure(PAGE, 0.7 + 0.22 * sum(heights) + 0.25 * len(systems))
    grid = figure.subplots(
        len(systems), len(_PANELS), squeeze=False, sharey="row", sharex="col", height_ratios=heights
    )
    for system, line in zip(systems, grid, strict=True):  # `line`: one panel per column
        rows = table[table["system"] == system]
        for axes, (name, title) in zip(line, _PANELS.items(), strict=True):
            _draw(axes, rows, name, system_colour(system))
            if system == systems[-1]:
                axes.set_xlabel(title)
            if name == "accuracy":
                percent_axis(axes.xaxis)
        horizontal_rows(line[0], [_label(row) for row in rows.itertuples()])
        line[0].set_title(system_name(system))
    bars = "bars: 95 % intervals over questions, bootstrap"
    footnote(figure, scale, number_of_questions(table), bars)
    return figure, table


def _draw(axes, rows: pd.DataFrame, name: str, colour: str) -> None:
    axes.axvline(rows[name].iloc[0], color=GREY, linewidth=0.7, linestyle=DASHED, zorder=0)
    places = range(len(rows))  # heights of the rows on the vertical axis
    if Estimate.names(name)[1] in rows:  # this column has intervals in this table
        estimate_bars(axes, rows, name, places, along="x", color=colour, marker="o")
    else:
        axes.plot(rows[name], places, "o", color=colour)


def _label(row) -> str:
    label = shortened(row.setting, _LABEL_LENGTH)
    return f"{label} ({row.seeds} seeds)" if row.seeds > 1 else label

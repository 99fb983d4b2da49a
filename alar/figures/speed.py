"""Speed: time ratios of the benchmark notebook, each with its range over the rounds and what is claimed of it."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from alar import tables
from alar.figures.style import BLACK, BLUE, GREY, PAGE, VERMILLION, Source, footnote, interval_bars, new_figure, styled

_TICKS = (0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32)


@styled
def speed(ratios: Source, *, clock: str = "wall", scale: str = "measured") -> tuple[Figure, pd.DataFrame]:
    """One row per comparison, time of the first over time of the second. `clock` is "wall" or "cpu".

    A triangle marks a claim, pointing to the side that keeps it.
    """
    ratios = tables.read(ratios, tables.BENCH_RATIOS)
    rows = ratios[ratios["clock"] == clock].reset_index(drop=True)
    if rows.empty:
        raise tables.TableError(f"table 'speed ratios': column 'clock' has no '{clock}'; {tables.BENCH_RATIOS.origin}")
    place = np.arange(len(rows))[::-1]
    figure = new_figure(PAGE, 0.9 + 0.2 * len(rows))
    axes = figure.subplots()
    axes.set_xscale("log")
    axes.axvline(1, color=GREY, linewidth=0.8, linestyle=(0, (4, 2)), zorder=0)
    interval_bars(axes, rows["ratio"], place, rows["ratio_low"], rows["ratio_high"], along="x", fmt="o", color=BLUE)
    for column, marker in (("at_most", "<"), ("at_least", ">")):
        axes.plot(rows[column], place, marker, color=VERMILLION, markerfacecolor="none", markersize=5, zorder=4)
    names = [f"{r.part} · {r.case}: {r.numerator} / {r.denominator}" for r in rows.itertuples()]
    axes.set_yticks(place, names)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    drawn = rows[["ratio_low", "ratio_high", "at_most", "at_least"]].to_numpy(dtype=float)
    low, high = min(np.nanmin(drawn), 1) / 1.15, max(np.nanmax(drawn), 1) * 1.15
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(FixedLocator([tick for tick in _TICKS if low <= tick <= high]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel(f"Ratio of {'wall' if clock == 'wall' else 'CPU'} times per token")
    axes.tick_params(axis="y", colors=BLACK, length=0)
    footnote(figure, f"{scale} · median and range of the rounds · triangle: the claim, pointing to the side that keeps it")
    return figure, rows

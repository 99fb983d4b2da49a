"""Speed: time ratios of the benchmark notebook, tokens per second of the serving notebook."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from alar.evaluate import tables
from alar.figures.style import (
    BLACK,
    BLUE,
    COLUMN,
    DASHED,
    GREEN,
    GREY,
    MEASURED,
    PAGE,
    VERMILLION,
    TableOrFile,
    estimate_bars,
    footnote,
    new_figure,
    styled,
)

ROUTES = {  # as `alar.study.bench.serving` names them: label, colour, marker
    "hf": ("in-process engine", BLUE, "o"),
    "vllm": ("vLLM engine", VERMILLION, "s"),
    "server": ("vLLM server, over HTTP", GREEN, "^"),
}
_TICKS = (0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # ratios, for a logarithmic axis


@styled
def speed(
    ratios: TableOrFile, *, clock: str = "wall", scale: str = MEASURED
) -> tuple[Figure, pd.DataFrame]:
    """One row per comparison: the time of the first over the time of the second.

    `clock` is "wall" or "cpu". A triangle marks a claim and points to the side that keeps it.
    Raises TableError if the table has no row of that clock.
    """
    ratios = tables.read(ratios, tables.BENCH_RATIOS)
    rows = ratios[ratios["clock"] == clock].reset_index(drop=True)
    if rows.empty:
        raise tables.TableError(
            f"table 'ratios': column 'clock' has no '{clock}'; {tables.BENCH_RATIOS.origin}"
        )
    place = np.arange(len(rows))[::-1]  # (comparisons,), from the top down
    figure = new_figure(PAGE, 0.9 + 0.2 * len(rows))
    axes = figure.subplots()
    axes.set_xscale("log")  # half and double are equally far from 1
    axes.axvline(1, color=GREY, linewidth=0.8, linestyle=DASHED, zorder=0)
    estimate_bars(axes, rows, "ratio", place, along="x", fmt="o", color=BLUE)
    # shows the point behind
    hollow = {"color": VERMILLION, "markerfacecolor": "none", "markersize": 5, "zorder": 4}
    for column, marker in (("at_most", "<"), ("at_least", ">")):
        # NaN, where nothing is claimed, is not drawn
        axes.plot(rows[column], place, marker, **hollow)
    names = [f"{r.part} · {r.case}: {r.numerator} / {r.denominator}" for r in rows.itertuples()]
    axes.set_yticks(place, names)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    # (comparisons, 4)
    drawn = rows[["ratio_low", "ratio_high", "at_most", "at_least"]].to_numpy(dtype=float)
    # The ratio 1, equally fast, is always in view.
    low, high = min(np.nanmin(drawn), 1) / 1.15, max(np.nanmax(drawn), 1) * 1.15
    axes.set_xlim(low, high)
    _only_ticks(axes.xaxis, FixedLocator([tick for tick in _TICKS if low <= tick <= high]))
    axes.set_xlabel(f"Ratio of {'wall' if clock == 'wall' else 'CPU'} times per token")
    axes.tick_params(axis="y", colors=BLACK, length=0)
    footnote(
        figure,
        scale,
        "median and range of the rounds",
        "triangle: the claim, pointing to the side that keeps it",
    )
    return figure, rows


@styled
def throughput(table: TableOrFile, *, scale: str = MEASURED) -> tuple[Figure, pd.DataFrame]:
    """Generated tokens per second against turns written at once. One line per route."""
    table = tables.read(table, tables.THROUGHPUT)
    table = table.sort_values(["route", "concurrent"], ignore_index=True)
    figure = new_figure(COLUMN, 2.3)
    axes = figure.subplots()
    axes.set_xscale("log", base=2)  # 1, 2, 4, 8 … are evenly spaced
    axes.set_yscale("log")
    for route, rows in table.groupby("route", sort=False):
        label, colour, marker = ROUTES.get(route, (route, BLACK, "D"))
        look = {"marker": marker, "color": colour, "label": label}
        axes.plot(rows["concurrent"], rows["tokens_per_second"], **look)
    _only_ticks(axes.xaxis, FixedLocator(sorted(set(table["concurrent"]))))
    _only_ticks(axes.yaxis, LogLocator(subs=(1, 2, 5)), "{:,.0f}")
    axes.set_xlabel("Turns written at once")
    axes.set_ylabel("Generated tokens per second")
    axes.legend(loc="best")
    footnote(figure, scale, "one measurement a point")
    return figure, table


def _only_ticks(axis, locator, form: str = "{:g}") -> None:
    """Only these ticks, as plain numbers instead of powers."""
    axis.set_major_locator(locator)
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: form.format(value)))

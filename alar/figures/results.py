"""What the evaluation found.

The figures: accuracy against tokens, stages, question types, controls at inference, oracle router.
Every drawing function reads a summary (`tables.SUMMARY`, which `alar.evaluate.statistics.summarise`
makes) and returns the figure with the table of what it shows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from alar.evaluate import published, tables
from alar.evaluate.intervals import Estimate
from alar.figures.style import (
    BLACK,
    BLUE,
    DASHED,
    GREEN,
    GREY,
    LIGHT,
    MEASURED,
    ORANGE,
    PAGE,
    PURPLE,
    SYSTEM_MARKERS,
    TableOrFile,
    estimate_bars,
    footnote,
    horizontal_rows,
    new_figure,
    number_of_questions,
    panel_letter,
    percent_axis,
    styled,
    system_colour,
    system_name,
    type_name,
)

_BARS = "bars: 95 % intervals, paired bootstrap"
_METRIC_TITLES = {  # column of the summary → title of its panel
    "em": "Accuracy (%)",
    "tokens": "Tokens per question",
    "latent_share": "Latent share of turns (%)",
    "em_difference": "Accuracy − {reference} (points)",
    "token_reduction": "Fewer tokens than {reference} (%)",
}
_SHARES = ("em", "latent_share", "em_difference", "token_reduction")  # fractions, shown in percent

# A policy within these margins of the oracle router counts as close to it.
_EM_MARGIN = 0.04  # 4 points of accuracy
_TOKEN_MARGIN = 1.25  # factor

_BELOW = 0.28  # published markers stand below ours, in rows
_OURS = "this study"
_SETTING_COLOURS = {  # model and domain of the published points → colour
    "Search-R1 7B": BLUE,
    "Search-R1 3B": ORANGE,
    "Qwen3-4B, tools": PURPLE,
    _OURS: GREEN,
}
_MODEL_LOOKS = {  # model of the published rows → colour and marker
    "Search-R1 7B": (BLUE, "s"),
    "Search-R1 3B": (ORANGE, "D"),
    "Qwen3-4B": (PURPLE, "o"),
}
_METHOD_MARKERS = SYSTEM_MARKERS | {"ThinkPrune": "D", "ShorterBetter": "X", "O1-Pruner": "p"}


@styled
def accuracy_against_tokens(
    summary: TableOrFile, *, scale: str = MEASURED
) -> tuple[Figure, pd.DataFrame]:
    """Accuracy change against token reduction, each from its own base.

    Published points are hollow, ours are filled: means over the sets if the summary has them, else
    over all questions. The vertical axis is broken if a wide gap would squeeze the points above it.
    """
    measured = _overall(summary)
    points = pd.concat([_published_points(), _measured_points(measured)], ignore_index=True)
    # (low, high) of each panel
    bands = _bands(points["accuracy_difference_low"], points["accuracy_difference_high"])
    spans = [high - low for low, high in bands]
    # Heights follow the ranges, but a lower panel has 0.3 to 0.6 of the height of the first.
    heights = [spans[0]] + [min(max(span, 0.3 * spans[0]), 0.6 * spans[0]) for span in spans[1:]]
    figure = new_figure(PAGE, 3.5)
    grid = figure.subplots(len(bands), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (low, high) in zip(grid, bands, strict=True):
        axes.axhline(0, color=GREY, linewidth=0.7, linestyle=DASHED)
        axes.axvline(0, color=GREY, linewidth=0.7, linestyle=DASHED)
        inside = points[points["accuracy_difference"].between(low, high)]
        for point in inside.to_dict("records"):
            _draw_point(axes, point)
        axes.set_ylim(low, high)
        percent_axis(axes.yaxis, ticks=6 if axes is grid[0] else 3)
    # Every base is at (0, 0), because all differences are to it.
    grid[0].plot(0, 0, "*", color=BLACK, markersize=8, zorder=2)
    percent_axis(grid[-1].xaxis, ticks=10)
    _mark_breaks(grid)
    grid[-1].set_xlabel("Fewer generated tokens than the base (%)")
    figure.supylabel("Accuracy − base (points)", fontsize=7)
    figure.legend(handles=_point_legend(points), loc="outside right upper", labelspacing=0.45)
    counted = number_of_questions(measured)
    theirs = "hollow: published, second-hand; 3B ShorterBetter and O1-Pruner digitised"
    footnote(figure, f"{theirs}; tools by the released check\nfilled: {scale}, {counted}, {_BARS}")
    return figure, points


@styled
def stages(
    summary: TableOrFile, *, domain: str = "", scale: str = MEASURED
) -> tuple[Figure, pd.DataFrame]:
    """Accuracy, tokens and latent share of every system: means over the sets, if the summary has
    them, else over all questions.

    With a `domain`, hollow markers show what was published of these systems on other models.
    """
    rows = _overall(summary)
    if not domain:
        figure, _ = _dot_panels(rows, ("em", "tokens", "latent_share"))
        footnote(figure, scale, number_of_questions(rows), _BARS)
        return figure, rows
    theirs = _published_rows(domain, list(rows["system"]))
    figure, grid = _dot_panels(rows, ("em", "tokens", "latent_share"), published=theirs)
    for axes, metric in zip(grid, ("em", "tokens", "latent_share"), strict=True):
        for row in theirs.itertuples():
            place = list(rows["system"]).index(row.system) + _BELOW
            axes.plot(getattr(row, metric), place, **_hollow(row.source))
    models = list(dict.fromkeys(theirs["source"]))
    handles = [Line2D([], [], label=f"{model}, published", **_hollow(model)) for model in models]
    if handles:  # none of these systems may have been published
        figure.legend(handles=handles, loc="outside upper right", ncols=len(handles))
    where = "means of sets" + (", by the released check" if domain == "tool" else "")
    notes = [f"hollow: {note}, {where}" for note in dict.fromkeys(theirs["note"])]
    footnote(figure, scale, number_of_questions(rows), _BARS, *notes)
    return figure, pd.concat([rows.assign(source="measured"), theirs], ignore_index=True)


@styled
def question_types(summary: TableOrFile, *, scale: str = MEASURED) -> tuple[Figure, pd.DataFrame]:
    """Accuracy and tokens of every system, one column per question type."""
    summary = tables.read(summary, tables.SUMMARY)
    types = tables.in_order(set(summary["question_type"]) - {"all"}, tables.QUESTION_TYPES)
    many = len(types) > 4  # narrow columns: titles take two lines
    shown = summary[summary["question_type"].isin(types)]
    systems = tables.in_order(shown["system"], tables.SYSTEMS)
    figure = new_figure(PAGE, 1.2 + 0.34 * len(systems))
    grid = figure.subplots(2, len(types), sharey=True, squeeze=False)
    for metric, line in zip(("em", "tokens"), grid, strict=True):
        for axes, question_type in zip(line, types, strict=True):
            rows = shown[shown["question_type"] == question_type]
            _dots(axes, rows, metric, systems)
            if metric == "em":
                count = f"(n = {int(rows['n'].iloc[0])})"
                title = f"{type_name(question_type)}{chr(10) if many else ' '}{count}"
                axes.set_title(title, fontsize=6.5 if many else 7.5)
            axes.set_xlim(*_limits(shown, metric))  # the same for all types, so that they compare
    for line, label in zip(grid, (_METRIC_TITLES["em"], "Generated tokens"), strict=True):
        for axes in line:
            axes.set_xlabel(label, fontsize=6.5)
    footnote(figure, scale, _BARS)
    return figure, shown.reset_index(drop=True)


@styled
def controls_figure(summary: TableOrFile, *, scale: str = MEASURED) -> tuple[Figure, pd.DataFrame]:
    """Accuracy under each control on z at inference, and its difference from intact latents."""
    rows = _rows(summary, "all", tables.CONTROLS)
    _demand_system(rows, "intact")
    figure, grid = _dot_panels(rows, ("em", "em_difference"), "intact")
    grid[1].axvline(0, color=GREY, linewidth=0.8, linestyle=DASHED, zorder=0)  # no difference
    footnote(figure, scale, f"stage-1 model, {number_of_questions(rows)}", _BARS)
    return figure, rows


@styled
def oracle_figure(summary: TableOrFile, *, scale: str = MEASURED) -> tuple[Figure, pd.DataFrame]:
    """Accuracy and tokens of all systems, and the band that counts as close to the oracle router.

    The band reaches 4 points below the oracle's accuracy and to 1.25 times its tokens.
    """
    rows = _rows(summary, "all")
    yardstick = _demand_system(rows, "oracle")
    figure, grid = _dot_panels(rows, ("em", "tokens"), least_rows=3)
    tint = {"color": LIGHT, "alpha": 0.7, "linewidth": 0, "zorder": 0}
    grid[0].axvspan(yardstick["em"] - _EM_MARGIN, yardstick["em"], **tint)
    grid[1].axvspan(yardstick["tokens"], _TOKEN_MARGIN * yardstick["tokens"], **tint)
    margins = f"{100 * _EM_MARGIN:.0f} points and {_TOKEN_MARGIN:.2f} × the tokens"
    band = f"grey: within {margins} of the {system_name('oracle')}"
    footnote(figure, scale, number_of_questions(rows), _BARS, band)
    return figure, rows


def _rows(
    summary: TableOrFile, question_type: str, order: tuple[str, ...] = tables.SYSTEMS
) -> pd.DataFrame:
    # The rows of one question type, with the systems in `order`.
    summary = tables.read(summary, tables.SUMMARY)
    rows = summary[summary["question_type"] == question_type]
    if rows.empty:
        raise tables.TableError(
            f"table 'summary': column 'question_type' has no '{question_type}';"
            f" {tables.SUMMARY.origin}"
        )
    present = tables.in_order(rows["system"], order)
    return rows.sort_values("system", key=lambda names: names.map(present.index), ignore_index=True)


def _overall(summary: TableOrFile) -> pd.DataFrame:
    summary = tables.read(summary, tables.SUMMARY)
    several = tables.MACRO in set(summary["question_type"])
    return _rows(summary, tables.MACRO if several else "all")


def _demand_system(rows: pd.DataFrame, system: str) -> pd.Series:
    found = rows[rows["system"] == system]
    if found.empty:
        raise tables.TableError(
            f"table 'summary': column 'system' has no '{system}' to compare with; it has "
            f"{', '.join(rows['system'])}; {tables.SUMMARY.origin}"
        )
    return found.iloc[0]


def _dot_panels(
    rows: pd.DataFrame,
    metrics: Sequence[str],
    reference: str = "base",
    least_rows: int = 1,
    published: pd.DataFrame | None = None,
):
    """A figure with one panel per metric and one row per system. Returns it and its axes.

    The axes have room for the rows of `published`, too; it has the columns of `rows`.
    """
    within = rows if published is None else pd.concat([rows, published])
    figure = new_figure(PAGE, 0.9 + 0.21 * max(least_rows, len(rows)))  # inches
    grid = figure.subplots(1, len(metrics), sharey=True)  # (metrics,)
    for index, (axes, metric) in enumerate(zip(grid, metrics, strict=True)):
        _dots(axes, rows, metric, list(rows["system"]))
        title = _METRIC_TITLES[metric].format(reference=system_name(reference))
        axes.set_title(f"{panel_letter(index)}   {title}")
        axes.set_xlim(*_limits(within, metric))
    return figure, grid


def _dots(axes, rows: pd.DataFrame, metric: str, systems: list[str]) -> None:
    for system, part in rows.groupby("system", sort=False):
        look = {
            "color": system_colour(system),
            "marker": SYSTEM_MARKERS.get(system, "o"),
            "markersize": 5.5 if system == "base" else 3.8,
        }
        estimate_bars(axes, part, metric, [systems.index(system)], along="x", **look)
    horizontal_rows(axes, [system_name(system) for system in systems])
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    if metric in _SHARES:
        percent_axis(axes.xaxis)


def _limits(rows: pd.DataFrame, metric: str) -> tuple[float, float]:
    ends = rows[list(Estimate.names(metric))].to_numpy()  # (rows, 3): value, low, high
    low, high = np.nanmin(ends), np.nanmax(ends)
    if metric == "tokens":  # with 0 in view, a reader can compare lengths
        return 0, 1.08 * high
    if metric == "latent_share":
        return -0.04, 1.04
    pad = max(0.01, 0.06 * (high - low))
    if metric == "em":
        left = -0.03 if low < 0.3 else low - pad  # an accuracy near 0 is shown from 0 on
        return left, min(1.03, high + pad)
    return min(low, 0) - pad, max(high, 0) + pad  # 0, no difference, is always in view


def _published_points() -> pd.DataFrame:
    points = published.points()
    points = points[points["system"] != "base"].assign(source="published")  # bases are at (0, 0)
    for name in ("accuracy_difference", "token_reduction"):
        # Published without intervals, so both ends equal the value.
        points = points.assign(**Estimate(*[points[name]] * 3).columns(name))
    return points[_POINT_COLUMNS]


def _published_rows(domain: str, systems: list[str]) -> pd.DataFrame:
    """Published means of these systems with the columns of a summary, and their source and note."""
    found = published.means(domain)
    found = found[found["system"].isin(systems)]
    unknown = np.full(len(found), np.nan)  # published without intervals
    return pd.DataFrame(
        {
            "system": found["system"],
            "question_type": tables.MACRO,
            **Estimate(found["accuracy"] / 100, unknown, unknown).columns("em"),
            **Estimate(found["tokens"], unknown, unknown).columns("tokens"),
            **Estimate(unknown, unknown, unknown).columns("latent_share"),
            **Estimate(unknown, unknown, unknown).columns("em_difference"),
            **Estimate(found["token_reduction"] / 100, unknown, unknown).columns("token_reduction"),
            "source": found["model"],
            "note": found["note"],
        }
    )


def _hollow(model: str) -> dict:
    colour, marker = _MODEL_LOOKS[model]
    return {
        "color": colour,
        "marker": marker,
        "markersize": 3.6,
        "markerfacecolor": "none",
        "linestyle": "none",
    }


def _measured_points(rows: pd.DataFrame) -> pd.DataFrame:
    points = rows[rows["system"] != "base"].rename(columns=lambda name: _RENAMED.get(name, name))
    if points["accuracy_difference"].isna().any():
        raise tables.TableError(
            "table 'summary': column 'em_difference' is empty, because system 'base' was not"
            f" evaluated; {tables.SUMMARY.origin}: evaluate the base too"
        )
    return points.assign(source="measured", setting=_OURS)[_POINT_COLUMNS]


# Our column → the published table's name for it.
_RENAMED = {"em": "accuracy"} | dict(
    zip(Estimate.names("em_difference"), Estimate.names("accuracy_difference"))
)
_POINT_COLUMNS = [
    *("source", "setting", "system", "accuracy", "tokens"),
    *Estimate.names("accuracy_difference"),
    *Estimate.names("token_reduction"),
]


def _draw_point(axes, point: dict) -> None:
    row = pd.DataFrame([point])  # `estimate_bars` reads a table
    colour, ours = _SETTING_COLOURS[point["setting"]], point["source"] == "measured"
    x, y = row["token_reduction"], row["accuracy_difference"]
    if ours:
        bars = {"color": colour, "elinewidth": 0.9, "zorder": 3}
        estimate_bars(axes, row, "accuracy_difference", x, **bars)
        estimate_bars(axes, row, "token_reduction", y, along="x", **bars)
    axes.plot(
        x,
        y,
        _METHOD_MARKERS.get(point["system"], "o"),
        markersize=6,
        markeredgecolor=colour,
        markerfacecolor=colour if ours else "none",
        markeredgewidth=1.1,
        zorder=4,
    )


def _bands(low: pd.Series, high: pd.Series) -> list[tuple[float, float]]:
    """Ranges of the vertical axis, top first: one, or two if the widest gap deserves a break."""
    # Intervals of the points, the highest first.
    spans = sorted(zip(low, high, strict=True), key=lambda span: span[1], reverse=True)
    gaps = []  # (width, upper end, lower end) of the space between neighbours
    floor = 0.0  # lowest end so far; the base's line, at 0, belongs to the upper part
    for bottom, top in spans:
        gaps.append((floor - top, floor, top))
        floor = min(floor, bottom)
    gap, above, below = max(gaps)
    ceiling, bottom = max(0.0, *high), min(0.0, *low)
    if gap < 0.05:  # under 5 points: not worth a break
        pad = 0.06 * (ceiling - bottom) + 0.004
        return [(bottom - pad, ceiling + pad)]
    pad, lower_pad = 0.1 * (ceiling - above) + 0.004, 0.1 * (below - bottom) + 0.014
    # If the two ranges would overlap, they meet halfway.
    edge = min(below + lower_pad, (above + below) / 2)
    return [(max(above - pad, edge), ceiling + pad), (bottom - lower_pad, edge)]


def _mark_breaks(grid) -> None:
    for upper, lower in zip(grid[:-1], grid[1:], strict=True):
        upper.spines["bottom"].set_visible(False)
        upper.tick_params(axis="x", length=0)
        # The short oblique strokes at both ends of a broken axis, in axes coordinates.
        slashes = {
            "marker": [(-1, -0.6), (1, 0.6)],
            "markersize": 6,
            "linestyle": "none",
            "color": GREY,
            "markeredgewidth": 0.8,
            "clip_on": False,
        }
        upper.plot(0, 0, transform=upper.transAxes, **slashes)
        lower.plot(0, 1, transform=lower.transAxes, **slashes)


def _point_legend(points: pd.DataFrame) -> list[Line2D]:
    def entry(label: str, **style) -> Line2D:
        style = {"markersize": 5.5, "markeredgewidth": 1.1} | style
        return Line2D([], [], linestyle="none", label=label, **style)

    handles = [entry("base of each setting", marker="*", color=BLACK)]
    for setting, colour in _SETTING_COLOURS.items():
        # as in the figure: measured points are filled
        fill = colour if setting == _OURS else "none"
        label = f"{setting}, {'measured' if setting == _OURS else 'published'}"
        handles.append(entry(label, marker="o", markeredgecolor=colour, markerfacecolor=fill))
    handles.append(entry("", marker="none"))  # an empty line between settings and systems
    known = ("alar", "stage1", "warmup", "alar-think", "alar-latent")
    for system in tables.in_order(points["system"], known):
        look = {"marker": _METHOD_MARKERS.get(system, "o"), "markerfacecolor": "none"}
        handles.append(entry(system_name(system), markeredgecolor=GREY, **look))
    return handles

"""The compared methods: accuracy against tokens with intervals, and TokenSkip at all ratios."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from alar.evaluate import published, tables
from alar.figures.style import (
    BLACK,
    BLUE,
    DASHED,
    GREEN,
    GREY,
    MEASURED,
    ORANGE,
    PAGE,
    PURPLE,
    SKY,
    VERMILLION,
    TableOrFile,
    estimate_bars,
    footnote,
    new_figure,
    number_of_questions,
    panel_letter,
    percent_axis,
    shortened,
    styled,
    system_name,
)

_COLOURS = (BLUE, VERMILLION, PURPLE, ORANGE, SKY, GREY)
_MARKERS = "sD^vPXphd<>"
_BARS = "bars: 95 % intervals, bootstrap"
_LEGEND_LENGTH = 34  # characters of a line
_NEAR = 0.1  # methods at most this far below the base's accuracy are drawn again, larger


@styled
def methods_figure(table: TableOrFile) -> tuple[Figure, pd.DataFrame]:
    """Accuracy against mean generated tokens, one row of panels per domain.

    The left panel has all methods. The right one has those near the base's accuracy, larger. A line
    joins the settings of one method. Up and to the left is better. The dashed lines go through the
    base of each domain.
    """
    table = tables.read(table, tables.METHODS)
    # An empty setting comes back from a CSV file as NaN.
    table = table.assign(settings=table["settings"].fillna(""))
    domains = tables.in_order(table["domain"], ("search", "tool"))
    looks = _looks(tables.in_order(table["method"], ("base", "ALAR")))  # method → colour and marker
    # room for the legend
    figure = new_figure(PAGE, max(2.6 * len(domains), 0.6 + 0.16 * len(looks)))
    grid = figure.subplots(len(domains), 2, squeeze=False)
    for number, (panels, domain) in enumerate(zip(grid, domains, strict=True)):
        rows = table[table["domain"] == domain]
        base = rows.loc[rows["method"] == "base", "accuracy"]
        near = rows if base.empty else rows[rows["accuracy"] > base.iloc[0] - _NEAR]
        where = f"{domain}, " if len(domains) > 1 else ""
        # title → rows
        shown = {"all methods": rows, f"at most {100 * _NEAR:.0f} points below the base": near}
        for column, (axes, title) in enumerate(zip(panels, shown, strict=True)):
            _panel(axes, shown[title], looks)
            axes.set_title(f"{panel_letter(2 * number + column)}   {where}{title}")
        panels[0].set_ylabel("Accuracy (%)")
    figure.legend(handles=_legend(table, looks), loc="outside right upper", labelspacing=0.45)
    footnote(figure, *dict.fromkeys(table["scale"]), number_of_questions(table), _BARS)
    return figure, table


def _panel(axes, rows: pd.DataFrame, looks: dict[str, dict]) -> None:
    for method, part in rows.groupby("method", sort=False):
        _draw(axes, part, looks[method])
    for base in rows[rows["method"] == "base"].itertuples():
        dashed = {"color": GREY, "linewidth": 0.7, "linestyle": DASHED, "zorder": 0}
        axes.axhline(base.accuracy, **dashed)
        axes.axvline(base.tokens, **dashed)
    percent_axis(axes.yaxis)
    axes.set_xlabel("Generated tokens per question")


def _looks(methods: list[str]) -> dict[str, dict]:
    """method → colour and marker. No two methods share both, up to 66 besides base and ALAR."""
    looks = {
        "base": {"color": BLACK, "marker": "*", "markersize": 8},
        "ALAR": {"color": GREEN, "marker": "o", "markersize": 5},
    }
    others = [method for method in methods if method not in looks]
    for number, method in enumerate(others):
        # 6 and 11 have no common divisor: 66 pairs
        colour, marker = _COLOURS[number % len(_COLOURS)], _MARKERS[number % len(_MARKERS)]
        looks[method] = {"color": colour, "marker": marker, "markersize": 4.5}
    return {method: looks[method] for method in methods}  # in the order of the legend


def _draw(axes, part: pd.DataFrame, look: dict) -> None:
    # above the line that joins settings
    thin = look | {"elinewidth": 0.7, "capsize": 1.2, "zorder": 3}
    estimate_bars(axes, part, "accuracy", part["tokens"], **thin)
    estimate_bars(axes, part, "tokens", part["accuracy"], along="x", **thin)
    if len(part) > 1:
        ordered = part.sort_values("tokens")
        line = {"color": look["color"], "linewidth": 0.6, "alpha": 0.6, "zorder": 1}
        axes.plot(ordered["tokens"], ordered["accuracy"], **line)


def _legend(table: pd.DataFrame, looks: dict[str, dict]) -> list[Line2D]:
    handles = []
    for method, look in looks.items():
        settings = list(dict.fromkeys(table.loc[table["method"] == method, "settings"]))
        label = system_name(method)
        if len(settings) > 1:
            label += f" ({len(settings)} settings)"
        elif settings[0]:
            label += f", {settings[0]}"
        label = shortened(label, _LEGEND_LENGTH)
        handles.append(Line2D([], [], linestyle="none", label=label, **look))
    return handles


@styled
def ratios(
    table: TableOrFile, achieved: pd.DataFrame | None = None, *, scale: str = MEASURED
) -> tuple[Figure, pd.DataFrame]:
    """Accuracy and think tokens against the ratio in the prompt. One line per model and scorer.

    `achieved` adds the tokens that the training data hold at each ratio. Hollow markers are the
    published accuracies, of a larger model on MATH; its 1,231 to 1,536 think tokens would leave no
    room for ours and stand in tables only.
    """
    table = tables.read(table, tables.RATIOS)
    figure = new_figure(PAGE, 2.6)
    left, right = figure.subplots(1, 2)
    lines = table.groupby(["model", "scorer"], sort=False)
    colours = (BLUE, VERMILLION, GREEN, PURPLE, BLACK) * 2  # up to ten lines
    for ((model, scorer), rows), colour, marker in zip(lines, colours, "osD^v" * 2):
        rows = rows.sort_values("ratio")
        look = {"color": colour, "marker": marker, "label": f"{model}, {scorer}"}
        for axes, name in ((left, "accuracy"), (right, "think_tokens")):
            axes.plot(rows["ratio"], rows[name], color=colour, linewidth=0.8)
            estimate_bars(axes, rows, name, rows["ratio"], **look)
    theirs = _published_ratios()
    handles = []
    for (model, rows), marker in zip(theirs.groupby("model", sort=False), "os"):
        hollow = {"color": GREY, "markerfacecolor": "none", "linestyle": "none", "marker": marker}
        left.plot(rows["ratio"], rows["accuracy"], **hollow)
        handles.append(Line2D([], [], label=f"{rows['source'].iloc[0]}, {model}", **hollow))
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles))
    # What a model would write that obeys the ratio to the letter, given its largest one.
    largest = table["ratio"].max()
    whole = table.loc[table["ratio"] == largest, "think_tokens"].mean() / largest
    dashed = {"color": GREY, "linewidth": 0.8, "linestyle": DASHED}
    right.plot([0, 1], [0, whole], label="in proportion to the ratio", **dashed)
    if achieved is not None:
        x, y = achieved["requested"], achieved["tokens_per_sample"]
        right.plot(x, y, "x", color=GREY, label="training data")
    percent_axis(left.yaxis)
    left.set_ylabel("Accuracy (%)")
    right.set_ylabel("Think tokens per question")
    for index, axes in enumerate((left, right)):
        axes.set_title(panel_letter(index))
        axes.set_xlim(0, 1.05)
        axes.set_xlabel("Ratio in the prompt")
    right.set_ylim(bottom=0)
    right.legend(loc="upper left")
    footnote(figure, scale, f"n = {int(table['n'].max())} questions", _BARS, "hollow: published")
    return figure, pd.concat([table.assign(source="measured"), theirs], ignore_index=True)


def _published_ratios() -> pd.DataFrame:
    """TokenSkip's published accuracies as fractions, with the columns of `tables.RATIOS`."""
    theirs = published.tokenskip_ratios()
    return theirs.assign(
        scorer="llmlingua2",
        accuracy=theirs["accuracy"] / 100,
        source=f"published: {published.TOKENSKIP_MODEL}",
    )

"""When the policy thinks aloud: latent share by question type and turn, and one real trajectory."""

from __future__ import annotations

import re
import textwrap

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from alar.evaluate import published, tables
from alar.figures.style import (
    BLACK,
    BLUE,
    GREY,
    MEASURED,
    MODE_COLOURS,
    MODE_NAMES,
    PAGE,
    VERMILLION,
    TableOrFile,
    estimate_bars,
    footnote,
    new_figure,
    panel_letter,
    percent_axis,
    styled,
    system_name,
    type_name,
)

_BLOCK_END = re.compile(r"(?<=</think>)|(?<=</latent>)")  # the empty place after the tag
_HARDNESS = {"easy": (BLUE, "o"), "hard": (VERMILLION, "D")}  # colour, marker
_PUBLISHED = {"linestyle": "none", "marker": "s", "color": BLACK, "markerfacecolor": "none"}
_MIN_TURNS = 10  # turns that a point needs; with fewer its interval is very wide
_WIDTH = 84  # characters of a line of a turn's text
_WHOLE = "all"  # in place of a turn's number: all turns of a set
_BESIDE = 0.16  # distance of hard and easy turns of one number from their common place


@styled
def latent_share(
    shares: TableOrFile, *, systems: tuple[str, ...] = ("warmup", "alar"), scale: str = MEASURED
) -> tuple[Figure, pd.DataFrame]:
    """Latent share by question type and turn, with one panel per system and hard turns marked.

    `shares` comes from `alar.evaluate.statistics.mode_share`. Rows of fewer than 10 turns are left
    out, unless nothing would be left. A set whose share over all turns was published has a place
    for it, with ours (filled) and the paper's (hollow, beside ALAR). Raises TableError if a system
    is not in the table.
    """
    shares = tables.read(shares, tables.MODE_SHARE)
    absent = [name for name in systems if name not in set(shares["system"])]
    if absent:
        raise tables.TableError(
            f"table 'mode share': column 'system' has no '{absent[0]}'; it has"
            f" {', '.join(tables.in_order(shares['system'], tables.SYSTEMS))};"
            f" {tables.MODE_SHARE.origin}"
        )
    shown = shares[shares["system"].isin(systems)]
    if (shown["n"] >= _MIN_TURNS).any():
        shown = shown[shown["n"] >= _MIN_TURNS]
    types = tables.in_order(shown["question_type"], tables.QUESTION_TYPES)
    theirs = published.latent_shares().set_index("set")
    theirs = theirs[theirs.index.isin(types)]
    places = _places(shown, types, list(theirs.index))
    whole = _whole_sets(shares[shares["system"].isin(systems)], list(theirs.index))
    figure = new_figure(PAGE, 0.9 + 1.25 * len(systems))  # inches
    # (systems,)
    grid = figure.subplots(len(systems), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for index, (axes, system) in enumerate(zip(grid, systems, strict=True)):
        _share_panel(axes, shown[shown["system"] == system], places)
        for row in whole[whole["system"] == system].itertuples():
            place = places[row.question_type, _WHOLE]
            axes.plot(place - _BESIDE, row.latent_share, "s", color=BLACK)
            if system == "alar":
                share = theirs.loc[row.question_type, "value"] / 100
                axes.plot(place + _BESIDE, share, **_PUBLISHED)
        axes.set_title(f"{panel_letter(index)}   {system_name(system)}")
        axes.set_ylabel("Latent share (%)")
        axes.set_ylim(-0.05, 1.05)  # room for whole markers at 0 % and 100 %
        percent_axis(axes.yaxis)
    _label_types(grid[-1], types, places)
    handles = [
        Line2D([], [], linestyle="none", label=f"{name} turn", color=colour, marker=marker)
        for name, (colour, marker) in _HARDNESS.items()
    ]
    place = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderaxespad": 0.2}
    grid[0].legend(handles=handles, ncols=2, **place)
    counted = f"n = {_range(shown['n'])} turns per point"
    if theirs.empty:
        footnote(figure, scale, counted, "bars: 95 % intervals, Wilson")
        return figure, shown.reset_index(drop=True)
    about = f"{theirs['model'].iloc[0]}, {theirs['note'].iloc[0]}"
    handles = [
        Line2D([], [], linestyle="none", marker="s", color=BLACK, label="all turns"),
        Line2D([], [], label=f"all turns, {about}", **_PUBLISHED),
    ]
    figure.legend(handles=handles, loc="outside upper right", ncols=2)
    footnote(figure, scale, counted, "bars: 95 % intervals, Wilson", f"hollow: {about}")
    known = theirs.reset_index(names="question_type")
    known = known.assign(latent_share=known["value"] / 100, turn=_WHOLE, source=about)
    known = known[["system", "question_type", "turn", "latent_share", "source"]]
    measured = pd.concat([shown, whole]).assign(source="measured")
    return figure, pd.concat([measured, known], ignore_index=True)


@styled
def trajectory_figure(
    example: TableOrFile, *, scale: str = MEASURED
) -> tuple[Figure, pd.DataFrame]:
    """Tokens per turn on one question: a bar per turn and system, beside what the turn says."""
    example = tables.read(example, tables.EXAMPLE_TURNS)
    questions = list(dict.fromkeys(example["question"]))
    example = example[example["question"] == questions[0]]  # the figure has room for one
    systems = tables.in_order(example["system"], tables.SYSTEMS)
    # A stable sort keeps the order of the turns within a system.
    rows = example.sort_values("turn", kind="stable").sort_values(
        "system", key=lambda names: names.map(systems.index), kind="stable", ignore_index=True
    )
    longest = rows["tokens"].max()
    figure = new_figure(PAGE, 1.0 + 0.3 * len(rows) + 0.12 * len(systems))
    axes, text = figure.subplots(1, 2, sharey=True, width_ratios=[1, 1.55])  # bars, words
    heights = _heights(rows["system"])
    for place, row in zip(heights, rows.itertuples(), strict=True):
        axes.barh(place, row.tokens, height=0.72, color=MODE_COLOURS[row.mode])
        label = f"{row.tokens:g}"
        axes.text(row.tokens + 0.02 * longest, place, label, va="center", fontsize=6.3)
        said = _excerpt(row.text)
        # a "$" is no formula
        small = {"va": "center", "fontsize": 5.8, "linespacing": 1.25, "parse_math": False}
        text.text(0, place, said, **small)
    labels = [f"turn {row.turn}{'  (hard)' if row.hard else ''}" for row in rows.itertuples()]
    axes.set_yticks(heights, labels)
    for label, hard in zip(axes.get_yticklabels(), rows["hard"], strict=True):
        label.set_fontweight("bold" if hard else "normal")
    for system in systems:
        own = rows.index[rows["system"] == system]  # the rows of one system
        title = f"{system_name(system)}: {rows.loc[own, 'tokens'].sum():g} tokens"
        above = heights[own[0]] - 0.72  # the axis points down
        text.text(0, above, title, fontsize=6.5, fontweight="bold", va="center")
    axes.set_ylim(heights[-1] + 0.6, -1.1)  # upside down, with room for the first title
    axes.set_xlim(0, 1.14 * longest)  # room for the number behind the longest bar
    axes.set_xlabel("Generated tokens in the turn")
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    text.set_xlim(0, 1)
    text.axis("off")
    used = [mode for mode in tables.MODES if (rows["mode"] == mode).any()]
    patches = [Patch(color=MODE_COLOURS[mode], label=MODE_NAMES[mode]) for mode in used]
    text.legend(handles=patches, loc="upper right", borderaxespad=0.2, ncols=len(used))
    question = "\n".join(textwrap.wrap(questions[0], 92))
    axes.set_title(question, fontsize=7, loc="left", parse_math=False)
    footnote(figure, scale, "one question, greedy decoding")
    return figure, rows


def _heights(systems: pd.Series) -> list[float]:
    """Vertical places of the turns, with a larger step where the next system begins."""
    heights = [0.0]
    for before, after in zip(systems[:-1], systems[1:]):  # pairs of neighbours
        heights.append(heights[-1] + (1.0 if before == after else 1.7))
    return heights


def _whole_sets(shares: pd.DataFrame, sets: list[str]) -> pd.DataFrame:
    """Latent share over all turns of a set, hard and easy: one row per system and set."""
    part = shares[shares["question_type"].isin(sets)]
    part = part.assign(latent=part["n"] * part["latent_share"])  # turns
    sums = part.groupby(["system", "question_type"], as_index=False)[["n", "latent"]].sum()
    sums = sums.assign(latent_share=sums["latent"] / sums["n"], turn=_WHOLE)
    return sums.drop(columns="latent")


def _places(
    shown: pd.DataFrame, types: list[str], sets: list[str]
) -> dict[tuple[str, int | str], float]:
    """(question type, turn) → horizontal place, with a space between types.

    Those in `sets` have a further place, for all of their turns.
    """
    places, x = {}, 0.0
    for question_type in types:
        turns = sorted(set(shown.loc[shown["question_type"] == question_type, "turn"]))
        if question_type in sets:
            turns.append(_WHOLE)
        for turn in turns:
            places[question_type, turn] = x
            x += 1.0
        x += 0.8
    return places


def _share_panel(axes, rows: pd.DataFrame, places: dict[tuple[str, int | str], float]) -> None:
    keys = ["question_type", "turn"]
    x = np.array([places[key] for key in rows[keys].itertuples(index=False, name=None)])
    # Only a place with both kinds of turns needs them side by side.
    aside = np.where(rows["hard"], _BESIDE, -_BESIDE)
    rows = rows.assign(x=x + np.where(rows.duplicated(keys, keep=False), aside, 0.0))
    # A line joins the turns of one type. No line leads from type to type.
    for _, line in rows.groupby("question_type"):
        line = line.sort_values("x")
        axes.plot(line["x"], line["latent_share"], color=GREY, linewidth=0.8, zorder=1)
    axes.grid(axis="x", visible=False)
    for name, (colour, marker) in _HARDNESS.items():
        part = rows[rows["hard"] == (name == "hard")]
        estimate_bars(axes, part, "latent_share", part["x"], color=colour, marker=marker)


def _label_types(axes, types: list[str], places: dict[tuple[str, int | str], float]) -> None:
    axes.set_xticks(list(places.values()), [f"{turn}" for _, turn in places])
    for question_type in types:
        x = [place for (name, _), place in places.items() if name == question_type]
        axes.annotate(
            type_name(question_type),
            ((x[0] + x[-1]) / 2, 0),
            # x in turns, y as a share of the axes' height; the text 15 points below.
            xycoords=axes.get_xaxis_transform(),
            xytext=(0, -15),
            textcoords="offset points",
            ha="center",
            va="top",
            fontweight="bold",
        )
    axes.set_xlabel("Turn", labelpad=13)
    axes.set_xlim(-0.6, max(places.values()) + 0.6)


def _excerpt(text: str) -> str:
    """The reasoning block on one line and the action on the next, both cut to the width."""
    parts = _BLOCK_END.split(str(text), maxsplit=1)
    lines = [textwrap.shorten(part.strip(), _WIDTH, placeholder=" …") for part in parts]
    return "\n".join(line for line in lines if line)


def _range(counts: pd.Series) -> str:
    low, high = int(counts.min()), int(counts.max())
    return f"{low}" if low == high else f"{low}–{high}"

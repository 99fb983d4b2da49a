"""One look for all figures, and saving them.

Sizes are those of a two-column page: `COLUMN` (3.4 in) and `PAGE` (7 in) wide, text of 7 points, so
a figure placed at its own width is readable. Colours are Okabe & Ito's, distinct under the common
colour blindnesses and, with the markers, in grey. Output is deterministic: no dates, no versions,
fixed SVG identifiers, and the fonts that come with matplotlib. Figures are made without pyplot, so
drawing leaves no global state behind.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from PIL import Image

from alar.evaluate.intervals import Estimate

COLUMN, PAGE = 3.4, 7.0  # inches
DASHED = (0, (4, 2))  # the line of what others are compared with

MEASURED = "measured"  # what the small print says unless told otherwise
TableOrFile = pd.DataFrame | str | Path  # a table, or the file that holds it

BLACK, GREY, LIGHT = "#222222", "#666666", "#DDDDDD"
BLUE, SKY, GREEN = "#0072B2", "#56B4E9", "#009E73"
ORANGE, VERMILLION, PURPLE, YELLOW = "#E69F00", "#D55E00", "#CC79A7", "#F0E442"

# Background tints of the same hues, for boxes.
PALE = {
    GREY: "#F5F5F5",
    BLUE: "#EAF3FA",
    SKY: "#EDF7FD",
    GREEN: "#E6F4EF",
    ORANGE: "#FDF5E4",
    VERMILLION: "#FCEFE6",
    PURPLE: "#F9EEF4",
}

MODE_COLOURS = {"latent": BLUE, "think": VERMILLION, "none": GREY}
MODE_NAMES = {"latent": "latent block", "think": "think text", "none": "no reasoning block"}

SYSTEM_NAMES = {
    "base": "base (explicit)",
    "stage1": "stage 1 (always latent)",
    "warmup": "mode warm-up",
    "alar": "ALAR",
    "alar-think": "ALAR, always think",
    "alar-latent": "ALAR, always latent",
    "oracle": "oracle router",
    "intact": "intact",
    "zeroed": "zeroed",
    "shuffled": "shuffled",
    "noise": "noise, equal norm",
    "mean": "mean latent",
    "text": "think text instead",
}
SYSTEM_COLOURS = {
    "base": BLACK,
    "stage1": SKY,
    "warmup": ORANGE,
    "alar": GREEN,
    "alar-think": VERMILLION,
    "alar-latent": BLUE,
    "oracle": PURPLE,
    "intact": GREEN,
    "text": VERMILLION,
}
SYSTEM_MARKERS = {
    "base": "*",
    "stage1": "s",
    "warmup": "P",
    "alar": "o",
    "alar-think": "^",
    "alar-latent": "v",
}
TYPE_NAMES = {
    "all": "all questions",
    "single": "single hop",
    "parallel_multiple": "parallel, multiple",
    "multi_turn": "multi-turn",
}

STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 7,
    "axes.titlesize": 7.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 7,
    "axes.linewidth": 0.6,
    "axes.edgecolor": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#EBEBEB",
    "grid.linewidth": 0.6,
    "xtick.labelsize": 6.5,
    "ytick.labelsize": 6.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "legend.fontsize": 6.5,
    "legend.frameon": False,
    "legend.handlelength": 1.6,
    "lines.linewidth": 1.3,
    "lines.markersize": 4,
    "figure.dpi": 144,
    "savefig.dpi": 200,
    "svg.hashsalt": "alar",
    "svg.fonttype": "path",
}


class StyledFigure(Figure):
    """Keeps the style when it is rendered later, and shows itself in a notebook without pyplot."""

    def draw(self, renderer):
        with rc_context(STYLE):
            super().draw(renderer)

    def get_tightbbox(self, *args, **kwargs):
        with rc_context(STYLE):
            return super().get_tightbbox(*args, **kwargs)

    def _repr_png_(self) -> bytes:
        return _rendered(self, "png", dpi=STYLE["figure.dpi"])


def styled(draw: Callable) -> Callable:
    """Runs a drawing function under the shared style and settles the layout of its figure.

    The layout engine moves things a little each time a figure is rendered; settled, all its copies
    are equal.
    """

    @functools.wraps(draw)
    def wrapper(*args, **kwargs):
        with rc_context(STYLE):
            figure, table = draw(*args, **kwargs)
            figure.get_layout_engine().execute(figure)
            figure.set_layout_engine("none")
        return figure, table

    return wrapper


def new_figure(width: float, height: float) -> StyledFigure:
    """An empty figure of that size in inches, whose layout keeps labels inside and apart."""
    return StyledFigure(figsize=(width, height), layout="constrained")


def footnote(figure: Figure, *parts: str) -> None:
    """Small print under the axes: where the numbers come from, how many, and what the bars are."""
    figure.supxlabel(
        " · ".join(part for part in parts if part), fontsize=5.8, color=GREY, x=0.995, ha="right"
    )


def save_figure(
    figure: Figure,
    table: pd.DataFrame,
    folder: str | Path,
    name: str,
    formats: Iterable[str] = ("png", "svg"),
):
    """Write `name.csv`, the plotted numbers, and `name.<format>` for each format.

    Returns the paths.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.csv"]
    table.to_csv(paths[0], index=False, lineterminator="\n", float_format="%.6g")
    for kind in formats:
        paths.append(folder / f"{name}.{kind}")
        paths[-1].write_bytes(_rendered(figure, kind))
    return paths


def percent_axis(axis, ticks: int = 6) -> None:
    """Round ticks of a fraction, written in percent."""
    axis.set_major_locator(MaxNLocator(nbins=ticks, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{round(100 * value, 6):g}".replace("-", "−"))
    )


def interval_bars(axes, x, y, low, high, *, along: str = "y", **style) -> None:
    """A point with its interval along one axis. Missing interval ends leave the bare point."""
    x, y, low, high = (np.asarray(value, dtype=float) for value in (x, y, low, high))
    centre = y if along == "y" else x
    # Distances to both ends, (2, points); rounding may leave a tiny negative one.
    reach = np.abs(np.nan_to_num(np.stack([centre - low, high - centre])))
    style = {"linestyle": "none", "elinewidth": 1.0, "capsize": 1.8, "capthick": 0.8} | style
    axes.errorbar(x, y, **{f"{along}err": reach}, **style)


def estimate_bars(axes, rows: pd.DataFrame, name: str, at, *, along: str = "y", **style) -> None:
    """Estimates `name` of a table with intervals along one axis, at places `at` of the other."""
    value, low, high = Estimate.read(rows, name)
    x, y = (at, value) if along == "y" else (value, at)
    interval_bars(axes, x, y, low, high, along=along, **style)


def horizontal_rows(axes, names: Sequence[str]) -> None:
    """One row for each name, from the top down."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)


def number_of_questions(rows: pd.DataFrame) -> str:
    """For the small print, from the column `n`."""
    counts = dict.fromkeys(int(n) for n in rows["n"])
    return f"n = {', '.join(map(str, counts))} questions"


def shortened(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def system_name(system: str) -> str:
    return SYSTEM_NAMES.get(system, system)


def system_colour(system: str) -> str:
    return SYSTEM_COLOURS.get(system, GREY)


def type_name(question_type: str) -> str:
    return TYPE_NAMES.get(question_type, question_type)


def panel_letter(index: int) -> str:
    return "abcdefghijklmnop"[index]


def _rendered(figure: Figure, kind: str, **options) -> bytes:
    # Dates and the library's version would make equal figures differ byte by byte.
    metadata = {
        "svg": {"Date": None, "Creator": None},
        "png": {"Software": None},
        "pdf": {"CreationDate": None},
    }
    # The style applies once more, since a figure may be saved long after it was drawn.
    buffer = io.BytesIO()
    with rc_context(STYLE):
        figure.savefig(buffer, format=kind, metadata=metadata.get(kind), **options)
    return _with_palette(buffer) if kind == "png" else buffer.getvalue()


def _with_palette(png: io.BytesIO) -> bytes:
    """The picture with 128 colours: a third of the size, no visible change to such drawings."""
    small = io.BytesIO()
    picture = Image.open(png).convert("RGB").quantize(128, dither=Image.Dither.NONE)
    picture.save(small, "PNG", optimize=True)
    return small.getvalue()

"""One look for all figures, and how to save them.

Sizes are those of a two-column page: `COLUMN` (3.4 in) and `PAGE` (7 in) wide, text of 7 points. So
a figure placed at its own width is readable. The colours are Okabe & Ito's. They stay distinct
under the common colour blindnesses and, with the markers, in grey. Output is deterministic: no
dates, no versions, fixed SVG identifiers, and the fonts that come with matplotlib. Figures are made
without pyplot, so drawing leaves no global state behind.
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
DASHED = (0, (4, 2))  # line of a reference; dash and gap, in line widths

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

MODE_COLOURS = {"latent": BLUE, "think": VERMILLION, "none": GREY}  # mode of a turn → colour
MODE_NAMES = {"latent": "latent block", "think": "think text", "none": "no reasoning block"}

SYSTEM_NAMES = {  # name in the tables → name in a figure; systems first, then controls on z
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
SYSTEM_COLOURS = {  # a system has one colour in all figures; controls without one are grey
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
TYPE_NAMES = {  # types that are not here are shown as they are
    "all": "all questions",
    "single": "single hop",
    "parallel_multiple": "parallel, multiple",
    "multi_turn": "multi-turn",
}

STYLE = {  # matplotlib's rcParams; sizes and widths in points
    "font.family": "DejaVu Sans",  # comes with matplotlib, so all machines draw the same
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
    "axes.axisbelow": True,  # the grid lies behind the points
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
    "figure.dpi": 144,  # in a notebook
    "savefig.dpi": 200,  # of PNG files
    "svg.hashsalt": "alar",  # without it SVG identifiers are random
    "svg.fonttype": "path",  # letters as outlines: no font is needed to show them
}


class StyledFigure(Figure):
    """A figure that keeps its style when rendered later, and shows itself without pyplot."""

    def draw(self, renderer):
        with rc_context(STYLE):
            super().draw(renderer)

    # Its answer depends on the sizes of the text, so it needs the style, too.
    def get_tightbbox(self, *args, **kwargs):
        with rc_context(STYLE):
            return super().get_tightbbox(*args, **kwargs)

    # IPython calls it to show the last value of a cell.
    def _repr_png_(self) -> bytes:
        return _rendered(self, "png", dpi=STYLE["figure.dpi"])


def styled(draw: Callable) -> Callable:
    """Runs a drawing function under the shared style and fixes the layout of its figure.

    The layout engine moves things a little each time it renders a figure. With a fixed layout all
    copies of the figure are equal.
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
    """An empty figure of this size in inches. Its layout keeps labels inside and apart."""
    return StyledFigure(figsize=(width, height), layout="constrained")


def footnote(figure: Figure, *parts: str) -> None:
    """Small print under the axes: the source of the numbers, how many, and what the bars mean."""
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
    """Write `name.csv`, the numbers in the figure, and `name.<format>` for each format.

    Returns the paths, the table first.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.csv"]
    # equal on all systems
    table.to_csv(paths[0], index=False, lineterminator="\n", float_format="%.6g")
    for kind in formats:
        paths.append(folder / f"{name}.{kind}")
        paths[-1].write_bytes(_rendered(figure, kind))
    return paths


def percent_axis(axis, ticks: int = 6) -> None:
    """Round ticks of a fraction, written in percent."""
    axis.set_major_locator(MaxNLocator(nbins=ticks, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(
        # a true minus sign
        FuncFormatter(lambda value, _: f"{round(100 * value, 6):g}".replace("-", "−"))
    )


def interval_bars(axes, x, y, low, high, *, along: str = "y", **style) -> None:
    """Points, each with its interval along one axis. Without interval ends a point stands bare."""
    x, y, low, high = (np.asarray(value, dtype=float) for value in (x, y, low, high))  # (points,)
    centre = y if along == "y" else x
    # Distances to both ends, (2, points). Rounding may make one negative, an error in matplotlib.
    reach = np.abs(np.nan_to_num(np.stack([centre - low, high - centre])))
    style = {"linestyle": "none", "elinewidth": 1.0, "capsize": 1.8, "capthick": 0.8} | style
    axes.errorbar(x, y, **{f"{along}err": reach}, **style)


def estimate_bars(axes, rows: pd.DataFrame, name: str, at, *, along: str = "y", **style) -> None:
    """The estimates `name` of a table, with intervals along one axis, at `at` on the other."""
    value, low, high = Estimate.read(rows, name)
    x, y = (at, value) if along == "y" else (value, at)
    interval_bars(axes, x, y, low, high, along=along, **style)


def horizontal_rows(axes, names: Sequence[str]) -> None:
    """One row for each name, from the top down."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)  # upside down, so that the first row is on top


def number_of_questions(rows: pd.DataFrame) -> str:
    """The column `n` in words, for the small print."""
    counts = dict.fromkeys(int(n) for n in rows["n"])  # distinct, in the order of the rows
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
    # Dates and the library's version would make the files of equal figures differ.
    metadata = {
        "svg": {"Date": None, "Creator": None},
        "png": {"Software": None},
        "pdf": {"CreationDate": None},
    }
    # A figure may be saved long after it was drawn, so it needs the style once more.
    buffer = io.BytesIO()
    with rc_context(STYLE):
        figure.savefig(buffer, format=kind, metadata=metadata.get(kind), **options)
    return _with_palette(buffer) if kind == "png" else buffer.getvalue()


def _with_palette(png: io.BytesIO) -> bytes:
    """The picture with 128 colours: a third of the size, and no visible change to a drawing."""
    small = io.BytesIO()
    picture = Image.open(png).convert("RGB").quantize(128, dither=Image.Dither.NONE)
    picture.save(small, "PNG", optimize=True)
    return small.getvalue()

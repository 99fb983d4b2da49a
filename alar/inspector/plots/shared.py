"""What several of the inspector's pictures need: text that looks the same on every machine, numbers
as coloured cells, boxes per latent step."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import pandas as pd
from jaxtyping import Float
from matplotlib import font_manager

from alar.figures.style import BLUE

MONO = "DejaVu Sans Mono"  # comes with matplotlib, so every machine has it


@functools.cache
def _glyphs() -> frozenset[int]:
    # Code points that the font can draw.
    return frozenset(font_manager.get_font(font_manager.findfont(MONO)).get_charmap())


def drawable(text: str) -> str:
    """The text with a box for each character that matplotlib's own font lacks.

    Otherwise matplotlib would take another font, which differs from machine to machine.
    """
    return "".join(c if ord(c) in _glyphs() or c == "\n" else "□" for c in text)


def put_text(axes, x: float, y: float, text: str, **style) -> None:
    """Draw text from outside, in which `$` does not begin a formula."""
    axes.text(x, y, drawable(text), parse_math=False, **style)


def cells(
    axes, matrix: Float[np.ndarray, "rows columns"], labels: np.ndarray, reach: float, **image
):
    """A matrix as coloured cells from −reach to reach, each with its label in readable ink.

    A NaN stays empty. `image` goes to matplotlib's `imshow` and may choose other colours; `vmin=0`
    stands for a sequential map with a dark low end.
    """
    image = {"cmap": "RdBu_r", "vmin": -reach, "vmax": reach} | image
    drawn = axes.imshow(matrix, **image)
    for (row, column), value in np.ndenumerate(matrix):
        if np.isnan(value):
            continue
        # Both ends of a diverging map are dark, but only the low end of a sequential one.
        dark = value < 0.5 * reach if image["vmin"] == 0 else abs(value) > 0.6 * reach
        ink = "white" if dark else "black"
        middle = {"ha": "center", "va": "center", "fontsize": 6}
        put_text(axes, column, row, labels[row, column], color=ink, **middle)
    axes.grid(False)
    return drawn


def boxes(axes, table: pd.DataFrame, column: str, by: str) -> Sequence:
    """Draw the quartiles of a column for each value of `by`; returns those values."""
    places = sorted(set(table[by]))
    groups = [table.loc[table[by] == place, column] for place in places]  # one series per box
    median = {"color": BLUE}
    axes.boxplot(groups, positions=places, widths=0.5, showfliers=False, medianprops=median)
    return places

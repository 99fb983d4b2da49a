"""Trajectories as figures: time line, tokens coloured by origin, one question under several
checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from alar.figures.style import GREY, PAGE, footnote, new_figure, styled
from alar.inspector.plots.shared import MONO, drawable, put_text
from alar.inspector.tokens import (
    ORIGIN_COLOURS,
    ORIGIN_NAMES,
    Piece,
    one_line,
    pieces,
    stretches,
    turn_action,
)
from alar.records import Trajectory
from alar.rollout.codec import Codec

COLUMNS = 128  # characters on a line of tokens; they fit on a page at the font size of `_tokens`


@styled
def draw_trajectory(
    shown: Trajectory, codec: Codec, *, p_latent: Sequence[float] | None = None
) -> tuple[Figure, pd.DataFrame]:
    """The time line of one trajectory above its tokens, and a table of the time line's stretches.

    `p_latent` is p(latent | state) of every turn, from `alar.rollout.modes.latent_probabilities`.
    """
    lines = _wrapped(pieces(shown, codec))  # the height depends on their number
    height = 0.115 * len(lines)  # inches
    figure = new_figure(PAGE, 1.0 + height)
    line, text = figure.subplots(2, 1, height_ratios=[0.55, height])
    _bar(line, shown, p_latent)
    mark = "correct" if shown.correct else f"wrong, expected {' | '.join(shown.question.answers)}"
    title = one_line(f"{shown.question.text} → {shown.prediction} ({mark})", 120)
    line.set_title(drawable(title), parse_math=False)  # a `$` in a question is no formula
    _tokens(text, lines)
    handles = [
        Patch(facecolor=back, edgecolor=GREY, linewidth=0.4, label=ORIGIN_NAMES[origin])
        for origin, (back, _) in ORIGIN_COLOURS.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return figure, _stretch_table(shown, p_latent)


@styled
def draw_comparison(
    systems: Mapping[str, Trajectory], p_latent: Mapping[str, Sequence[float]] | None = None
) -> tuple[Figure, pd.DataFrame]:
    """One question as several systems answered it: one time line per system, on one scale.

    `systems` and `p_latent` map the name of a system to its trajectory and to p(latent | state) of
    every turn.
    """
    figure = new_figure(PAGE, 0.5 + 0.8 * len(systems))
    grid = figure.subplots(len(systems), 1, sharex=True, squeeze=False)[:, 0]
    tables = []
    for axes, (name, shown) in zip(grid, systems.items(), strict=True):
        scores = (p_latent or {}).get(name)
        _bar(axes, shown, scores)
        title = f"{name}: {shown.prediction} ({'correct' if shown.correct else 'wrong'})"
        axes.set_title(drawable(one_line(title, 110)), parse_math=False)
        tables.append(_stretch_table(shown, scores).assign(system=name))
    # `_bar` fitted each axis to its own trajectory; the longest one sets the common scale.
    grid[0].set_xlim(0, max(len(shown.ids) for shown in systems.values()))
    grid[-1].set_xlabel("Token")
    question = one_line(shown.question.text, 130)
    footnote(figure, drawable(question).replace("$", r"\$"))
    return figure, pd.concat(tables, ignore_index=True)


def _stretch_table(shown: Trajectory, p_latent: Sequence[float] | None) -> pd.DataFrame:
    """One row per prompt, turn or observation. `turn` counts from 1; it is 0 outside turns."""
    rows = []
    for stretch in stretches(shown):
        chance, action = float("nan"), ""
        if stretch.turn:
            turn = shown.turns[stretch.turn - 1]
            action = turn_action(turn) if turn.action else ""
            if p_latent is not None:
                chance = p_latent[stretch.turn - 1]
        rows.append(
            {
                "question_id": shown.question.id,
                "start": stretch.start,
                "tokens": len(stretch),
                "kind": stretch.kind,
                "turn": stretch.turn,
                "p_latent": chance,
                "action": action,
            }
        )
    return pd.DataFrame(rows)


def _bar(axes, shown: Trajectory, p_latent: Sequence[float] | None) -> None:
    """Draw the stretches side by side, with the action of every turn underneath.

    A stretch has a label where there is room.
    """
    axes.set(ylim=(-0.1, 1), yticks=[], xlim=(0, len(shown.ids)))  # x in tokens
    axes.grid(False)
    axes.spines["left"].set_visible(False)
    for stretch in stretches(shown):
        back, ink = stretch.colours
        look = {"facecolor": back, "edgecolor": "white", "linewidth": 0.8}
        axes.add_patch(Rectangle((stretch.start, 0.42), len(stretch), 0.5, **look))
        # A character of a label takes about 0.7 % of the width.
        if len(stretch) > 0.007 * len(stretch.label) * len(shown.ids):
            middle = stretch.start + len(stretch) / 2
            label = {"ha": "center", "va": "center", "fontsize": 5.8, "color": ink}
            axes.text(middle, 0.67, stretch.label, **label)
        if stretch.turn:
            said = one_line(turn_action(shown.turns[stretch.turn - 1]), 34)
            if p_latent is not None:
                said = f"p(latent) {p_latent[stretch.turn - 1]:.2f}\n{said}"
            put_text(axes, stretch.start, 0.37, said, va="top", fontsize=5, color=GREY)


def _tokens(axes, lines: list[list[tuple[Piece, str]]]) -> None:
    axes.set(xlim=(0, COLUMNS), ylim=(len(lines), 0))  # x in characters, y in lines from the top
    axes.axis("off")
    font = {"family": MONO, "fontsize": 4.9, "ha": "center", "va": "center"}
    for row, line in enumerate(lines):
        column = 0  # where the next piece begins
        for piece, text in line:
            back, ink = ORIGIN_COLOURS[piece.origin]
            look = {"facecolor": back, "edgecolor": "white", "linewidth": 0.5}
            axes.add_patch(Rectangle((column, row + 0.04), len(text), 0.92, **look))
            put_text(axes, column + len(text) / 2, row + 0.5, text, color=ink, **font)
            column += len(text)


def _wrapped(shown: list[Piece]) -> list[list[tuple[Piece, str]]]:
    """Lines of (piece, text to draw), each at most COLUMNS characters long.

    A line break in the text ends a line too.
    """
    lines: list[list[tuple[Piece, str]]] = [[]]
    room = COLUMNS  # characters left on the last line
    for piece in shown:
        text = drawable(piece.text.replace("\n", "↵").replace("\t", " "))[:COLUMNS]
        if len(text) > room:
            lines.append([])
            room = COLUMNS
        lines[-1].append((piece, text))
        room -= len(text)
        # A line of up to 8 characters goes on, since otherwise every tag would take its own line.
        if piece.text.endswith("\n") and room < COLUMNS - 8:
            room = 0
    return [line for line in lines if line]

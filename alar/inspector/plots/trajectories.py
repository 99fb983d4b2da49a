"""Trajectories as figures: time line, tokens coloured by origin, and the same question under
several checkpoints."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib import font_manager
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from alar.figures.style import BLACK, GREY, PAGE, footnote, new_figure, styled
from alar.inspector.fragments import ORIGIN_COLOURS, ORIGIN_NAMES, STRETCH_COLOURS
from alar.inspector.tokens import Piece, pieces, shortened, timeline
from alar.records import Trajectory
from alar.rollout.codec import Codec

COLUMNS = 128  # characters on a line of tokens
MONO = "DejaVu Sans Mono"


@styled
def trajectory(
    shown: Trajectory, codec: Codec, *, p_latent: Sequence[float] | None = None
) -> tuple[Figure, pd.DataFrame]:
    """The time line of one trajectory above its tokens, and a table of the time line's stretches.

    `p_latent` is p(latent | state) of every turn, from `alar.rollout.modes.latent_probabilities`.
    """
    lines = _wrapped(pieces(shown, codec))
    figure = new_figure(PAGE, 1.0 + 0.115 * len(lines))
    line, text = figure.subplots(2, 1, height_ratios=[0.55, 0.115 * len(lines)])
    _bar(line, shown, p_latent)
    mark = "correct" if shown.correct else f"wrong, expected {' | '.join(shown.question.answers)}"
    line.set_title(
        drawable(shortened(f"{shown.question.text} → {shown.prediction} ({mark})", 120)),
        parse_math=False,
    )
    _tokens(text, lines)
    handles = [
        Patch(facecolor=back, edgecolor=GREY, linewidth=0.4, label=ORIGIN_NAMES[origin])
        for origin, (back, _) in ORIGIN_COLOURS.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return figure, stretches(shown, p_latent)


@styled
def comparison(
    systems: Mapping[str, Trajectory], p_latent: Mapping[str, Sequence[float]] | None = None
):
    """One question as several systems answered it: a time line each, on a common scale."""
    figure = new_figure(PAGE, 0.5 + 0.8 * len(systems))
    grid = figure.subplots(len(systems), 1, sharex=True, squeeze=False)[:, 0]
    tables = []
    for axes, (name, shown) in zip(grid, systems.items(), strict=True):
        scores = (p_latent or {}).get(name)
        _bar(axes, shown, scores)
        title = f"{name}: {shown.prediction} ({'correct' if shown.correct else 'wrong'})"
        axes.set_title(drawable(shortened(title, 110)), parse_math=False)
        tables.append(stretches(shown, scores).assign(system=name))
    grid[0].set_xlim(0, max(len(shown.ids) for shown in systems.values()))
    grid[-1].set_xlabel("Token")
    question = next(iter(systems.values())).question.text
    footnote(figure, drawable(shortened(question, 130)).replace("$", r"\$"))
    return figure, pd.concat(tables, ignore_index=True)


def stretches(shown: Trajectory, p_latent: Sequence[float] | None = None) -> pd.DataFrame:
    """The time line as a table: one row per prompt, turn or observation."""
    rows = []
    for stretch in timeline(shown):
        turn = shown.turns[stretch.turn] if stretch.turn >= 0 else None
        rows.append(
            {
                "question_id": shown.question.id,
                "start": stretch.start,
                "tokens": stretch.end - stretch.start,
                "kind": stretch.kind,
                "turn": stretch.turn + 1,
                "p_latent": (
                    p_latent[stretch.turn] if turn and p_latent is not None else float("nan")
                ),
                "action": f"{turn.action}: {turn.argument}" if turn and turn.action else "",
            }
        )
    return pd.DataFrame(rows)


def _bar(axes, shown: Trajectory, p_latent: Sequence[float] | None) -> None:
    """Stretches side by side, labelled where there is room, with the action of every turn
    underneath."""
    axes.set(ylim=(-0.1, 1), yticks=[], xlim=(0, len(shown.ids)))
    axes.grid(False)
    axes.spines["left"].set_visible(False)
    for stretch in timeline(shown):
        length = stretch.end - stretch.start
        colour = STRETCH_COLOURS.get(stretch.kind, GREY)
        axes.add_patch(
            Rectangle(
                (stretch.start, 0.42),
                length,
                0.5,
                facecolor=colour,
                edgecolor="white",
                linewidth=0.8,
            )
        )
        label, ink = (
            (stretch.kind, BLACK)
            if stretch.turn < 0
            else (f"{stretch.turn + 1} {stretch.kind}", "white")
        )
        if length > 0.007 * len(label) * len(shown.ids):
            axes.text(
                stretch.start + length / 2,
                0.67,
                label,
                ha="center",
                va="center",
                fontsize=5.8,
                color=ink,
            )
        if stretch.turn >= 0:
            turn = shown.turns[stretch.turn]
            said = f"{turn.action or 'no action'}: {turn.argument}" if turn.action else "no action"
            chance = "" if p_latent is None else f"p(latent) {p_latent[stretch.turn]:.2f}\n"
            said = chance + shortened(said, 34)
            axes.text(
                stretch.start,
                0.37,
                drawable(said),
                va="top",
                fontsize=5,
                color=GREY,
                parse_math=False,
            )


def _tokens(axes, lines: list[list[tuple[Piece, str]]]) -> None:
    axes.set(xlim=(0, COLUMNS), ylim=(len(lines), 0))
    axes.axis("off")
    for row, line in enumerate(lines):
        column = 0
        for piece, text in line:
            back, ink = ORIGIN_COLOURS[piece.origin]
            axes.add_patch(
                Rectangle(
                    (column, row + 0.04),
                    len(text),
                    0.92,
                    facecolor=back,
                    edgecolor="white",
                    linewidth=0.5,
                )
            )
            axes.text(
                column + len(text) / 2,
                row + 0.5,
                text,
                family=MONO,
                fontsize=4.9,
                color=ink,
                ha="center",
                va="center",
                parse_math=False,
            )
            column += len(text)


def _wrapped(shown: list[Piece]) -> list[list[tuple[Piece, str]]]:
    """Lines of (piece, text to draw) of at most COLUMNS characters; a line break in the text also
    ends a line."""
    lines: list[list[tuple[Piece, str]]] = [[]]
    room = COLUMNS
    for piece in shown:
        text = drawable(piece.text.replace("\n", "↵").replace("\t", " "))[:COLUMNS]
        if len(text) > room:
            lines.append([])
            room = COLUMNS
        lines[-1].append((piece, text))
        room -= len(text)
        if piece.text.endswith("\n") and room < COLUMNS - 8:
            room = 0
    return [line for line in lines if line]


@functools.cache
def _glyphs() -> frozenset[int]:
    return frozenset(font_manager.get_font(font_manager.findfont(MONO)).get_charmap())


def drawable(text: str) -> str:
    """The text with characters that matplotlib's own fonts lack as boxes, so that no machine draws
    something else."""
    return "".join(c if ord(c) in _glyphs() or c == "\n" else "□" for c in text)

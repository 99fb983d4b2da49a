"""Pieces of HTML that show a trajectory: legend, time line, tokens coloured by origin, turns.

Widgets and the report are made of these pieces. Text from a question, a passage or a model is
escaped here, and nothing refers to the network, so a fragment is safe on any page.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from itertools import groupby

from alar.figures.style import MODE_COLOURS, MODE_NAMES
from alar.inspector.tokens import (
    ORIGIN_COLOURS,
    ORIGIN_NAMES,
    one_line,
    pieces,
    stretches,
    turn_action,
)
from alar.records import Trajectory
from alar.rollout.codec import Codec

# Every rule begins with .alar, so it leaves the rest of a notebook page alone.
STYLE = """\
.alar{font:14px/1.5 system-ui,sans-serif;color:#1a1a1a}
.alar .line{display:flex;height:22px;border-radius:3px;overflow:hidden;font-size:11px}
.alar .line span{overflow:hidden;white-space:nowrap;padding:2px 4px;min-width:3px;
box-sizing:border-box}
.alar .tokens{font:12px/1.75 ui-monospace,monospace;white-space:pre-wrap;overflow-wrap:anywhere}
.alar .tokens i{font-style:normal;box-shadow:inset -1px 0 rgba(0,0,0,.13)}
.alar table{border-collapse:collapse;font-size:12px}
.alar td{max-width:44em}
.alar td,.alar th{padding:1px 8px 1px 0;text-align:left;vertical-align:top;
border-bottom:1px solid #eee;overflow-wrap:anywhere}
.alar .key span{padding:0 6px;margin-right:6px;border-radius:2px;font-size:11px}
.alar .bar{display:inline-block;height:8px;background:#56B4E9}
.alar .yes{color:#00674b}
.alar .no{color:#a03c00}
.alar small{color:#666}
""" + "".join(  # one class per origin: o0 for PROMPT, o1 for SAMPLED, …
    f".alar .o{int(origin)}{{background:{back};color:{ink}}}\n"
    for origin, (back, ink) in ORIGIN_COLOURS.items()
)


def boxed(*parts: str) -> str:
    """Fragments with the shared style, for a widget. A page has the style in its head instead."""
    return f'<style>{STYLE}</style><div class="alar">{"".join(parts)}</div>'


def escaped(text: object) -> str:
    return html.escape(str(text), quote=True)


def legend_html() -> str:
    """What the colours of origins and of modes mean."""
    origins = [
        f'<span class="o{int(origin)}">{name}</span>' for origin, name in ORIGIN_NAMES.items()
    ]
    modes = [
        f'<span style="background:{colour};color:#fff">{MODE_NAMES[mode]}</span>'
        for mode, colour in MODE_COLOURS.items()
    ]
    return f'<p class="key">{"".join(origins)}</p><p class="key">{"".join(modes)}</p>'


def timeline_html(trajectory: Trajectory) -> str:
    """A bar with one stretch per prompt, turn and observation, coloured by mode.

    A stretch is as wide as its number of tokens.
    """
    cells = []
    for stretch in stretches(trajectory):
        label, (back, ink) = escaped(stretch.label), stretch.colours
        # `flex` shares the width of the bar in proportion to the tokens.
        style = f"flex:{len(stretch)};background:{back};color:{ink}"
        cells.append(f'<span title="{label}: {len(stretch)} tokens" style="{style}">{label}</span>')
    return f'<div class="line">{"".join(cells)}</div>'


def tokens_html(trajectory: Trajectory, codec: Codec, span: tuple[int, int] | None = None) -> str:
    """The text of a trajectory, or of its tokens [start, end): one mark per piece, one colour per
    origin."""
    runs = []  # neighbours of one origin share a span, which keeps a report small
    for origin, run in groupby(pieces(trajectory, codec, span), key=lambda piece: piece.origin):
        marks = "".join(f"<i>{escaped(piece.text)}</i>" for piece in run)
        runs.append(f'<span class="o{int(origin)}">{marks}</span>')
    return f'<div class="tokens">{"".join(runs)}</div>'


def headline_html(trajectory: Trajectory) -> str:
    """Question, prediction and gold answer on one line."""
    question, answer = trajectory.question, "<small>no answer</small>"
    if trajectory.prediction is not None:
        answer = escaped(trajectory.prediction)
    mark, gold = '<b class="yes">✓</b>', ""
    if not trajectory.correct:
        mark = '<b class="no">✗</b>'
        gold = f" <small>gold: {escaped(' | '.join(question.answers))}</small>"
    kind = f" <small>({escaped(question.type)})</small>" if question.type else ""
    return f"{mark} {escaped(one_line(question.text, 200))}{kind} → {answer}{gold}"


def turns_html(trajectory: Trajectory, p_latent: Sequence[float] | None = None) -> str:
    """One row per turn: mode, p(latent | state) where known, action, tokens, problem, retrieved
    titles."""
    rows = []
    for number, turn in enumerate(trajectory.turns):  # from 0, shown from 1
        mode = turn.mode + (" (forced)" if turn.forced_mode else "")
        chance = "" if p_latent is None else f"{p_latent[number]:.2f}"
        row = (number + 1, mode, chance, turn_action(turn), turn.end - turn.start, turn.problem)
        rows.append((*row, " · ".join(turn.titles)))
    head = ("turn", "mode", "p(latent)", "action", "tokens", "problem", "retrieved")
    return table_html(head, rows)


def table_html(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A plain table. Every cell is escaped; a column without any content is left out."""
    # Turned into columns first, since a column is left out as a whole.
    columns = zip(head, *([str(cell) for cell in row] for row in rows))
    kept = [column for column in columns if any(column[1:])]
    lines = zip(*kept)
    marked = []
    for number, line in enumerate(lines):
        tag = "td" if number else "th"  # line 0 is the head
        marked.append("".join(f"<{tag}>{escaped(cell)}</{tag}>" for cell in line))
    return f"<table>{''.join(f'<tr>{cells}</tr>' for cells in marked)}</table>"

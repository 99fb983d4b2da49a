"""Pieces of HTML that show a trajectory: legend, time line, tokens coloured by origin, turns.

Widgets and the report are made of the same pieces. Everything that comes from a question, a passage
or a model is escaped here, and nothing refers to the network, so a fragment is safe wherever it is
put.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from alar.figures.style import GREY, LIGHT, MODE_COLOURS, MODE_NAMES
from alar.inspector.tokens import pieces, shortened
from alar.inspector.tokens import timeline as stretches
from alar.records import Origin, Trajectory
from alar.rollout.codec import Codec

ORIGIN_NAMES = {
    Origin.PROMPT: "prompt",
    Origin.SAMPLED: "sampled by the policy",
    Origin.FORCED: "forced",
    Origin.LATENT: "latent thought",
    Origin.OBSERVATION: "observation",
}
ORIGIN_CLASSES = {origin: f"o{int(origin)}" for origin in Origin}
ORIGIN_COLOURS = {  # background and text; sampled text is plain, so that a long page stays quiet
    Origin.PROMPT: ("#EEEEEE", "#555555"),
    Origin.SAMPLED: ("#FFFFFF", "#111111"),
    Origin.FORCED: ("#FCE3CF", "#7A3600"),
    Origin.LATENT: ("#0072B2", "#FFFFFF"),
    Origin.OBSERVATION: ("#E6F4EF", "#0B4D3A"),
}
STRETCH_COLOURS = {"prompt": LIGHT, "observation": "#A9D8C6"} | MODE_COLOURS

STYLE = (
    ".alar{font:14px/1.5 system-ui,sans-serif;color:#1a1a1a}.alar"
    " .line{display:flex;height:22px;border-radius:3px;overflow:hidden;font-size:11px}.alar .line"
    " span{overflow:hidden;white-space:nowrap;padding:2px"
    " 4px;min-width:3px;box-sizing:border-box}.alar .tokens{font:12px/1.75"
    " ui-monospace,monospace;white-space:pre-wrap;overflow-wrap:anywhere}.alar .tokens"
    " i{font-style:normal;box-shadow:inset -1px 0 rgba(0,0,0,.13)}.alar"
    " table{border-collapse:collapse;font-size:12px}.alar td{max-width:44em}.alar td,.alar"
    " th{padding:1px 8px 1px 0;text-align:left;vertical-align:top;border-bottom:1px solid"
    " #eee;overflow-wrap:anywhere}.alar .key span{padding:0"
    " 6px;margin-right:6px;border-radius:2px;font-size:11px}.alar"
    " .bar{display:inline-block;height:8px;background:#56B4E9}.alar .yes{color:#00674b}.alar"
    " .no{color:#a03c00}.alar small{color:#666}"
    + "".join(
        f".alar .{ORIGIN_CLASSES[origin]}{{background:{back};color:{ink}}}"
        for origin, (back, ink) in ORIGIN_COLOURS.items()
    )
)


def boxed(*parts: str) -> str:
    """Fragments under the shared style, for a widget; a page states the style once in its head."""
    return f'<style>{STYLE}</style><div class="alar">{"".join(parts)}</div>'


def escaped(text: object) -> str:
    return html.escape(str(text), quote=True)


def legend() -> str:
    """The colours of origins and of modes."""
    origins = "".join(
        f'<span class="{ORIGIN_CLASSES[origin]}">{name}</span>'
        for origin, name in ORIGIN_NAMES.items()
    )
    modes = "".join(
        f'<span style="background:{colour};color:#fff">{MODE_NAMES[mode]}</span>'
        for mode, colour in MODE_COLOURS.items()
    )
    return f'<p class="key">{origins}</p><p class="key">{modes}</p>'


def timeline(trajectory: Trajectory) -> str:
    """A bar whose stretches are as wide as they have tokens, coloured by mode."""
    cells = []
    for stretch in stretches(trajectory):
        length = stretch.end - stretch.start
        label = stretch.kind if stretch.turn < 0 else f"{stretch.turn + 1} · {stretch.kind}"
        ink = "#333" if stretch.turn < 0 else "#fff"
        cells.append(
            f'<span title="{escaped(label)}: {length} tokens" style="flex:{length};'
            f'background:{STRETCH_COLOURS.get(stretch.kind, GREY)};color:{ink}">{escaped(label)}</span>'
        )
    return f'<div class="line">{"".join(cells)}</div>'


def tokens(trajectory: Trajectory, codec: Codec, span: tuple[int, int] | None = None) -> str:
    """The text of a trajectory, or of its tokens [start, end): one mark per piece, one colour per
    origin."""
    runs: list[str] = []
    origin = None
    for piece in pieces(trajectory, codec, span):
        if piece.origin != origin:
            runs.append(f'{"</span>" if runs else ""}<span class="{ORIGIN_CLASSES[piece.origin]}">')
            origin = piece.origin
        runs.append(f"<i>{escaped(piece.text)}</i>")
    return f'<div class="tokens">{"".join(runs)}{"</span>" if runs else ""}</div>'


def headline(trajectory: Trajectory) -> str:
    """Question, prediction and gold answer on one line."""
    question = trajectory.question
    mark = '<b class="yes">✓</b>' if trajectory.correct else '<b class="no">✗</b>'
    gold = (
        ""
        if trajectory.correct
        else f" <small>gold: {escaped(' | '.join(question.answers))}</small>"
    )
    kind = f" <small>({escaped(question.type)})</small>" if question.type else ""
    answer = (
        escaped(trajectory.prediction)
        if trajectory.prediction is not None
        else "<small>no answer</small>"
    )
    return f"{mark} {escaped(shortened(question.text, 200))}{kind} → {answer}{gold}"


def turns(trajectory: Trajectory, p_latent: Sequence[float] | None = None) -> str:
    """One row per turn: mode, p(latent | state) where known, action, tokens, problem, retrieved
    titles."""
    rows = []
    for number, turn in enumerate(trajectory.turns):
        mode = turn.mode + (" (forced)" if turn.forced_mode else "")
        action = f"{turn.action}: {turn.argument}" if turn.action else "none"
        chance = "" if p_latent is None else f"{p_latent[number]:.2f}"
        rows.append(
            (
                number + 1,
                mode,
                chance,
                action,
                turn.end - turn.start,
                turn.problem,
                " · ".join(turn.titles),
            )
        )
    head = ("turn", "mode", "p(latent)", "action", "tokens", "problem", "retrieved")
    return table(head, rows)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A plain table; every cell is escaped, an empty column is left out."""
    rows = [[str(cell) for cell in row] for row in rows]
    kept = [index for index in range(len(head)) if any(row[index] for row in rows)]
    top = "".join(f"<th>{escaped(head[index])}</th>" for index in kept)
    body = "".join(
        "<tr>" + "".join(f"<td>{escaped(row[index])}</td>" for index in kept) + "</tr>"
        for row in rows
    )
    return f"<table><tr>{top}</tr>{body}</table>"

"""The method in one drawing: a turn with its two modes, the latent recurrence, and the training
stages.

After the ALAR paper (arXiv 2606.02871): one turn is one reasoning block and one action; a latent
block feeds K projected hidden states back as input embeddings; training goes from explicit teacher
trajectories through AASD and mode warm-up to AR-GRPO.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from alar.figures.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PAGE,
    PALE,
    PURPLE,
    SKY,
    VERMILLION,
    footnote,
    new_figure,
    styled,
)


@styled
def method(*, num_latent: int = 4) -> tuple[Figure, pd.DataFrame]:
    """The schematic and a table of its parts (panel, element, meaning). `num_latent` is K."""
    figure = new_figure(PAGE, 3.9)
    turn, recurrence, training = figure.subplots(3, 1, height_ratios=[1.35, 0.85, 0.95])
    parts: list[tuple[str, str, str]] = []
    for axes, title, draw in (
        (turn, "a   One turn: the policy chooses how to reason, then acts", _turn),
        (
            recurrence,
            "b   Inside a latent block: hidden states become the next inputs",
            _recurrence,
        ),
        (training, "c   Training", _training),
    ):
        axes.set(xlim=(-0.3, 100.3), ylim=(0, 20), title=title)
        axes.axis("off")
        draw(_Board(axes, title[0], parts), num_latent)
    footnote(figure, "method of arXiv 2606.02871, drawn for this study · not a measurement")
    return figure, pd.DataFrame(parts, columns=["panel", "element", "meaning"])


class _Board:
    """Boxes and arrows on axes of 100 × 20 units; notes every box for the table."""

    def __init__(self, axes, panel: str, parts: list[tuple[str, str, str]]):
        self.axes, self.panel, self.parts = axes, panel, parts

    def box(
        self,
        x,
        y,
        width,
        height,
        text,
        meaning,
        *,
        title="",
        colour=GREY,
        fill="white",
        size=6.6,
        mono=False,
    ):
        """A rounded box centred on (x, y), with an optional bold first line."""
        self.axes.add_patch(
            FancyBboxPatch(
                (x - width / 2, y - height / 2),
                width,
                height,
                boxstyle="round,pad=0,rounding_size=0.9",
                mutation_aspect=0.55,
                facecolor=fill,
                edgecolor=colour,
                linewidth=0.9,
                clip_on=False,
            )
        )
        font = {"family": "DejaVu Sans Mono"} if mono else {}
        if title:
            self.note(
                x, y + height / 2 - 3.9, title, colour=BLACK, size=7, weight="bold", va="baseline"
            )
        self.note(x, y - 1.5 if title else y, text, colour=BLACK, size=size, **font)
        self.parts.append((self.panel, title or " ".join(text.replace("$", "").split()), meaning))

    def arrow(self, start, end, *, colour=GREY):
        self.axes.add_patch(
            FancyArrowPatch(
                start,
                end,
                arrowstyle="-|>",
                mutation_scale=6.5,
                color=colour,
                linewidth=0.9,
                shrinkA=0,
                shrinkB=0,
            )
        )

    def note(self, x, y, text, *, colour=GREY, size=6.2, **font):
        style = {"ha": "center", "va": "center", "linespacing": 1.25, "clip_on": False} | font
        self.axes.text(x, y, text, fontsize=size, color=colour, **style)


def _turn(board: _Board, num_latent: int) -> None:
    bullets = "•" * num_latent
    board.box(8, 11.5, 15, 8, "question and\npast turns", "what the policy reads", fill=PALE[GREY])
    board.box(27, 11.5, 12, 8, "policy", "the language model with the projector f", colour=BLACK)
    board.box(
        54,
        17,
        30,
        6,
        f"<latent>{bullets}</latent>",
        "latent mode: K continuous thoughts, no text",
        colour=BLUE,
        fill=PALE[BLUE],
        mono=True,
    )
    board.box(
        54,
        6,
        30,
        6,
        "<think>text</think>",
        "explicit mode: a chain of thought",
        colour=VERMILLION,
        fill=PALE[VERMILLION],
        mono=True,
    )
    board.box(
        82,
        11.5,
        15,
        8,
        "action\nsearch or answer",
        "the same in both modes; it anchors AASD",
        colour=BLACK,
    )
    board.arrow((15.5, 11.5), (21, 11.5))
    board.arrow((33, 13), (39, 17), colour=BLUE)
    board.arrow((33, 10), (39, 6), colour=VERMILLION)
    board.arrow((69, 17), (74.5, 13), colour=BLUE)
    board.arrow((69, 6), (74.5, 10), colour=VERMILLION)
    board.note(36, 11.5, "mode")
    board.note(54, 11.5, "routine turns  ↑        ↓  hard turns")
    board.arrow((89.5, 11.5), (94, 11.5))
    board.note(97, 11.5, "answer", colour=BLACK)
    board.axes.plot([82, 82, 8], [7.5, -0.5, -0.5], color=GREY, linewidth=0.9, clip_on=False)
    board.arrow((8, -0.5), (8, 7.5))
    board.note(25, 1.2, "observation, then the next turn")


def _recurrence(board: _Board, num_latent: int) -> None:
    """A row of boxes, left to right; between them f leads from h to z, the model from z to the next
    h."""
    pairs = (
        [("0", "1"), ("1", "2"), None, ("K-1", "K")]
        if num_latent > 3
        else [(str(k), str(k + 1)) for k in range(num_latent)]
    )
    row = [("<latent>", 11.5, BLUE, "opened by the policy", "model")]
    for pair in pairs:
        if pair is None:
            row.append(("· · ·", 5, None, "", "model"))
            continue
        before, after = pair
        row.append(
            (
                f"$h_{{{before}}}$",
                7,
                SKY,
                f"last hidden state {before}, after the final norm",
                "$f$",
            )
        )
        row.append(
            (f"$z_{{{after}}}$", 6, BLUE, f"input embedding of latent position {after}", "model")
        )
    row.append(("</latent>", 11.5, GREY, "forced after the last z", ""))
    gap = (100 - sum(width for _, width, *_ in row)) / (len(row) - 1)
    x, y = 0.0, 11.5
    for place, (text, width, colour, meaning, leads) in enumerate(row):
        mono = text.endswith("latent>")
        if colour is None:
            board.note(x + width / 2, y, text, size=9)
        else:
            fill = PALE.get(colour, "white")
            board.box(
                x + width / 2, y, width, 6, text, meaning, colour=colour, fill=fill, mono=mono
            )
        x += width
        if place < len(row) - 1:
            board.arrow((x + 0.3, y), (x + gap - 0.3, y))
            ahead = row[place + 1]
            board.note(
                x + gap / 2,
                y + (1.9 if leads == "$f$" else 1.7),
                "" if ahead[0] == "</latent>" else leads,
                colour=BLACK if leads == "$f$" else GREY,
                size=7 if leads == "$f$" else 5.2,
            )
            x += gap
    board.note(
        50,
        3.5,
        r"$z_k = f(h_{k-1})$,   $h_k$: last hidden state after the model has read $z_k$       "
        r"$f$: Dropout → Linear → GELU → Linear → LayerNorm       "
        f"$K$ = {num_latent}",
        colour=BLACK,
        size=6.6,
    )


def _training(board: _Board, num_latent: int) -> None:
    stages = [
        ("base", "explicit teacher;\nkeep the correct", GREY, "sampled trajectories that succeed"),
        (
            "AASD",
            "every CoT → latent block;\nloss on tags and actions",
            SKY,
            "stage 1: always latent",
        ),
        (
            "mode warm-up",
            "a fair coin per turn:\nlatent block or text",
            ORANGE,
            "both modes become fluent",
        ),
        (
            "AR-GRPO",
            "reward: success, latent\nshare, diversity, length",
            GREEN,
            "learns when to think",
        ),
        (
            "ALAR",
            "latent where it is enough,\ntext where it is needed",
            PURPLE,
            "the adaptive policy",
        ),
    ]
    for place, (name, text, colour, meaning) in enumerate(stages):
        x = 9 + 20.5 * place
        board.box(
            x, 11, 17.4, 11, text, meaning, title=name, colour=colour, fill=PALE[colour], size=5.9
        )
        if place:
            board.arrow((x - 11.6, 11), (x - 8.9, 11), colour=BLACK)

"""The method in one drawing: a turn with its two modes, the recurrence, the training stages.

It follows the ALAR paper (arXiv 2606.02871). One turn is one reasoning block and one action. A
latent block feeds K projected hidden states back as input embeddings. Training goes from explicit
teacher trajectories through AASD and mode warm-up to AR-GRPO.
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
    panels = {  # axes → (title, what draws on them)
        turn: ("a   One turn: the policy chooses how to reason, then acts", _turn),
        recurrence: (
            "b   Inside a latent block: hidden states become the next inputs",
            _recurrence,
        ),
        training: ("c   Training", _training),
    }
    for axes, (title, draw) in panels.items():
        # 0.3: the edges of the outer boxes show
        axes.set(xlim=(-0.3, 100.3), ylim=(0, 20), title=title)
        axes.axis("off")
        draw(_Board(axes, title[0], parts), num_latent)  # title[0] is the letter of the panel
    footnote(figure, "method of arXiv 2606.02871, drawn for this study · not a measurement")
    return figure, pd.DataFrame(parts, columns=["panel", "element", "meaning"])


class _Board:
    """Boxes and arrows on axes of 100 × 20 units. It notes every box for the table."""

    def __init__(self, axes, panel: str, parts: list[tuple[str, str, str]]):
        self.axes, self.panel, self.parts = axes, panel, parts  # `parts` is shared by the panels

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
        # below the title
        self.note(x, y - 1.5 if title else y, text, colour=BLACK, size=size, **font)
        # "$h_{0}$" → "h_{0}"
        self.parts.append((self.panel, title or " ".join(text.replace("$", "").split()), meaning))

    def arrow(self, start, end, *, colour=GREY):
        self.axes.add_patch(
            FancyArrowPatch(
                start,
                end,
                arrowstyle="-|>",
                mutation_scale=6.5,  # size of the head, in points
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
    bullets = "•" * num_latent  # one per latent position
    board.box(8, 11.5, 15, 8, "question and\npast turns", "what the policy reads", fill=PALE[GREY])
    board.box(27, 11.5, 12, 8, "policy", "the language model with the projector f", colour=BLACK)
    latent = {"colour": BLUE, "fill": PALE[BLUE], "mono": True}
    meaning = "latent mode: K continuous thoughts, no text"
    board.box(54, 17, 30, 6, f"<latent>{bullets}</latent>", meaning, **latent)
    explicit = {"colour": VERMILLION, "fill": PALE[VERMILLION], "mono": True}
    meaning = "explicit mode: a chain of thought"
    board.box(54, 6, 30, 6, "<think>text</think>", meaning, **explicit)
    meaning = "the same in both modes; it anchors AASD"
    board.box(82, 11.5, 15, 8, "action\nsearch or answer", meaning, colour=BLACK)
    board.arrow((15.5, 11.5), (21, 11.5))
    board.arrow((33, 13), (39, 17), colour=BLUE)
    board.arrow((33, 10), (39, 6), colour=VERMILLION)
    board.arrow((69, 17), (74.5, 13), colour=BLUE)
    board.arrow((69, 6), (74.5, 10), colour=VERMILLION)
    board.note(36, 11.5, "mode")
    board.note(54, 11.5, "routine turns  ↑        ↓  hard turns")
    board.arrow((89.5, 11.5), (94, 11.5))
    board.note(97, 11.5, "answer", colour=BLACK)
    # from the action back under the boxes
    board.axes.plot([82, 82, 8], [7.5, -0.5, -0.5], color=GREY, linewidth=0.9, clip_on=False)
    board.arrow((8, -0.5), (8, 7.5))
    board.note(25, 1.2, "observation, then the next turn")


def _recurrence(board: _Board, num_latent: int) -> None:
    """A row of boxes, left to right; f leads from h to z, the model from z to the next h."""
    pairs = [(str(k), str(k + 1)) for k in range(num_latent)]  # h_k gives z_{k+1}
    if num_latent > 3:
        pairs = [("0", "1"), ("1", "2"), None, ("K-1", "K")]  # None: the dots between
    # text, width, colour, meaning, what leads to the next box
    row = [("<latent>", 11.5, BLUE, "opened by the policy", "model")]
    for pair in pairs:
        if pair is None:
            row.append(("· · ·", 5, None, "", "model"))
            continue
        before, after = pair
        hidden = f"last hidden state {before}, after the final norm"
        row.append((f"$h_{{{before}}}$", 7, SKY, hidden, "$f$"))
        fed = f"input embedding of latent position {after}"
        row.append((f"$z_{{{after}}}$", 6, BLUE, fed, "model"))
    row.append(("</latent>", 11.5, GREY, "forced after the last z", ""))
    # what the boxes leave, shared equally
    gap = (100 - sum(width for _, width, *_ in row)) / (len(row) - 1)
    x, y = 0.0, 11.5  # left edge of the next box, middle of the row
    for place, (text, width, colour, meaning, leads) in enumerate(row):
        mono = text.endswith("latent>")
        if colour is None:
            board.note(x + width / 2, y, text, size=9)
        else:
            look = {"colour": colour, "fill": PALE.get(colour, "white"), "mono": mono}
            board.box(x + width / 2, y, width, 6, text, meaning, **look)
        x += width
        if place == len(row) - 1:
            break
        board.arrow((x + 0.3, y), (x + gap - 0.3, y))
        forced = row[place + 1][0] == "</latent>"  # the engine writes it; no model step leads there
        if leads == "$f$":
            board.note(x + gap / 2, y + 1.9, leads, colour=BLACK, size=7)
        elif not forced:
            board.note(x + gap / 2, y + 1.7, leads, size=5.2)
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
        ("base", "explicit teacher;\nkeep the correct", GREY),
        ("AASD", "every CoT → latent block;\nloss on tags and actions", SKY),
        ("mode warm-up", "a fair coin per turn:\nlatent block or text", ORANGE),
        ("AR-GRPO", "reward: success, latent\nshare, diversity, length", GREEN),
        ("ALAR", "latent where it is enough,\ntext where it is needed", PURPLE),
    ]
    meanings = (
        "sampled trajectories that succeed",
        "stage 1: always latent",
        "both modes become fluent",
        "learns when to think",
        "the adaptive policy",
    )
    for place, ((name, text, colour), meaning) in enumerate(zip(stages, meanings)):
        x = 9 + 20.5 * place  # five boxes of 17.4 and four spaces of 3.1
        look = {"title": name, "colour": colour, "fill": PALE[colour], "size": 5.9}
        board.box(x, 11, 17.4, 11, text, meaning, **look)
        if place:
            board.arrow((x - 11.6, 11), (x - 8.9, 11), colour=BLACK)

"""A trajectory as people read it: text of its tokens, stretches on a time line, actions.

Byte-level BPE may split one character over several tokens. So the unit of display is the *piece*:
the fewest consecutive tokens of one origin whose bytes are whole characters.
"""

from __future__ import annotations

from dataclasses import dataclass

from alar.figures.style import GREY, LIGHT, MODE_COLOURS, shortened
from alar.protocol import BULLET
from alar.records import Origin, Trajectory, TurnRecord
from alar.rollout.codec import Codec

ORIGIN_NAMES = {
    Origin.PROMPT: "prompt",
    Origin.SAMPLED: "sampled by the policy",
    Origin.FORCED: "forced",
    Origin.LATENT: "latent thought",
    Origin.OBSERVATION: "observation",
}
ORIGIN_COLOURS = {  # (background, text); sampled text is plain, so that a long page stays quiet
    Origin.PROMPT: ("#EEEEEE", "#555555"),
    Origin.SAMPLED: ("#FFFFFF", "#111111"),
    Origin.FORCED: ("#FCE3CF", "#7A3600"),
    Origin.LATENT: ("#0072B2", "#FFFFFF"),
    Origin.OBSERVATION: ("#E6F4EF", "#0B4D3A"),
}
# kind of a stretch → its background
_STRETCH_COLOURS = {"prompt": LIGHT, "observation": "#A9D8C6"} | MODE_COLOURS


@dataclass(frozen=True)
class Piece:
    """Tokens [start, end) of a trajectory and their text. A latent position is a bullet."""

    start: int
    end: int
    origin: Origin
    text: str


@dataclass(frozen=True)
class Stretch:
    """Tokens [start, end) on the time line.

    `kind` is "prompt", "observation", or the mode of a turn. `turn` counts from 1; it is 0 outside
    turns.
    """

    start: int
    end: int
    kind: str
    turn: int = 0

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def label(self) -> str:
        return f"{self.turn} · {self.kind}" if self.turn else self.kind

    @property
    def colours(self) -> tuple[str, str]:
        """Background and text, as hex codes or names."""
        return _STRETCH_COLOURS.get(self.kind, GREY), "white" if self.turn else "#333333"


def pieces(
    trajectory: Trajectory, codec: Codec, span: tuple[int, int] | None = None
) -> list[Piece]:
    """The pieces of a trajectory, or of its tokens [start, end), in order.

    Together they cover every token once.
    """
    begun, end = span or (0, len(trajectory.ids))
    found: list[Piece] = []
    waiting = b""  # bytes of tokens [begun, index] that are not yet in a piece
    for index in range(begun, end):
        origin = trajectory.origins[index]
        waiting += _bytes(trajectory.ids[index], codec)
        last = index + 1 == end or trajectory.origins[index + 1] != origin
        if last or _whole(waiting):
            # A character that the end of its origin or span cuts can only be shown as �.
            text = waiting.decode("utf-8", errors="replace")
            found.append(Piece(begun, index + 1, Origin(origin), text))
            waiting, begun = b"", index + 1
    return found


def stretches(trajectory: Trajectory) -> list[Stretch]:
    """The prompt, then each turn and the observation behind it, without gaps."""
    found, here, between = [], 0, "prompt"  # `here`: end of the last stretch; `between`: next kind
    for number, turn in enumerate(trajectory.turns, start=1):
        found.append(Stretch(here, turn.start, between))
        found.append(Stretch(turn.start, turn.end, turn.mode, number))
        here, between = turn.end, "observation"
    found.append(Stretch(here, len(trajectory.ids), between))
    return [stretch for stretch in found if len(stretch)]  # nothing may stand behind the last turn


def turn_action(turn: TurnRecord) -> str:
    """What the turn did, in the words of tables and labels."""
    return f"{turn.action}: {turn.argument}" if turn.action else "no action"


def one_line(text: str, width: int) -> str:
    """At most `width` characters on one line."""
    return shortened(" ".join(text.split()), width)


def visible(text: str) -> str:
    """A token's text with visible white space, for tables; ∅ for a token without text."""
    return text.replace("\n", "↵").replace(" ", "␣") or "∅"


def _bytes(token_id: int, codec: Codec) -> bytes:
    if token_id == codec.latent_token_id:
        return BULLET.encode()  # it has no text of its own
    table = codec.piece_bytes
    if token_id >= len(table):  # a spare row of the embedding table
        return f"[{token_id}]".encode()
    if table[token_id]:
        return table[token_id]
    # A special token has no bytes; its name is shown.
    return str(codec.tokenizer.convert_ids_to_tokens(token_id) or f"[{token_id}]").encode()


def _whole(data: bytes) -> bool:
    """Whether the bytes do not end in the middle of a character."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        # Any other error stays an error with more bytes, so waiting for them would be in vain.
        return error.reason != "unexpected end of data"
    return True

"""A trajectory as people read it: the text of its tokens, and its stretches on a time line.

Byte-level BPE may split one character over several tokens, so the unit of display is the piece: the
fewest consecutive tokens of one origin whose bytes are whole characters.
"""

from __future__ import annotations

from dataclasses import dataclass

from alar.protocol import BULLET
from alar.records import Origin, Trajectory
from alar.rollout.codec import Codec


@dataclass(frozen=True)
class Piece:
    """Tokens [start, end) of a trajectory and their text; latent positions are bullets."""

    start: int
    end: int
    origin: Origin
    text: str


@dataclass(frozen=True)
class Stretch:
    """Tokens [start, end) on the time line: `kind` is "prompt", "observation", or the mode of
    `turn`, counted from 0."""

    start: int
    end: int
    kind: str
    turn: int = -1


def pieces(
    trajectory: Trajectory, codec: Codec, span: tuple[int, int] | None = None
) -> list[Piece]:
    """The pieces of a trajectory or of its tokens [start, end), in order; together they cover every
    token once."""
    start, end = span or (0, len(trajectory.ids))
    found: list[Piece] = []
    waiting, begun = b"", start
    for index in range(start, end):
        origin = trajectory.origins[index]
        waiting += _bytes(trajectory.ids[index], codec)
        last = index + 1 == end or trajectory.origins[index + 1] != origin
        if last or _whole(waiting):
            found.append(
                Piece(begun, index + 1, Origin(origin), waiting.decode("utf-8", errors="replace"))
            )
            waiting, begun = b"", index + 1
    return found


def timeline(trajectory: Trajectory) -> list[Stretch]:
    """The prompt, then each turn and the observation behind it, without gaps."""
    found, here = [], 0
    for number, turn in enumerate(trajectory.turns):
        found.append(Stretch(here, turn.start, "observation" if number else "prompt"))
        found.append(Stretch(turn.start, turn.end, turn.mode, number))
        here = turn.end
    found.append(
        Stretch(here, len(trajectory.ids), "observation" if trajectory.turns else "prompt")
    )
    return [stretch for stretch in found if stretch.end > stretch.start]


def shortened(text: str, width: int) -> str:
    """At most `width` characters on one line."""
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 1] + "…"


def visible(text: str) -> str:
    """A token's text with its white space shown, as in tables; ∅ for a token without text."""
    return text.replace("\n", "↵").replace(" ", "␣") or "∅"


def _bytes(token_id: int, codec: Codec) -> bytes:
    if token_id == codec.latent_token_id:
        return BULLET.encode()
    table = codec.piece_bytes
    if token_id < len(table) and table[token_id]:
        return table[token_id]
    if token_id < len(table):
        return str(codec.tokenizer.convert_ids_to_tokens(token_id) or f"[{token_id}]").encode()
    return f"[{token_id}]".encode()


def _whole(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.reason != "unexpected end of data"
    return True

"""What a walk looks like as text: a reasoning block, then a few moves. The lake is the observation.

    \\n\\n<think>The way is right, down.</think>\\n\\n<action>right, down</action>

Tiles as in RAGEN: P the walker, G the goal, O a hole, _ ice, X the walker in a hole, * the walker
at the goal.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from alar import protocol
from alar.protocol import Trusted, Turn

MOVES = ("left", "down", "right", "up")  # gymnasium's actions 0 … 3
ACTION = "action"

INSTRUCTION = (
    "Reason inside <think> and </think> before every action. Walk from P to G over the ice _ and"
    " keep out of the holes O. Move inside <action> and </action> with left, down, right and up,"
    " {limit}; the lake comes back inside <information> and </information>."
)
_SEPARATOR = re.compile(r"[\s,;]+|\|\|")  # RAGEN writes || between moves


def parse_moves(text: str, limit: int) -> tuple[list[int], str]:
    """(moves, problem) of a text.

    The moves are gymnasium's numbers. They are [], with a problem, if any word is not a move or if
    there are not 1 to `limit` words. Never raises.
    """
    words = [word.lower() for word in _SEPARATOR.split(text) if word]
    for word in words:
        if word not in MOVES:
            return [], f"{word[:40]!r} is no move"  # the policy reads this: it must stay short
    if not words or len(words) > limit:
        return [], f"{len(words)} moves in one turn, expected 1 to {limit}"
    return [MOVES.index(word) for word in words], ""


def moves_text(moves: Sequence[int]) -> str:
    return ", ".join(MOVES[move] for move in moves)


class LakeForm(protocol.SearchForm):
    """A turn has 1 to `moves_per_turn` moves; any other action is malformed and moves nothing."""

    def __init__(self, moves_per_turn: int = 5):
        if moves_per_turn < 1:
            raise ValueError(f"moves_per_turn is {moves_per_turn}: expected at least one")
        self.moves_per_turn = moves_per_turn

    def prompt(self, question) -> Sequence[str]:
        limit = f"at most {self.moves_per_turn} moves a turn"
        if self.moves_per_turn == 1:
            limit = "one move a turn"
        opening, closing = Trusted("<|im_start|>"), Trusted("<|im_end|>\n<|im_start|>assistant\n")
        return opening, f"user\n{INSTRUCTION.format(limit=limit)}\n{question.text}\n", closing

    def invalid(self, problem: str) -> str:
        return f"\n\n<information>Nothing moved: {problem}.</information>\n\n"

    def parse(self, text: str) -> Turn:
        turn = protocol.parse_turn(text, (ACTION,))
        problem = parse_moves(turn.argument, self.moves_per_turn)[1] if turn.action else ""
        if problem:
            # Without an action, the loop answers with `invalid`. An earlier problem stays named.
            return replace(
                turn, action=None, argument="", well_formed=False, problem=turn.problem or problem
            )
        return turn


def lake_observation(lake: str, remark: str = "") -> str:
    remark = f"\n{remark}" if remark else ""
    return f"\n\n<information>{lake}{remark}</information>\n\n"

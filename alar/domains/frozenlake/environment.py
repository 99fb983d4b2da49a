"""The lake as an environment: it plays moves, and a trajectory that reaches the goal is right."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from alar import protocol
from alar.domains.frozenlake.lakes import Walk, drawing, walk
from alar.domains.frozenlake.protocol import ACTION, LakeForm, lake_observation, parse_moves
from alar.records import Observation, Question, Trajectory, TurnRecord


class FrozenLakeEnvironment:
    """A trajectory is over at the goal, in a hole, or after `max_moves` moves.

    No action of its own ends it. A turn makes at most `moves_per_turn` moves, so
    `rollout.max_turns` has to leave room for `max_moves`.
    """

    final = ()  # the lake ends a trajectory, not an action
    stop = (f"</{ACTION}>",)

    def __init__(self, *, moves_per_turn: int = 5, max_moves: int = 10):
        if max_moves < 1:
            raise ValueError(f"max_moves is {max_moves}: expected at least one")
        self.form = LakeForm(moves_per_turn)
        self.moves_per_turn, self.max_moves = moves_per_turn, max_moves

    def observe(self, steps: Sequence[tuple[Question, protocol.Turn]]) -> list[Observation]:
        # All turns are played anew each time, so the environment keeps no state between them.
        return [self._observe(question, [*turn.earlier, turn]) for question, turn in steps]

    def correct(self, trajectory: Trajectory) -> bool:
        return self.walk(trajectory.question, trajectory.turns).reached

    def walk(self, question: Question, turns: Iterable[protocol.Turn | TurnRecord]) -> Walk:
        """Where the moves of some turns lead; at most `max_moves` moves are played."""
        moves = []  # gymnasium's numbers 0 … 3
        for turn in turns:
            if turn.action:
                moves += parse_moves(turn.argument, self.moves_per_turn)[0]
        return walk(question, moves[: self.max_moves])

    def _observe(self, question: Question, turns: Sequence[protocol.Turn]) -> Observation:
        walked = self.walk(question, turns)
        remark = ""
        if walked.reached:
            remark = "The goal is reached."
        elif walked.fallen:
            remark = "The ice has a hole here."
        elif walked.played == self.max_moves:
            remark = "No moves are left."
        lake = drawing(json.loads(question.details)["rows"], walked.position)
        # Every remark is an end. "answer" makes it a regular one: the trajectory is well formed.
        return Observation(lake_observation(lake, remark), end="answer" if remark else "")

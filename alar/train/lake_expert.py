"""Walks to imitate: the shortest way, told in think blocks, and an engine that plays given turns
through the loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from alar import protocol
from alar.domains.frozenlake.environment import FrozenLakeEnvironment
from alar.domains.frozenlake.lakes import shortest_way, walk
from alar.domains.frozenlake.protocol import ACTION, MOVES, moves_text
from alar.records import Origin, Question, Trajectory
from alar.rollout.codec import Codec
from alar.rollout.engine import Engine, Sampling, TurnOutput, TurnRequest
from alar.rollout.loop import run


class ScriptedEngine(Engine):
    """Writes the given turns, `turns[session]` one after another."""

    def __init__(self, codec: Codec, turns: Mapping[int, Sequence[str]]):
        self.codec, self._turns, self._waiting = (
            codec,
            {row: iter(texts) for row, texts in turns.items()},
            [],
        )

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    def submit(self, requests: Sequence[TurnRequest], sampling: Sampling) -> None:
        self._waiting += requests

    def step(self) -> list[tuple[TurnRequest, TurnOutput]]:
        ended, self._waiting = self._waiting, []
        return [(request, self._written(next(self._turns[request.session]))) for request in ended]

    def release(self, sessions: Sequence[int]) -> None:
        self._waiting = [request for request in self._waiting if request.session not in sessions]

    def _written(self, text: str) -> TurnOutput:
        ids = self.codec.untrusted(text)
        return TurnOutput(
            ids, [int(Origin.SAMPLED)] * len(ids), [float("nan")] * len(ids), [], "stop"
        )


def thought(question: Question, done: Sequence[int], todo: Sequence[int]) -> str:
    """The way that is left, tile by tile: row, column and the move from there."""
    width, steps = len(question.text.splitlines()), []
    for number in range(len(todo) + 1):
        row, column = divmod(walk(question, [*done, *todo[:number]]).position, width)
        move = f" {MOVES[todo[number]]}" if number < len(todo) else ""
        steps.append(f"{row + 1} {column + 1}{move}")
    return ", ".join(steps)


def expert_turns(question: Question, moves_per_turn: int) -> list[str]:
    """The turns of a shortest way over a lake that is not slippery."""
    way, texts = shortest_way(question), []
    for first in range(0, len(way), moves_per_turn):
        block = protocol.think_block(thought(question, way[:first], way[first:]))
        action = protocol.action_text(ACTION, moves_text(way[first : first + moves_per_turn]))
        texts.append(
            (protocol.BLOCK_SEPARATOR if first == 0 else "")
            + block
            + protocol.BLOCK_SEPARATOR
            + action
        )
    return texts


def expert_trajectories(
    questions: Sequence[Question], environment: FrozenLakeEnvironment, codec: Codec
) -> list[Trajectory]:
    """The shortest ways, walked through the agent loop."""
    engine = ScriptedEngine(
        codec, {row: expert_turns(q, environment.moves_per_turn) for row, q in enumerate(questions)}
    )
    return run(
        questions,
        engine,
        environment,
        Sampling(stop=environment.stop),
        max_turns=environment.max_moves,
    )

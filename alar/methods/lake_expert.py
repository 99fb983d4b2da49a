"""FrozenLake walks to imitate: the shortest way over each lake, told in think blocks.

An engine that writes given turns takes them through the ordinary agent loop. So the trajectories
are those of a policy that walked this way. Notebook 16 trains on them.
"""

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
        self.codec = codec
        # Session → the turns still to write.
        self._turns = {session: iter(texts) for session, texts in turns.items()}
        self._waiting: list[TurnRequest] = []

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    def submit(self, requests: Sequence[TurnRequest], sampling: Sampling) -> None:
        self._waiting += requests

    def step(self) -> list[tuple[TurnRequest, TurnOutput]]:
        ended, self._waiting = self._waiting, []  # a turn takes one step: all of it is known
        return [(request, self._written(next(self._turns[request.session]))) for request in ended]

    def release(self, sessions: Sequence[int]) -> None:
        self._waiting = [request for request in self._waiting if request.session not in sessions]

    def _written(self, text: str) -> TurnOutput:
        ids = self.codec.untrusted(text)
        origins = [int(Origin.SAMPLED)] * len(ids)
        unknown = [float("nan")] * len(ids)  # nobody sampled them
        return TurnOutput(ids, origins, unknown, [], "stop")


def thought(question: Question, done: Sequence[int], todo: Sequence[int]) -> str:
    """The way that is left, tile by tile: row, column and the move from there."""
    width, steps = len(question.text.splitlines()), []
    # One tile more than moves: the last is the goal.
    for number in range(len(todo) + 1):
        row, column = divmod(walk(question, [*done, *todo[:number]]).position, width)
        step = f"{row + 1} {column + 1}"  # people count from 1
        if number < len(todo):
            step += f" {MOVES[todo[number]]}"
        steps.append(step)
    return ", ".join(steps)


def expert_turns(question: Question, moves_per_turn: int) -> list[str]:
    """The turns of a shortest way over a lake that is not slippery."""
    way, texts = shortest_way(question), []
    for first in range(0, len(way), moves_per_turn):
        block = protocol.think_block(thought(question, way[:first], way[first:]))
        action = protocol.action_text(ACTION, moves_text(way[first : first + moves_per_turn]))
        # The first block too has a separator before it.
        before = protocol.BLOCK_SEPARATOR if first == 0 else ""
        texts.append(before + block + protocol.BLOCK_SEPARATOR + action)
    return texts


def expert_trajectories(
    questions: Sequence[Question], environment: FrozenLakeEnvironment, codec: Codec
) -> list[Trajectory]:
    """The shortest ways, walked through the agent loop."""
    turns = {}
    for session, question in enumerate(questions):
        turns[session] = expert_turns(question, environment.moves_per_turn)
    engine = ScriptedEngine(codec, turns)
    sampling = Sampling(stop=environment.stop)
    return run(questions, engine, environment, sampling, max_turns=environment.max_moves)

"""ToolMind's recorded responses as an environment.

Nobody here can run ToolMind's functions. To write a whole episode, the teacher still needs their
responses. Each of its calls gets the response that the conversation has for the same call (equal
after `toolmind.coerced`), in whatever turn the teacher makes it. A call without a recorded response
ends the trajectory, with that as the reason. If nobody answered the last calls of a conversation,
they end the trajectory as its final action.
"""

from __future__ import annotations

from collections.abc import Sequence

from alar import protocol
from alar.domains.tool.environment import ToolEnvironment
from alar.domains.tool.protocol import parse_calls, responses_text
from alar.domains.tool.toolmind import ToolMindRow, call_key
from alar.records import Observation, Question

UNRECORDED = "a call that the data has no response for"


class ReplayEnvironment(ToolEnvironment):
    """`rows` are whole episodes. The id of a question is the id of its row."""

    def __init__(self, rows: Sequence[ToolMindRow]):
        super().__init__(execute=False, judge="toolmind")
        self.final = ("answer",)  # a call is no final action: it gets a response
        self.recorded: dict[str, dict[str, str]] = {}  # row id → {call key: response}
        self.last: dict[str, set[str]] = {}  # row id → call keys of the last turn
        for row in rows:
            self.recorded[row.id] = {call_key(call): text for call, text in row.responses}
            self.last[row.id] = {call_key(call) for call in row.expected}

    def observe(self, steps: Sequence[tuple[Question, protocol.Turn]]) -> list[Observation]:
        return [self._replay(question.id, turn) for question, turn in steps]

    def _replay(self, row: str, turn: protocol.Turn) -> Observation:
        calls, problem = parse_calls(turn.argument)
        if problem:
            return Observation("", end=problem)
        recorded = self.recorded[row]
        try:
            keys = [call_key(call) for call in calls]
        except RecursionError:  # arguments nested more deeply than any of the data
            return Observation("", end=UNRECORDED)
        if all(key in recorded for key in keys):
            return Observation(responses_text([recorded[key] for key in keys]))
        # The conversation may stop at its last calls; making them is then all that was asked for.
        return Observation("", end="answer" if set(keys) <= self.last[row] else UNRECORDED)

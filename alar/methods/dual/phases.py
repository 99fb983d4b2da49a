"""The phase of a turn that is written in a dual vocabulary, as a row of `PhaseConstraint`'s table.

0       visible: before and after the think block
1       thinking
1 + n   n pieces of `</think>` are written
"""

from __future__ import annotations

from collections.abc import Sequence

from alar.records import Origin, Trajectory
from alar.rollout.codec import Codec
from alar.rollout.constraint import TurnPhase
from alar.rollout.engine import Sampling, TurnRequest, TurnWriter


class ThinkPhase(TurnPhase):
    """A turn has one think phase; after it, `row` stays 0. `close` are the ids of `</think>`."""

    def __init__(self, close: Sequence[int], in_think: bool = False):
        self.close = tuple(close)
        self.row = int(in_think)
        self.over = False

    def push(self, token: int, in_think: bool) -> None:
        if self.over or not in_think:  # `in_think` ends with the last piece of `</think>`
            self.over = self.over or self.row > 0
            self.row = 0
        elif self.row == 0:
            self.row = 1
        elif token == self.close[self.row - 1]:
            self.row += 1
        else:  # a mirror
            self.row = 1


def phases_of(trajectory: Trajectory, codec: Codec) -> list[int]:
    """For each token of a trajectory the row of the constraint under which it was written.

    The row is 0 where the policy did not write the token. The engines' own `TurnWriter` tells the
    rows, so training and sampling agree.
    """
    ids = trajectory.ids
    phases = [0] * len(ids)
    endless = Sampling(max_new_tokens=len(ids) + 1, stop=())
    for turn in trajectory.turns:
        # With a forced opening, the engine did not look at what the context ends in.
        sampled = trajectory.origins[turn.start] == Origin.SAMPLED
        context = ids[: turn.start] if sampled else ()
        writer = TurnWriter(codec, TurnRequest(0, context, (), allow_latent=False), endless)
        for place in range(turn.start, turn.end):
            phases[place] = writer.phase.row
            writer.push(ids[place], float("nan"))
    return phases

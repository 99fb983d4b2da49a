"""The agent loop: question → turns of reasoning and action → observation → … → answer. One loop for
every engine.

The environment says what an action returns, the engine writes the turns, and the loop keeps the
record: ids, origins, log-probs and z, appended and never derived again from text. A trajectory goes
on as soon as its turn has ended, and a new question takes the place of one that is answered, so
that the engine's batch stays full until the last questions.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from alar import protocol
from alar.records import Observation, Origin, Question, Trajectory, TurnRecord
from alar.rollout.engine import Engine, Sampling, TurnOutput, TurnRequest

MODES = ("free", "think", "latent", "off")
ModePlan = Callable[[int, int], str]  # (row, turn) → one of MODES
# finished turns are collected until they are one in so many slots: one call of the environment
# serves them
QUORUM = 16


def run(
    questions: Sequence[Question],
    engine: Engine,
    environment: Environment,
    sampling: Sampling,
    *,
    modes: str | ModePlan = "free",
    max_turns: int = 6,
    batch_size: int = 256,
    seed: int = 0,
    first_row: int = 0,
    progress: Callable[[Iterable], Iterable] = iter,
) -> list[Trajectory]:
    """One trajectory for each question, in order.

    `modes`: "free" lets the policy choose; "think" and "latent" force the open tag of every turn;
    "off" leaves `<latent>` plain text (a base model); or a function of (row, turn). At most
    `batch_size` trajectories are under way at once; the same `seed` gives the same ones whatever
    `batch_size` is, up to rounding. `first_row` is the row of the first question, for calls that
    share the rows of one batch. `progress` wraps an iteration in which a step is a finished
    trajectory.
    """
    plan = modes if callable(modes) else lambda row, turn: modes
    if isinstance(modes, str) and modes not in MODES:
        raise ValueError(
            f"modes {modes!r}: expected one of {', '.join(MODES)}, or a function of (row, turn)"
        )
    if batch_size < 1:
        raise ValueError(f"batch_size {batch_size}: expected at least one trajectory at a time")
    loop = _Loop(engine, environment, sampling, plan, max_turns, seed, first_row)
    finished = loop.finish(questions, batch_size)
    trajectories = dict(next(finished) for _ in progress(range(len(questions))))
    return [trajectories[first_row + index] for index in range(len(questions))]


def with_form(environment: Environment, form: protocol.Form) -> Environment:
    """The same environment, retriever and caches shared, whose prompts or turns look otherwise."""
    twin = copy.copy(environment)
    twin.form = form
    return twin


@dataclass
class _Rollout:
    """A trajectory under way: `mode` is that of the turn being written."""

    trajectory: Trajectory
    latents: list[np.ndarray] = field(default_factory=list)
    turns: list[protocol.Turn] = field(default_factory=list)
    mode: str = ""


@dataclass
class _Loop:
    engine: Engine
    environment: Environment
    sampling: Sampling
    plan: ModePlan
    max_turns: int
    seed: int
    first_row: int

    def finish(self, questions: Sequence[Question], slots: int) -> Iterator[tuple[int, Trajectory]]:
        """(row, trajectory) as they end."""
        live: dict[int, _Rollout] = {}
        entering, asked = [], 0  # rows whose next turn is to be written, questions begun
        quorum = max(1, slots // QUORUM)
        try:
            while live or asked < len(questions):
                while asked < len(questions) and len(live) < slots:
                    row = self.first_row + asked
                    live[row] = _Rollout(
                        _start(questions[asked], self.engine, self.environment.form)
                    )
                    entering.append(row)
                    asked += 1
                self.engine.submit(
                    [self._request(row, live[row]) for row in entering], self.sampling
                )
                ended = []
                while self.engine.busy and len(ended) < quorum:
                    ended += self.engine.step()
                entering = self._take_turns(
                    live, [(request.session, output) for request, output in ended]
                )
                over = [
                    request.session
                    for request, _ in ended
                    if live[request.session].trajectory.finish
                ]
                self.engine.release(over)
                for row in over:
                    yield row, self._judge(live.pop(row))
        finally:
            self.engine.release(list(live))

    def _take_turns(
        self, live: dict[int, _Rollout], ended: list[tuple[int, TurnOutput]]
    ) -> list[int]:
        """Record the turns that ended and act on them; returns the rows that go on."""
        going: list[tuple[int, protocol.Turn]] = []
        for row, output in ended:
            rollout = live[row]
            parsed = _record(
                rollout.trajectory, output, rollout.mode, self.engine, self.environment.form
            )
            rollout.latents.extend(output.latents)
            rollout.turns.append(parsed)
            if parsed.action in self.environment.final:
                rollout.trajectory.prediction, rollout.trajectory.finish = parsed.argument, "answer"
            elif len(rollout.turns) == self.max_turns and self.environment.final:
                rollout.trajectory.finish = "max_turns"
            else:
                going.append((row, replace(parsed, earlier=tuple(rollout.turns[:-1]))))
        acting = [
            (live[row].trajectory.question, parsed)
            for row, parsed in going
            if parsed.action is not None
        ]
        form = self.environment.form
        found = iter(self.environment.observe(acting) if acting else ())
        for row, parsed in going:
            trajectory = live[row].trajectory
            observation = (
                next(found)
                if parsed.action is not None
                else Observation(form.invalid(parsed.problem))
            )
            if observation.text or not observation.end:
                _observe(trajectory, observation, self.engine, form)
            if observation.end:
                trajectory.finish = observation.end
                trajectory.prediction = parsed.argument if observation.end == "answer" else None
            elif len(trajectory.turns) == self.max_turns:
                trajectory.finish = "max_turns"
        return [row for row, _ in going if not live[row].trajectory.finish]

    def _request(self, row: int, rollout: _Rollout) -> TurnRequest:
        turn, codec, forced = len(rollout.trajectory.turns), self.engine.codec, []
        mode = rollout.mode = self.plan(row, turn)
        if mode in ("think", "latent"):
            opening = codec.trusted(self.environment.form.opening) if turn == 0 else []
            forced = opening + (codec.think_open if mode == "think" else codec.latent_open)
        elif mode not in MODES:
            raise ValueError(f"mode {mode!r} for turn {turn}: expected one of {', '.join(MODES)}")
        seed = zlib.crc32(f"{self.seed} {row} {turn}".encode())
        return TurnRequest(
            row,
            rollout.trajectory.ids,
            list(rollout.latents),
            forced,
            seed,
            allow_latent=mode != "off",
        )

    def _judge(self, rollout: _Rollout) -> Trajectory:
        trajectory, latents = rollout.trajectory, rollout.latents
        width = len(latents[0]) if latents else 0
        trajectory.latents = np.asarray(latents, dtype=np.float32).reshape(len(latents), width)
        if trajectory.prediction is not None:
            trajectory.correct = self.environment.correct(trajectory)
            trajectory.grade = (
                self.environment.grade(trajectory) if hasattr(self.environment, "grade") else None
            )
        return trajectory


def _start(question: Question, engine: Engine, form: protocol.Form) -> Trajectory:
    ids = engine.codec.encode(form.prompt(question))
    return Trajectory(
        question,
        ids,
        [int(Origin.PROMPT)] * len(ids),
        [float("nan")] * len(ids),
        np.zeros((0, 0), np.float32),
    )


def _record(
    trajectory: Trajectory, output: TurnOutput, mode: str, engine: Engine, form: protocol.Form
) -> protocol.Turn:
    """Append what was written, parse it, and note the turn."""
    start = len(trajectory.ids)
    trajectory.ids = trajectory.ids + output.ids
    trajectory.origins = trajectory.origins + output.origins
    trajectory.logprobs = trajectory.logprobs + output.logprobs
    parsed = form.parse(engine.codec.text(output.ids))
    if form.closing and output.finish == "length":
        parsed = replace(
            parsed,
            action=None,
            well_formed=False,
            problem="the turn was cut at the limit of new tokens",
        )
    trajectory.turns.append(
        TurnRecord(
            start,
            len(trajectory.ids),
            parsed.mode,
            parsed.action,
            parsed.argument,
            parsed.well_formed,
            parsed.problem,
            len(parsed.policy_text),
            mode if mode in ("think", "latent") else "",
        )
    )
    return parsed


def _observe(
    trajectory: Trajectory, observation: Observation, engine: Engine, form: protocol.Form
) -> None:
    ids = engine.codec.encode(form.observation(observation.text))
    if form.closing and ids[:1] == trajectory.ids[-1:]:
        ids = ids[1:]  # the policy closed its turn itself
    trajectory.ids = trajectory.ids + ids
    trajectory.origins = trajectory.origins + [int(Origin.OBSERVATION)] * len(ids)
    trajectory.logprobs = trajectory.logprobs + [float("nan")] * len(ids)
    if trajectory.turns:
        trajectory.turns[-1].titles = list(observation.titles)

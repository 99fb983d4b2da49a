"""The agent loop: question → turns of reasoning and action → observation → … → answer.

There is one loop for every engine and every domain. The engine writes the turns, the environment
says what an action returns, and the loop keeps the record: ids, origins, log-probs and z are
appended, and never derived again from text.

A trajectory goes on as soon as its turn has ended, and a new question takes the place of a finished
one. So the engine's batch stays full until the last questions.

An environment that waits for a server may have several calls under way (`Environment.ahead`), while
the engine writes other turns. Their number, not their timing, decides when the loop takes an answer
in: the same engine gets the same batches, however long a server needs.
"""

from __future__ import annotations

import copy
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from alar import protocol
from alar.records import Environment, Observation, Origin, Question, Trajectory, TurnRecord
from alar.rollout.engine import Engine, Sampling, TurnOutput, TurnRequest

MODES = ("free", "think", "latent", "off")
ModePlan = Callable[[int, int], str]  # (row, turn) → one of MODES
# Ended turns are collected until they fill one in QUORUM slots, so that one call of the environment
# serves several of them.
QUORUM = 16
NAN = float("nan")  # the log-prob of tokens that the policy did not choose


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
    "off" leaves `<latent>` plain text (a base model), and opens the think block where the model's
    own chat template does (`Codec.text_mode`). Or a function of (row, turn), where row is the place
    of the question, counted from `first_row`.

    At most `batch_size` trajectories are under way at once. The same `seed` gives the same
    trajectories for every `batch_size`, up to rounding. `progress` wraps an iteration in which a
    step is a finished trajectory.
    """
    if modes == "off":
        modes = engine.text_mode
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
    """The environment with another form of prompts and turns; retriever and caches are shared."""
    twin = copy.copy(environment)
    twin.form = form
    return twin


@dataclass
class _Unfinished:
    """A trajectory under way. `mode` is that of the turn being written."""

    trajectory: Trajectory
    latents: list[np.ndarray] = field(default_factory=list)  # z (H,) of each latent position
    turns: list[protocol.Turn] = field(default_factory=list)
    mode: str = ""


@dataclass(frozen=True)
class _Acted:
    """Turns whose actions the environment was asked about. `observations()` waits for its answer,
    one entry for each turn with an action."""

    turns: list[tuple[int, protocol.Turn]]  # with their rows
    observations: Callable[[], list[Observation]]


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
        """(row, trajectory) of every question, in the order in which they end."""
        live: dict[int, _Unfinished] = {}
        entering: list[int] = []  # rows whose next turn is to be written
        asked = 0  # questions begun
        quorum = max(1, slots // QUORUM)
        ahead = getattr(self.environment, "ahead", 0)
        acted: deque[_Acted] = deque()  # at most `ahead` of them while the engine has work
        with ExitStack() as stack:
            # An error, or a caller who wants no more: the engine forgets what is left.
            stack.callback(lambda: self.engine.release(list(live)))
            pool = ThreadPoolExecutor(ahead) if ahead else None
            if pool is not None:
                stack.callback(pool.shutdown, wait=False, cancel_futures=True)
            while live or asked < len(questions):
                while asked < len(questions) and len(live) < slots:
                    row = self.first_row + asked
                    live[row] = self._start(questions[asked])
                    entering.append(row)
                    asked += 1
                requests = [self._request(row, live[row]) for row in entering]
                self.engine.submit(requests, self.sampling)

                ended: list[tuple[TurnRequest, TurnOutput]] = []
                while self.engine.busy and len(ended) < quorum:
                    ended += self.engine.step()

                outputs = {request.session: output for request, output in ended}
                going = self._take_turns(live, outputs)
                acted.append(self._act(live, going, pool))
                settled, entering = list(outputs), []  # settled: rows that may be over now
                while acted and (len(acted) > ahead or not (entering or self.engine.busy)):
                    rows = self._take_observations(live, acted.popleft())
                    settled += rows
                    entering += [row for row in rows if not live[row].trajectory.finish]
                over = [row for row in dict.fromkeys(settled) if live[row].trajectory.finish]
                self.engine.release(over)
                for row in over:
                    yield row, self._judge(live.pop(row))

    def _start(self, question: Question) -> _Unfinished:
        ids = self.engine.codec.encode(self.environment.form.prompt(question))
        count = len(ids)
        no_latents = np.zeros((0, 0), np.float32)
        return _Unfinished(
            Trajectory(question, ids, [int(Origin.PROMPT)] * count, [NAN] * count, no_latents)
        )

    def _request(self, row: int, unfinished: _Unfinished) -> TurnRequest:
        """The next turn of a trajectory, in the mode that the plan chooses."""
        trajectory, codec = unfinished.trajectory, self.engine.codec
        turn = len(trajectory.turns)
        mode = unfinished.mode = self.plan(row, turn)
        if mode not in MODES:
            raise ValueError(f"mode {mode!r} for turn {turn}: expected one of {', '.join(MODES)}")
        forced: list[int] = []
        if mode in ("think", "latent"):
            if turn == 0:
                forced += codec.trusted(self.environment.form.opening)
            forced += codec.think_open if mode == "think" else codec.latent_open
        return TurnRequest(
            session=row,
            ids=trajectory.ids,
            latents=list(unfinished.latents),
            forced=forced,
            # Names the turn, not its place in a batch: so `batch_size` does not change the draws.
            seed=zlib.crc32(f"{self.seed} {row} {turn}".encode()),
            allow_latent=mode != "off",
        )

    def _take_turns(
        self, live: dict[int, _Unfinished], outputs: dict[int, TurnOutput]
    ) -> list[tuple[int, protocol.Turn]]:
        """Record the turns that ended; returns (row, turn) of those whose trajectories go on."""
        final = self.environment.final
        going: list[tuple[int, protocol.Turn]] = []
        for row, output in outputs.items():
            parsed = self._record(live[row], output)
            trajectory = live[row].trajectory
            if parsed.action in final:
                trajectory.prediction, trajectory.finish = parsed.argument, "answer"
            elif final and len(trajectory.turns) == self.max_turns:
                trajectory.finish = "max_turns"  # what it asks for could not be read any more
            else:
                earlier = tuple(live[row].turns[:-1])
                going.append((row, replace(parsed, earlier=earlier)))
        return going

    def _act(
        self,
        live: dict[int, _Unfinished],
        going: list[tuple[int, protocol.Turn]],
        pool: ThreadPoolExecutor | None,
    ) -> _Acted:
        """Ask the environment about the actions of some turns in one call: in the pool, or later,
        when the observations are taken."""
        acting = [
            (live[row].trajectory.question, parsed)
            for row, parsed in going
            if parsed.action is not None
        ]
        if not acting:
            return _Acted(going, list)
        if pool is None:
            return _Acted(going, partial(self.environment.observe, acting))
        return _Acted(going, pool.submit(self.environment.observe, acting).result)

    def _take_observations(self, live: dict[int, _Unfinished], acted: _Acted) -> list[int]:
        """Append what some actions returned; returns their rows."""
        form = self.environment.form
        returned = iter(acted.observations())  # of the turns with an action, in order
        for row, parsed in acted.turns:
            trajectory = live[row].trajectory
            if parsed.action is None:
                observation = Observation(form.invalid(parsed.problem))
            else:
                observation = next(returned)
            if observation.text or not observation.end:
                self._observe(trajectory, observation)
            if observation.end:
                trajectory.finish = observation.end
                trajectory.prediction = parsed.argument if observation.end == "answer" else None
            elif len(trajectory.turns) == self.max_turns:
                trajectory.finish = "max_turns"
        return [row for row, _ in acted.turns]

    def _record(self, unfinished: _Unfinished, output: TurnOutput) -> protocol.Turn:
        """Append what was written, parse it, and note the turn."""
        trajectory, form = unfinished.trajectory, self.environment.form
        start = len(trajectory.ids)
        # New lists: the engine may still hold the old ones as a context.
        trajectory.ids = trajectory.ids + output.ids
        trajectory.origins = trajectory.origins + output.origins
        trajectory.logprobs = trajectory.logprobs + output.logprobs
        unfinished.latents.extend(output.latents)

        parsed = form.parse(self.engine.codec.text(output.ids))
        if form.closing and output.finish == "length":
            # Such a turn has no stop string, so a cut one can look whole.
            problem = "the turn was cut at the limit of new tokens"
            parsed = replace(parsed, action=None, well_formed=False, problem=problem)
        unfinished.turns.append(parsed)
        trajectory.turns.append(
            TurnRecord(
                start=start,
                end=len(trajectory.ids),
                mode=parsed.mode,
                action=parsed.action,
                argument=parsed.argument,
                well_formed=parsed.well_formed,
                problem=parsed.problem,
                think_length=len(parsed.policy_text),
                forced_mode=unfinished.mode if unfinished.mode in ("think", "latent") else "",
            )
        )
        return parsed

    def _observe(self, trajectory: Trajectory, observation: Observation) -> None:
        form = self.environment.form
        ids = self.engine.codec.encode(form.observation(observation.text))
        if form.closing and ids[:1] == trajectory.ids[-1:]:
            ids = ids[1:]  # the policy closed its turn itself
        trajectory.ids = trajectory.ids + ids
        trajectory.origins = trajectory.origins + [int(Origin.OBSERVATION)] * len(ids)
        trajectory.logprobs = trajectory.logprobs + [NAN] * len(ids)
        if trajectory.turns:
            trajectory.turns[-1].titles = list(observation.titles)

    def _judge(self, unfinished: _Unfinished) -> Trajectory:
        """The finished record, with its z (N, H) and the environment's verdict."""
        trajectory, latents = unfinished.trajectory, unfinished.latents
        width = len(latents[0]) if latents else 0
        trajectory.latents = np.asarray(latents, dtype=np.float32).reshape(len(latents), width)
        if trajectory.prediction is not None:
            trajectory.correct = self.environment.correct(trajectory)
            if hasattr(self.environment, "grade"):
                trajectory.grade = self.environment.grade(trajectory)
        return trajectory

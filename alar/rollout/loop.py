"""The agent loop: question → turns of reasoning and action → observation → … → answer. One loop for every engine.

The environment says what an action returns, the engine writes the turns, and the loop keeps the record: ids, origins,
log-probs and z, appended and never derived again from text.
"""

from __future__ import annotations

import zlib
from typing import Callable, Iterable, Protocol, Sequence

import numpy as np

from alar import protocol
from alar.records import Observation, Origin, Question, Trajectory, TurnRecord
from alar.rollout.engine import Engine, Sampling, TurnRequest

MODES = ("free", "think", "latent", "off")
ModePlan = Callable[[int, int], str]  # (row, turn) → one of MODES


class Environment(Protocol):
    """A domain as the loop sees it."""

    actions: tuple[str, ...]
    stop: tuple[str, ...]

    def observe(self, steps: Sequence[tuple[Question, protocol.Turn]]) -> list[Observation]:
        """Execute the actions of several trajectories at once."""

    def correct(self, question: Question, prediction: str) -> bool: ...


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
    progress: Callable[[Iterable], Iterable] = iter,
) -> list[Trajectory]:
    """One trajectory for each question, in order.

    `modes`: "free" lets the policy choose; "think" and "latent" force the open tag of every turn; "off" leaves `<latent>`
    plain text (a base model); or a function of (row, turn). The same `seed` gives the same trajectories whatever
    `batch_size` is, up to rounding. `progress` wraps the iteration over batches.
    """
    plan = modes if callable(modes) else lambda row, turn: modes
    if isinstance(modes, str) and modes not in MODES:
        raise ValueError(f"modes {modes!r}: expected one of {', '.join(MODES)}, or a function of (row, turn)")
    trajectories: list[Trajectory] = []
    for start in progress(range(0, len(questions), batch_size)):
        rows = range(start, min(start + batch_size, len(questions)))
        batch = {row: _start(questions[row], engine) for row in rows}
        _run_batch(batch, engine, environment, sampling, plan, max_turns, seed)
        engine.release(list(rows))
        trajectories.extend(batch.values())
    return trajectories


def _start(question: Question, engine: Engine) -> Trajectory:
    ids = engine.codec.prompt(question.text)
    return Trajectory(question, ids, [int(Origin.PROMPT)] * len(ids), [float("nan")] * len(ids), np.zeros((0, 0), np.float32))


def _run_batch(batch: dict[int, Trajectory], engine, environment, sampling, plan, max_turns: int, seed: int) -> None:
    latents: dict[int, list[np.ndarray]] = {row: [] for row in batch}
    live = list(batch)
    for turn in range(max_turns):
        modes = {row: plan(row, turn) for row in live}
        requests = [_request(row, turn, batch[row], latents[row], modes[row], engine, seed) for row in live]
        steps: list[tuple[int, protocol.Turn]] = []
        for row, output in zip(live, engine.generate(requests, sampling)):
            parsed = _record(batch[row], output, modes[row], engine, environment)
            latents[row].extend(output.latents)
            if parsed.action == "answer":
                batch[row].prediction, batch[row].finish = parsed.argument, "answer"
            else:
                steps.append((row, parsed))
        searching = [(batch[row].question, parsed) for row, parsed in steps if parsed.action is not None]
        found = iter(environment.observe(searching) if searching and turn + 1 < max_turns else ())
        live = []
        for row, parsed in steps:
            if turn + 1 == max_turns:
                batch[row].finish = "max_turns"
                continue
            observation = next(found) if parsed.action is not None else Observation(protocol.INVALID_ACTION)
            _observe(batch[row], observation, engine)
            live.append(row)
        if not live:
            break
    for row, trajectory in batch.items():
        width = len(latents[row][0]) if latents[row] else 0
        trajectory.latents = np.asarray(latents[row], dtype=np.float32).reshape(len(latents[row]), width)
        if trajectory.prediction is not None:
            trajectory.correct = environment.correct(trajectory.question, trajectory.prediction)


def _request(row: int, turn: int, trajectory: Trajectory, latents, mode: str, engine, seed: int) -> TurnRequest:
    codec, forced = engine.codec, []
    if mode in ("think", "latent"):
        forced = (codec.separator if turn == 0 else []) + (codec.think_open if mode == "think" else codec.latent_open)
    elif mode not in MODES:
        raise ValueError(f"mode {mode!r} for turn {turn}: expected one of {', '.join(MODES)}")
    turn_seed = zlib.crc32(f"{seed} {row} {turn}".encode())
    return TurnRequest(row, trajectory.ids, latents, forced, turn_seed, allow_latent=mode != "off")


def _record(trajectory: Trajectory, output, mode: str, engine, environment) -> protocol.Turn:
    """Append what was written, parse it, and note the turn."""
    start = len(trajectory.ids)
    trajectory.ids = trajectory.ids + output.ids
    trajectory.origins = trajectory.origins + output.origins
    trajectory.logprobs = trajectory.logprobs + output.logprobs
    parsed = protocol.parse_turn(engine.codec.text(output.ids), environment.actions)
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


def _observe(trajectory: Trajectory, observation: Observation, engine) -> None:
    ids = engine.codec.observation(observation.text)
    trajectory.ids = trajectory.ids + ids
    trajectory.origins = trajectory.origins + [int(Origin.OBSERVATION)] * len(ids)
    trajectory.logprobs = trajectory.logprobs + [float("nan")] * len(ids)
    if trajectory.turns:
        trajectory.turns[-1].titles = list(observation.titles)

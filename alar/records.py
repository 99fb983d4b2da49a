"""Questions and trajectories: token ids with, for every token, where it came from.

Everything that later needs to know which tokens were sampled, forced, latent or observed (loss
masks, counts, the RL objective, the inspector) reads these fields; nobody derives them again from
text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Protocol

import numpy as np

from alar import protocol
from alar.files import read_jsonl, write_jsonl


class Origin(IntEnum):
    """Where a token came from. SAMPLED, FORCED and LATENT tokens count as generated; only SAMPLED
    ones have a log-prob."""

    PROMPT = 0
    SAMPLED = 1
    FORCED = 2
    LATENT = 3
    OBSERVATION = 4


GENERATED = (Origin.SAMPLED, Origin.FORCED, Origin.LATENT)


@dataclass(frozen=True)
class Question:
    """One question. `hard_turns` (0-based) marks the turns that need a computation, for analysis
    only: it never reaches prompts, mode choices or rewards. `world` names the facts that it is
    asked about. `details` is JSON with what a domain adds: functions, messages and accepted calls
    in the tool domain."""

    id: str
    text: str
    answers: tuple[str, ...]
    type: str = ""
    hard_turns: tuple[int, ...] = ()
    world: str = ""
    details: str = ""


@dataclass(frozen=True)
class Observation:
    """What an environment answers to an action: the text to show, and the titles of the passages in
    it.

    With `end` the trajectory is over: "answer" if this action is all that was asked for, else why
    nothing can be shown. Its text, if there is any, is the last thing in the record.
    """

    text: str
    titles: tuple[str, ...] = ()
    end: str = ""


@dataclass(frozen=True)
class Step:
    """One turn of the expert that a question comes with: the thought, then the action with its
    argument."""

    thought: str
    action: str
    argument: str


@dataclass(frozen=True)
class Solved:
    question: Question
    steps: tuple[Step, ...]


@dataclass
class TurnRecord:
    """One turn of a trajectory: token span [start, end) of what the policy wrote, and its parse."""

    start: int
    end: int
    mode: str  # "think" | "latent" | "none", as parsed
    action: str | None
    argument: str
    well_formed: bool
    problem: str = ""
    think_length: int = 0  # characters of policy text outside latent blocks, tags and actions
    forced_mode: str = ""  # "think" | "latent" when the mode was not the policy's choice
    titles: list[str] = field(
        default_factory=list
    )  # of the passages retrieved by this turn's action


@dataclass
class Trajectory:
    """Token ids, origins, behaviour log-probs (NaN unless SAMPLED) and z of the latent positions,
    row-major [N, H]."""

    question: Question
    ids: list[int]
    origins: list[int]
    logprobs: list[float]
    latents: np.ndarray
    turns: list[TurnRecord] = field(default_factory=list)
    prediction: str | None = None
    correct: bool = False
    finish: str = ""  # "answer" | "max_turns" | "length" | what the environment ended it for
    grade: float | None = None  # how right it is, 1 for wholly, where the environment grades

    def count(self, *origins: Origin, span: tuple[int, int] | None = None) -> int:
        start, end = span or (0, len(self.ids))
        return sum(origin in origins for origin in self.origins[start:end])

    @property
    def generated_tokens(self) -> int:
        return self.count(*GENERATED)

    @property
    def well_formed(self) -> bool:
        return (
            bool(self.turns)
            and self.finish == "answer"
            and all(turn.well_formed for turn in self.turns)
        )

    @property
    def num_latent_turns(self) -> int:
        return sum(turn.mode == "latent" for turn in self.turns)

    @property
    def num_think_turns(self) -> int:
        return sum(turn.mode == "think" for turn in self.turns)

    @property
    def think_length(self) -> int:
        return sum(turn.think_length for turn in self.turns)

    def check(self) -> None:
        """Raise ValueError if the record contradicts itself: one origin and log-prob a token, one z
        a LATENT token."""
        if not len(self.ids) == len(self.origins) == len(self.logprobs):
            raise ValueError(
                f"{self.question.id}: ids, origins and log-probs have different lengths"
            )
        marked = {token for token, origin in zip(self.ids, self.origins) if origin == Origin.LATENT}
        plain = {token for token, origin in zip(self.ids, self.origins) if origin != Origin.LATENT}
        if len(marked) > 1 or marked & plain:
            raise ValueError(f"{self.question.id}: latent ids and LATENT origins do not agree")
        if self.count(Origin.LATENT) != len(self.latents):
            raise ValueError(
                f"{self.question.id}: {len(self.latents)} latent vectors for"
                f" {self.count(Origin.LATENT)} latent positions"
            )

    def to_json(self) -> dict:
        record = asdict(self)
        record["logprobs"] = [
            None if np.isnan(value) else round(float(value), 6) for value in self.logprobs
        ]
        record["latents"] = [
            [float(x) for x in row] for row in np.asarray(self.latents, dtype=np.float32)
        ]
        return record

    @classmethod
    def from_json(cls, record: dict) -> Trajectory:
        record = dict(record)
        record["question"] = question_from_json(record["question"])
        record["logprobs"] = [
            float("nan") if value is None else value for value in record["logprobs"]
        ]
        record["latents"] = np.asarray(record["latents"], dtype=np.float32)
        record["turns"] = [TurnRecord(**turn) for turn in record["turns"]]
        trajectory = cls(**record)
        trajectory.check()
        return trajectory


class Environment(Protocol):
    """A domain as the loop sees it. `final` actions end a trajectory; their argument is its
    prediction.

    A domain without final actions ends a trajectory by an observation's `end`, and the last turn
    that `max_turns` allows is acted on too. An environment keeps no state between turns: what has
    happened is in `Turn.earlier`. It may have a method `grade(trajectory)`: how right it is as a
    number, 1 for wholly, or None.
    """

    form: protocol.Form
    final: tuple[str, ...]
    stop: tuple[str, ...]

    def observe(self, steps: Sequence[tuple[Question, protocol.Turn]]) -> list[Observation]:
        """Execute the actions of several trajectories at once."""

    def correct(self, trajectory: Trajectory) -> bool:
        """Judge a trajectory that ended in a final action."""


def question_from_json(record: dict) -> Question:
    record = dict(record)
    for name in ("answers", "hard_turns"):
        record[name] = tuple(record.get(name, ()))
    return Question(**record)


def write_trajectories(path: str | Path, trajectories: Iterable[Trajectory]) -> Path:
    """Write JSON lines in one step, so that a half-written file is never taken for a whole one."""
    write_jsonl(path, (trajectory.to_json() for trajectory in trajectories))
    return Path(path)


def read_trajectories(path: str | Path) -> list[Trajectory]:
    """Read JSON lines; a broken or incomplete line is an error that names the file and the line."""
    path, trajectories = Path(path), []
    if not path.exists():
        raise FileNotFoundError(
            f"{path}: no such file of trajectories; run the stage that writes it first"
        )
    for number, record in enumerate(read_jsonl(path), start=1):
        try:
            trajectories.append(Trajectory.from_json(record))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path}, line {number}: not a complete trajectory ({error}); delete the file and"
                " run the stage again"
            ) from error
    return trajectories

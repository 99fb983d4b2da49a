"""Teacher rollouts on ToolMind: sampled in shards, scored, and merged into the traces that AASD
learns from.

    python -m alar.study.teacher sample data/toolmind traces --student FOLDER --shard 1/4
    python -m alar.study.teacher sample data/toolmind traces --student FOLDER \\
        --endpoint http://127.0.0.1:8000/v1 --model NAME
    python -m alar.study.teacher merge traces -o runs/paper/tool/02_teacher_traces/traces.jsonl

By default every row is one trajectory of one turn, as published. ToolMind's rows are prefixes of
conversations, one per assistant turn. The prompt holds the earlier calls and all their responses as
they were recorded, and the trajectory ends with the calls of its one turn. With `whole` the teacher
answers an episode from the last user message to its end, and its own calls get the recorded
responses (`alar.domains.tool.replay`). A trajectory is kept if it scores at least 1.5, is well
formed and reasons in text.

The split key of a request is the hash of its first user message and functions. It decides the
shard, so the rows of one conversation stay together. A shard's folder is a store (`alar.store`) of
chunks, each of `chunk` requests. Sampling starts from a fresh state with every chunk, so an
interrupted shard that is started again gives the same results. `shard.json`, written last, lists
the chunks of the finished shard. `merge` refuses shards that do not belong together.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from alar.domains.tool.environment import ToolEnvironment, toolmind_score
from alar.domains.tool.protocol import TOOL
from alar.domains.tool.replay import ReplayEnvironment
from alar.domains.tool.toolmind import SPLITS, SUCCESS, Loaded, ToolMindRow, load_rows, split_of_row
from alar.domains.tool.toolmind_files import read_records, toolmind_files
from alar.engines.endpoint import EndpointEngine
from alar.files import write_json, write_jsonl
from alar.records import Trajectory
from alar.rollout.engine import Engine, Sampling
from alar.rollout.loop import run
from alar.store import Store, content, digest, key

# More rows than any shard has, so no two requests share their random draws.
ROWS_OF_A_SHARD = 2**24
BEHIND_PROMPT = 32  # positions kept free besides the prompt and `max_new_tokens`
TOO_LONG = "the prompt is longer than the model's context"
SHARD_RECEIPT = "shard.json"


@dataclass(frozen=True)
class Shard:
    """Shard number `index` of `count`, counted from 1; written "index/count"."""

    index: int = 1
    count: int = 1

    def __post_init__(self):
        if not 1 <= self.index <= self.count:
            raise ValueError(
                f"shard {self}: expected the first to be 1/{self.count} and the last"
                f" {self.count}/{self.count}"
            )

    @classmethod
    def of(cls, text: str) -> Shard:
        if not re.fullmatch(r"\d+/\d+", text):
            raise ValueError(f"shard {text!r}: expected INDEX/COUNT, such as 1/4")
        return cls(*map(int, text.split("/")))

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @property
    def folder(self) -> str:
        return f"shard-{self.index:04d}-of-{self.count:04d}"

    def holds(self, row: ToolMindRow) -> bool:
        """Whether the row belongs to this shard. Uses other digits of the hash than the split."""
        # The split reads the first 8 digits.
        return int(row.group[8:], 16) % self.count == self.index - 1


@dataclass(frozen=True)
class Plan:
    """What is asked, and how; the same for all shards.

    `questions` limits the requests of all shards together; 0 means all. The requests of a smaller
    number are among those of a larger one. `mode` is as in `alar.rollout.loop.run`. `context` is
    the student's number of positions.
    """

    split: str = "train"  # "train", "validation" or "test"
    whole: bool = False  # False: one turn per request
    questions: int = 0
    mode: str = "off"
    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 2048  # of a turn
    max_turns: int = 8  # of a whole episode
    context: int = 32768
    seed: int = 0
    chunk: int = 1024  # requests in one file

    def __post_init__(self):
        if self.split not in (*(name for name, _ in SPLITS), "train"):
            raise ValueError(
                f"split {self.split!r}: expected train, {', '.join(name for name, _ in SPLITS)}"
            )
        if self.chunk < 1 or self.questions < 0 or self.max_turns < 1:
            raise ValueError(f"{self}: expected chunk ≥ 1, max_turns ≥ 1 and questions ≥ 0")


def shard_requests(source: str | Path, plan: Plan, shard: Shard = Shard()) -> Loaded:
    """A shard's requests, sorted by the hash of their content, so the order of the files does not
    matter."""
    asked: set[str] = set()  # ids in all shards

    def wanted(row: ToolMindRow) -> bool:
        if split_of_row(row) != plan.split:  # before `asked`: other splits are not counted
            return False
        asked.add(row.id)
        return shard.holds(row)

    loaded = load_rows(read_records(toolmind_files(source)), whole=plan.whole, wanted=wanted)
    # Ids are hashes, so the first ones in order are a random choice.
    chosen = set(sorted(asked)[: plan.questions or None])
    rows = [row for row in loaded.rows if row.id in chosen]
    return Loaded(sorted(rows, key=lambda row: row.id), loaded.skipped)


def sample_shard(
    engine: Engine,
    source: str | Path,
    folder: str | Path,
    plan: Plan,
    *,
    teacher: dict,
    shard: Shard = Shard(),
    batch_size: int = 256,
    progress: Callable[[Iterable], Iterable] = iter,
) -> Path:
    """Roll out and score the requests of one shard into a folder below `folder`; returns that
    folder.

    `teacher` describes the engine's model, as JSON. Chunks that the same teacher has answered
    already, with the same plan and data, are not asked again.
    """
    loaded = shard_requests(source, plan, shard)
    rows = loaded.rows
    recoded = isinstance(engine, EndpointEngine)  # a server gives text, not ids
    files = toolmind_files(source)
    settings = asdict(plan) | {
        "teacher": teacher,
        # The hash covers the names and contents of the files.
        "data": digest([[file.name, content(file)] for file in files]),
        "shard": str(shard),
        "tokens": "encoded again" if recoded else "sampled",
    }
    store, chunks = Store(Path(folder) / shard.folder), []  # chunks: file names in order
    for start in progress(range(0, len(rows), plan.chunk)):
        asked = rows[start : start + plan.chunk]
        ids = [row.id for row in asked]
        # Other settings or other ids give another file.
        chunk = key(f"chunk-{start:08d}.jsonl", {**settings, "ids": ids})
        if store.get(chunk) is None:
            if hasattr(engine, "reset"):
                engine.reset()  # prefixes cached by earlier chunks would change the rounding
            first = shard.index * ROWS_OF_A_SHARD + start  # seeds do not depend on the other shards
            with store.writing(chunk) as aside:
                write_jsonl(aside, _answered(engine, asked, plan, first, batch_size))
        chunks.append(chunk)
    receipt = {"settings": settings, "requests": len(rows), "skipped": dict(loaded.skipped)}
    write_json(store.folder / SHARD_RECEIPT, receipt | {"chunks": chunks})
    return store.folder


def _answered(
    engine: Engine, rows: Sequence[ToolMindRow], plan: Plan, first: int, batch_size: int
) -> list[dict]:
    """One line per request: `score`, the `reason` why it is dropped ("" if kept), and the
    trajectory if it is kept. `first` is the number of the first request; it seeds the random
    draws."""
    questions = [row.request.question(row.id, world="toolmind") for row in rows]
    room = plan.context - plan.max_new_tokens - BEHIND_PROMPT  # positions for the prompt
    # One bool per row.
    short = [len(engine.codec.encode(TOOL.prompt(question))) <= room for question in questions]
    if plan.whole:
        environment, max_turns = ReplayEnvironment(rows), plan.max_turns
    else:
        environment, max_turns = ToolEnvironment(execute=False, judge="toolmind"), 1
    trajectories = iter(
        run(
            [question for question, fits in zip(questions, short) if fits],
            engine,
            environment,
            Sampling(plan.max_new_tokens, plan.temperature, plan.top_p, stop=environment.stop),
            modes=plan.mode,
            max_turns=max_turns,
            batch_size=batch_size,
            seed=plan.seed,
            first_row=first,
        )
    )
    lines, number = [], first  # number: that of the next row that was asked
    for row, fits in zip(rows, short):
        line = {
            "id": row.id,
            "score": None,
            "reason": TOO_LONG,
            "generated_tokens": 0,
            "trajectory": None,
        }
        if fits:
            trajectory = next(trajectories)  # in the order of the questions that fit
            # session → problem; only endpoint engines have it.
            problem = getattr(engine, "problems", {}).get(number, "")
            score, number = toolmind_score(trajectory), number + 1
            reason = problem or why_dropped(trajectory, score)
            line |= {
                "score": score,
                "reason": reason,
                "generated_tokens": trajectory.generated_tokens,
                # A dropped trajectory is not stored.
                "trajectory": None if reason else trajectory.to_json(),
            }
        lines.append(line)
    return lines


def why_dropped(trajectory: Trajectory, score: float) -> str:
    """Why a trajectory is not used for training; "" if it is used."""
    # The problem of the first malformed turn, or "".
    malformed = next((turn.problem for turn in trajectory.turns if not turn.well_formed), "")
    if malformed or trajectory.finish != "answer":
        return malformed or f"no end: {trajectory.finish}"
    if any(turn.mode != "think" for turn in trajectory.turns):
        return "a turn that does not reason in text"
    return "" if score >= SUCCESS else f"a score below {SUCCESS}"

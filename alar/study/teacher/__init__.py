"""Teacher rollouts on ToolMind: sampled in shards, scored, and merged into the traces that AASD
learns from.

    python -m alar.study.teacher sample data/toolmind traces --student FOLDER --shard 1/4
    python -m alar.study.teacher sample data/toolmind traces --student FOLDER \\
        --endpoint http://127.0.0.1:8000/v1 --model NAME
    python -m alar.study.teacher merge traces -o runs/paper/tool/02_teacher_traces/traces.jsonl

As published, every row is one trajectory of one turn: ToolMind's rows are prefixes of
conversations, one per assistant turn, so that the earlier calls and all their responses stand in
the prompt as they were recorded, and the trajectory ends with the calls of its one turn. With
`whole` the teacher answers an episode from the last user message to its end instead, and its own
calls get the recorded responses (`alar.domains.tool.replay`). A trajectory is kept when it scores
at least 1.5, is well formed and reasons in text.

A shard holds the requests whose split key, the hash of first user message and functions, falls to
it: the rows of one conversation never part. Its folder is a store (`alar.store`) of chunks, each of
`chunk` requests; sampling starts afresh with every chunk, so that an interrupted shard which is
started again goes on to the same results. `shard.json`, written last, says what the finished shard
consists of. `merge` refuses what does not belong together.
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

ROWS_OF_A_SHARD = 2**24  # more than there are: the random draws of no two requests are the same
BEHIND_PROMPT = 32  # positions kept free between the prompt and the limit of new tokens
TOO_LONG = "the prompt is longer than the model's context"
SHARD_RECEIPT = "shard.json"


@dataclass(frozen=True)
class Shard:
    """Number `index` of `count`, from 1."""

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
        """By other digits of the hash than those that decide the split."""
        return int(row.group[8:], 16) % self.count == self.index - 1


@dataclass(frozen=True)
class Plan:
    """What is asked, and how; the same for all shards. `questions` limits the requests of all
    shards together, 0 for all; a smaller number asks for some of the same. `mode` is that of
    `alar.rollout.loop.run`; `context` the student's number of positions.
    """

    split: str = "train"
    whole: bool = False
    questions: int = 0
    mode: str = "off"
    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 2048
    max_turns: int = 8  # of a whole episode
    context: int = 32768
    seed: int = 0
    chunk: int = 1024

    def __post_init__(self):
        if self.split not in (*(name for name, _ in SPLITS), "train"):
            raise ValueError(
                f"split {self.split!r}: expected train, {', '.join(name for name, _ in SPLITS)}"
            )
        if self.chunk < 1 or self.questions < 0 or self.max_turns < 1:
            raise ValueError(f"{self}: expected chunk ≥ 1, max_turns ≥ 1 and questions ≥ 0")


def shard_requests(source: str | Path, plan: Plan, shard: Shard = Shard()) -> Loaded:
    """A shard's requests, ordered by their content's hash, whatever the order of the files."""
    asked: set[str] = set()  # ids in all shards

    def wanted(row: ToolMindRow) -> bool:
        if split_of_row(row) != plan.split:
            return False
        asked.add(row.id)
        return shard.holds(row)

    loaded = load_rows(read_records(toolmind_files(source)), whole=plan.whole, wanted=wanted)
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
    """Roll out and score the requests of one shard into a folder of its own below `folder`; returns
    that folder.

    `teacher` says what the engine's model is, as JSON. What the same teacher has answered already,
    with the same plan and data, is not asked for again.
    """
    loaded = shard_requests(source, plan, shard)
    rows = loaded.rows
    recoded = isinstance(engine, EndpointEngine)
    files = toolmind_files(source)
    settings = asdict(plan) | {
        "teacher": teacher,
        "data": digest([[file.name, content(file)] for file in files]),
        "shard": str(shard),
        "tokens": "encoded again" if recoded else "sampled",
    }
    store, chunks = Store(Path(folder) / shard.folder), []
    for start in progress(range(0, len(rows), plan.chunk)):
        asked = rows[start : start + plan.chunk]
        ids = [row.id for row in asked]
        chunk = key(f"chunk-{start:08d}.jsonl", {**settings, "ids": ids})
        if store.get(chunk) is None:
            if hasattr(engine, "reset"):
                engine.reset()  # what earlier chunks left in the cache would change the rounding
            first = shard.index * ROWS_OF_A_SHARD + start
            with store.writing(chunk) as aside:
                write_jsonl(aside, _answered(engine, asked, plan, first, batch_size))
        chunks.append(chunk)
    receipt = {"settings": settings, "requests": len(rows), "skipped": dict(loaded.skipped)}
    write_json(store.folder / SHARD_RECEIPT, receipt | {"chunks": chunks})
    return store.folder


def _answered(
    engine: Engine, rows: Sequence[ToolMindRow], plan: Plan, first: int, batch_size: int
) -> list[dict]:
    """One line per request: `score`, the `reason` why it is dropped, and the trajectory if it is
    kept. `first` is the number of the first request, which its random draws follow."""
    questions = [row.request.question(row.id, world="toolmind") for row in rows]
    room = plan.context - plan.max_new_tokens - BEHIND_PROMPT
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
    lines, number = [], first
    for row, fits in zip(rows, short):
        line = {
            "id": row.id,
            "score": None,
            "reason": TOO_LONG,
            "generated_tokens": 0,
            "trajectory": None,
        }
        if fits:
            trajectory = next(trajectories)
            problem = getattr(engine, "problems", {}).get(number, "")
            score, number = toolmind_score(trajectory), number + 1
            reason = problem or why_dropped(trajectory, score)
            line |= {
                "score": score,
                "reason": reason,
                "generated_tokens": trajectory.generated_tokens,
                "trajectory": None if reason else trajectory.to_json(),
            }
        lines.append(line)
    return lines


def why_dropped(trajectory: Trajectory, score: float) -> str:
    """ "" for a trajectory to learn from."""
    malformed = next((turn.problem for turn in trajectory.turns if not turn.well_formed), "")
    if malformed or trajectory.finish != "answer":
        return malformed or f"no end: {trajectory.finish}"
    if any(turn.mode != "think" for turn in trajectory.turns):
        return "a turn that does not reason in text"
    return "" if score >= SUCCESS else f"a score below {SUCCESS}"

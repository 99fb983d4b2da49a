"""Teacher rollouts of notebook 02, a part of the questions at a time.

    files = roll_out_parts(questions, engine, environment, sampling, folder, settings={})
    table, longest = gather_parts(files, "traces.jsonl")

Search-R1's training pool has 170 K questions, and a trajectory takes about 0.1 MB of memory. So
only one part is held at a time. A part is a file that is found again by its content (`alar.store`):
an interrupted stage goes on with the first part that is missing. Every part begins with an engine
that remembers nothing, and a question's random draws depend on its number alone. So an interrupted
run gives the same traces as an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd

from alar.evaluate.systems import question_table
from alar.files import iterate_jsonl, write_jsonl
from alar.records import Environment, Question, Trajectory, TurnRecord
from alar.rollout.engine import Engine, Sampling
from alar.rollout.loop import run
from alar.store import Store, digest, key

PART = 8192  # questions; more than a laptop's study asks, whose single part is one rollout


def check_teacher(tokenizer, base: str | Path) -> None:
    """Raise ValueError unless the teacher's tokenizer is that of the base: traces hold ids, and the
    student reads them as its own."""
    from transformers import AutoTokenizer

    if tokenizer.get_vocab() != AutoTokenizer.from_pretrained(base).get_vocab():
        raise ValueError(
            f"teacher.model: {tokenizer.name_or_path} has another vocabulary than {base}; take a"
            " teacher of the same family, or one behind an endpoint (alar.study.teacher sample)"
        )


def roll_out_parts(
    questions: Sequence[Question],
    engine: Engine,
    environment: Environment,
    sampling: Sampling,
    folder: str | Path,
    *,
    settings: dict[str, Any],
    size: int = PART,
    max_turns: int = 6,
    batch_size: int = 256,
    seed: int = 0,
    drop_repeats: bool = False,
    progress: Callable[[Iterable], Iterable] = iter,
) -> list[Path]:
    """Roll out all questions in text, `size` of them in one file of `folder`; returns the files.

    A file has one line per question: its row of `question_table`, and its trajectory if that is
    right and well formed. With `drop_repeats` it loses its repeated queries (`without_repeats`).
    `settings` (JSON) says what else decides the answers: the teacher's
    checkpoint and the environment's parameters. `progress` wraps an iteration in which a step is a
    finished trajectory, of an earlier run too.
    """
    store, files = Store(folder), []
    ticks = iter(progress(range(len(questions))))
    next(ticks, None)  # each further step says that the one before is done
    for start in range(0, len(questions), size):
        asked = questions[start : start + size]
        decided_by = {
            **settings,
            "questions": digest([asdict(question) for question in asked]),
            "prompt": digest(list(environment.form.prompt(asked[0]))),
            "sampling": asdict(sampling),
            "max_turns": max_turns,
            "seed": seed,
            "drop_repeats": drop_repeats,
        }
        name = key(f"part-{start:08d}.jsonl", decided_by)

        def counted(rows: Iterable) -> Iterator:
            for row in rows:
                yield row
                next(ticks, None)

        if store.get(name) is not None:
            for _ in counted(asked):
                pass
        else:
            if hasattr(engine, "reset"):
                engine.reset()  # prefixes of an earlier part would change the rounding
            found = run(
                asked,
                engine,
                environment,
                sampling,
                modes="off",
                max_turns=max_turns,
                batch_size=batch_size,
                seed=seed,
                first_row=start,
                progress=counted,
            )
            with store.writing(name) as aside:
                write_jsonl(aside, _lines(found, drop_repeats))
            del found  # before the next part is held
        files.append(store.folder / name)
    return files


def gather_parts(
    files: Sequence[Path], output: str | Path
) -> tuple[pd.DataFrame, Trajectory | None]:
    """Write the kept trajectories of all parts as one file.

    Returns the table of all questions, with a column `kept`, and of the kept trajectories the one
    that thinks longest, None without any.
    """
    rows: list[dict] = []
    longest: dict = {}  # the trajectory as JSON
    most = -1  # its think length, in characters

    def kept() -> Iterator[dict]:
        nonlocal longest, most
        for file in files:
            for line in iterate_jsonl(file):
                rows.append(line["row"])
                if line["trajectory"] is None:
                    continue
                if line["row"]["think_length"] > most:
                    longest, most = line["trajectory"], line["row"]["think_length"]
                yield line["trajectory"]

    write_jsonl(output, kept())
    return pd.DataFrame(rows), Trajectory.from_json(longest) if longest else None


def without_repeats(trajectory: Trajectory) -> Trajectory:
    """The trajectory less each search for what the search before it asked, with its result.

    ValueError for a trajectory with latent blocks: the teacher writes text.
    """
    if len(trajectory.latents):
        raise ValueError(f"{trajectory.question.id}: has latent blocks; the teacher writes text")
    turns = trajectory.turns
    ends = [*(turn.start for turn in turns[1:]), len(trajectory.ids)]  # with the observation
    kept = list(range(turns[0].start))  # places of tokens
    remaining: list[TurnRecord] = []
    asked = ""
    for turn, end in zip(turns, ends):
        query = turn.argument if turn.action == "search" else ""
        if query and query == asked:
            continue
        asked = query
        start = len(kept)
        remaining.append(replace(turn, start=start, end=start + turn.end - turn.start))
        kept += range(turn.start, end)
    return replace(
        trajectory,
        ids=[trajectory.ids[place] for place in kept],
        origins=[trajectory.origins[place] for place in kept],
        logprobs=[trajectory.logprobs[place] for place in kept],
        turns=remaining,
    )


def _lines(trajectories: Sequence[Trajectory], drop_repeats: bool) -> Iterator[dict]:
    """One line of a part's file per trajectory."""
    rows = question_table(trajectories, "teacher").to_dict("records")
    for row, trajectory in zip(rows, trajectories):
        keep = trajectory.correct and trajectory.well_formed
        line = {"row": row | {"kept": keep}, "trajectory": None}
        if keep:
            trace = without_repeats(trajectory) if drop_repeats else trajectory
            line["trajectory"] = trace.to_json()
        yield line

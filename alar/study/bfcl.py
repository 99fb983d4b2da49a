"""Evaluates any checkpoint, through any engine, on BFCL's single-turn categories: accuracy of each
category and their mean, by the official checker and, beside it, by the one that published numbers
come from.

    python -m alar.study.bfcl FOLDER RESULTS    the paper's four categories; --help lists the rest

The trajectories of every `shard` questions are written as one file into a store (`alar.store`). A
later call with the same checkpoint and settings reads the files that are there and asks the rest. A
question that is too long for the model's context counts as answered wrongly.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pandas as pd
from transformers import AutoConfig

from alar.domains.tool import bfcl
from alar.domains.tool.environment import ToolEnvironment, verdict
from alar.domains.tool.published_check import published_verdict
from alar.domains.tool.requests import bfcl_request
from alar.engines.choice import ENGINES, opened_engine
from alar.evaluate.accuracy import accuracy_table
from alar.evaluate.systems import evaluate, question_table
from alar.records import Question, Trajectory, read_trajectories, write_trajectories
from alar.rollout.engine import Engine
from alar.rollout.loop import MODES
from alar.store import Store, checkpoint_content, key
from alar.study.stage import progress

BEHIND_PROMPT = 32  # positions kept free besides the prompt and `max_new_tokens`


def evaluate_bfcl(
    engine: Engine,
    folder: str | Path,
    *,
    checkpoint: str | Path,
    categories: Sequence[str] = bfcl.PAPER_CATEGORIES,
    mode: str = "free",
    max_new_tokens: int = 2048,
    context: int = 32768,
    questions: int | None = None,
    batch_size: int = 64,
    shard: int = 128,
    progress: Callable[[Iterable], Iterable] = iter,
) -> pd.DataFrame:
    """Roll out greedily. One row per question: `category`, `correct`, `reason`, the verdict
    `published_protocol`, and the columns of `question_table`.

    `folder` is the store of the shards. `checkpoint` is what the engine was opened on, a folder or
    a hub id; its content and the settings decide whether a shard is there already. `questions`
    limits each category to its first ones. `context` is the model's number of positions.
    `accuracy_table` turns the result into accuracies with intervals. Raises ValueError for the
    Java and JavaScript categories: their prompts would have to ask for source text instead of JSON
    values.
    """
    if foreign := set(categories) & set(bfcl.LANGUAGES):
        raise ValueError(
            f"categories: {', '.join(sorted(foreign))} cannot be asked here; the checker can judge"
            " their answers"
        )
    # The batch size only changes the rounding, so it does not decide a result.
    settings = {
        "checkpoint": checkpoint_content(checkpoint),
        "mode": mode,
        "max_new_tokens": max_new_tokens,
        "context": context,
        "data": bfcl.PACKAGE,
    }
    # `execute=False`: the checker judges the calls as written; nothing runs them.
    store, environment, tables = Store(folder), ToolEnvironment(execute=False), []

    def roll_out(path: Path, asked: Sequence[Question]) -> None:
        answered = evaluate(
            engine,
            environment,
            [question for question in asked if _fits(engine, question, context - max_new_tokens)],
            mode=mode,
            max_new_tokens=max_new_tokens,
            max_turns=1,  # single-turn categories
            batch_size=batch_size,
            progress=progress,
        )
        write_trajectories(path, answered)

    for category in categories:
        items = bfcl.load_category(category)[:questions]  # None: all of them
        asked = [bfcl_request(item).question(item.id, world="bfcl") for item in items]
        trajectories: list[Trajectory] = []
        # A kill costs at most one shard.
        for start in range(0, len(asked), shard):
            part = asked[start : start + shard]
            ids = [question.id for question in part]
            # The ids are in the key: other questions give other answers.
            name = key(f"{category}-{start:05d}-{len(part)}.jsonl", {**settings, "ids": ids})
            # The default `part=part` keeps this shard's value; the loop changes the name.
            path = store.once(name, lambda path, part=part: roll_out(path, part))
            trajectories += read_trajectories(path)
        tables.append(_table(category, asked, trajectories))
    return pd.concat(tables, ignore_index=True)


def _table(
    category: str, asked: Sequence[Question], trajectories: Sequence[Trajectory]
) -> pd.DataFrame:
    reasons = [verdict(trajectory).reason for trajectory in trajectories]
    lenient = [published_verdict(trajectory) for trajectory in trajectories]
    table = question_table(trajectories, "bfcl")
    table = table.assign(reason=reasons, published_protocol=lenient)
    # Questions that `_fits` left out.
    missing = sorted({question.id for question in asked} - set(table["question_id"]))
    if missing:
        reason = "the prompt is longer than the model's context"
        # The columns that are not given here become NaN.
        absent = pd.DataFrame({"question_id": missing, "correct": False, "reason": reason})
        if category in bfcl.AST_CATEGORIES:  # the released check knows no others
            absent["published_protocol"] = False
        table = pd.concat([table, absent], ignore_index=True)
    return table.assign(category=category)


def both_accuracies(table: pd.DataFrame) -> pd.DataFrame:
    """`accuracy_table` of what `evaluate_bfcl` returns, with the columns `published_protocol…`.

    These are the accuracies by the released, more lenient check. They are NaN in categories that it
    does not know, and then in the row "macro" too.
    """
    official = accuracy_table(table)
    judged = table[table["published_protocol"].notna()]
    if judged.empty:
        return official
    lenient = accuracy_table(judged.assign(correct=judged["published_protocol"].astype(bool)))
    if judged["category"].nunique() < table["category"].nunique():
        lenient = lenient[lenient["category"] != "macro"]  # not the mean of the same categories
    names = {name: name.replace("accuracy", "published_protocol") for name in lenient}
    lenient = lenient.drop(columns="questions").rename(columns=names)
    return official.merge(lenient, on="category", how="left")


def _fits(engine: Engine, question: Question, room: int) -> bool:
    # The ids of the whole prompt, with the function descriptions.
    prompt = engine.codec.encode(ToolEnvironment.form.prompt(question))
    return len(prompt) + BEHIND_PROMPT <= room


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m alar.study.bfcl", description="Ask a checkpoint BFCL's own questions."
    )
    parser.add_argument("checkpoint", type=Path, help="model folder, latent or not")
    parser.add_argument(
        "results",
        type=Path,
        help="folder of the trajectories and the tables; an interrupted call goes on there",
    )
    parser.add_argument(
        "--categories",
        nargs="+",
        choices=bfcl.ASKED_CATEGORIES,
        default=bfcl.PAPER_CATEGORIES,
        metavar="NAME",
    )
    parser.add_argument(
        "--questions", type=int, help="the first ones of each category (default: all)"
    )
    parser.add_argument(
        "--mode",
        choices=MODES,
        default="free",
        help='"off" for a base without latent blocks (default: free)',
    )
    parser.add_argument("--engine", choices=ENGINES, default="hf")
    parser.add_argument("--max-new-tokens", type=int, default=2048)
    options = parser.parse_args(argv)
    try:
        # The number of positions; longer questions are not asked.
        context = AutoConfig.from_pretrained(options.checkpoint).max_position_embeddings
        with opened_engine(options.checkpoint, options.engine) as engine:
            table = evaluate_bfcl(
                engine,
                options.results,
                checkpoint=options.checkpoint,
                categories=options.categories,
                mode=options.mode,
                max_new_tokens=options.max_new_tokens,
                context=context,
                questions=options.questions,
                progress=progress,
            )
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    accuracy = both_accuracies(table)  # per category, and their mean
    table.to_csv(options.results / "questions.csv", index=False)
    accuracy.to_csv(options.results / "accuracy.csv", index=False)
    print(accuracy.to_string(index=False, float_format="{:.3f}".format))
    return 0


if __name__ == "__main__":
    sys.exit(main())

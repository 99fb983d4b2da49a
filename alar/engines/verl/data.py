"""Prompts for verl: a Parquet file whose rows stand in the order in which the steps use them.

verl reads `prompt` (chat messages), `data_source`, `reward_model` and `extra_info`. The agent loop
reads the whole question back from `extra_info`. verl does not shuffle the file, so a resumed job
goes on with the right rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from alar.files import replacing
from alar.records import Question, question_from_json


def write_prompts(path: str | Path, questions: Sequence[Question], *, source: str = "alar") -> Path:
    """Write the whole Parquet file or none of it. Raises ValueError if there are no questions."""
    if not questions:
        raise ValueError(f"{path}: no questions to write")
    rows = [
        {
            "data_source": source,
            # For people who read the file. The agent loop writes the prompt itself.
            "prompt": [{"role": "user", "content": question.text}],
            "ability": question.type or source,
            "reward_model": {
                "style": "rule",
                # For people too: the agent loop's environment judges answers.
                "ground_truth": json.dumps(list(question.answers), ensure_ascii=False),
            },
            "extra_info": {
                "index": index,  # becomes the prompt's id in the queue, which sorts by it
                "question": json.dumps(asdict(question), ensure_ascii=False),
            },
        }
        for index, question in enumerate(questions)
    ]
    with replacing(path) as aside:
        pq.write_table(pa.Table.from_pylist(rows), aside)
    return Path(path)


def question_of(extra_info: Mapping) -> Question:
    """The question of a row. Raises ValueError if `write_prompts` did not write the file."""
    if "question" not in extra_info:
        raise ValueError(
            "extra_info has no `question`: write the prompts with"
            " alar.engines.verl.data.write_prompts"
        )
    return question_from_json(json.loads(extra_info["question"]))


def read_prompts(path: str | Path) -> list[Question]:
    return [
        question_of(row["extra_info"])
        for row in pq.read_table(path, columns=["extra_info"]).to_pylist()
    ]

"""Answer datasets as `Question` records: published ones by name, and files in one of their shapes.

| format | columns | may also have | scorer |
|---|---|---|---|
| gsm8k | question, answer: a chain, then `#### 18` | subject | numeric |
| math | problem, solution with `\\boxed{}` | answer, subject, type | math |
| mmlu | question, choices, answer: 0–3 or A–D | subject | letter |
| metamathqa | query, response that ends in `The answer is: 18` | type | math |

A *format* is a processor (row → question text, accepted answers, solution) with a scorer. `FORMATS`
is a plain dict; others can be added to it. Every broken row is an error that names file, row and
column: a silently dropped question would change a published number.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from alar.domains.search.datasets import DatasetError, fixed_sample, hub_rows, read_rows
from alar.domains.static import arithmetic
from alar.domains.static.answers import SCORERS, after_hashes, last_boxed, stated_answer
from alar.records import Question

LETTERS = "ABCDEFGHIJ"  # MMLU has four choices; sets of its kind have up to ten
EMBEDDED = "arithmetic"  # the set that is generated here, in GSM8K's format


@dataclass(frozen=True)
class Processed:
    """What a processor reads from one row."""

    text: str  # the question
    answers: tuple[str, ...]  # accepted ones
    solution: str = ""  # the published chain of thought
    subject: str = ""


@dataclass(frozen=True)
class Format:
    """Rows must have `columns`; `process` may read others. `scorer` is in `answers.SCORERS`."""

    columns: tuple[str, ...]
    process: Callable[[dict], Processed]
    scorer: str


@dataclass(frozen=True)
class Published:
    """A set on the hub; `train` and `test` name its splits, best first."""

    hub: str
    config: str | None
    format: str
    train: tuple[str, ...] = ("train",)
    test: tuple[str, ...] = ("test",)
    size: int = 0  # of the test split


def read_gsm8k(row: dict) -> Processed:
    gold = after_hashes(row["answer"])
    if gold is None:
        raise ValueError(f"answer: no `####` with the final answer in {row['answer'][-60:]!r}")
    chain = row["answer"].rpartition("####")[0].strip()
    # GSM8K writes some answers with separators: 1,200.
    return Processed(row["question"], (gold.replace(",", ""),), chain, _text(row, "subject"))


def read_math(row: dict) -> Processed:
    gold = _text(row, "answer") or last_boxed(row["solution"])
    if not gold:
        raise ValueError(
            f"solution: no `\\boxed{{}}` in {row['solution'][-60:]!r}, and no column answer"
        )
    subject = _text(row, "subject") or _text(row, "type")
    return Processed(row["problem"], (gold,), row["solution"], subject)


def read_mmlu(row: dict) -> Processed:
    choices, gold = row["choices"], row["answer"]
    listed = isinstance(choices, Sequence) and not isinstance(choices, str)
    if not listed or not 2 <= len(choices) <= len(LETTERS):
        raise ValueError(f"choices: expected 2 to {len(LETTERS)} texts, got {choices!r:.80}")
    names = LETTERS[: len(choices)]
    # A letter becomes its number; one that is no choice becomes −1, an error below.
    if isinstance(gold, str) and gold.strip():
        gold = names.find(gold.strip().upper())
    # A bool is not a choice, although Python counts it as an int.
    if type(gold) is not int or not 0 <= gold < len(choices):
        raise ValueError(
            f"answer: expected a number below {len(choices)} or a letter of {names}, got"
            f" {row['answer']!r}"
        )
    options = "\n".join(f"{name}. {choice}" for name, choice in zip(names, choices))
    text = f"{row['question']}\n{options}\nAnswer with the letter."
    return Processed(text, (names[gold],), "", _text(row, "subject"))


def read_metamathqa(row: dict) -> Processed:
    gold = stated_answer(row["response"])
    if gold is None:
        raise ValueError(f"response: no `The answer is: …` in {row['response'][-60:]!r}")
    chain = row["response"].rpartition("The answer is")[0].strip()
    return Processed(row["query"], (gold,), chain, _text(row, "type"))


# name → format
FORMATS = {
    "gsm8k": Format(("question", "answer"), read_gsm8k, "numeric"),
    "math": Format(("problem", "solution"), read_math, "math"),
    "mmlu": Format(("question", "choices", "answer"), read_mmlu, "letter"),
    "metamathqa": Format(("query", "response"), read_metamathqa, "math"),
}
# Name of a set, as `static.sets` and `load_questions` take it → where it is.
PUBLISHED = {
    "gsm8k": Published("openai/gsm8k", "main", "gsm8k", size=1319),
    "math": Published("nlile/hendrycks-MATH-benchmark", None, "math", size=500),
    "mmlu": Published("cais/mmlu", "all", "mmlu", train=("auxiliary_train", "dev"), size=14042),
    "metamathqa": Published("meta-math/MetaMathQA", None, "metamathqa", test=("test", "train")),
}


def load_questions(
    source: str | Path,
    split: str = "test",
    *,
    format: str = "",
    limit: int = 0,
    hub: str = "",
    seed: int = 0,
) -> list[Question]:
    """A set's questions: a published name, "arithmetic", or a .jsonl, .json or .parquet file.

    `split` is "train" or "test"; a file has no splits and is taken whole. `format` names the
    processor of a file; without it, the columns of the file decide. `hub` replaces a published
    set's repository by another id or a local folder. `limit` keeps that many questions, always the
    same ones; the arithmetic set generates that many, and 2000 without it. The type of a question
    is the name of its set or file. Raises DatasetError.
    """
    if split not in ("train", "test"):
        raise ValueError(f"split {split!r}: expected train or test")
    name = str(source)
    if name == EMBEDDED:
        rows = arithmetic.rows(split, limit or 2000, seed)
        numbered = [(f"{name}, row {i}", row) for i, row in enumerate(rows, start=1)]
        return from_rows(numbered, name, FORMATS["gsm8k"])
    if name in PUBLISHED:
        published = PUBLISHED[name]
        rows = hub_rows(hub or published.hub, published.config, getattr(published, split))
        return _limited(from_rows(rows, name, FORMATS[published.format]), limit)
    if not Path(source).is_file():
        raise DatasetError(
            f"{name}: neither a file nor a known set; known sets:"
            f" {', '.join([EMBEDDED, *PUBLISHED])}"
        )
    found = list(read_rows(Path(source)))
    if not found:
        raise DatasetError(f"{name}: the set has no questions")
    chosen = _format(format, found[0][1], name)
    return _limited(from_rows(found, Path(source).stem, chosen), limit)


def from_rows(rows: Iterable[tuple[str, dict]], name: str, format: Format) -> list[Question]:
    """(where, row) pairs as questions of type `name`; errors name `where`."""
    questions = []
    for number, (where, row) in enumerate(rows):
        missing = [column for column in format.columns if row.get(column) is None]
        if missing:
            raise DatasetError(
                f"{where}: no column {', '.join(missing)}; the columns here are"
                f" {', '.join(map(str, row))}"
            )
        for column in format.columns:
            value = row[column]
            # MMLU's choices are a list and its answer may be a number: `read_mmlu` checks both.
            if column not in ("choices", "answer") and not isinstance(value, str):
                raise DatasetError(f"{where}: {column}: expected a text, got {value!r:.80}")
        try:
            found = format.process(row)
        except (ValueError, TypeError, AttributeError) as error:
            raise DatasetError(f"{where}: {error}") from error
        if not found.text.strip():
            raise DatasetError(f"{where}: the question is empty")
        # What `is_correct` and `subject_of` read again from `Question.details`.
        details = {"scorer": format.scorer, "solution": found.solution, "subject": found.subject}
        written = json.dumps(details, ensure_ascii=False)
        # Rows without an id are numbered.
        identity = f"{name}/{number if row.get('id') in (None, '') else row['id']}"
        questions.append(
            Question(identity, found.text.strip(), found.answers, name, details=written)
        )
    if not questions:
        raise DatasetError(f"{name}: the set has no questions")
    if len({question.id for question in questions}) < len(questions):
        raise DatasetError(f"{name}: the column id repeats itself; ids must be unique")
    return questions


def subject_of(question: Question) -> str:
    """The subject of MMLU and MATH, the kind of an embedded problem, "" elsewhere."""
    return json.loads(question.details)["subject"] if question.details else ""


def is_correct(prediction: str, question: Question) -> bool:
    """The verdict of the question's own scorer; exact match if it names none."""
    name = json.loads(question.details)["scorer"] if question.details else "exact"
    if name not in SCORERS:
        raise ValueError(
            f"{question.id}: scorer {name!r} is unknown; there are {', '.join(SCORERS)}"
        )
    return SCORERS[name](prediction, question.answers)


def _format(name: str, row: dict, source: str) -> Format:
    if name:
        if name not in FORMATS:
            raise ValueError(f"{source}: format {name!r}: expected one of {', '.join(FORMATS)}")
        return FORMATS[name]
    fitting = [kind for kind, format in FORMATS.items() if set(format.columns) <= set(row)]
    if not fitting:
        shapes = "; ".join(
            f"{kind}: {', '.join(format.columns)}" for kind, format in FORMATS.items()
        )
        raise DatasetError(
            f"{source}: the columns {', '.join(map(str, row))} are those of no known format"
            f" ({shapes})"
        )
    # MMLU's columns contain GSM8K's: the format with the most columns is the right one.
    return FORMATS[max(fitting, key=lambda kind: len(FORMATS[kind].columns))]


def _limited(questions: list[Question], limit: int) -> list[Question]:
    return fixed_sample(questions, limit) if limit else questions


def _text(row: dict, column: str) -> str:
    return row[column].strip() if isinstance(row.get(column), str) else ""

"""The published question sets, and anybody's own JSONL or Parquet file, as `Question` records.

The six evaluation sets come from FlashRAG's collection (`RUC-NLPIR/FlashRAG_datasets`: id,
question, golden_answers). They use the split that Search-R1 evaluates on: test, else dev, else
train. `nq_hotpotqa_train` is Search-R1's training set, for teacher traces and RL prompts. A file
needs `question` and one of `golden_answers`, `answers`, `answer` (a list or a string). Every broken
row is an error that names file, row and field: a silently dropped question would change a published
number.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from alar.records import Question

FLASHRAG = "RUC-NLPIR/FlashRAG_datasets"
SEARCH_R1_TRAIN = "PeterJinGo/nq_hotpotqa_train"

# Questions in the split that is evaluated (Search-R1, table 2; FlashRAG's data card).
published_sizes = {
    "nq": 3610,
    "triviaqa": 11313,
    "hotpotqa": 7405,
    "2wikimultihopqa": 12576,
    "musique": 2417,
    "bamboogle": 125,
}

EVALUATION_SPLITS = ("test", "dev", "train")  # the first that a set has
ANSWER_FIELDS = ("golden_answers", "answers", "answer")  # the first that a row has
# All that is read of a question's row.
COLUMNS = (*ANSWER_FIELDS, "question", "id", "_id", "data_source", "type", "prompt")


class DatasetError(ValueError):
    """A question set is missing or a row of it cannot be used."""


def load_questions(
    source: str | Path, *, hub: str | Path = "", split: str = "", limit: int = 0
) -> list[Question]:
    """Load a set by name ("nq", …, "nq_hotpotqa_train") or a local .jsonl, .json or .parquet file.

    `hub` replaces the set's hub repository: another repository id, or the folder of a clone.
    `split` overrides the default: the evaluation split of a published set, train of
    nq_hotpotqa_train. `limit` keeps that many questions, those with the smallest hash of their id.
    So it keeps always the same ones, and a smaller sample is part of a larger one.

    Question ids start with the name of the set or file, and `type` is that name unless a file has a
    `type` of its own. So several sets can be evaluated together. Chat messages in a column `prompt`
    are kept in `details`. Raises DatasetError.
    """
    name = str(source)
    if name in published_sizes:
        splits = (split,) if split else EVALUATION_SPLITS
        questions = _from_rows(hub_rows(str(hub or FLASHRAG), name, splits), name)
    elif name in ("nq_hotpotqa_train", SEARCH_R1_TRAIN):
        # Its splits hold different structs in `metadata`. The library `datasets` casts all of them
        # to that of the first one and fails, so one split's file is read, without that column.
        file = hub_file(str(hub or SEARCH_R1_TRAIN), f"{split or 'train'}.parquet")
        rows = read_rows(file, COLUMNS)
        questions = _from_rows(rows, "nq_hotpotqa_train")
    elif Path(source).is_file():
        questions = _from_rows(read_rows(Path(source), COLUMNS), Path(source).stem)
    else:
        known = ", ".join([*published_sizes, "nq_hotpotqa_train"])
        raise DatasetError(f"{name}: neither a file nor a known set; known sets: {known}")
    if limit < 0:
        raise ValueError(f"limit must be 0 (all) or positive, got {limit}")
    return fixed_sample(questions, limit) if limit else questions


def hub_file(hub: str, name: str) -> Path:
    """A file of the hub's set, or of a clone in the folder `hub`; downloaded once."""
    if Path(hub).is_dir():
        return Path(hub) / name
    import huggingface_hub  # only here: local files need no client of the hub

    try:
        return Path(huggingface_hub.hf_hub_download(hub, name, repo_type="dataset"))
    except (huggingface_hub.errors.HfHubHTTPError, OSError, ValueError) as error:
        raise DatasetError(
            f"{hub}: {name} cannot be fetched: {type(error).__name__}: {error}\nOn a machine with a"
            f" network: hf download {hub} {name} --repo-type dataset; or give the set as a JSONL or"
            " Parquet file"
        ) from error


def hub_rows(hub: str, config: str | None, splits: Sequence[str]) -> Iterator[tuple[str, dict]]:
    """(where, record) of each row in the first of `splits` that the hub's set has."""
    import datasets  # slow to import, and not needed for files

    try:
        loaded = datasets.load_dataset(hub, config)
    except Exception as error:
        # The library raises a dozen unrelated types when it cannot reach or read a hub.
        raise DatasetError(
            f"{hub} ({config}): cannot be loaded: {type(error).__name__}:"
            f" {error}\nWithout a network, give the set as a JSONL or Parquet file"
        ) from error
    split = next((split for split in splits if split in loaded), None)
    if split is None:
        raise DatasetError(
            f"{hub} ({config}): no split {' or '.join(splits)}; it has {', '.join(loaded)}"
        )
    for row, record in enumerate(loaded[split], start=1):
        yield f"{hub} ({config or 'default'}, {split}), row {row}", record


def read_rows(path: Path, columns: Sequence[str] = ()) -> Iterator[tuple[str, dict]]:
    """(where, record) of each row.

    `where` is file:line for JSON lines and "file, row n" for Parquet, both counted from 1. Of
    Parquet only `columns` are read, if any are given and there: others may be large, as HotpotQA's
    `metadata`, which has ten passages a question.
    """
    if path.suffix == ".parquet":
        import pyarrow  # only here: JSON lines do not need it
        import pyarrow.parquet

        row = 0
        try:
            file = pyarrow.parquet.ParquetFile(path)
            found = [name for name in file.schema_arrow.names if name in columns]
            for batch in file.iter_batches(columns=found or None):
                for record in batch.to_pylist():
                    row += 1
                    yield f"{path}, row {row}", record
        except (pyarrow.ArrowInvalid, OSError) as error:
            raise DatasetError(
                f"{path}: not a readable Parquet file ({error}); fetch it again"
            ) from error
        return
    if path.suffix not in (".jsonl", ".json"):
        raise DatasetError(f"{path}: unknown kind of file {path.suffix!r}: give .jsonl or .parquet")
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise DatasetError(
                    f"{path}:{number}: not a JSON object ({error}); one question per line, whole"
                    " lines only"
                ) from error
            if not isinstance(record, dict):
                raise DatasetError(
                    f"{path}:{number}: not a JSON object but {type(record).__name__}"
                )
            yield f"{path}:{number}", record


def _from_rows(rows: Iterable[tuple[str, dict]], name: str) -> list[Question]:
    questions: list[Question] = []
    seen: dict[str, str] = {}  # question id → where it stands
    for number, (where, record) in enumerate(rows):
        question = _question(record, name, number, where)
        if question.id in seen:
            first = seen[question.id]
            raise DatasetError(
                f"{where}: id: {question.id!r} was used before, at {first}; ids must be unique"
            )
        seen[question.id] = where
        questions.append(question)
    if not questions:
        raise DatasetError(f"{name}: the set has no questions")
    return questions


def _question(record: dict, name: str, number: int, where: str) -> Question:
    text = record.get("question")
    if not isinstance(text, str) or not text.strip():
        raise DatasetError(f"{where}: question: expected a text, got {text!r}")
    identity = record.get("id", record.get("_id"))  # 2WikiMultihopQA's own files write `_id`
    identity = str(number) if identity in (None, "") else str(identity)
    # Search-R1's merged set numbers the questions of each source from 0: ids need their source.
    origin = record.get("data_source") or name
    kind = record.get("type")
    if not isinstance(kind, str) or not kind:
        kind = origin
    answers, details = _answers(record, where), _messages(record, where)
    return Question(f"{origin}/{identity}", text.strip(), answers, type=kind, details=details)


def _messages(record: dict, where: str) -> str:
    """The row's own chat messages as JSON, "" if it has none. Search-R1's data have them in the
    column `prompt`; in other sets a text may stand there, which is no chat."""
    prompt = record.get("prompt")
    if not isinstance(prompt, list) or not prompt:
        return ""
    messages = []
    for message in prompt:
        role = message.get("role") if isinstance(message, dict) else None
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(role, str) or not isinstance(content, str):
            raise DatasetError(
                f"{where}: prompt: expected messages with role and content, got {message!r:.80}"
            )
        messages.append({"role": role, "content": content})
    return json.dumps({"messages": messages}, ensure_ascii=False)


def _answers(record: dict, where: str) -> tuple[str, ...]:
    present = [field for field in ANSWER_FIELDS if record.get(field) is not None]
    if not present:
        raise DatasetError(
            f"{where}: no answers: expected one of the fields {', '.join(ANSWER_FIELDS)}"
        )
    field = present[0]
    value = record[field]
    # A plain string is one answer, not a sequence of characters.
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(answer, str) for answer in values):
        raise DatasetError(
            f"{where}: {field}: expected a text or a list of texts, got {value!r:.80}"
        )
    # Without blanks and repetitions, in the order of the file.
    answers = tuple(dict.fromkeys(answer.strip() for answer in values if answer.strip()))
    if not answers:
        raise DatasetError(
            f"{where}: {field}: there is no answer in {value!r}; a question needs at least one"
        )
    return answers


def fixed_sample(questions: list[Question], limit: int) -> list[Question]:
    """The `limit` questions whose ids have the smallest hashes, in their order in `questions`."""

    # Not Python's `hash`: it is salted anew in every process.
    def position(i: int) -> str:
        return hashlib.blake2b(questions[i].id.encode(), digest_size=16).hexdigest()

    chosen = sorted(range(len(questions)), key=position)[:limit]  # indices into `questions`
    return [questions[i] for i in sorted(chosen)]

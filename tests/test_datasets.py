"""Loaders of the published sets, on files of the published shape, and of anybody's own files."""

import json

import pandas as pd
import pytest

from alar.domains.search.datasets import DatasetError, load_questions, published_sizes
from alar.records import Question
from alar.study.check.data import question_sets


def write_jsonl(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records),
        encoding="utf-8",
    )
    return path


def rows(split, count):
    return [
        {
            "id": f"{split}_{i}",
            "question": f"who won {split} {i} ",
            "golden_answers": [f"Winner {i}", f"W. {i}"],
        }
        for i in range(count)
    ]


SPLITS = {
    "nq": ("train", "dev", "test"),
    "triviaqa": ("train", "dev", "test"),
    "hotpotqa": ("train", "dev"),
    "2wikimultihopqa": ("train", "dev"),
    "musique": ("train", "dev"),
    "bamboogle": ("test",),
}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A clone of FlashRAG's repository: <name>/<split>.jsonl, and a card that names the sets."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "FlashRAG_datasets"
    lines = ["---", "configs:"]
    for name, splits in SPLITS.items():
        lines += [f"- config_name: {name}", "  data_files:"]
        for split in splits:
            write_jsonl(folder / name / f"{split}.jsonl", rows(split, 4 if split == "train" else 3))
            lines += [f"  - split: {split}", f"    path: {name}/{split}.jsonl"]
    (folder / "README.md").write_text("\n".join([*lines, "---", "# FlashRAG datasets", ""]))
    return folder


@pytest.mark.parametrize("name", list(SPLITS))
def test_published_sets_load_from_the_split_that_is_evaluated(hub, name):
    split = "test" if "test" in SPLITS[name] else "dev"
    assert load_questions(name, hub=hub) == [
        Question(
            f"{name}/{split}_{i}", f"who won {split} {i}", (f"Winner {i}", f"W. {i}"), type=name
        )
        for i in range(3)
    ]


def test_the_six_published_sets_are_known():
    assert set(published_sizes) == set(SPLITS)


def test_a_split_can_be_chosen(hub):
    assert [question.id for question in load_questions("nq", hub=hub, split="train")][
        -1
    ] == "nq/train_3"
    with pytest.raises(DatasetError, match=r"nq.*validation.*train, dev, test"):
        load_questions("nq", hub=hub, split="validation")


def test_a_broken_row_of_the_library_is_named(hub):
    records = rows("test", 5)
    records[3]["golden_answers"] = []
    write_jsonl(hub / "nq" / "test.jsonl", records)
    with pytest.raises(DatasetError, match=r"nq, test.*row 4: golden_answers"):
        load_questions("nq", hub=hub)


def test_an_unreachable_hub_is_an_error_with_a_remedy(monkeypatch):
    import datasets

    def refuse(*arguments, **keywords):
        raise ConnectionError("Couldn't reach the hub")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(DatasetError, match=r"RUC-NLPIR/FlashRAG_datasets(.|\n)*JSONL"):
        load_questions("nq")


def test_search_r1s_training_set_keeps_questions_of_both_sources_apart(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    frame = pd.DataFrame(
        [
            {
                "id": f"train_{i}",
                "question": f"question {i} of {source}?",
                "golden_answers": [f"answer {i}"],
                "data_source": source,
                "prompt": [{"content": "Answer the given question.", "role": "user"}],
                "reward_model": {"ground_truth": {"target": [f"answer {i}"]}, "style": "rule"},
            }
            for source in ("nq", "hotpotqa")
            for i in range(3)
        ]
    )
    (tmp_path / "hub").mkdir()
    frame.to_parquet(tmp_path / "hub" / "train.parquet")
    questions = load_questions("nq_hotpotqa_train", hub=tmp_path / "hub")
    assert [question.id for question in questions] == [
        f"{s}/train_{i}" for s in ("nq", "hotpotqa") for i in range(3)
    ]
    messages = {"messages": [{"role": "user", "content": "Answer the given question."}]}
    assert questions[4] == Question(
        "hotpotqa/train_1",
        "question 1 of hotpotqa?",
        ("answer 1",),
        type="hotpotqa",
        details=json.dumps(messages),
    )


def test_search_r1s_training_set_loads_although_its_splits_have_different_metadata(
    tmp_path, monkeypatch
):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    metadata = {  # `context` is a struct in one split and a text in the other
        "train": {"type": "bridge", "context": {"title": ["a"], "sentences": [["x"]]}},
        "test": {"type": "bridge", "possible_answers": "x", "context": "x"},
    }
    folder = tmp_path / "nq_hotpotqa_train"
    folder.mkdir()
    for split, held in metadata.items():
        frame = pd.DataFrame([row | {"metadata": held} for row in rows(split, 3)])
        frame.to_parquet(folder / f"{split}.parquet")
    with pytest.raises(datasets.exceptions.DatasetGenerationError):
        datasets.load_dataset(str(folder))  # as a whole: the defect of the published set
    for split in metadata:
        found = load_questions("nq_hotpotqa_train", hub=folder, split=split)
        ids = [f"nq_hotpotqa_train/{split}_{i}" for i in range(3)]
        assert [question.id for question in found] == ids


def test_search_r1s_training_set_is_fetched_once_and_its_absence_has_a_remedy(
    tmp_path, monkeypatch
):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DatasetError, match=r"hf download PeterJinGo/nq_hotpotqa_train train\.par"):
        load_questions("nq_hotpotqa_train")
    # The layout of the hub's cache: after the download no network is needed.
    repository, commit = tmp_path / "datasets--PeterJinGo--nq_hotpotqa_train", "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots" / commit).mkdir(parents=True)
    pd.DataFrame(rows("train", 3)).to_parquet(repository / "snapshots" / commit / "train.parquet")
    assert len(load_questions("nq_hotpotqa_train")) == 3
    (finding,) = question_sets(["nq_hotpotqa_train"])
    assert not finding.remedy  # `--check` sees it too


@pytest.mark.parametrize(
    "answers",
    [
        {"golden_answers": ["sol", "Peruvian sol"]},
        {"answers": ["sol", "Peruvian sol"]},
        {"answer": ["sol", " Peruvian sol ", "sol", ""]},
    ],
)
def test_own_files_may_call_the_answers_by_three_names(tmp_path, answers):
    record = {"question": "Which currency has Peru?", **answers}
    expected = Question("mine/0", "Which currency has Peru?", ("sol", "Peruvian sol"), type="mine")
    assert load_questions(write_jsonl(tmp_path / "mine.jsonl", [record])) == [expected]
    pd.DataFrame([record]).to_parquet(tmp_path / "mine.parquet")
    assert load_questions(str(tmp_path / "mine.parquet")) == [expected]


def test_own_files_may_give_one_answer_as_text_an_id_and_a_type(tmp_path):
    record = {"_id": 17, "question": "Zürich?", "answer": "Schweiz", "type": "bridge"}
    path = write_jsonl(tmp_path / "mine.jsonl", [record])
    assert load_questions(path) == [Question("mine/17", "Zürich?", ("Schweiz",), type="bridge")]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ('{"question": "q", "answers": ["a"', r"mine\.jsonl:3: "),
        ('["q", "a"]', r"mine\.jsonl:3: "),
        ('{"answers": ["a"]}', r"mine\.jsonl:3: question"),
        ('{"question": " ", "answers": ["a"]}', r"mine\.jsonl:3: question"),
        ('{"question": "q"}', r"mine\.jsonl:3: .*golden_answers, answers, answer"),
        ('{"question": "q", "answers": []}', r"mine\.jsonl:3: answers"),
        ('{"question": "q", "answer": "  "}', r"mine\.jsonl:3: answer"),
        ('{"question": "q", "answers": ["a", 3]}', r"mine\.jsonl:3: answers"),
        ('{"question": "q", "answer": {"value": "a"}}', r"mine\.jsonl:3: answer"),
        (
            '{"id": "x", "question": "q", "answer": "a"}',
            r"mine\.jsonl:3: id: 'mine/x'.*mine\.jsonl:1",
        ),
    ],
)
def test_a_broken_row_is_named_with_file_line_and_field(tmp_path, record, message):
    good = '{"id": "x", "question": "q", "answers": ["a"]}'
    path = tmp_path / "mine.jsonl"
    path.write_text(f"{good}\n\n{record}\n")
    with pytest.raises(DatasetError, match=message):
        load_questions(path)


def test_a_missing_column_of_a_parquet_file_is_named(tmp_path):
    pd.DataFrame({"question": ["q"], "gold": ["a"]}).to_parquet(tmp_path / "mine.parquet")
    with pytest.raises(DatasetError, match=r"mine\.parquet, row 1"):
        load_questions(tmp_path / "mine.parquet")
    (tmp_path / "mine.parquet").write_bytes(b"PAR1 cut off")
    with pytest.raises(DatasetError, match=r"mine\.parquet"):
        load_questions(tmp_path / "mine.parquet")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("trivia_qa", "trivia_qa.*nq, triviaqa"),
        ("empty.jsonl", "empty"),
        ("notes.txt", "notes.txt"),
    ],
)
def test_unusable_sources_are_refused(tmp_path, monkeypatch, source, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "notes.txt").touch()
    with pytest.raises(DatasetError, match=message):
        load_questions(source)


def test_a_folder_without_the_set_is_named(tmp_path):
    with pytest.raises(DatasetError, match=f"{tmp_path}.*nq"):
        load_questions("nq", hub=tmp_path)


def test_a_limit_takes_the_same_questions_whatever_their_order_and_smaller_samples_are_nested(
    tmp_path,
):
    records = [{"id": str(i), "question": f"q{i}", "answer": "a"} for i in range(200)]
    path = write_jsonl(tmp_path / "mine.jsonl", records)
    twenty, fifty = load_questions(path, limit=20), load_questions(path, limit=50)
    assert len(twenty) == 20 and set(twenty) < set(fifty)
    numbers = [int(question.text[1:]) for question in fifty]
    assert numbers == sorted(numbers) and numbers != list(range(50))
    write_jsonl(path, records[::-1])
    assert set(load_questions(path, limit=20)) == set(twenty)
    assert len(load_questions(path, limit=1000)) == 200

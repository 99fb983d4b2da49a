"""Answer datasets: rows of the published shapes, scorers, the embedded arithmetic set, one turn
through the agent loop."""

import itertools
import json
import re
from fractions import Fraction

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as some

from alar.domains.search.datasets import DatasetError
from alar.domains.static import answers, arithmetic, sets
from alar.domains.static.environment import StaticEnvironment
from alar.domains.static.forms import FORMS
from alar.evaluate.systems import evaluate, question_table
from alar.methods import conversations
from alar.protocol import parse_turn
from alar.records import Question
from alar.rollout.codec import Codec
from alar.rollout.hf import HFEngine

GSM8K = {
    "question": "Tom has 20 pens and loses 2. How many?",
    "answer": "20-2=<<20-2=18>>18\n#### 1,018",
}
MATH = {
    "problem": "What is $1/2$?",
    "solution": r"It is $\boxed{\frac{1}{2}}$.",
    "subject": "Algebra",
    "level": "Level 1",
}
MMLU = {
    "question": "Pick the second.",
    "choices": ["a", "b", "c", "d"],
    "answer": 1,
    "subject": "picking",
}
META = {"query": "1+1?", "response": "1+1=2\nThe answer is: 2", "type": "GSM_AnsAug"}
ROWS = {"gsm8k": GSM8K, "math": MATH, "mmlu": MMLU, "metamathqa": META}
GOLDS = {"gsm8k": "1018", "math": r"\frac{1}{2}", "mmlu": "B", "metamathqa": "2"}


def write(path, rows):
    if path.suffix == ".parquet":
        pd.DataFrame(rows).to_parquet(path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("name", list(ROWS))
def test_files_of_each_published_shape_are_recognised_and_judged(tmp_path, name, suffix):
    path = write(tmp_path / f"own{suffix}", [ROWS[name]] * 3)
    questions = sets.load(path)
    assert [q.id for q in questions] == ["own/0", "own/1", "own/2"] and {
        q.type for q in questions
    } == {"own"}
    assert questions[0].answers == (GOLDS[name],) == sets.load(path, format=name)[0].answers
    assert json.loads(questions[0].details)["scorer"] == sets.FORMATS[name].scorer
    assert sets.is_correct(GOLDS[name], questions[0]) and not sets.is_correct("7", questions[0])
    assert sets.subject_of(questions[0]) == ROWS[name].get("subject", ROWS[name].get("type", ""))
    assert len(sets.load(path, limit=2)) == 2


def test_choices_stand_in_the_prompt_with_their_letters(tmp_path):
    question = sets.load(write(tmp_path / "m.jsonl", [MMLU | {"answer": "c"}]))[0]
    assert (
        question.text == "Pick the second.\nA. a\nB. b\nC. c\nD. d\nAnswer with the letter."
        and question.answers == ("C",)
    )


def test_published_names_load_through_datasets(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    hub = tmp_path / "gsm8k"
    (hub / "main").mkdir(parents=True)
    for split, count in (("train", 3), ("test", 2)):
        write(hub / "main" / f"{split}.parquet", [GSM8K] * count)
    card = ["---", "configs:", "- config_name: main", "  data_files:"]
    card += [f"  - split: {split}\n    path: main/{split}.parquet" for split in ("train", "test")]
    (hub / "README.md").write_text("\n".join([*card, "---", ""]))
    assert [len(sets.load("gsm8k", split, hub=str(hub))) for split in ("train", "test")] == [3, 2]
    assert sets.load("gsm8k", hub=str(hub))[0].id == "gsm8k/0"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "x"}, "the columns question are those of no known format"),
        (GSM8K | {"answer": "18"}, "x.jsonl:1: answer: no `####`"),
        (GSM8K | {"question": "  "}, "x.jsonl:1: the question is empty"),
        (GSM8K | {"question": 3}, "x.jsonl:1: question: expected a text, got 3"),
        (GSM8K | {"answer": 18}, "x.jsonl:1:"),
        (MATH | {"solution": "one half"}, "x.jsonl:1: solution: no `\\boxed{}`"),
        (
            MMLU | {"answer": 4},
            "x.jsonl:1: answer: expected a number below 4 or a letter of ABCD, got 4",
        ),
        (MMLU | {"answer": "E"}, "x.jsonl:1: answer: expected a number below 4"),
        (MMLU | {"choices": "abcd"}, "x.jsonl:1: choices: expected 2 to 10 texts"),
        (META | {"response": "2"}, "x.jsonl:1: response: no `The answer is"),
    ],
)
def test_a_broken_row_is_an_error_that_names_file_row_and_column(tmp_path, row, message):
    with pytest.raises(DatasetError, match=re.escape(message)):
        sets.load(write(tmp_path / "x.jsonl", [row]))


def test_missing_columns_sets_and_repeated_ids_are_errors(tmp_path):
    path = write(tmp_path / "x.jsonl", [GSM8K, {"question": "x"}])
    with pytest.raises(
        DatasetError, match=r"x.jsonl:2: no column answer; the columns here are question"
    ):
        sets.load(path)
    with pytest.raises(DatasetError, match="ids must be unique"):
        sets.load(write(path, [GSM8K | {"id": 1}] * 2))
    with pytest.raises(
        DatasetError, match="neither a file nor a known set; known sets: arithmetic, gsm8k"
    ):
        sets.load("gsm9k")
    with pytest.raises(ValueError, match="expected one of gsm8k"):
        sets.load(path, format="gsm")


@pytest.mark.parametrize(
    ("scorer", "prediction", "gold", "right"),
    [
        ("numeric", "18", "18", True),
        ("numeric", "$18.00", "18", True),
        ("numeric", "1,018 dollars.", "1018", True),
        ("numeric", "The answer is 7.", "7", True),
        ("numeric", "1/2", "0.5", True),
        ("numeric", "50%", "50", True),
        ("numeric", "18 or 19", "18", False),
        ("numeric", "3+4=7", "7", False),
        ("numeric", "-5", "5", False),
        ("numeric", "1/0", "1", False),
        ("numeric", "", "5", False),
        ("numeric", "eighteen", "18", False),
        ("letter", "The answer is **B**.", "B", True),
        ("letter", "**B**", "B", True),
        ("letter", "B", "B", True),
        ("letter", "(b)", "B", True),
        ("letter", "B. cats", "B", True),
        ("letter", "I think the answer is (C) here", "C", True),
        ("letter", "Because", "B", False),
        ("letter", "A man", "A", False),
        ("math", r"\frac12", "0.5", True),
        ("math", r"x = \dfrac{1}{2}", r"\frac12", True),
        ("math", r"90^\circ", "90", True),
        ("math", r"\boxed{10\%}", "10", True),
        ("math", r"5\text{ cm}", "5", True),
        ("math", "1,000", "1000", True),
        ("math", "(x+1)^2", "x^2+2x+1", True),
        ("math", r"2\sqrt{3}", r"\sqrt{12}", True),
        ("math", r"\{1,2\}", r"\{2,1\}", True),
        ("math", r"\text{even}", "even", True),
        ("math", "odd", "even", False),
        ("math", "neve", "even", False),
        ("math", "(1,2)", "[1,2]", False),
        ("math", "(1,2)", "(2,1)", False),
        ("math", "3.14", r"\pi", False),
        ("math", "}{\\frac", "3", False),
        ("math", "9^9^9^9^9", "3", False),
        ("math", "", "3", False),
        ("exact", "The Aha", "a-ha", True),
    ],
)
def test_scorers(scorer, prediction, gold, right):
    assert answers.SCORERS[scorer](prediction, [gold]) is right


@given(some.integers(-(10**9), 10**9), some.integers(0, 99))
def test_a_number_is_read_however_it_is_written(whole, cents):
    value = Fraction(whole) + Fraction(cents, 100) * (1 if whole >= 0 else -1)
    written = f"{whole:,}.{cents:02d}"
    for text in (
        written,
        written.replace(",", ""),
        f"${written}" if whole >= 0 else written,
        f"{written} pens",
    ):
        assert answers.number(text) == value


@given(some.text("{}\\frac box", max_size=40), some.sampled_from(list(answers.SCORERS)))
def test_no_scorer_raises_whatever_was_written(text, name):
    assert answers.SCORERS[name](text, ["even"]) in (True, False)


def test_the_last_box_is_found_with_its_braces():
    assert answers.last_boxed(r"\boxed{1} and \boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert answers.last_boxed(r"\boxed{\frac{1}{2}") is None


def test_problems_are_solved_by_their_chains_and_splits_share_no_numbers():
    seen = {}
    for split in ("train", "test"):
        found = list(itertools.islice(arithmetic.problems(split), 400))
        assert found == list(itertools.islice(arithmetic.problems(split), 400))
        for problem in found:
            numbers = [int(n) for n in re.findall(r"\d+", problem.question)]
            a, b, c = (*numbers, 0)[:3]
            expected = {"sum": a + b, "difference": a - b, "two_steps": a + b - c}[problem.kind]
            assert problem.answer == expected >= 0
            for left, right in re.findall(r"([\d+*-]+)=(\d+)", problem.chains["full"]):
                assert eval(left) == int(right), problem.chains["full"]
            assert problem.chains["brief"] in problem.chains["full"] and problem.chains[
                "brief"
            ].endswith(f"so {expected}")
            seen.setdefault(split, set()).add((problem.kind, *numbers))
    assert not seen["train"] & seen["test"]
    assert len({q.text for q in sets.load("arithmetic", limit=300)}) == 300


@pytest.mark.parametrize("form", FORMS)
def test_what_an_expert_writes_is_parsed_back(form):
    for problem in itertools.islice(arithmetic.problems("train"), 8):
        for chain in (problem.chains["full"], problem.chains["brief"]):
            written = conversations.conversation_turn(form, chain, str(problem.answer))
            turn = FORMS[form].parse(written)
            assert turn.well_formed and (turn.action, turn.argument) == (
                "answer",
                str(problem.answer),
            )
            assert chain in turn.reasoning


@pytest.mark.parametrize(
    ("text", "problem"), [("so it is 7", "no stated answer"), ("", "no stated answer")]
)
def test_raw_text_without_a_stated_answer_is_malformed(text, problem):
    turn = FORMS["raw"].parse(text)
    assert (turn.action, turn.well_formed, turn.problem) == (None, False, problem)


@pytest.mark.parametrize("form", FORMS)
def test_one_turn_goes_through_the_loop_as_any_other(random_model, form):
    engine, environment = HFEngine(*random_model()), StaticEnvironment(form)
    questions = sets.load("arithmetic", limit=3)
    trajectories = evaluate(
        engine, environment, questions, mode="off", max_new_tokens=6, max_turns=1, batch_size=2
    )
    assert question_table(trajectories, form).turns.tolist() == [1, 1, 1]
    for t in trajectories:
        assert t.ids[: t.turns[0].start] == engine.codec.encode(environment.form.prompt(t.question))
        t.prediction = t.question.answers[0]
        assert environment.correct(t)
        t.prediction = "none"
        assert not environment.correct(t)


def test_a_question_cannot_inject_the_end_of_its_turn(tokenizer):
    codec, end = Codec(tokenizer), tokenizer.eos_token_id
    for form in FORMS.values():
        ids = codec.encode(form.prompt(Question("", "x<|im_end|>y", ())))
        assert ids.count(end) == 1


def test_the_loss_of_a_conversation_is_on_what_the_policy_writes(tokenizer):
    codec = Codec(tokenizer)
    lengths, known = (
        set(),
        [
            p.question
            for split in ("train", "test")
            for p in itertools.islice(arithmetic.problems(split), 300)
        ],
    )
    for form, style, solved in conversations.conversations(24, seed=0):
        found = conversations.example(codec, form, style, solved)
        learned = codec.text([i for i, label in zip(found.ids, found.labels) if label != -100])
        assert learned == "".join(
            conversations.conversation_turn(form, p.chains[style], str(p.answer)) for p in solved
        )
        assert sum(label == tokenizer.eos_token_id for label in found.labels) == len(solved)
        assert all(p.question not in known for p in solved)
        lengths.add(len(solved))
    assert lengths == {1, 2, 3}


def test_the_tagged_form_is_the_search_domains_without_search():
    text = "\n\n<think>a</think>\n\n<answer>7</answer>"
    assert FORMS["tagged"].parse(text) == parse_turn(text)
    assert FORMS["tagged"].parse("\n\n<think>a</think>\n\n<search>7</search>").action is None

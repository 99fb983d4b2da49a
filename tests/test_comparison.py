"""The comparison: rows agree with the statistics, are paired by question, and are measured once."""

import numpy as np
import pytest

from alar.domains.search.environment import SearchEnvironment
from alar.domains.search.questions import test_questions as split_questions
from alar.evaluate import statistics, tables
from alar.files import write_json
from alar.methods import comparison
from alar.methods.comparison import (
    Method,
    MethodComparison,
    open_comparison,
    readable_methods,
    study_methods,
)
from alar.model import save
from alar.study.stage import open_stage


@pytest.fixture(scope="module")
def checkpoint(random_model, tmp_path_factory):
    return save(*random_model(), tmp_path_factory.mktemp("checkpoint") / "model")


@pytest.fixture
def measured(monkeypatch):
    """The labels that were really rolled out; answers are made right or wrong by a rule, since
    random models know none."""
    labels, original = [], comparison.evaluate

    def evaluate(engine, environment, questions, **settings):
        trajectories = original(engine, environment, questions, **settings)
        labels.append(settings["mode"])
        for number, trajectory in enumerate(trajectories):
            trajectory.correct = number % (3 if settings["mode"] == "latent" else 2) == 0
        return trajectories

    monkeypatch.setattr(comparison, "evaluate", evaluate)
    return labels


ENVIRONMENT = SearchEnvironment()  # its index of the real world is built once


def compare(folder, n=8, environment=ENVIRONMENT, **changes):
    limits = {"max_new_tokens": 12, "max_turns": 2, "batch_size": 32} | changes
    return MethodComparison(folder, environment, split_questions(n), **limits)


def test_a_row_holds_what_the_statistics_say_of_its_answers(checkpoint, measured, tmp_path):
    here = compare(tmp_path)
    here.measure(Method("base", checkpoint))
    here.measure(
        Method(
            "short",
            checkpoint,
            "latent",
            {"ratio": 0.5},
            training_seconds=3.0,
            training_tokens=70.0,
        )
    )
    table = here.table(resamples=300)
    assert list(table["method"]) == ["base", "short"] and list(table["settings"]) == [
        "",
        "ratio 0.5",
    ]
    base, row = table.iloc[0], table.iloc[1]
    answers = {
        name: part.sort_values("question_id") for name, part in here.answers().groupby("system")
    }
    a, b = answers["short, ratio 0.5"], answers["base"]
    options = {"resamples": 300, "seed": 0}
    for name, expected in {
        "accuracy": statistics.bootstrap_mean(a["correct"], **options),
        "accuracy_difference": statistics.paired_bootstrap(a["correct"], b["correct"], **options),
        "tokens": statistics.bootstrap_mean(a["generated_tokens"], **options),
        "token_reduction": statistics.token_reduction(
            b["generated_tokens"], a["generated_tokens"], **options
        ),
    }.items():
        assert tuple(row[[name, f"{name}_low", f"{name}_high"]]) == pytest.approx(
            tuple(expected)
        ), name
    gained = (a["correct"].mean() - b["correct"].mean()) / b["correct"].mean()
    assert gained < 0
    assert row["aes"] == pytest.approx(
        1 - a["generated_tokens"].mean() / b["generated_tokens"].mean() + 5 * gained
    )
    assert row["aes_low"] <= row["aes"] <= row["aes_high"]
    assert (base["accuracy_difference"], base["token_reduction"], base["aes"]) == (0, 0, 0)
    assert (row["training_seconds"], row["training_tokens"], row["scale"]) == (
        3.0,
        70.0,
        "measured",
    )
    assert readable_methods(table).loc[("short", "ratio 0.5"), "n"] == 8


def test_a_method_is_measured_again_only_when_an_answer_could_differ(
    checkpoint, random_model, measured, tmp_path, monkeypatch
):
    one = Method("base", checkpoint)
    compare(tmp_path).measure(one)
    path = compare(tmp_path).measure(Method("base", checkpoint, training_seconds=9.0))
    assert len(measured) == 1 and compare(tmp_path).measured()[0]["training_seconds"] == 9.0
    path.unlink()  # lost
    compare(tmp_path).measure(one)
    compare(tmp_path, n=9).measure(one)
    compare(tmp_path, n=9, max_turns=1).measure(one)
    assert len(measured) == 4
    fewer = {"n": 9, "max_turns": 1, "environment": SearchEnvironment(topk=1)}
    now = compare(tmp_path, **fewer)
    now.measure(one)
    assert len(measured) == 5
    model, tokenizer = random_model()
    model.lm_head.weight.data *= 1.5
    save(model, tokenizer, tmp_path / "other")
    now.measure(Method("base", tmp_path / "other"))
    assert len(measured) == 6
    now.measure(Method("base", tmp_path / "other"))
    assert len(measured) == 6
    monkeypatch.setattr(comparison, "closure", lambda _: {"alar.evaluate.systems": "edited"})
    compare(tmp_path, **fewer).measure(Method("base", tmp_path / "other"))
    assert len(measured) == 7


def test_only_methods_of_the_same_protocol_share_a_table(checkpoint, measured, tmp_path):
    compare(tmp_path).measure(Method("base", checkpoint))
    compare(tmp_path, n=6).measure(Method("other", checkpoint))
    assert list(compare(tmp_path).table(resamples=100)["method"]) == ["base"]
    with pytest.raises(tables.TableError, match="'base' is not measured here"):
        compare(tmp_path, n=6).table()
    with pytest.raises(FileNotFoundError, match="call `measure` first"):
        compare(tmp_path, n=5).table()


def test_another_retriever_is_another_protocol(checkpoint, measured, tmp_path):
    compare(tmp_path).measure(Method("base", checkpoint))
    elsewhere = compare(tmp_path)
    elsewhere.environment = SearchEnvironment(source="another corpus")
    elsewhere.measure(Method("base", checkpoint))
    assert len(measured) == 2


def test_settings_are_put_in_the_order_of_their_numbers(checkpoint, measured, tmp_path):
    here = compare(tmp_path, n=2, max_turns=1)
    for ratio in (1.0, 0.3, 0.5):
        here.measure(Method("TokenSkip", checkpoint, settings={"ratio": ratio}))
    here.measure(Method("base", checkpoint))
    assert list(here.table(resamples=100)["settings"]) == [
        "",
        "ratio 0.3",
        "ratio 0.5",
        "ratio 1.0",
    ]
    assert np.isfinite(here.table(resamples=100)["tokens_high"]).all()


def test_a_missing_checkpoint_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="base: no checkpoint folder"):
        compare(tmp_path).measure(Method("base", tmp_path / "nothing"))


def test_a_notebook_is_set_beside_the_study_only_where_base_and_questions_are_the_studys(tmp_path):
    for folder in ("01_latent_model/base", "03_aasd/checkpoint"):
        (tmp_path / folder).mkdir(parents=True)
    stage = open_stage("12_tokenskip", tmp_path)
    limits = dict(max_new_tokens=8, max_turns=1, batch_size=2)

    def found(base, **options):
        comparison, peers = open_comparison(
            stage, base, ENVIRONMENT, split_questions(2), **options, **limits
        )
        return comparison.folder.parent, comparison.domain, [method.name for method in peers]

    own = stage.input("01_latent_model", "base")
    assert found(own) == (stage.run_dir, "search", ["base", "stage 1"])
    assert found(own, dataset="data/gsm8k.jsonl") == (stage.folder, "gsm8k", ["base"])
    assert found(tmp_path / "another") == (stage.folder, "search", ["base"])


def test_the_studys_own_methods_come_with_the_seconds_that_their_notebooks_took(tmp_path):
    for folder in ("01_latent_model/base", "03_aasd/checkpoint"):
        (tmp_path / folder).mkdir(parents=True)
    stage = open_stage("11_length_rewards", tmp_path)
    base, first = study_methods(stage)
    assert (base.name, base.mode, base.training_seconds) == ("base", "off", 0.0)
    assert (first.name, first.mode) == ("stage 1", "latent") and np.isnan(first.training_seconds)
    (tmp_path / "05_ar_grpo" / "checkpoint").mkdir(parents=True)
    for seconds, stem in enumerate(
        ("02_teacher_traces", "03_aasd", "04_mode_warmup", "05_ar_grpo"), start=1
    ):
        write_json(tmp_path / stem / "stage.json", {"seconds": 10**seconds})
    found = {method.name: method for method in study_methods(stage)}
    assert found["stage 1"].training_seconds == 110 and found["ALAR"].training_seconds == 11110
    assert found["ALAR"].mode == "free" and np.isnan(found["ALAR"].training_tokens)

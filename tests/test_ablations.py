"""The ablations' table: rows by what really differs, paired by question, averaged over seeds; the
notebook on run folders."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from alar.evaluate import ablations, statistics, tables
from alar.evaluate.ablations import (
    MeasuredVariant,
    ablation_table,
    by_type,
    each_run,
    files_of,
    read_variant,
    readable_ablations,
)
from alar.evaluate.intervals import Estimate
from alar.study import params
from alar.study.params.notebooks import code, declared_parameters
from alar.study.stage import RunError, read_inputs

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "notebooks/17_ablations.ipynb"
OPTIONS = {"resamples": 300, "seed": 0}


def variant(
    name, accuracy, *, seed=0, systems=("stage1", "alar"), n=40, **parameters
) -> MeasuredVariant:
    """Random answers at the given accuracy; `rl__alpha=0.3` is the parameter rl.alpha."""
    rng = np.random.default_rng([seed, *name.encode()])
    questions, turns = [], []
    for system in ("base", *systems):
        for i in range(n):
            kind = ("single", "arithmetic")[i % 2]
            modes = [
                (
                    "latent"
                    if system == "stage1" or (system == "alar" and rng.random() < 0.5)
                    else "think"
                )
                for _ in range(2)
            ]
            right = bool(rng.random() < (0.95 if system == "base" else accuracy))
            latent = modes.count("latent")
            questions.append(
                (
                    system,
                    f"q{i}",
                    kind,
                    right,
                    int(rng.integers(40, 90)),
                    5,
                    2,
                    latent,
                    2 - latent,
                    True,
                )
            )
            for number, mode in enumerate(modes, start=1):
                p = 0.2 + 0.6 * (number == 1) if system == "alar" else np.nan
                turns.append(
                    (
                        system,
                        f"q{i}",
                        kind,
                        number,
                        kind == "arithmetic" and number == 2,
                        mode,
                        20,
                        p,
                    )
                )
    return MeasuredVariant(
        name,
        seed,
        {"model.num_latent": 4, "rl.alpha": 0.15}
        | {key.replace("__", "."): value for key, value in parameters.items()},
        pd.DataFrame(questions, columns=list(tables.QUESTIONS.columns)),
        pd.DataFrame(turns, columns=list(tables.TURNS.columns)),
    )


REFERENCE = variant("reference", 0.9)


def answers(found: MeasuredVariant, system: str, column: str) -> np.ndarray:
    rows = found.questions[found.questions["system"] == system]
    return rows.sort_values("question_id")[column].to_numpy(float)


def test_every_run_stands_against_its_own_base():
    other = variant("other-seed", 0.6, seed=1)
    table = each_run([REFERENCE, other], **OPTIONS)
    assert list(table.index) == [
        (s, *v) for s in ("stage1", "alar") for v in (("reference", 0), ("other-seed", 1))
    ]
    difference = statistics.paired_bootstrap(
        answers(other, "alar", "correct"), answers(other, "base", "correct"), **OPTIONS
    )
    shown = table.loc[("alar", "other-seed", 1), "accuracy − base, points"]
    assert shown.startswith(f"{100 * difference[0]:+.1f} [")
    assert table.loc[("stage1", "reference", 0), "latent share %"].startswith("100.0")


def test_one_seed_equals_the_paired_statistics():
    k0 = variant("k0", 0.4, systems=("stage1",), model__num_latent=0)
    table = ablation_table([REFERENCE, k0], **OPTIONS).set_index(["system", "setting"])
    assert list(table.index) == [
        ("stage1", "as the reference"),
        ("stage1", "model.num_latent 0"),
        ("alar", "as the reference"),
    ]
    row = table.loc[("stage1", "model.num_latent 0")]
    ours, theirs = answers(k0, "stage1", "correct"), answers(REFERENCE, "stage1", "correct")
    for name, expected in {
        "accuracy": statistics.bootstrap_mean(ours, **OPTIONS),
        "accuracy_difference": statistics.paired_bootstrap(ours, theirs, **OPTIONS),
        "tokens": statistics.bootstrap_mean(answers(k0, "stage1", "generated_tokens"), **OPTIONS),
        "token_reduction": statistics.token_reduction(
            answers(k0, "base", "generated_tokens"),
            answers(k0, "stage1", "generated_tokens"),
            **OPTIONS,
        ),
    }.items():
        assert Estimate.read(row, name) == pytest.approx(tuple(expected)), name
    assert (
        row["difference_lowest"]
        == row["difference_highest"]
        == pytest.approx(ours.mean() - theirs.mean())
    )
    assert row["seeds"] == 1 and row["latent_share"] == 1
    reference = table.loc[("stage1", "as the reference")]
    assert reference["accuracy_difference"] == reference["accuracy_difference_low"] == 0


def test_seeds_are_averaged_question_by_question_and_paired_with_their_own_reference():
    references = [REFERENCE, variant("reference-1", 0.9, seed=1)]
    alphas = [variant("a", 0.6, rl__alpha=0.3), variant("a-1", 0.8, seed=1, rl__alpha=0.3)]
    table = ablation_table([*references, *alphas], systems=["alar"], **OPTIONS)
    assert list(table["setting"]) == ["as the reference", "rl.alpha 0.3"] and list(
        table["seeds"]
    ) == [2, 2]
    row = table.iloc[1]
    ours, theirs = (
        np.array([answers(v, "alar", "correct") for v in found]) for found in (alphas, references)
    )
    expected = statistics.paired_bootstrap(ours.mean(0), theirs.mean(0), **OPTIONS)
    assert (
        row["accuracy_difference"],
        row["accuracy_difference_low"],
        row["accuracy_difference_high"],
    ) == pytest.approx(expected)
    each = sorted(ours.mean(1) - theirs.mean(1))
    assert [row["difference_lowest"], row["difference_highest"]] == pytest.approx(each)
    information = [
        statistics.adaptivity(v.turns[v.turns["system"] == "alar"], resamples=1)[
            "mutual_information"
        ]
        for v in alphas
    ]
    assert row["mutual_information"] == pytest.approx(np.mean(information))
    assert list(readable_ablations(table)["over seeds"])[1].count("…") == 1


def test_a_row_of_one_seed_is_compared_with_the_reference_of_that_seed_alone():
    references = [REFERENCE, variant("reference-1", 0.2, seed=1)]
    row = ablation_table(
        [*references, variant("a", 0.9, rl__alpha=0.3)], systems=["alar"], **OPTIONS
    ).iloc[1]
    difference = row["accuracy"] - answers(REFERENCE, "alar", "correct").mean()
    assert row["accuracy_difference"] == pytest.approx(difference)


def test_question_types_are_means_over_seeds():
    found = by_type([REFERENCE, variant("reference-1", 0.5, seed=1)])
    pooled = pd.concat([REFERENCE.questions, variant("reference-1", 0.5, seed=1).questions])
    mine = pooled[(pooled["system"] == "alar") & (pooled["question_type"] == "arithmetic")][
        "correct"
    ].mean()
    assert found.loc[("alar", "as the reference"), "arithmetic"] == pytest.approx(mine)
    assert list(found.columns) == ["single", "arithmetic"] and list(
        found.index.get_level_values(0)
    ) == ["stage1", "alar"]


@pytest.mark.parametrize(
    "others, message",
    [
        ([variant("again", 0.5)], "reference and again .* seed 0"),
        ([variant("a-1", 0.5, seed=1, rl__alpha=0.3)], "a-1: .*'stage1' with seed 1"),
        ([variant("short", 0.5, n=12, rl__alpha=0.3)], "short .* different questions"),
    ],
)
def test_what_cannot_be_compared_is_refused(others, message):
    with pytest.raises(tables.TableError, match=message):
        ablation_table([REFERENCE, *others], **OPTIONS)


def test_nothing_to_compare_says_what_to_run():
    with pytest.raises(tables.TableError, match="params/ablations.yaml"):
        ablation_table([])


def test_the_file_changes_one_choice_a_variant_and_compares_them_all():
    variants = {
        name: found["search"]
        for name, found in params.load_variants(ROOT / "params/ablations.yaml", root=ROOT).items()
    }
    gathered = variants.pop("table").ablations
    assert set(gathered.compared) == set(variants) and gathered.reference in variants

    def as_variant(name):
        experiment = variants[name]
        named = {
            f"{s}.{k}": v
            for s, keys in experiment.model_dump().items()
            if s not in ablations._ASIDE
            for k, v in keys.items()
        }
        return MeasuredVariant(name, experiment.run.seed, named, pd.DataFrame(), pd.DataFrame())

    reference = as_variant(gathered.reference)
    choices = {"reference": 0, "no-bonus": 2, "trajectory-credit": 3, "published-recipe": 6}
    for name in variants:
        changed = ablations.changed_parameters(as_variant(name), reference)
        assert len(changed) == choices.get(name.partition("-seed")[0], 1), (name, changed)


@pytest.fixture
def experiment(tmp_path):
    """Run folders as run_all.py leaves them, as far as notebook 17 reads them."""

    def write(found: MeasuredVariant, folder: str):
        home = tmp_path / "ablations" / folder / "search"
        (home / "06_benchmark_eval").mkdir(parents=True)
        found.questions.to_parquet(home / "06_benchmark_eval/questions.parquet")
        found.turns.to_parquet(home / "06_benchmark_eval/turns.parquet")
        sections: dict = {
            "run": {"name": "ablations", "seed": found.seed},
            "eval": {"systems": [folder]},
        }
        for name, value in found.parameters.items():
            section, key = name.split(".")
            sections.setdefault(section, {})[key] = value
        (home / "provenance.json").write_text(
            json.dumps({"parameters": sections, "seeds": {"run": found.seed}})
        )
        return home

    write(REFERENCE, "reference")
    write(variant("k0", 0.4, systems=("stage1",), model__num_latent=0), "k0")
    return tmp_path / "ablations"


def run_notebook(run_dir, **changes):
    """Its code cells, in this process."""
    scope = declared_parameters(NOTEBOOK) | {
        "run_dir": str(run_dir),
        "eval_bootstrap": 100,
        **changes,
    }
    for cell in code(NOTEBOOK):
        exec(cell, scope)
    return scope


def test_the_notebook_gathers_what_is_there_and_names_what_is_not(experiment, capsys):
    home = experiment / "table" / "search"
    scope = run_notebook(home, compared=["reference", "k0", "k8"])
    assert "2 variants; not run: k8" in capsys.readouterr().out
    written = tables.read(home / "17_ablations/ablations.csv", tables.ABLATIONS)
    assert list(written["setting"]) == [
        "as the reference",
        "model.num_latent 0",
        "as the reference",
    ]
    assert (home / "17_ablations/ablations_figure.png").exists() and "k8" in scope["missing"]
    noted = read_inputs(home / "17_ablations")  # so that the stage runs again once k8 is there
    assert "../../k8/search/06_benchmark_eval/questions.parquet" in noted


def test_accuracies_by_k_stand_beside_what_was_published_of_k():
    variants = [
        variant("reference", 0.9, model__num_latent=4),
        variant("k0", 0.4, systems=("stage1",), model__num_latent=0),
        variant("alpha", 0.8, model__num_latent=4, rl__alpha=0.3),  # its K is the reference's
    ]
    found = ablation_table(variants, **OPTIONS)
    shown = ablations.thoughts_beside(found, variants[0])
    assert list(shown.index) == [0, 1, 2, 4, 8]
    theirs = shown["the paper, published, second-hand"]
    assert theirs[4] == "four thoughts capture most of the benefit"
    assert (theirs.drop(4) == "–").all()  # its numbers could not be found
    ours = shown["stage1, accuracy %"]
    table = found.set_index(["setting", "system"])["accuracy"]
    assert ours[4].startswith(f"{100 * table['as the reference', 'stage1']:.1f} [")
    assert ours[0].startswith(f"{100 * table['model.num_latent 0', 'stage1']:.1f} [")
    assert (ours[[1, 2, 8]] == "–").all()


def test_the_notebook_gathers_the_variants_of_its_own_domain(experiment):
    for variant_home in list(experiment.iterdir()):
        (variant_home / "search").rename(variant_home / "tool")
    scope = run_notebook(experiment / "table" / "tool", domain="tool", compared=["reference", "k0"])
    assert not scope["missing"] and len(scope["table"]) == 3


def test_the_notebook_without_its_reference_says_what_to_run(tmp_path):
    with pytest.raises(RunError, match="--variant reference --variant table"):
        run_notebook(tmp_path / "ablations/table/search")


def test_a_record_cut_off_is_named(experiment):
    path = experiment / "k0/search/provenance.json"
    path.write_text(path.read_text()[:40])
    with pytest.raises(tables.TableError, match="provenance.json"):
        read_variant(*files_of(path.parent))

"""Probes, geometry and explanations: against scikit-learn, the questions' expert steps and the
agent loop."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GroupKFold, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from alar.domains.search.questions import solved_questions
from alar.domains.tool import questions as tool_questions
from alar.inspector import geometry, inspect
from alar.inspector.explain import explain, pseudo_text
from alar.inspector.interventions import InterventionLab
from alar.inspector.probes import class_hits, labels, name_hits, probe_table
from alar.protocol import SEARCH
from alar.records import Observation, Question
from alar.rollout.engine import Sampling
from alar.rollout.hf import HFEngine
from alar.rollout.loop import run
from alar.rollout.modes import latent_probabilities

QUESTIONS = [
    Question(f"q{n}", f"{text} {place}?", ("12",), kind)
    for n, place in enumerate(("Peru", "Chad", "Mali", "Cuba", "Oman", "Fiji"))
    for kind, text in [
        ("single", "Which money has") if n % 2 else ("bridge", "When was the currency changed in")
    ]
]


class Silent:
    form, final, stop = SEARCH, ("answer",), ("</search>", "</answer>")

    def observe(self, steps):
        return [Observation("\n\n<information>nothing</information>\n\n")] * len(steps)

    def correct(self, trajectory):
        return False


@pytest.fixture(scope="module")
def latent(random_model):
    """Always-latent trajectories of two turns by a random model, its lab and sites."""
    model, tokenizer = random_model()
    engine = HFEngine(model, tokenizer)
    trajectories = run(QUESTIONS, engine, Silent(), Sampling(20, 1.0), modes="latent", max_turns=2)
    lab, sites = InterventionLab(engine), InterventionLab(engine).sites(trajectories)
    return SimpleNamespace(model=model, lab=lab, trajectories=trajectories, sites=sites)


def expert_site(solved, number):
    """A site as the probes read it, whose turn did what the expert does."""
    turns = [SimpleNamespace(action=step.action, argument=step.argument) for step in solved.steps]
    return SimpleNamespace(
        trajectory=SimpleNamespace(question=solved.question, turns=turns),
        block=SimpleNamespace(turn=number),
    )


def test_labels_name_what_the_expert_looks_up():
    questions = solved_questions("real", 60, 0)
    sites = [
        expert_site(solved, number) for solved in questions for number in range(len(solved.steps))
    ]
    table = labels(sites)
    for site, (_, row) in zip(sites, table.iterrows()):
        question, number = site.trajectory.question, site.block.turn
        turn = site.trajectory.turns[number]
        assert row["type"] == question.type and row["hard"] == (
            "hard" if number in question.hard_turns else "easy"
        )
        if turn.action == "search":
            assert row["query_entity"] == turn.argument.removesuffix(" currency").removesuffix(
                " languages"
            )
        else:
            assert pd.isna(row["query_entity"])
        if question.type == "bridge":  # the expert's second query is about the bridge
            assert site.trajectory.turns[1].argument in (
                row["bridge_entity"] + " currency",
                row["bridge_entity"] + " languages",
            )
        else:
            assert pd.isna(row["bridge_entity"])
        assert (row["number"] in ("above", "below")) == question.answers[0].isdigit()


def test_labels_name_the_function_that_the_expert_calls_and_its_provider():
    solved = tool_questions.solved_questions("test", 60, 0)
    sites = [expert_site(item, number) for item in solved for number in range(len(item.steps))]
    called = 0
    for site, (_, row) in zip(sites, labels(sites).iterrows()):
        turn = site.trajectory.turns[site.block.turn]
        if turn.action == "call":
            assert (
                f'"name": "{row["function"]}_{row["provider"]}"'
                in turn.argument.split("</tool_call>")[0]
            )
            called += 1
        else:
            assert pd.isna(row["function"]) and pd.isna(row["provider"])
    assert called == 60  # 40 of one turn, 10 of two, 10 that nothing fits


def test_a_class_probe_equals_scikit_learns_cross_validation_and_never_sees_its_question():
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(30), 2)
    classes = rng.choice(["a", "b", "c"], 30)[groups]
    features = (
        rng.standard_normal((60, 6)) + np.eye(6)[:3][np.searchsorted(["a", "b", "c"], classes)] * 2
    )
    probe = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=300))
    reference = cross_val_predict(probe, features, classes, groups=groups, cv=GroupKFold(5))
    hits = class_hits(features, classes, groups)
    np.testing.assert_array_equal(hits, reference == classes)
    assert hits.mean() > 0.7
    identity = np.eye(30)[
        groups
    ]  # says which question it is and nothing else: worth nothing unless a question leaks
    assert class_hits(identity, classes, groups).mean() < 0.6


def test_a_name_probe_finds_names_from_a_linear_image_and_none_from_noise():
    rng = np.random.default_rng(1)
    embeddings = {f"n{i}": rng.standard_normal(8) for i in range(12)}
    names, groups = rng.choice(sorted(embeddings), 120), np.arange(120)
    image = np.stack([embeddings[name] for name in names]) @ rng.standard_normal((8, 16))
    assert name_hits(image, names, embeddings, groups).mean() > 0.95
    assert name_hits(rng.standard_normal((120, 16)), names, embeddings, groups).mean() < 0.3


def test_the_probe_table_holds_every_step_beside_its_controls(latent):
    options = {"targets": ("type", "bridge_entity"), "folds": 3, "least": 3, "resamples": 50}
    table = probe_table(latent.sites, latent.model, latent.lab.codec, **options)
    assert list(table["target"].unique()) == ["type"] and list(table["turn"]) == [1] * 4 + [2] * 4
    assert (
        list(table["k"]) == [1, 2, 3, 4] * 2
        and set(table["questions"]) == {6}
        and set(table["common"]) == {0.5}
    )
    assert table.groupby("turn")["embedding"].nunique().max() == 1
    np.testing.assert_allclose(table["difference"], table["accuracy"] - table["embedding"])
    z = np.stack([site.z for site in latent.sites if site.block.turn == 1])[:, 2]
    kinds = np.array([question.type for question in QUESTIONS])
    hits = class_hits(
        z.astype(float), kinds, np.array([question.id for question in QUESTIONS]), folds=3
    )
    assert table[(table["turn"] == 2) & (table["k"] == 3)]["accuracy"].item() == pytest.approx(
        hits.mean()
    )


def test_principal_components_equal_scikit_learns(latent):
    about, z = geometry.step_table(latent.sites)
    table, explained = geometry.principal_components(about, z, 3)
    reference = PCA(3, svd_solver="full").fit(z.astype(np.float64))
    np.testing.assert_allclose(explained, reference.explained_variance_ratio_, rtol=1e-6)
    np.testing.assert_allclose(
        np.abs(table[["pc1", "pc2", "pc3"]]),
        np.abs(reference.transform(z.astype(np.float64))),
        atol=1e-5,
    )
    assert len(table) == 6 * 2 * 4 and set(table["mode"]) == {"unknown"} and table["forced"].all()
    with pytest.raises(ValueError, match="at least two"):
        geometry.principal_components(about[:1], z[:1])


def test_step_sizes_are_distances_between_neighbours(latent):
    sizes = geometry.step_sizes(latent.sites)
    assert len(sizes) == 12 * 3
    z = latent.sites[0].z.astype(np.float64)
    row = sizes.iloc[1]
    assert row["step"] == 2 and row["size"] == pytest.approx(np.linalg.norm(z[2] - z[1]))
    assert row["relative_size"] == pytest.approx(row["size"] / np.linalg.norm(z[1]))
    assert row["cosine"] == pytest.approx(z[1] @ z[2] / np.linalg.norm(z[1]) / np.linalg.norm(z[2]))


def test_the_mode_path_is_the_exact_probability_of_the_latent_mode(latent):
    engine = latent.lab.engine
    expected = latent_probabilities(latent.model, engine.codec, latent.trajectories)
    path = geometry.mode_path(engine, latent.trajectories)
    np.testing.assert_allclose(path["p_latent"], np.concatenate(expected), rtol=1e-6)
    chosen = geometry.site_probabilities(engine, latent.sites)
    about, _ = geometry.step_table(latent.sites, chosen)
    assert list(about["p_latent"][::4]) == pytest.approx(list(path["p_latent"]))
    assert list(about["mode"] == "latent") == list(about["p_latent"] >= 0.5)


def test_an_explanation_is_the_lens_beside_the_turn_that_thinks_in_text(latent):
    site = latent.sites[2]
    readings = inspect(site.trajectory, latent.model, latent.lab.codec)
    told = explain(readings, latent.lab, site, max_new_tokens=12)
    assert pseudo_text(readings, 0).split(" | ") == [
        readings.lens(row)[0][0].strip() or "␣" for row in range(4)
    ]
    thinking = run(
        [site.trajectory.question],
        latent.lab.engine,
        Silent(),
        Sampling(12 + len(latent.lab.codec.separator)),
        modes="think",
        max_turns=1,
    )[0]
    written = latent.lab.codec.text(thinking.ids[thinking.turns[0].start :])
    assert told.thought and "<think>" + told.thought == written.strip().split("</think>")[0]
    assert told.pseudo_text == pseudo_text(readings, 0) and told.same_action == (
        told.latent_action == told.thought_action
    )
    with pytest.raises(ValueError, match="readings are of"):
        explain(readings, latent.lab, latent.sites[0])

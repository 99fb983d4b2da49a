"""Tables agree with the trajectories, controls do what they say, an oracle is an oracle."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from alar.domains.search.environment import SearchEnvironment
from alar.domains.search.questions import test_questions as split_questions
from alar.evaluate import oracle as oracle_module
from alar.evaluate import systems as evaluation
from alar.evaluate.controls import (
    CONTROLS,
    TamperedProjector,
    answers_with_tampered_latents,
    latent_bank,
)
from alar.evaluate.oracle import oracle_router
from alar.evaluate.systems import question_table, turn_table
from alar.records import Origin
from alar.rollout.hf import HFEngine

SETTINGS = dict(max_new_tokens=20, max_turns=2, batch_size=64)


@pytest.fixture(scope="module")
def engine(random_model):
    return HFEngine(*random_model())


@pytest.fixture(scope="module")
def questions():
    return split_questions(8)


@pytest.fixture(scope="module")
def intact(engine, questions):
    return evaluation.evaluate(engine, SearchEnvironment(), questions, mode="latent", **SETTINGS)


def test_tables_agree_with_the_trajectories(engine, intact):
    table = question_table(intact, "stage1")
    assert table.question_id.tolist() == [t.question.id for t in intact]
    generated = [
        sum(o in (Origin.SAMPLED, Origin.FORCED, Origin.LATENT) for o in t.origins) for t in intact
    ]
    assert table.generated_tokens.tolist() == generated
    turns = turn_table(intact, "stage1", evaluation.mode_scores(engine, intact))
    assert turns.groupby("question_id").tokens.sum().to_dict() == dict(
        zip(table.question_id, generated)
    )
    assert turns.p_latent.between(0, 1).all() and len(turns) == table.turns.sum()


@pytest.mark.parametrize("kind", CONTROLS)
def test_a_tampered_projector_replaces_every_z(engine, intact, kind):
    bank = latent_bank(intact, 4)
    projector = engine.model.model.projector
    tampered = TamperedProjector(projector, kind, bank)
    hidden = torch.randn(50, engine.model.config.hidden_size)
    with torch.no_grad():
        z, out = projector(hidden, 2), tampered(hidden, 2)
    assert out.shape == z.shape and not torch.allclose(out, z)
    if kind == "zeroed":
        assert not out.any()
    if kind == "mean":
        assert torch.allclose(out, bank[:, 2].mean(0).expand_as(out))
    if kind == "noise":
        assert torch.allclose(out.norm(dim=1), z.norm(dim=1), rtol=1e-4)
        assert torch.nn.functional.cosine_similarity(out, z).abs().mean() < 0.3
    if kind == "shuffled":
        assert all((row == bank[:, 2]).all(1).any() for row in out)


def test_controls_cover_every_question_and_leave_the_model_as_it_was(engine, questions, intact):
    projector = engine.model.model.projector
    table = answers_with_tampered_latents(
        engine, SearchEnvironment(), questions, intact, **SETTINGS
    )
    assert engine.model.model.projector is projector
    assert table.groupby("system").size().to_dict() == dict.fromkeys(
        ("intact", *CONTROLS), len(questions)
    )
    again = evaluation.evaluate(engine, SearchEnvironment(), questions, mode="latent", **SETTINGS)
    assert [t.ids for t in again] == [t.ids for t in intact]


def test_the_oracle_takes_the_cheapest_correct_modes(engine, questions, monkeypatch):
    """With EM replaced by a rule on the modes, the best assignment is known."""
    environment = SearchEnvironment()
    tried = []
    original = oracle_module.run

    def judged(*args, **kwargs):
        trajectories = original(*args, **kwargs)
        for t in trajectories:
            t.correct = t.turns[0].forced_mode == "latent" or (
                len(t.turns) > 1 and t.turns[1].forced_mode == "latent"
            )
            tried.append(t)
        return trajectories

    monkeypatch.setattr(oracle_module, "run", judged)
    chosen = oracle_router(engine, environment, questions, max_routed_turns=2, **SETTINGS)
    assert len(tried) == 4 * len(questions)
    for question, t in zip(questions, chosen, strict=True):
        candidates = [c for c in tried if c.question.id == question.id and c.correct]
        assert t.question.id == question.id and t.correct
        assert t.generated_tokens == min(c.generated_tokens for c in candidates)
    monkeypatch.setattr(oracle_module, "run", lambda *a, **k: [wrong(t) for t in original(*a, **k)])
    fallback = oracle_router(engine, environment, questions, max_routed_turns=2, **SETTINGS)
    assert all(turn.forced_mode == "think" for t in fallback for turn in t.turns)


def wrong(trajectory):
    trajectory.correct = False
    return trajectory


def test_controls_without_any_latent_block_are_refused(engine, questions):
    explicit = evaluation.evaluate(
        engine, SearchEnvironment(), questions[:2], mode="off", **SETTINGS
    )
    with pytest.raises(ValueError, match="no latent block"):
        latent_bank(explicit, 4)


def test_the_hardness_label_changes_nothing_but_the_tables(engine, questions):
    blind = [replace(q, hard_turns=(), type="") for q in questions]
    plain = evaluation.evaluate(engine, SearchEnvironment(), questions, mode="free", **SETTINGS)
    hidden = evaluation.evaluate(engine, SearchEnvironment(), blind, mode="free", **SETTINGS)
    assert [t.ids for t in plain] == [t.ids for t in hidden]
    assert not np.array_equal(
        turn_table(plain, "a").question_type, turn_table(hidden, "a").question_type
    )

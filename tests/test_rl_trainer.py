"""AR-GRPO in one process: true behaviour log-probs, masks from origins, credit per turn, exact
resume."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from alar.domains.search.environment import SearchEnvironment
from alar.domains.search.questions import training_questions, validation_questions
from alar.records import Origin
from alar.rl import rollouts
from alar.rl import trainer as module
from alar.rl.rollouts import Summary, explores, mode_plan, outcomes_of, token_advantages
from alar.rl.trainer import ARGRPO, RLConfig, make_batch, token_logprobs
from alar.rollout.modes import block_start

CONFIG = RLConfig(
    steps=3,
    prompts_per_step=3,
    group_size=4,
    learning_rate=1e-3,
    max_turns=3,
    max_new_tokens=20,
    length_tolerance=100.0,
    trainable="full",
    validation_every=2,
    checkpoint_every=1,
    gradient_accumulation=2,
)


def make(random_model, folder, **changes) -> ARGRPO:
    model, tokenizer = random_model()
    return ARGRPO(
        model,
        tokenizer,
        SearchEnvironment(),
        training_questions(12, worlds=2, seed=0),
        validation_questions(4),
        replace(CONFIG, **changes),
        folder=folder,
    )


@pytest.fixture(scope="module")
def rolled(random_model, tmp_path_factory):
    trainer = make(random_model, tmp_path_factory.mktemp("rl"))
    trajectories, groups = trainer.rollouts(1)
    return trainer, trajectories, groups


@pytest.mark.parametrize("latents", ["recomputed", "cached"])
def test_the_first_ratio_is_one(rolled, latents):
    trainer, trajectories, _ = rolled
    batch = make_batch(trajectories, [[0.0] * len(t.ids) for t in trajectories], 0)
    with torch.no_grad():
        logprobs = token_logprobs(trainer.model, batch, temperature=1.0, latents=latents)
    behaviour = batch.behaviour[:, 1:][batch.mask[:, 1:]]
    assert len(logprobs) == sum(o == Origin.SAMPLED for t in trajectories for o in t.origins)
    assert (torch.exp(logprobs - behaviour) - 1).abs().max() <= 2e-5
    assert any(len(t.latents) for t in trajectories)


def test_a_part_of_each_group_explores_and_the_rest_is_free(rolled):
    trainer, trajectories, groups = rolled
    assert groups == [0] * 4 + [1] * 4 + [2] * 4
    for row, t in enumerate(trajectories):
        forced = [turn.forced_mode for turn in t.turns if turn.forced_mode]
        assert len(forced) <= (row % 4 >= 2) and set(forced) <= {"think", "latent"}
    assert {turn.forced_mode for t in trajectories for turn in t.turns} == {"", "think", "latent"}


def test_an_explorer_draws_one_turn_and_a_fair_mode_for_it():
    plan, drawn = mode_plan(replace(CONFIG, group_size=8, explore_fraction=0.75), 7), Counter()
    for row in range(8000):
        forced = [(turn, plan(row, turn)) for turn in range(40) if plan(row, turn) != "free"]
        assert (
            len(forced)
            == (row % 8 >= 2)
            == explores(replace(CONFIG, group_size=8, explore_fraction=0.75), row)
        )
        drawn.update(forced)
    for turn in range(4):
        for mode in ("think", "latent"):
            expected = 6000 * 0.5 ** (turn + 1) / 2
            assert abs(drawn[turn, mode] - expected) <= 4 * expected**0.5
    assert any(plan(row, 0) != mode_plan(CONFIG, 8)(row, 0) for row in range(4, 8000, 8))


def test_credit_per_turn_falls_on_sampled_open_tags_only(rolled):
    trainer, trajectories, groups = rolled
    codec = trainer.engine.codec
    rewards = np.random.default_rng(0).normal(size=len(trajectories)).tolist()
    summaries, lengths = (
        [Summary.of(t, codec) for t in trajectories],
        [len(t.ids) for t in trajectories],
    )
    turn, whole = token_advantages(
        summaries, lengths, rewards, groups, replace(CONFIG, mode_weight=7.0), 1
    )
    flat, same = token_advantages(
        summaries, lengths, rewards, groups, replace(CONFIG, credit="trajectory"), 1
    )
    assert whole == same
    for t, by_turn, plain, value in zip(trajectories, turn, flat, whole, strict=True):
        assert plain == [value] * len(t.ids)
        tags = set()
        for number, record in enumerate(t.turns):
            begin = block_start(t, number, codec)
            if record.mode in ("think", "latent"):
                tags |= set(range(begin, begin + 3))
        assert all(a == value for position, a in enumerate(by_turn) if position not in tags)


@pytest.mark.parametrize(
    "step, share", [(1, 0.75), (2, 0.25), (3, 0.0)]
)  # of the mean effect; d_t of three steps
def test_the_baseline_of_the_mode_credit_falls_to_nothing_by_the_last_step(step, share):
    modes = [(True, True), (True, False), (False, True), (False, False)]
    tags = ((4, 7), (9, 12))
    blank = Summary(True, True, 1, 1, 10, 12, (), tags, (False, False), False)
    summaries = [replace(blank, modes=own) for own in modes]
    rewards = [-0.9, -1.0, 0.1, 0.0]  # effects −1 and 0.1
    config = replace(CONFIG, norm_adv_by_std=False, mode_weight=2.0, mode_baseline=1.0)
    advantages, whole = token_advantages(summaries, [14] * 4, rewards, [0] * 4, config, step)
    first, second = -1.0 + 0.45 * share, 0.1 + 0.45 * share
    for own, tokens, value in zip(modes, advantages, whole, strict=True):
        expected = [value] * 14
        expected[4:7] = [first if own[0] else -first] * 3
        expected[9:12] = [second if own[1] else -second] * 3
        assert tokens == pytest.approx(expected)


def test_the_loss_gradient_equals_a_slow_computation_token_by_token(
    random_model, tmp_path, monkeypatch
):
    trainer = make(random_model, tmp_path, kl_coefficient=0.0, gradient_accumulation=3)
    trajectories, groups = trainer.rollouts(1)
    advantages = [[float(i + 1)] * len(t.ids) for i, t in enumerate(trajectories)]
    gradients = {}
    monkeypatch.setattr(
        trainer.optimizer,
        "step",
        lambda: gradients.update(
            {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}
        ),
    )
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *a: None)
    trainer._update(trajectories, advantages)
    trainer.model.zero_grad()
    total = sum(t.count(Origin.SAMPLED) for t in trajectories)
    for t, row in zip(trajectories, advantages):
        hidden = trainer.model.latent_states(torch.tensor([t.ids])).hidden[0]
        logp = torch.log_softmax(module.policy_logits(trainer.model, hidden), -1)
        sampled = [n for n, origin in enumerate(t.origins) if origin == Origin.SAMPLED]
        loss = (
            -sum(row[n] * logp[n - 1, t.ids[n]] for n in sampled) / total
        )  # at ratio 1, ∇ρ = ∇ log p
        loss.backward()
    for name, parameter in trainer.model.named_parameters():
        if parameter.grad is not None:
            assert (
                gradients[name] - parameter.grad
            ).norm() <= 2e-4 * parameter.grad.norm() + 1e-6, name


def test_a_resumed_run_equals_an_uninterrupted_one(random_model, tmp_path):
    whole_rows, rows = [], []
    whole = make(random_model, tmp_path / "whole").fit(whole_rows.append)
    first = make(random_model, tmp_path / "cut")
    first.config = replace(CONFIG, steps=3)

    def stop_after_two(row):
        if row["step"] == 2:
            first._checkpoint()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first.fit(stop_after_two)
    resumed = make(random_model, tmp_path / "cut").fit(rows.append)
    for (name, a), (_, b) in zip(whole.named_parameters(), resumed.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert [row["step"] for row in rows] == [1, 2, 3]
    for one, other in zip(whole_rows, rows, strict=True):
        assert {k: v for k, v in one.items() if k != "seconds"} == pytest.approx(
            {k: v for k, v in other.items() if k != "seconds"}, nan_ok=True
        )
    assert rows[-1]["diversity_weight"] < rows[0]["diversity_weight"]


def test_groups_without_variance_carry_no_loss_under_the_filter(
    random_model, tmp_path, monkeypatch
):
    trainer = make(random_model, tmp_path, kept_variance=0.9)
    monkeypatch.setattr(
        rollouts,
        "shaped_rewards",
        lambda outcomes, **_: [float(n % 4) if n < 4 else 1.0 for n in range(len(outcomes))],
    )
    seen = []
    monkeypatch.setattr(
        trainer, "_update", lambda trajectories, advantages: seen.append(len(trajectories)) or {}
    )
    row = trainer.step()
    assert (
        seen == [4]
        and row["zero_variance_share"] == pytest.approx(2 / 3)
        and row["trained_share"] == pytest.approx(1 / 3)
    )
    monkeypatch.setattr(rollouts, "shaped_rewards", lambda outcomes, **_: [1.0] * len(outcomes))
    row = trainer.step()
    assert seen == [4] and row["trained_share"] == 0 and row["zero_variance_share"] == 1


def test_the_projector_is_frozen_unless_asked_for(random_model, tmp_path, monkeypatch):
    monkeypatch.setattr(
        rollouts,
        "shaped_rewards",
        lambda outcomes, **_: [float(n % 3) for n in range(len(outcomes))],
    )
    for train_projector in (False, True):
        trainer = make(
            random_model, tmp_path / str(train_projector), train_projector=train_projector
        )
        before = {n: p.clone() for n, p in trainer.model.model.projector.named_parameters()}
        trainer.step()
        moved = any(
            not torch.equal(p, before[n])
            for n, p in trainer.model.model.projector.named_parameters()
        )
        assert moved == train_projector


def test_lora_trains_adapters_and_returns_a_plain_model(random_model, tmp_path):
    trainer = make(random_model, tmp_path, trainable="lora", steps=1)
    names = {name for name, p in random_model()[0].named_parameters()}
    trained = trainer.fit(lambda row: None)
    assert {name for name, _ in trained.named_parameters()} == names


def test_outcomes_count_parsed_turns(rolled):
    trainer, trajectories, groups = rolled
    summaries = [Summary.of(t, trainer.engine.codec) for t in trajectories]
    for outcome, t in zip(outcomes_of(summaries, groups), trajectories, strict=True):
        assert outcome.n_latent + outcome.n_think <= len(t.turns)
        assert outcome.well_formed == (
            t.finish == "answer" and all(turn.well_formed for turn in t.turns)
        )


@pytest.mark.parametrize(
    "change",
    [
        {"variant": "other"},
        {"credit": "none"},
        {"latents": "frozen"},
        {"latents": "cached", "train_projector": True},
        {"trainable": "none"},
        {"kept_variance": 0.0},
    ],
)
def test_settings_that_cannot_be_are_refused(change):
    with pytest.raises(ValueError, match="rl\\."):
        replace(CONFIG, **change)

"""AR-GRPO in one process: true behaviour log-probs, masks from origins, credit per turn, exact
resume."""

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from alar.domains.search.environment import SearchEnvironment
from alar.domains.search.questions import training_questions, validation_questions
from alar.records import Origin
from alar.rl import trainer as module
from alar.rl.config import RLConfig
from alar.rl.strategy import (
    ClippedLoss,
    ExploringSampler,
    GroupCredit,
    Reward,
    Sampler,
    Strategy,
    TurnCredit,
    ar_grpo,
)
from alar.rl.summary import TrajectorySummary, outcomes_of
from alar.rl.trainer import ARGRPO, make_batch, token_logprobs
from alar.rollout.modes import block_start

CONFIG = RLConfig(
    steps=3,
    prompts_per_step=3,
    group_size=4,
    learning_rate=1e-3,
    schedule="constant",
    warmup_ratio=0.0,
    kl_coefficient=1e-3,
    alpha=0.3,
    length_tolerance=100.0,
    norm_adv_by_std=True,
    explore_fraction=0.5,
    mode_weight=1.0,
    mode_baseline=0.0,
    validation_every=2,
    checkpoint_every=1,
    gradient_accumulation=2,
)


def changed(**changes) -> RLConfig:
    return RLConfig(**CONFIG.model_dump() | changes)


@dataclass(frozen=True)
class Given(Reward):
    """The n-th trajectory's reward is the n-th of `values`, which begin anew after the last."""

    values: tuple[float, ...]

    def rewards(self, summaries, groups, step, total_steps):
        return [self.values[n % len(self.values)] for n in range(len(summaries))]


def make(random_model, folder, *, reward=None, dtype="float32", **changes) -> ARGRPO:
    model, tokenizer = random_model(dtype=dtype)
    config = changed(**changes)
    strategy = ar_grpo(config)
    if reward is not None:
        strategy = replace(strategy, reward=reward)
    return ARGRPO(
        model,
        tokenizer,
        SearchEnvironment(),
        training_questions(12, worlds=2, seed=0),
        validation_questions(4),
        config,
        strategy,
        folder=folder,
        max_turns=3,
        max_new_tokens=20,
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
    sampler, drawn = ExploringSampler(3, 8, explore_fraction=0.75), Counter()
    plan = sampler.modes(7)
    for row in range(8000):
        forced = [(turn, plan(row, turn)) for turn in range(40) if plan(row, turn) != "free"]
        assert len(forced) == (row % 8 >= 2) == sampler.explores(row)
        drawn.update(forced)
    for turn in range(4):
        for mode in ("think", "latent"):
            expected = 6000 * 0.5 ** (turn + 1) / 2
            assert abs(drawn[turn, mode] - expected) <= 4 * expected**0.5
    assert any(plan(row, 0) != sampler.modes(8)(row, 0) for row in range(4, 8000, 8))


def test_credit_per_turn_falls_on_sampled_open_tags_only(rolled):
    trainer, trajectories, groups = rolled
    codec = trainer.engine.codec
    rewards = np.random.default_rng(0).normal(size=len(trajectories)).tolist()
    summaries = [TrajectorySummary.of(t, codec) for t in trajectories]
    step = (summaries, [len(t.ids) for t in trajectories], rewards, groups, 1, 3)
    turn = TurnCredit(mode_weight=7.0).advantages(*step)
    flat = GroupCredit().advantages(*step)
    whole = GroupCredit().of_trajectories(rewards, groups)
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
    blank = TrajectorySummary(True, True, 1, 1, 10, 12, (), tags, (False, False), False)
    summaries = [replace(blank, modes=own) for own in modes]
    rewards = [-0.9, -1.0, 0.1, 0.0]  # effects −1 and 0.1
    credit = TurnCredit(norm_by_std=False, mode_weight=2.0, mode_baseline=1.0)
    advantages = credit.advantages(summaries, [14] * 4, rewards, [0] * 4, step, 3)
    whole = credit.of_trajectories(rewards, [0] * 4)
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
    varied = Given((0.0, 1.0, 2.0, 3.0) + (1.0,) * 8)
    trainer = make(random_model, tmp_path, kept_variance=0.9, reward=varied)
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
    trainer.strategy = replace(trainer.strategy, reward=Given((1.0,)))
    row = trainer.step()
    assert seen == [4] and row["trained_share"] == 0 and row["zero_variance_share"] == 1


def test_the_projector_is_frozen_unless_asked_for(random_model, tmp_path):
    for train_projector in (False, True):
        trainer = make(
            random_model,
            tmp_path / str(train_projector),
            train_projector=train_projector,
            reward=Given((0.0, 1.0, 2.0)),
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


@pytest.mark.parametrize("returned, kept", [("best", 2), ("last", 3)])
def test_the_asked_weights_are_returned_and_decay_reaches_the_optimizer(
    random_model, tmp_path, monkeypatch, returned, kept
):
    trainer = make(
        random_model, tmp_path, weight_decay=0.25, returned_weights=returned, validation_every=1
    )
    assert {group["weight_decay"] for group in trainer.optimizer.param_groups} == {0.25}
    rewards = iter([0.1, 0.9, 0.5])  # of the three steps' validation
    monkeypatch.setattr(trainer, "validate", lambda: {"validation_reward": next(rewards)})
    after = {}  # step → weights

    def keep(row):
        after[row["step"]] = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}

    model = trainer.fit(log=keep)
    assert all(torch.equal(p, after[kept][name]) for name, p in model.named_parameters())
    assert any(not torch.equal(after[2][name], after[3][name]) for name in after[2])


def test_outcomes_count_parsed_turns(rolled):
    trainer, trajectories, groups = rolled
    summaries = [TrajectorySummary.of(t, trainer.engine.codec) for t in trajectories]
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
        {"explore_fraction": 0.1},
    ],
)
def test_settings_that_cannot_be_are_refused(random_model, tmp_path, change):
    with pytest.raises(ValueError, match=next(reversed(change))):
        make(random_model, tmp_path, **change)


def test_another_method_in_the_same_folder_is_refused_and_named(random_model, tmp_path):
    trainer = make(random_model, tmp_path)
    trainer._checkpoint()
    with pytest.raises(ValueError, match="reward"):
        make(random_model, tmp_path, reward=Given((1.0,)))._resume(print)
    with pytest.raises(ValueError, match="alpha"):
        make(random_model, tmp_path, alpha=0.1)._resume(print)


def test_the_parameters_choose_the_parts():
    ours, published = ar_grpo(CONFIG, seed=4), ar_grpo(changed(credit="trajectory"))
    assert type(ours.credit) is TurnCredit and type(published.credit) is GroupCredit
    assert ours.sampler.seed == 4 and ours.sampler.group_size == CONFIG.group_size
    assert ours.loss == ClippedLoss(CONFIG.clip_low, CONFIG.clip_high)
    assert ours.reward.length_tolerance == CONFIG.length_tolerance


def test_a_strategy_comes_back_from_its_classes_and_settings():
    first = replace(ar_grpo(CONFIG, seed=2), reward=Given((1.0, 2.0)))
    described = first.to_json()
    assert described["reward"]["class"] == f"{__name__}:Given"
    assert Strategy.from_json(described) == first


def test_every_question_comes_once_per_epoch_whatever_step_a_training_goes_on_at():
    asked, sampler = training_questions(7, worlds=1, seed=0), Sampler(3, 2, seed=5)
    epoch = sampler.prompts(asked, 1) + sampler.prompts(asked, 2)
    assert len({question.id for question in epoch}) == 6
    assert sampler.prompts(asked, 3) == Sampler(3, 2, seed=5).prompts(asked, 3)
    assert sampler.prompts(asked, 3) != epoch[:3]
    with pytest.raises(ValueError, match="prompts_per_step"):
        sampler.prompts(asked[:2], 1)


def test_what_the_reference_writes_is_trained_on_where_the_sampler_says_so(random_model, tmp_path):
    trainer = make(random_model, tmp_path)
    assert trainer.writer is trainer.engine
    config, strategy = CONFIG, ar_grpo(CONFIG)
    strategy = replace(strategy, sampler=Sampler(2, 2, writer="reference"))
    args = (trainer.environment, trainer.questions, [], config, strategy)
    other = ARGRPO(*random_model(), *args, folder=tmp_path)
    assert other.writer.model is other.reference

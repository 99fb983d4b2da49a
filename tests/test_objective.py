"""The objective: equal to verl where verl is installed, equal to plain loops everywhere; credit and
information by hand.

Every function is called with its jaxtyping signature checked by beartype.
"""

import math
import random

import numpy as np
import pytest
import torch
from beartype import beartype
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError, jaxtyped
from sklearn.linear_model import LinearRegression

from alar.rl import objective

NAMES = (
    "group_advantages",
    "policy_loss",
    "aggregate",
    "kl_penalty",
    "mode_advantages",
    "mode_information",
)
CHECKED = {name: jaxtyped(typechecker=beartype)(getattr(objective, name)) for name in NAMES}
group_advantages, policy_loss, aggregate, kl_penalty, mode_advantages, mode_information = (
    CHECKED.values()
)

SEEDS = range(5)


def batch(seed, rows=6, width=11):
    """Random float64 log-probs (spread wide enough to clip), advantages and a mask whose last row
    is empty."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale):
        return torch.randn(rows, width, generator=generator, dtype=torch.float64) * scale

    old = -normal(1.0).abs()
    mask = torch.rand(rows, width, generator=generator) < 0.7
    mask[-1] = False
    mask[0, 0] = True
    return old + normal(0.8), old, normal(1.0), mask


@pytest.fixture(scope="module")
def verl():
    return pytest.importorskip(
        "verl.trainer.ppo.core_algos",
        reason="verl is not installed: python run_all.py --install engines",
    )


def by_group(rewards, groups, eps=1e-6):
    """GRPO advantages with Python's statistics module."""
    import statistics

    result = []
    for reward, group in zip(rewards, groups):
        members = [r for r, g in zip(rewards, groups) if g == group]
        mean, std = (
            (statistics.fmean(members), statistics.stdev(members))
            if len(members) > 1
            else (0.0, 1.0)
        )
        result.append((reward - mean) / (std + eps))
    return result


def looped_loss(log_probs, old, advantages, mask, low, high, c, aggregation):
    """Dual-clip PPO, token by token in Python floats."""
    sequences, clipped, dual, kl = [], [], [], []
    for row in range(len(mask)):
        losses = []
        for t in range(len(mask[row])):
            if not mask[row][t]:
                continue
            log_ratio = max(-20.0, min(20.0, (log_probs[row][t] - old[row][t]).item()))
            ratio, a = math.exp(log_ratio), advantages[row][t].item()
            surrogate = min(ratio * a, max(1 - low, min(1 + high, ratio)) * a)
            clipped.append(surrogate < ratio * a)
            dual.append(a < 0 and surrogate < c * a)
            kl.append(-log_ratio)
            losses.append(-max(surrogate, c * a) if a < 0 else -surrogate)
        if losses:
            sequences.append(losses)

    def mean(values):
        return sum(values) / len(values)

    loss = {
        "token-mean": lambda: mean([x for losses in sequences for x in losses]),
        "seq-mean-token-sum": lambda: mean([sum(losses) for losses in sequences]),
        "seq-mean-token-mean": lambda: mean([mean(losses) for losses in sequences]),
    }[aggregation]()
    return loss, {
        "clip_fraction": mean(clipped),
        "clip_fraction_dual": mean(dual),
        "approximate_kl": mean(kl),
    }


@given(st.lists(st.tuples(st.floats(-2, 2), st.integers(0, 4)), min_size=1, max_size=24))
def test_group_advantages_equal_the_statistics_module(members):
    rewards, groups = zip(*members)
    ours = group_advantages(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups))
    assert ours.tolist() == pytest.approx(by_group(rewards, groups), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("norm_by_std", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_group_advantages_equal_verl(verl, seed, norm_by_std):
    generator = torch.Generator().manual_seed(seed)
    groups = torch.tensor([0, 0, 0, 1, 2, 1, 1, 3, 2, 2, 2, 0])  # group 3 has one member
    rewards = torch.rand(12, generator=generator, dtype=torch.float64)
    spread = torch.zeros(12, 3, dtype=torch.float64)
    spread[:, -1] = rewards
    theirs, _ = verl.compute_grpo_outcome_advantage(
        spread.clone(), torch.ones(12, 3), groups.numpy(), norm_adv_by_std_in_grpo=norm_by_std
    )
    ours = group_advantages(rewards, groups, norm_by_std=norm_by_std)
    torch.testing.assert_close(ours, theirs[:, 0], atol=1e-6, rtol=0)


def test_without_the_deviation_a_latent_turn_is_worth_alpha_in_every_group():
    rewards = [1.0, 1.0, 1.15, 1.15] + [0.0, 1.0, 0.0, 1.15]  # all correct; two wrong
    groups = torch.tensor([0] * 4 + [1] * 4)
    apart = group_advantages(torch.tensor(rewards), groups, norm_by_std=False)
    stretched = group_advantages(torch.tensor(rewards), groups)
    assert (apart[2] - apart[0]).item() == pytest.approx(0.15, abs=1e-6)
    assert (stretched[2] - stretched[0]).item() == pytest.approx(3**0.5, abs=1e-4)
    assert (apart[7] - apart[5]).item() == pytest.approx(0.15, abs=1e-6)


def test_equal_rewards_have_no_advantage_in_float32():
    rewards = torch.tensor([1.3] * 7 + [0.7] * 3)
    assert group_advantages(rewards, torch.tensor([0] * 7 + [1] * 3)).abs().max() < 1e-6


def test_group_advantages_refuse_a_reward_that_is_not_finite():
    with pytest.raises(ValueError, match="reward 1 is not finite"):
        group_advantages(torch.tensor([0.0, math.nan]), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="one group per reward"):
        objective.group_advantages(torch.zeros(2), torch.zeros(3))


@pytest.mark.parametrize("aggregation", objective.AGGREGATIONS)
@pytest.mark.parametrize("clips", [(0.2, 0.2, 3.0), (0.1, 0.3, 1.5)])
@pytest.mark.parametrize("seed", SEEDS)
def test_policy_loss_equals_plain_loops(seed, clips, aggregation):
    low, high, c = clips
    loss, metrics = policy_loss(
        *batch(seed), clip_low=low, clip_high=high, clip_c=c, aggregation=aggregation
    )
    expected, expected_metrics = looped_loss(*batch(seed), low, high, c, aggregation)
    assert loss.item() == pytest.approx(expected, abs=1e-9)
    assert metrics == pytest.approx(expected_metrics, abs=1e-9)


@pytest.mark.parametrize("aggregation", objective.AGGREGATIONS)
@pytest.mark.parametrize("clips", [(0.2, 0.2, 3.0), (0.1, 0.3, 1.5)])
@pytest.mark.parametrize("seed", SEEDS)
def test_policy_loss_and_gradient_equal_verl(verl, seed, clips, aggregation):
    from verl.workers.config import ActorConfig

    low, high, c = clips
    log_probs, old, advantages, mask = batch(seed)
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=c,
    )
    a, b = log_probs.clone().requires_grad_(), log_probs.clone().requires_grad_()
    loss, metrics = policy_loss(
        a, old, advantages, mask, clip_low=low, clip_high=high, clip_c=c, aggregation=aggregation
    )
    theirs, their_metrics = verl.get_policy_loss_fn("vanilla")(
        old_log_prob=old,
        log_prob=b,
        advantages=advantages,
        response_mask=mask.double(),
        loss_agg_mode=aggregation,
        config=config,
    )
    torch.testing.assert_close(loss, theirs, atol=1e-6, rtol=0)
    loss.backward(), theirs.backward()
    torch.testing.assert_close(a.grad, b.grad, atol=1e-6, rtol=0)
    names = {
        "clip_fraction": "pg_clipfrac",
        "clip_fraction_dual": "pg_clipfrac_lower",
        "approximate_kl": "ppo_kl",
    }
    for ours, name in names.items():
        assert metrics[ours] == pytest.approx(their_metrics[f"actor/{name}"], abs=1e-6)


def test_clip_defaults_are_those_of_verl(verl):
    from verl.workers.config import ActorConfig

    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    assert (config.clip_ratio_low, config.clip_ratio_high, config.clip_ratio_c) == (0.2, 0.2, 3.0)
    log_probs, old, advantages, mask = batch(0)
    theirs, _ = verl.get_policy_loss_fn("vanilla")(
        old, log_probs, advantages, mask.double(), config=config
    )
    torch.testing.assert_close(
        policy_loss(log_probs, old, advantages, mask)[0], theirs, atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("aggregation", objective.AGGREGATIONS)
def test_aggregation_equals_verl(verl, aggregation):
    for seed in SEEDS:
        values, _, _, mask = batch(seed)
        theirs = verl.agg_loss(values, mask.double(), aggregation)
        torch.testing.assert_close(aggregate(values, mask, aggregation), theirs, atol=1e-6, rtol=0)


def test_values_outside_the_mask_reach_neither_loss_nor_gradient():
    log_probs, old, advantages, mask = batch(0)
    clean = policy_loss(log_probs, old, advantages, mask)[0]
    dirty = [x.masked_fill(~mask, math.nan) for x in (log_probs, old, advantages)]
    dirty[0].requires_grad_()
    loss, metrics = policy_loss(*dirty, mask)
    assert loss == clean and all(math.isfinite(value) for value in metrics.values())
    loss.backward()
    assert torch.isfinite(dirty[0].grad).all() and (dirty[0].grad[~mask] == 0).all()


def test_at_the_behaviour_policy_the_gradient_is_that_of_reinforce():
    log_probs, _, advantages, mask = batch(1)
    log_probs.requires_grad_()
    loss, metrics = policy_loss(log_probs, log_probs.detach().clone(), advantages, mask)
    loss.backward()
    torch.testing.assert_close(log_probs.grad, -(advantages * mask) / mask.sum())
    assert metrics == {"clip_fraction": 0.0, "clip_fraction_dual": 0.0, "approximate_kl": 0.0}


def test_a_batch_without_a_token_and_unknown_names_are_errors():
    log_probs, old, advantages, mask = batch(0)
    with pytest.raises(ValueError, match="the mask holds no token"):
        policy_loss(log_probs, old, advantages, torch.zeros_like(mask))
    with pytest.raises(ValueError, match="choose one of token-mean"):
        policy_loss(log_probs, old, advantages, mask, aggregation="mean")
    with pytest.raises(ValueError, match="clip_c=1.0"):
        policy_loss(log_probs, old, advantages, mask, clip_c=1.0)


def test_shapes_that_do_not_fit_are_refused_by_the_signature():
    log_probs, old, advantages, mask = batch(0)
    with pytest.raises(TypeCheckError):
        policy_loss(log_probs, old, advantages[:, :1], mask)
    with pytest.raises(TypeCheckError):
        group_advantages(torch.zeros(3), torch.zeros(2, dtype=torch.long))


def test_kl_and_its_gradient_equal_verl(verl):
    for seed in SEEDS:
        log_probs, reference, _, _ = batch(seed)
        log_probs[0, 0], reference[0, 1] = reference[0, 0] - 30, log_probs[0, 1] - 30  # both clamps
        a, b = log_probs.clone().requires_grad_(), log_probs.clone().requires_grad_()
        ours = kl_penalty(a, reference)
        theirs = verl.kl_penalty(b, reference, "low_var_kl")
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
        ours.sum().backward(), theirs.sum().backward()
        torch.testing.assert_close(a.grad, b.grad, atol=1e-6, rtol=0)


def test_low_variance_kl_is_never_negative_and_has_the_true_kl_as_its_mean():
    torch.manual_seed(0)
    p, q = torch.randn(2, 7, dtype=torch.float64).log_softmax(-1)
    per_token = kl_penalty(p, q)
    assert (per_token >= 0).all()
    true = torch.nn.functional.kl_div(q, p, log_target=True, reduction="sum")
    assert (p.exp() * per_token).sum().item() == pytest.approx(true.item(), abs=1e-12)


def credit_by_definition(modes, advantages, groups, i, t):
    """scikit-learn's least squares over the rollouts of the group that have a block at turn t,
    looked up anew for every turn."""
    rows = [
        j
        for j in range(len(modes))
        if groups[j] == groups[i] and len(modes[j]) > t and modes[j][t] is not None
    ]
    if modes[i][t] is None or len({modes[j][t] for j in rows}) < 2:
        return 0.0
    table = [
        [{True: 0.5, False: -0.5, None: 0.0}[m] for m in modes[j]] + [0.0] * (4 - len(modes[j]))
        for j in rows
    ]
    effect = LinearRegression().fit(table, [advantages[j] for j in rows]).coef_[t]
    return 0.5 * effect if modes[i][t] else -0.5 * effect


ROLLOUTS = st.lists(
    st.tuples(
        st.lists(st.sampled_from([True, False, None]), max_size=4),
        st.floats(-3, 3),
        st.integers(0, 2),
    ),
    max_size=16,
)


@given(ROLLOUTS)
def test_mode_advantages_equal_their_definition(rollouts):
    modes, advantages, groups = ([r[k] for r in rollouts] for k in range(3))
    credits = mode_advantages(modes, advantages, groups)
    for i, own in enumerate(modes):
        expected = [credit_by_definition(modes, advantages, groups, i, t) for t in range(len(own))]
        assert credits[i] == pytest.approx(expected, abs=1e-9)


def test_with_one_turn_the_effect_is_the_difference_of_the_two_means():
    modes, advantages = [[True], [True], [False], [False], [False]], [1.0, 0.0, -1.0, -2.0, 0.0]
    half = 0.5 * (0.5 - -1.0)
    assert mode_advantages(modes, advantages, [0] * 5) == [
        pytest.approx([half if m else -half]) for (m,) in modes
    ]


def test_mode_advantages_by_hand():
    modes = [[True, False], [True, True], [False, False], [False]]
    # turn 2, three rollouts: behind a latent turn 1 a latent turn 2 costs 1, so Δ = −1 (the
    # difference of the arms would be 0) turn 1, all four: the normal equations give Δ = 2.3, beside
    # −1.2 for turn 2
    (first, second), (_, other), (third, fourth), (last,) = mode_advantages(
        modes, [1.0, 0.0, -1.0, -2.0], [0] * 4
    )
    assert (second, other, fourth) == pytest.approx((0.5, -0.5, 0.5))
    assert (first, third, last) == pytest.approx((1.15, -1.15, -1.15))


def test_a_latent_turn_before_it_does_not_count_against_a_harmless_one():
    """Text everywhere, beside rollouts whose modes are drawn: latent costs the answer at turn 1 and
    nothing at turn 2."""
    modes = [[False, False]] * 4 + [[True, True], [True, False], [False, True], [False, False]]
    advantages = [0.0 if first else 1.0 for first, _ in modes]
    credits = mode_advantages(modes, advantages, [0] * 8)
    for (first, _), credit in zip(modes, credits):
        assert credit == pytest.approx([-0.5 if first else 0.5, 0.0], abs=1e-12)
    assert np.mean([a for a, (_, m) in zip(advantages, modes) if m]) < np.mean(
        [a for a, (_, m) in zip(advantages, modes) if not m]
    )


@given(ROLLOUTS, st.floats(0, 1))
def test_a_baseline_takes_a_share_of_the_mean_effect_off_every_effect(rollouts, share):
    modes, advantages, groups = ([r[k] for r in rollouts] for k in range(3))
    plain, relative = (
        mode_advantages(modes, advantages, groups),
        mode_advantages(modes, advantages, groups, baseline=share),
    )
    chosen = {(g, t, m[t]) for m, g in zip(modes, groups) for t in range(len(m))}
    compared = [
        (i, t)
        for i, own in enumerate(modes)
        for t, m in enumerate(own)
        if m is not None and (groups[i], t, not m) in chosen
    ]
    effects = {(i, t): 2 * plain[i][t] * (1 if modes[i][t] else -1) for i, t in compared}
    mean = sum(effects.values()) / max(1, len(effects))
    for i, own in enumerate(modes):
        for t in range(len(own)):
            expected = (
                (effects[i, t] - share * mean) / 2 * (1 if own[t] else -1)
                if (i, t) in effects
                else 0.0
            )
            assert relative[i][t] == pytest.approx(expected, abs=1e-9)


def test_a_baseline_compares_turns_with_each_other():
    modes = [[True, True], [True, False], [False, True], [False, False]]
    advantages = [
        -0.9,
        -1.0,
        0.1,
        0.0,
    ]  # a latent turn 1 costs 1, a latent turn 2 gains 0.1; the mean of the two is −0.45
    both, first, second, none = mode_advantages(modes, advantages, [0] * 4, baseline=1.0)
    assert both == pytest.approx([-0.275, 0.275]) and none == pytest.approx([0.275, -0.275])
    assert first == pytest.approx([-0.275, -0.275]) and second == pytest.approx([0.275, 0.275])
    with pytest.raises(ValueError, match="baseline is 1.5"):
        mode_advantages(modes, advantages, [0] * 4, baseline=1.5)


def test_a_group_with_one_mode_at_a_turn_gives_no_credit():
    assert mode_advantages([[True], [True], [False]], [1.0, -1.0, 0.5], ["a", "a", "b"]) == [
        [0.0],
        [0.0],
        [0.0],
    ]


def test_a_turn_without_a_block_gets_no_credit_and_is_compared_with_nobody():
    (first,), (second,), (third,) = mode_advantages(
        [[True], [None], [False]], [1.0, -9.0, 0.0], [0, 0, 0]
    )
    assert (first, second, third) == pytest.approx((0.5, 0.0, -0.5))


def test_a_shift_of_all_advantages_changes_no_credit():
    modes, advantages = [[True], [False], [True]], [0.3, -0.2, 0.9]
    shifted = [a + 5.0 for a in advantages]
    assert mode_advantages(modes, shifted, [0, 0, 0])[0] == pytest.approx(
        mode_advantages(modes, advantages, [0, 0, 0])[0]
    )


def test_mode_credit_has_the_policy_gradient_as_its_expectation():
    """One state, p(latent) known: the mean step along the logit is p(1−p)·Δ per rollout, up to
    one-mode groups."""
    p, value = 0.3, {True: 0.2, False: 1.0}
    generator, size, groups = random.Random(0), 8, 4000
    total = 0.0
    for _ in range(groups):
        modes = [[generator.random() < p] for _ in range(size)]
        rewards = [value[m] + generator.gauss(0, 0.3) for (m,) in modes]
        for (latent,), (credit,) in zip(modes, mode_advantages(modes, rewards, [0] * size)):
            total += credit * ((1 - p) if latent else -p)
    both = 1 - p**size - (1 - p) ** size
    assert total / (groups * size) == pytest.approx(
        p * (1 - p) * (value[True] - value[False]), rel=0.03 + (1 - both)
    )


def test_forced_random_modes_recover_the_effect_that_sampled_modes_confound():
    """The policy thinks where the question is hard: sampled modes make thinking look harmful,
    forced ones do not."""
    generator = random.Random(1)

    def mean_text_credit(forced):
        credits = []
        for _ in range(1500):
            hard = [generator.random() < 0.5 for _ in range(8)]
            modes = [[generator.random() < (0.5 if forced else (0.1 if h else 0.9))] for h in hard]
            rewards = [(0.3 if h else 1.0) + (0.0 if m else 0.2) for h, (m,) in zip(hard, modes)]
            credits += [
                c
                for (m,), (c,) in zip(modes, mode_advantages(modes, rewards, [0] * 8))
                if not m and c
            ]
        return sum(credits) / len(credits)

    assert mean_text_credit(forced=False) < -0.05
    assert mean_text_credit(forced=True) == pytest.approx(0.1, abs=0.01)


def test_lengths_that_differ_are_an_error():
    with pytest.raises(ValueError, match="1 lists of modes, 2 advantages, 1 groups"):
        mode_advantages([[True]], [0.0, 1.0], [0])


def test_information_separates_collapse_coin_flips_and_choice_by_state():
    assert mode_information(torch.zeros(6)) == (0.0, 0.0, 0.0)
    assert mode_information(torch.full((6,), 0.5)) == pytest.approx((1.0, 1.0, 0.0))
    assert mode_information(torch.tensor([0.0, 1.0])) == pytest.approx((1.0, 0.0, 1.0))


@settings(deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=30))
def test_information_equals_the_mutual_information_of_a_table_of_counts(latent):
    """Against scikit-learn: every state visited 1000 times, `latent` of them in the latent mode."""
    from sklearn.metrics import mutual_info_score

    table = [[count, 1000 - count] for count in latent]
    entropy, given_state, information = mode_information(
        torch.tensor(latent, dtype=torch.float64) / 1000
    )
    assert information == pytest.approx(
        mutual_info_score(None, None, contingency=table) / math.log(2), abs=1e-6
    )
    assert information >= -1e-12 and entropy == pytest.approx(given_state + information)


def test_information_of_no_states_is_nan_and_of_no_probability_an_error():
    assert all(math.isnan(value) for value in mode_information(torch.tensor([])))
    with pytest.raises(ValueError, match="state 1 is 1.5, not a probability"):
        mode_information(torch.tensor([0.5, 1.5]))
    with pytest.raises(ValueError, match="state 0 is nan"):
        mode_information(torch.tensor([math.nan]))

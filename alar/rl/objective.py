"""The objective of AR-GRPO: group advantages, the clipped policy loss, the KL penalty, and credit
for mode choices.

    advantage    A_i = (r_i − mean_G r) / (std_G r + ε)             GRPO, arXiv 2402.03300
                 A_i = r_i − mean_G r                               Dr. GRPO, 2503.20783
    policy loss  max(−A ρ, −A clip(ρ, 1 − ε_low, 1 + ε_high))       PPO, 1707.06347
                 for A < 0 at most −c A                             dual clip, 1912.09729
    KL           e^δ − δ − 1,  δ = log π_ref − log π                Schulman's k3

Names, clamps and defaults are those of verl (`verl.trainer.ppo.core_algos`), and the tests compare
with verl's numbers. The few lines are repeated here because importing verl takes seconds.
Deliberate: values outside the mask may be anything, NaN included. An empty mask is an error, not a
NaN loss.

Credit per turn (`mode_advantages`) and the information of the mode choice are the project's own.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from statistics import pvariance

import numpy as np
import torch
from jaxtyping import Bool, Float, Num, Shaped
from torch import Tensor

AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
LOG_RATIO_LIMIT = 20.0  # |log ratio| beyond this is clamped before exp
KL_LIMIT = 10.0  # nats per token: one rare token must not dominate the penalty


def group_advantages(
    rewards: Num[Tensor, " rollouts"],
    groups: Shaped[Tensor, " rollouts"],
    *,
    norm_by_std: bool = True,
    eps: float = 1e-6,
) -> Float[Tensor, " rollouts"]:
    """GRPO advantage of every rollout, in the rewards' dtype, without gradient.

    The standard deviation is the sample's (n − 1). A group of one keeps its reward, as in verl.
    The sums are in float64. In float32 the mean of equal rewards has a rounding error; divided by
    ε it becomes an advantage of 0.1.

    Without `norm_by_std` only the mean is taken off (Dr. GRPO, arXiv 2503.20783). In a group whose
    members are all correct the differences are small (α·f), and they then stay small. Division
    would stretch them to the size of right against wrong.

    Raises ValueError where rewards and groups differ in length or a reward is not finite.
    """
    if rewards.shape != groups.shape:
        raise ValueError(
            f"{tuple(rewards.shape)} rewards for {tuple(groups.shape)} groups: one group per reward"
            " is needed"
        )
    values = rewards.detach().cpu().double()  # (rollouts,)
    if not torch.isfinite(values).all():
        raise ValueError(f"reward {int((~torch.isfinite(values)).nonzero()[0])} is not finite")
    # index (rollouts,) numbers the group of each rollout; sizes (groups,) counts its members.
    _, index, sizes = torch.unique(groups.cpu(), return_inverse=True, return_counts=True)
    sums = torch.zeros(len(sizes), dtype=values.dtype).index_add_(0, index, values)  # (groups,)
    single = sizes == 1  # (groups,)
    means = torch.where(single, 0.0, sums / sizes)  # mean 0 and std 1 leave a lone reward as it is
    centred = values - means[index]  # (rollouts,)
    squares = torch.zeros_like(sums).index_add_(0, index, centred.square())
    stds = torch.where(single, 1.0, (squares / (sizes - 1).clamp(min=1)).sqrt())  # (groups,)
    # Whole-number rewards would round the advantages to whole numbers.
    dtype = rewards.dtype if rewards.is_floating_point() else torch.get_default_dtype()
    if norm_by_std:
        centred = centred / (stds[index] + eps)
    return centred.to(rewards.device, dtype)


def policy_loss(
    log_probs: Float[Tensor, "batch time"],
    old_log_probs: Float[Tensor, "batch time"],
    advantages: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"] | Num[Tensor, "batch time"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_c: float = 3.0,
    aggregation: str = "token-mean",
) -> tuple[Float[Tensor, ""], dict[str, float]]:
    """PPO's clipped loss with dual clip, and `clip_fraction`, `clip_fraction_dual`,
    `approximate_kl` over the mask.

    `old_log_probs` are those of the behaviour policy at the time of sampling. `clip_c` > 1 bounds
    the loss of a negative advantage at −c·A. Raises ValueError for an empty mask, an unknown
    aggregation or clip values out of range.
    """
    if not (0 <= clip_low <= 1 and clip_high >= 0 and clip_c > 1):
        raise ValueError(
            f"clip_low={clip_low}, clip_high={clip_high}, clip_c={clip_c}: needed are 0 ≤ clip_low"
            " ≤ 1, clip_high ≥ 0, clip_c > 1"
        )
    mask = mask.bool()
    _check_mask(mask)
    # A token outside the mask has no log-prob. Zeroing it first also keeps NaN out of the gradient:
    # a NaN that is multiplied by 0 stays NaN.
    log_ratio = (log_probs.masked_fill(~mask, 0.0) - old_log_probs.masked_fill(~mask, 0.0)).clamp(
        -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT
    )
    advantages = advantages.masked_fill(~mask, 0.0)
    ratio = log_ratio.exp()  # (B, T): ρ
    plain = -advantages * ratio  # (B, T)
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    losses = torch.maximum(plain, clipped)  # PPO: the more pessimistic of the two
    bound = -advantages * clip_c  # positive where A < 0, the only place it is used
    bounded = torch.where(advantages < 0, torch.minimum(losses, bound), losses)
    metrics = {
        "clip_fraction": (clipped > plain)[mask].double().mean().item(),
        "clip_fraction_dual": ((losses > bound) & (advantages < 0))[mask].double().mean().item(),
        # The estimator k1, the mean of log π_old − log π, which may be negative.
        "approximate_kl": -log_ratio.detach()[mask].double().mean().item(),
    }
    return aggregate(bounded, mask, aggregation), metrics


def aggregate(
    values: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"] | Num[Tensor, "batch time"],
    aggregation: str = "token-mean",
) -> Float[Tensor, ""]:
    """The mean of values that are given per token.

    "token-mean" is the mean over all tokens. The other two take the sum or the mean of each
    sequence's tokens, and then the mean over sequences.

    Sequences without a token in the mask do not count. Raises ValueError for an unknown aggregation
    or an empty mask.
    """
    mask = mask.bool()
    _check_mask(mask)
    values = values.masked_fill(~mask, 0.0)
    if aggregation == "token-mean":
        return values.sum() / mask.sum()
    tokens = mask.sum(-1)  # (B,)
    used = tokens > 0  # (B,); 0 / 0 would be NaN
    if aggregation == "seq-mean-token-sum":
        return values.sum(-1)[used].mean()
    if aggregation == "seq-mean-token-mean":
        return (values.sum(-1)[used] / tokens[used]).mean()
    raise ValueError(
        f"aggregation {aggregation!r} is unknown: choose one of {', '.join(AGGREGATIONS)}"
    )


def kl_penalty(
    log_probs: Float[Tensor, "*shape"], reference_log_probs: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """Estimate of KL(π ‖ π_ref) per token in nats, with gradient, from tokens that π sampled.

    It is k3 (verl: `low_var_kl`): unbiased, never negative, clamped to at most 10.
    """
    delta = reference_log_probs - log_probs  # log π_ref − log π
    delta = delta.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (delta.exp() - delta - 1).clamp(-KL_LIMIT, KL_LIMIT)


def mode_advantages(
    modes: Sequence[Sequence[bool | None]],
    advantages: Sequence[float],
    groups: Sequence[Hashable],
    *,
    baseline: float = 0.0,
) -> list[list[float]]:
    """Credit of every turn's mode choice, with the modes of the other turns held fixed.

    `modes[i][t]` is True for a latent block, False for text, None for a turn without a block. A
    turn without a block has credit 0 and is compared with no other. `advantages[i]` is the
    rollout's own. Pass the rollouts whose modes were forced too: their tags carry no loss, but they
    carry much of the comparison. Let m = +½ for a latent block, −½ for text and 0 where there is
    none. Least squares over the rollouts of a group that have a block at turn t fit

        A_i      ≈ μ + Δ_t m_it + Σ_{s≠t} γ_s m_is
        credit   = ±½ (Δ_t − b Δ̄): plus for a latent block, minus for text

    and the credit is 0 where the group has one mode only at t. Δ̄ is the mean of Δ over all compared
    turns of all groups; b = `baseline` is the share of it that every latent turn pays. At b = 0 the
    credit is the plain one. At b = 1 it says which turns need text *more than others*, and hardly
    moves the share of latent turns.

    Why ½: in one state with p = p(latent), the expected step of a rollout's score function is then
    p(1−p)·Δ along the logit. That is exactly the policy gradient of this choice; each of the two
    modes gives half of it.

    Why the other turns: without them Δ_t is mean(A | latent) − mean(A | text), which also contains
    what the other turns did. Take a policy that has moved to text. Its right answers are on the
    text side of *every* turn, and many forced latent blocks come after another one that has already
    cost the answer. A harmless latent turn then looks harmful, and text everywhere sustains itself.
    The fit removes this as far as effects add up.

    Why not leave-one-out: a baseline must not depend on the rollout's own action, but nothing is
    subtracted from its own reward here. Rewards enter linearly, with weights that depend on the
    modes only, so the expectation of Δ_t is the true difference. Leaving the own reward out has the
    same expectation, but no estimate at all for the only rollout of a rare mode, which is the one
    that is being explored.

    Why the baseline: a policy first learns what all turns have in common. Suppose latent first
    turns cost the answer and latent last turns gain a little: the mean is negative. The policy
    would move to text in both before it has told them apart, and p(1−p) then leaves next to nothing
    to learn from. A training therefore begins with b = 1. It ends with b = 0, because a baseline
    also changes the optimum, to the best policy with the present share of latent turns.

    Bias: (1) A group with one mode gives 0, which shrinks the step and never turns it. Choices that
    a group always makes together share their effect (the solution of least norm). (2) From the
    second turn on, the rollouts of a group are in different states. Where the policy chose its
    modes by state, Δ_t also holds the difference of those states; modes forced at random do not
    have this. (3) Effects that do not add up are averaged over the group's other turns. That is why
    an explorer's modes are its own in all turns but one. (4) Only rollouts that reached turn t are
    compared, so an effect on whether turn t happens is credited to the turns before it.

    Raises ValueError where the three differ in length, and for a baseline outside [0, 1].
    """
    if not 0 <= baseline <= 1:
        raise ValueError(f"baseline is {baseline}: expected a share from 0 to 1")
    if not len(modes) == len(advantages) == len(groups):
        raise ValueError(
            f"{len(modes)} lists of modes, {len(advantages)} advantages, {len(groups)} groups: one"
            " of each per rollout"
        )
    members: dict[Hashable, list[int]] = defaultdict(list)  # group → its rows
    for row, group in enumerate(groups):
        members[group].append(row)
    effects: dict[tuple[int, int], float] = {}  # (rollout, turn) → Δ
    for rows in members.values():
        for turn in range(max(len(modes[row]) for row in rows)):
            compared = [
                row for row in rows if len(modes[row]) > turn and modes[row][turn] is not None
            ]
            # With one mode alone there is nothing to compare: the credit stays 0.
            if len({modes[row][turn] for row in compared}) == 2:
                effect = _mode_effect(
                    [modes[row] for row in compared], [advantages[row] for row in compared], turn
                )
                effects |= {(row, turn): effect for row in compared}
    price = baseline * math.fsum(effects.values()) / max(1, len(effects))  # b Δ̄
    credits = [[0.0] * len(own) for own in modes]  # [rollout][turn]
    for (row, turn), effect in effects.items():
        sign = 0.5 if modes[row][turn] else -0.5
        credits[row][turn] = sign * (effect - price)
    return credits


def _mode_effect(
    modes: Sequence[Sequence[bool | None]], advantages: Sequence[float], turn: int
) -> float:
    """Δ of `turn`, at which every one of these rollouts has a block, of either mode."""
    signs = {True: 0.5, False: -0.5, None: 0.0}  # mode → m
    width = max(map(len, modes))  # turns of the longest rollout
    rows = [[signs[mode] for mode in own] + [0.0] * (width - len(own)) for own in modes]
    table = torch.tensor(rows, dtype=torch.float64)  # (rollouts, turns): m
    outcome = torch.tensor(advantages, dtype=torch.float64)  # (rollouts,): A
    # Centring takes μ out; the pseudo-inverse gives the solution of least norm.
    fitted = torch.linalg.pinv(table - table.mean(0), rtol=1e-9) @ (outcome - outcome.mean())
    return fitted[turn].item()


def informative_groups(
    rewards: Sequence[float], groups: Sequence[Hashable], share: float
) -> set[Hashable]:
    """The groups that together hold `share` of the rewards' variance; none where nothing varies.

    The most varied groups are taken first. This is RAGEN's filter by signal to noise: the advantage
    divides nearly equal rewards by their small deviation, so their noise would weigh as much as
    another group's signal. ValueError for a share outside (0, 1] or rewards that are not finite.
    """
    if not 0 < share <= 1:
        raise ValueError(f"a share of {share} of the variance: expected more than 0 and at most 1")
    members: dict[Hashable, list[float]] = defaultdict(list)  # group → its rewards
    for reward, group in zip(rewards, groups, strict=True):
        if not math.isfinite(reward):
            raise ValueError(f"a reward of group {group!r} is {reward}")
        members[group].append(reward)
    variances = {group: pvariance(values) for group, values in members.items()}
    total, held, kept = math.fsum(variances.values()), 0.0, set()
    # Both tolerances absorb rounding: equal rewards may show a variance just above 0.
    for group in sorted(variances, key=variances.get, reverse=True):
        if variances[group] <= 1e-18 or held >= share * total * (1 - 1e-12):
            break
        held += variances[group]
        kept.add(group)
    return kept


def mode_information(p_latent: Float[Tensor, " states"]) -> tuple[float, float, float]:
    """H(M), H(M|X) and I(X;M) = H(M) − H(M|X) in bits.

    `p_latent` holds the exact p(latent | state) of every visited state. H(M) is the entropy of the
    mean p, H(M|X) the mean of the entropies (RAGEN's diagnostics). H(M) → 0 is mode collapse. A
    high H(M) with I → 0 is a coin flip that ignores the state. No states give three NaN.
    Raises ValueError for a p outside [0, 1].
    """
    p = p_latent.detach().cpu().double()  # (states,)
    if not len(p):
        return math.nan, math.nan, math.nan
    outside = ~((p > -1e-6) & (p < 1 + 1e-6))  # float32 may round past the ends; NaN is outside too
    if outside.any():
        raise ValueError(
            f"p(latent) of state {int(outside.nonzero()[0])} is {p[outside][0]:.6g}, not a"
            " probability"
        )
    p = p.clamp(0, 1)
    marginal = float(binary_entropy(p.mean().item()))
    conditional = float(binary_entropy(p.numpy()).mean())
    return marginal, conditional, marginal - conditional


def binary_entropy(p):
    """Entropy in bits of a coin that shows heads with probability p; 0 at p = 0 and p = 1."""
    p = np.asarray(p, dtype=float)
    q = 1 - p
    # log2(1) = 0 stands in for 0 · log2(0), which would be NaN.
    return -(p * np.log2(np.where(p > 0, p, 1)) + q * np.log2(np.where(q > 0, q, 1)))


def _check_mask(mask: Tensor) -> None:
    if not mask.any():
        raise ValueError("the mask holds no token: there is nothing to learn from in this batch")

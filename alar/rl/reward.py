"""The reward of AR-GRPO, as published and as repaired (ALAR, arXiv 2606.02871, stage 2b, and its
released code).

For one trajectory of a group G, with f the share of latent turns among its reasoning turns:

    published   −1 if malformed, else  s_L · (r_fmt + r_div),   r_fmt = 1 + α·f if correct else −α·f
    repaired    −1 if malformed,  −α·f if wrong,                s_L · (1 + α·f) + r_div if correct

    r_div = δ · d_t · |f − mean_G f|,   d_t = ½ (1 + cos(π t / T)),   s_L = min(1, L / think_length)

δ is 1 as published; 0 switches the bonus off. An L that no text reaches switches the length scale
off.

What is malformed is decided by `alar.protocol` for both variants, and it is more than in the
released code, which looks for an unbalanced <think> only. There a right answer after no block at
all, or after a `<latent>` that never closes, is paid in full, and to give none costs α at most.
These are ways around the reward rather than a part of it; with one notion of form the two
variants differ in the formula alone.

An environment may grade its trajectories (the tool domain's dense score). The grade then replaces
the 1 of a correct trajectory and the 0 of a wrong one.

Four points of the repaired variant are deliberate. Length no longer shrinks a penalty. Only correct
answers are paid for diversity. Malformed trajectories do not move the mean that others are compared
with. A trajectory that never reasons is malformed. What is thinking is again the same for both.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

VARIANTS = ("published", "repaired")
MALFORMED = -1.0


@dataclass(frozen=True)
class Outcome:
    """What the reward knows of one trajectory.

    `group` names its prompt; `n_latent` and `n_think` count turns; `think_length` counts the
    characters that the policy wrote outside latent blocks, tags and actions. `grade` says how right
    the trajectory is, 1 for wholly; without a grade (None) `correct` decides. Raises ValueError for
    negative counts and a grade that is no number.
    """

    group: Hashable
    correct: bool
    well_formed: bool
    n_latent: int
    n_think: int
    think_length: float
    grade: float | None = None

    def __post_init__(self):
        for name in ("n_latent", "n_think", "think_length"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"Outcome.{name} is {value}: a count is finite and not negative")
        if self.grade is not None and not math.isfinite(self.grade):
            raise ValueError(f"Outcome.grade is {self.grade}: expected a number, or None")

    @property
    def worth(self) -> float:
        """The grade; without one, 1 if correct and 0 if not."""
        return float(self.correct) if self.grade is None else self.grade

    @property
    def latent_share(self) -> float:
        """f, 0 where there was no reasoning turn."""
        turns = self.n_latent + self.n_think  # turns without a block do not count
        return self.n_latent / turns if turns else 0.0


def diversity_weight(step: int, total_steps: int) -> float:
    """d_t: 1 at step 0, ½ halfway, 0 at the last step.

    Raises ValueError for a step outside [0, total_steps].
    """
    if total_steps < 1:
        raise ValueError(f"total_steps is {total_steps}: at least one step is needed")
    if not 0 <= step <= total_steps:
        raise ValueError(
            f"step {step} lies outside [0, {total_steps}]: pass the trainer's own step, also after"
            " a resume"
        )
    return 0.5 * (1.0 + math.cos(math.pi * step / total_steps))


def shaped_rewards(
    outcomes: Sequence[Outcome],
    *,
    step: int,
    total_steps: int,
    alpha: float = 0.3,
    length_tolerance: float = 400.0,
    diversity: float = 1.0,
    variant: str = "published",
) -> list[float]:
    """Reward of every outcome, in their order; groups may be mixed and of any size.

    `length_tolerance` is L in characters (published: 400 for search, 1600 for tools), `diversity`
    is δ. Raises ValueError for an unknown variant, a step outside the schedule, a negative α or δ,
    or an L that is not a positive number.
    """
    if variant not in VARIANTS:
        raise ValueError(f"variant {variant!r} is unknown: choose one of {', '.join(VARIANTS)}")
    if not (math.isfinite(alpha) and alpha >= 0):
        raise ValueError(f"alpha is {alpha}: it must be a number of at least 0")
    if not (math.isfinite(length_tolerance) and length_tolerance > 0):
        raise ValueError(
            f"length_tolerance is {length_tolerance}: it must be a positive number of characters"
        )
    if not (math.isfinite(diversity) and diversity >= 0):
        raise ValueError(f"diversity is {diversity}: it must be a number of at least 0")
    weight = diversity * diversity_weight(step, total_steps)  # δ · d_t
    repaired = variant == "repaired"

    shares = defaultdict(list)  # group → f of the members that its mean counts
    for outcome in outcomes:
        # As published, malformed members move the mean too: a defect of the released code.
        if not repaired or _usable(outcome):
            shares[outcome.group].append(outcome.latent_share)
    means = {group: math.fsum(values) / len(values) for group, values in shares.items()}

    def reward(outcome: Outcome) -> float:
        share = outcome.latent_share  # f
        scale = 1.0  # s_L
        if outcome.think_length:  # 0 characters: all latent, nothing to scale down
            scale = min(1.0, length_tolerance / outcome.think_length)
        if repaired:
            if not _usable(outcome):
                return MALFORMED
            if not outcome.correct:
                # No s_L here: a long text must not soften the penalty.
                return outcome.worth - alpha * share
            bonus = weight * abs(share - means[outcome.group])  # r_div
            return scale * (outcome.worth + alpha * share) + bonus
        if not outcome.well_formed:
            return MALFORMED
        bonus = weight * abs(share - means[outcome.group])
        # r_fmt is the worth plus this.
        signed = alpha * share if outcome.correct else -alpha * share
        # s_L shrinks a negative sum too, as published.
        return scale * (outcome.worth + signed + bonus)

    return [reward(outcome) for outcome in outcomes]


def _usable(outcome: Outcome) -> bool:
    """Well formed, and it reasoned at least once."""
    return outcome.well_formed and outcome.n_latent + outcome.n_think > 0

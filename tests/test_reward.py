"""The shaped reward: values by hand, an obvious reimplementation, and the hacks that the repaired
variant closes."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alar.protocol import parse_turns
from alar.rl.reward import VARIANTS, Outcome, diversity_weight, shaped_rewards

WRONG = dict(correct=False, well_formed=True)
END = dict(step=100, total_steps=100)  # d_t = 0: no diversity term


def outcome(n_latent, n_think, think_length=0.0, *, group=0, correct=True, well_formed=True):
    return Outcome(group, correct, well_formed, n_latent, n_think, think_length)


def rewards(*outcomes, variant, step=100, **options):
    return shaped_rewards(outcomes, step=step, total_steps=100, variant=variant, **options)


def test_diversity_weight_falls_from_one_to_zero_along_a_cosine():
    assert [diversity_weight(t, 100) for t in (0, 100)] == [1.0, 0.0]
    assert diversity_weight(50, 100) == pytest.approx(0.5)
    assert diversity_weight(25, 100) == pytest.approx(0.8535533905932737)


def test_published_rewards_equal_values_by_hand():
    # f = 1, ½, 0, 0, ½; mean 0.4 with the malformed member; d_50 = ½; s_L = 1, ½, 1, ¼, 1
    group = [
        outcome(2, 0),
        outcome(1, 1, 800),
        outcome(0, 2, 400),
        outcome(0, 4, 1600, correct=False),
        outcome(1, 1, well_formed=False),
    ]
    assert rewards(*group, variant="published", step=50) == pytest.approx(
        [1.3 + 0.3, 0.5 * (1.15 + 0.05), 1.0 + 0.2, 0.25 * (0.0 + 0.2), -1.0]
    )


def test_repaired_rewards_equal_values_by_hand():
    # mean f of the four well-formed members: 0.375
    group = [
        outcome(2, 0),
        outcome(1, 1, 800),
        outcome(0, 2, 400),
        outcome(0, 4, 1600, correct=False),
        outcome(1, 1, well_formed=False),
    ]
    assert rewards(*group, variant="repaired", step=50) == pytest.approx(
        [1.3 + 0.5 * 0.625, 0.5 * 1.15 + 0.5 * 0.125, 1.0 + 0.5 * 0.375, 0.0, -1.0]
    )
    assert rewards(outcome(3, 1, 4000, **WRONG), variant="repaired") == pytest.approx([-0.3 * 0.75])


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_diversity_bonus_is_scaled_by_its_weight(variant):
    group = [
        outcome(2, 0),
        outcome(1, 1, 800),
        outcome(0, 2, 400),
        outcome(0, 4, 1600, correct=False),
    ]
    none, half, whole = (
        rewards(*group, variant=variant, step=20, diversity=weight) for weight in (0.0, 0.5, 1.0)
    )
    assert none == pytest.approx(rewards(*group, variant=variant, step=100))  # where d_t is 0
    assert [h - n for h, n in zip(half, none)] == pytest.approx(
        [(w - n) / 2 for w, n in zip(whole, none)]
    )
    assert whole[0] > none[0]


def test_graded_rewards_equal_values_by_hand():
    # f = 1, ½, 0; mean ½; d_50 = ½; s_L = 1, ½, 1. ToolMind's score as a share of 1.5: all right,
    # two calls of four, none.
    group = [
        dataclasses.replace(outcome(2, 0), grade=1.0),
        dataclasses.replace(outcome(1, 1, 800, correct=False), grade=0.2),
        dataclasses.replace(outcome(0, 2, 400, correct=False), grade=-2 / 15),
    ]
    assert rewards(*group, variant="published", step=50) == pytest.approx(
        [1.0 + 0.3 + 0.25, 0.5 * (0.2 - 0.15 + 0.0), -2 / 15 + 0.25]
    )
    assert rewards(*group, variant="repaired", step=50) == pytest.approx(
        [1.3 + 0.25, 0.2 - 0.15, -2 / 15]
    )
    malformed = dataclasses.replace(outcome(1, 1, well_formed=False), grade=1.0)
    assert (
        rewards(malformed, variant="repaired") == rewards(malformed, variant="published") == [-1.0]
    )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("correct", [True, False])
def test_a_grade_of_one_or_zero_changes_nothing(variant, correct):
    plain = outcome(1, 2, 900, correct=correct)
    assert rewards(
        dataclasses.replace(plain, grade=float(correct)), variant=variant, step=30
    ) == rewards(plain, variant=variant, step=30)


def obvious(outcomes, index, *, step, total_steps, alpha, length_tolerance, variant):
    """The formulas of the paper and of the repair, one trajectory at a time, nothing shared."""
    me = outcomes[index]

    def f(o):
        return 0 if o.n_latent + o.n_think == 0 else o.n_latent / (o.n_latent + o.n_think)

    group = [o for o in outcomes if o.group == me.group]
    d = (1 + math.cos(math.pi * step / total_steps)) / 2
    s = 1 if me.think_length <= length_tolerance else length_tolerance / me.think_length
    if variant == "published":
        if not me.well_formed:
            return -1
        mean = sum(f(o) for o in group) / len(group)
        fmt = 1 + alpha * f(me) if me.correct else -alpha * f(me)
        return s * (fmt + d * abs(f(me) - mean))
    sound = [o for o in group if o.well_formed and o.n_latent + o.n_think > 0]
    if me not in sound:
        return -1
    if not me.correct:
        return -alpha * f(me)
    return s * (1 + alpha * f(me)) + d * abs(f(me) - sum(f(o) for o in sound) / len(sound))


OUTCOMES = st.lists(
    st.builds(
        Outcome,
        group=st.integers(0, 3),
        correct=st.booleans(),
        well_formed=st.booleans(),
        n_latent=st.integers(0, 6),
        n_think=st.integers(0, 6),
        think_length=st.one_of(st.just(0), st.integers(1, 5000)),
    ),
    max_size=20,
)


@given(
    outcomes=OUTCOMES,
    step=st.integers(0, 37),
    alpha=st.floats(0, 2),
    tolerance=st.floats(1, 3000),
    variant=st.sampled_from(["published", "repaired"]),
)
def test_rewards_equal_an_obvious_reimplementation(outcomes, step, alpha, tolerance, variant):
    options = dict(
        step=step, total_steps=37, alpha=alpha, length_tolerance=tolerance, variant=variant
    )
    expected = [obvious(outcomes, i, **options) for i in range(len(outcomes))]
    assert shaped_rewards(outcomes, **options) == pytest.approx(expected, abs=1e-12)


@given(outcomes=OUTCOMES, step=st.integers(0, 10))
def test_repaired_rewards_rank_malformed_below_wrong_below_correct(outcomes, step):
    values = shaped_rewards(outcomes, step=step, total_steps=10, variant="repaired")
    for one, value in zip(outcomes, values):
        if not one.well_formed or one.n_latent + one.n_think == 0:
            assert value == -1
        elif not one.correct:
            assert -0.3 <= value <= 0
        else:
            assert value > 0


def parsed(text, *, correct=True):
    """Outcome of an assistant text, counted by the project's own parser."""
    turns = parse_turns(text)
    return Outcome(
        0,
        correct,
        all(turn.well_formed for turn in turns),
        sum(turn.mode == "latent" for turn in turns),
        sum(turn.mode == "think" for turn in turns),
        sum(len(turn.policy_text) for turn in turns),
    )


# The hacks of the released code , each as what its counting makes of it against what ours does.


@pytest.mark.parametrize(
    "text", ["<latent>\n\n<answer>Peru</answer>", "<latent>••••\n\n<answer>Peru</answer>"]
)
def test_an_unclosed_latent_tag_earns_1_3_as_published_and_is_malformed_when_parsed(text):
    as_released = outcome(text.count("<latent>"), text.count("<think>"))
    assert rewards(as_released, variant="published") == pytest.approx([1.3])
    assert rewards(parsed(text), variant="repaired") == [-1.0]


def test_text_outside_the_tags_is_free_as_published_and_is_malformed_and_counted_when_parsed():
    text = f"<latent>••••</latent>\n\n{'I add the two numbers. ' * 40}<answer>12</answer>"
    as_released = outcome(1, 0, think_length=0)
    assert rewards(as_released, variant="published") == pytest.approx([1.3])
    ours = parsed(text)
    assert ours.think_length > 800 and not ours.well_formed
    assert rewards(ours, variant="repaired") == [-1.0]
    assert rewards(dataclasses.replace(ours, well_formed=True), variant="repaired")[0] < 0.6


def test_empty_think_blocks_dilute_the_penalty_as_published_and_are_malformed_when_parsed():
    text = "<latent>••••</latent>" + "<think></think>" * 9 + "\n\n<answer>Chad</answer>"
    as_released = outcome(1, 9, **WRONG)
    honest = outcome(1, 0, **WRONG)
    assert rewards(honest, variant="published") == pytest.approx([-0.3])
    assert rewards(as_released, variant="published") == pytest.approx([-0.03])
    assert rewards(parsed(text, correct=False), variant="repaired") == [-1.0]


def test_length_shrinks_a_penalty_as_published_and_not_when_repaired():
    short, long = outcome(1, 1, 100, **WRONG), outcome(1, 1, 4000, **WRONG)
    assert rewards(short, long, variant="published") == pytest.approx([-0.15, -0.015])
    assert rewards(short, long, variant="repaired") == pytest.approx([-0.15, -0.15])


def test_not_reasoning_is_best_in_an_all_wrong_group_as_published_and_worst_when_repaired():
    silent, thinks, latent = outcome(0, 0, **WRONG), outcome(0, 2, **WRONG), outcome(2, 0, **WRONG)
    assert rewards(silent, thinks, latent, variant="published") == pytest.approx([0.0, 0.0, -0.3])
    assert rewards(silent, thinks, latent, variant="repaired") == pytest.approx([-1.0, 0.0, -0.3])


def test_a_wrong_answer_is_paid_for_being_different_as_published_and_not_when_repaired():
    group = [outcome(0, 2, **WRONG), outcome(2, 0), outcome(2, 0), outcome(2, 0)]
    assert rewards(*group, variant="published", step=0)[0] == pytest.approx(0.75)
    assert rewards(*group, variant="repaired", step=0)[0] == 0.0


def test_malformed_members_pay_the_others_for_diversity_as_published_and_not_when_repaired():
    broken = outcome(0, 2, well_formed=False)
    assert rewards(outcome(2, 0), broken, variant="published", step=0) == pytest.approx([1.8, -1.0])
    assert rewards(outcome(2, 0), broken, variant="repaired", step=0) == pytest.approx([1.3, -1.0])


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(step=-1), "step -1 lies outside"),
        (dict(step=101), "step 101 lies outside"),
        (dict(total_steps=0, step=0), "total_steps is 0"),
        (dict(variant="fixed"), "'fixed' is unknown: choose one of published, repaired"),
        (dict(length_tolerance=0), "length_tolerance is 0"),
        (dict(length_tolerance=math.inf), "length_tolerance is inf"),
        (dict(length_tolerance=math.nan), "length_tolerance is nan"),
        (dict(alpha=-0.1), "alpha is -0.1"),
        (dict(alpha=math.nan), "alpha is nan"),
        (dict(diversity=-1), "diversity is -1"),
        (dict(diversity=math.inf), "diversity is inf"),
    ],
)
def test_impossible_settings_are_named_in_the_error(options, message):
    with pytest.raises(ValueError, match=message):
        shaped_rewards([outcome(1, 0)], **{**END, **options})


@pytest.mark.parametrize("name", ["n_latent", "n_think", "think_length"])
@pytest.mark.parametrize("value", [-1, math.nan])
def test_impossible_counts_are_named_in_the_error(name, value):
    with pytest.raises(ValueError, match=rf"Outcome\.{name} is"):
        dataclasses.replace(outcome(1, 1, 3), **{name: value})


def test_no_outcomes_have_no_rewards():
    assert shaped_rewards([], **END) == []


HACKS = {
    "a bare open tag": "<latent>\n\n<answer>Peru</answer>",
    "thoughts without a close tag": "<latent>••••\n\n<answer>Peru</answer>",
    "a think block that never closes": "<think>Peru\n\n<answer>Peru</answer>",
    "no reasoning at all": "<answer>Peru</answer>",
    "reasoning outside of the tags": (
        "<latent>••••</latent>\n\nIt must be Peru. <answer>Peru</answer>"
    ),
    "reasoning after the answer": (
        "<latent>••••</latent>\n\n<answer>Peru</answer> because of the Andes"
    ),
    "nine empty think blocks": (
        "<latent>••••</latent>" + "<think></think>" * 9 + "\n\n<answer>Peru</answer>"
    ),
    "a second latent block": (
        "<latent>••••</latent>\n\n<latent>••••</latent>\n\n<answer>Peru</answer>"
    ),
    "two answers to choose from": (
        "<latent>••••</latent>\n\n<answer>Chile</answer>\n\n<answer>Peru</answer>"
    ),
}


@pytest.mark.parametrize("hack", HACKS)
def test_a_hack_that_ends_in_the_right_answer_earns_no_more_than_an_honest_wrong_one_when_repaired(
    hack,
):
    honest = rewards(outcome(1, 0, **WRONG), variant="repaired")
    assert rewards(parsed(HACKS[hack]), variant="repaired") <= honest

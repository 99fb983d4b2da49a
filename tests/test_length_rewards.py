"""Length rewards: the published formulas by hand, the edge cases, and a trainer that shortens what
it should."""

import copy
import importlib.util
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from alar.domains.search.environment import SearchEnvironment
from alar.domains.search.questions import training_questions
from alar.engines.verl import Job
from alar.engines.verl.launch import verl_job
from alar.engines.verl.settings import hydra_values
from alar.methods.length_rewards import (
    O1Pruner,
    Reference,
    RewardAsAdvantage,
    Sample,
    ShorterBetter,
    ThinkPrune,
    length_grpo,
    o1_pruner,
    reference_means,
    round_lengths,
    shorter_better,
    stated_limit,
    think_prune,
    write_references,
)
from alar.model import embedded, from_base
from alar.protocol import SEARCH, Trusted
from alar.records import Origin
from alar.rl.config import RLConfig
from alar.rl.strategy import GroupCredit
from alar.rl.summary import TrajectorySummary, validation_metrics
from alar.rl.trainer import ARGRPO, make_batch, token_logprobs
from alar.rollout.engine import Sampling
from alar.rollout.loop import run

ENVIRONMENT = SearchEnvironment()
CONFIG = RLConfig(
    steps=2,
    prompts_per_step=2,
    group_size=8,
    learning_rate=1e-3,
    schedule="constant",
    warmup_ratio=0.0,
    validation_every=0,
    checkpoint_every=10,
    gradient_accumulation=2,
    kl_coefficient=0.0,
    norm_adv_by_std=True,
)
SHORTER = ShorterBetter()
REWARDS = {"shorterbetter": ShorterBetter, "thinkprune": ThinkPrune, "o1pruner": O1Pruner}


def samples(*triples) -> list[Sample]:
    return [Sample(group, correct, length, f"q{group}") for group, correct, length in triples]


MIXED = samples(
    (0, True, 120), (1, False, 50), (0, False, 40), (0, True, 200), (1, False, 70), (2, True, 30)
)


def test_shorterbetter_aims_at_the_shortest_correct_sample_or_the_groups_mean():
    # group 0: ℓ* = 120; group 1, nobody right: ℓ* = 60; group 2, one sample: its own
    by_hand = [2.0, -0.001 * 10, -0.001 * 80, 2 - 0.001 * 80, -0.001 * 10, 2.0]
    assert shorter_better(MIXED) == pytest.approx(by_hand, abs=1e-12)
    assert shorter_better(MIXED, 1.0, 0.5)[2:4] == pytest.approx([-40.0, 1 - 40.0])


def test_rounds_share_the_steps():
    assert (
        round_lengths(4, 3) == [2, 1, 1]
        and round_lengths(5, 4) == [2, 1, 1, 1]
        and round_lengths(9, 3) == [3, 3, 3]
    )
    with pytest.raises(ValueError, match="3 rounds in 2 steps"):
        round_lengths(2, 3)


def test_thinkprune_pays_for_answers_within_the_limit():
    assert think_prune(MIXED, 120) == [1, 0, 0, 0, 0, 1]
    assert think_prune(MIXED, 119) == [0, 0, 0, 0, 0, 1]
    assert think_prune(samples((0, True, 0)), 1) == [1]


def test_o1_pruner_compares_with_the_references_means():
    # group 0: ℓ̄ = 120, c̄ = 2/3; group 1: 60, 0; group 2: itself
    by_hand = [
        0 + 2 * (1 - 2 / 3),
        60 / 50 - 1,
        120 / 40 - 1 + 2 * (0 - 2 / 3),
        120 / 200 - 1 + 2 / 3,
        60 / 70 - 1,
        0,
    ]
    assert o1_pruner(MIXED) == pytest.approx(by_hand, abs=1e-12)
    given = {f"q{group}": Reference(100.0, 0.5) for group in range(3)}
    by_hand = [100 / 120 - 1 + 2.5, 100 / 50 - 1 - 2.5, 100 / 40 - 1 - 2.5, 100 / 200 - 1 + 2.5]
    assert o1_pruner(MIXED, 5.0, given)[:4] == pytest.approx(by_hand, abs=1e-12)
    assert reference_means(MIXED) == {
        "q0": Reference(120.0, pytest.approx(2 / 3)),
        "q1": Reference(60.0, 0.0),
        "q2": Reference(30.0, 1.0),
    }


def test_a_rollout_without_a_token_has_a_finite_reward_under_each():
    empty = samples((0, False, 0), (0, False, 0), (1, True, 0))
    assert (
        shorter_better(empty) == [0, 0, 2]
        and think_prune(empty, 5) == [0, 0, 1]
        and o1_pruner(empty) == [0, 0, 0]
    )
    assert o1_pruner(empty[:1], 2.0, {"q0": Reference(8.0, 0.25)}) == [8.0 - 1 - 0.5]
    for kind in REWARDS.values():
        assert kind().of_samples([]) == []


def test_the_settings_choose_the_formula_and_references_come_from_their_file(tmp_path):
    assert ShorterBetter(length_weight=0.01).of_samples(MIXED) == shorter_better(MIXED, 2.0, 0.01)
    assert ThinkPrune(token_limit=50).of_samples(MIXED) == think_prune(MIXED, 50)
    assert O1Pruner(accuracy_weight=5.0).of_samples(MIXED) == o1_pruner(MIXED, 5.0)
    means = {f"q{n}": Reference(90.0, 0.75) for n in range(2)}
    measured = O1Pruner(reference=str(write_references(tmp_path / "means.jsonl", means)))
    with pytest.raises(KeyError, match="q2"):
        measured.of_samples(MIXED)
    assert measured.of_samples(MIXED[:5])[0] == pytest.approx(90 / 120 - 1 + 2 * 0.25)


@pytest.mark.parametrize(
    "reward, field, value",
    [
        (ThinkPrune, "token_limit", 0),
        (O1Pruner, "accuracy_weight", -1.0),
        (ShorterBetter, "length_weight", float("nan")),
    ],
)
def test_settings_that_cannot_be_are_refused(reward, field, value):
    with pytest.raises(ValueError, match=field):
        reward(**{field: value})


def test_a_length_reward_trains_grpo_without_modes():
    for reward in REWARDS.values():
        strategy = length_grpo(reward(), CONFIG, seed=3)
        assert strategy.reward.modes == "off" and not strategy.reward.selects
        assert not any(strategy.sampler.explores(row) for row in range(8))
    assert length_grpo(ShorterBetter(), CONFIG).credit == GroupCredit(CONFIG.norm_adv_by_std)
    assert length_grpo(O1Pruner(), CONFIG).credit == RewardAsAdvantage()


def test_the_limit_stands_at_the_end_of_the_user_turn_and_nowhere_else():
    question = training_questions(1, worlds=1, seed=0)[0]
    plain, limited = list(SEARCH.prompt(question)), list(stated_limit(SEARCH, 80).prompt(question))
    assert [type(piece) for piece in plain] == [type(piece) for piece in limited]
    assert limited[1] == plain[1] + "Use at most 80 tokens.\n" and limited[::2] == plain[::2]
    from alar.domains.tool.protocol import TOOL
    from alar.domains.tool.questions import training_questions as requests

    plain, limited = (
        list(form.prompt(requests(1, seed=0)[0])) for form in (TOOL, stated_limit(TOOL, 80))
    )
    changed = [number for number, (a, b) in enumerate(zip(plain, limited, strict=True)) if a != b]
    assert len(changed) == 1 and limited[changed[0]].endswith("\nUse at most 80 tokens.\n")
    assert isinstance(limited[changed[0] + 1], Trusted)
    prune = ThinkPrune(token_limit=80)
    asking = prune.environment(ENVIRONMENT)
    assert (
        list(asking.form.prompt(question)) == list(stated_limit(SEARCH, 80).prompt(question))
        and ENVIRONMENT.form is SEARCH
    )
    for unchanged in (replace(prune, state_limit=False), O1Pruner()):
        assert unchanged.environment(ENVIRONMENT) is ENVIRONMENT


@pytest.fixture(scope="module")
def shipped():
    return from_base("embedded", num_latent=0)


def trainer_of(
    shipped, folder, reward=SHORTER, *, max_turns=5, max_new_tokens=64, **changes
) -> ARGRPO:
    model, tokenizer = shipped
    config = RLConfig(**CONFIG.model_dump() | changes)
    asked = training_questions(4, worlds=1, seed=3)
    return ARGRPO(
        copy.deepcopy(model),
        tokenizer,
        ENVIRONMENT,
        asked,
        [],
        config,
        length_grpo(reward, config),
        folder=folder,
        max_turns=max_turns,
        max_new_tokens=max_new_tokens,
    )


@pytest.fixture(scope="module")
def written(shipped, tmp_path_factory):
    """One step's rollouts of the explicit base, at a temperature at which their lengths differ."""
    trainer = trainer_of(shipped, tmp_path_factory.mktemp("rl"), temperature=1.3)
    trajectories, groups = trainer.rollouts(1)
    return trainer, trajectories, groups


def test_rollouts_reason_in_text_only_and_length_is_what_the_policy_wrote(written):
    trainer, trajectories, groups = written
    assert not any(
        turn.forced_mode or turn.mode == "latent" for t in trajectories for turn in t.turns
    )
    reward = trainer.strategy.reward
    summaries = [TrajectorySummary.of(t, trainer.engine.codec) for t in trajectories]
    lengths = [sum(origin == Origin.SAMPLED for origin in t.origins) for t in trajectories]
    expected = shorter_better(
        [Sample(g, t.correct, n) for g, t, n in zip(groups, trajectories, lengths)]
    )
    assert reward.rewards(summaries, groups, 1, 2) == expected
    checked = validation_metrics(summaries, reward.validation(summaries, 2))
    assert (
        checked["validation_reward"]
        == checked["validation_accuracy"]
        == sum(t.correct for t in trajectories) / 16
    )


@pytest.mark.parametrize("kind", ["shorterbetter", "thinkprune", "o1pruner"])
def test_one_step_makes_shorter_rollouts_likelier(shipped, written, tmp_path, kind):
    """Weighted by new over old probability, the same correct rollouts are shorter on average than
    they were."""
    trajectories, groups = written[1][:8], [0] * 8
    lengths = torch.tensor([float(t.generated_tokens) for t in trajectories])
    limit = {"token_limit": int(lengths.median())} if kind == "thinkprune" else {}
    reward = REWARDS[kind](**limit)
    trainer = trainer_of(shipped, tmp_path, reward, temperature=1.3)
    codec, credit = trainer.engine.codec, trainer.strategy.credit
    summaries = [replace(TrajectorySummary.of(t, codec), correct=True) for t in trajectories]
    rewards = reward.rewards(summaries, groups, 1, 2)
    sizes = [len(t.ids) for t in trajectories]
    advantages = credit.advantages(summaries, sizes, rewards, groups, 1, 2)
    batch = make_batch(trajectories, advantages, 0)

    def totals():
        with torch.no_grad():
            found = token_logprobs(trainer.model, batch, temperature=1.3, latents="recomputed")
        return torch.zeros(len(trajectories)).index_add_(
            0, batch.mask[:, 1:].nonzero()[:, 0], found
        )

    before = totals()
    trainer._update(trajectories, advantages)
    weights = torch.softmax((totals() - before).clamp(-2, 2), 0)
    assert float((weights * lengths).sum()) < float(lengths.mean()) - 0.2


def test_without_a_reference_file_o1_pruner_learns_from_what_the_reference_writes(
    shipped, tmp_path
):
    small = {"group_size": 2, "max_new_tokens": 12, "max_turns": 2}
    published = trainer_of(shipped, tmp_path / "a", O1Pruner(), **small)
    means = write_references(
        tmp_path / "means.jsonl", {q.id: Reference(80.0, 1.0) for q in published.questions}
    )
    ours = trainer_of(shipped, tmp_path / "b", O1Pruner(reference=str(means)), **small)
    for trainer in (published, ours):
        with torch.no_grad():
            trainer.model.lm_head.weight.mul_(0.1)  # a policy far from its reference
    rolled = {name: t.rollouts(1)[0] for name, t in (("reference", published), ("policy", ours))}
    expected = run(
        [rolled["reference"][row].question for row in range(4)],
        published.writer,
        ENVIRONMENT,
        Sampling(12, 1.0, stop=ENVIRONMENT.stop),
        modes="off",
        max_turns=2,
        seed=1,
    )
    assert published.writer.model is published.reference and ours.writer is ours.engine
    assert (
        [t.ids for t in rolled["reference"]]
        == [t.ids for t in expected]
        != [t.ids for t in rolled["policy"]]
    )
    strategy, groups = published.strategy, [0, 0, 1, 1]
    summaries = [TrajectorySummary.of(t, published.engine.codec) for t in expected]
    rewards = strategy.reward.rewards(summaries, groups, 1, 2)
    advantages = strategy.credit.advantages(summaries, [3] * 4, rewards, groups, 1, 2)
    assert advantages == [[reward] * 3 for reward in rewards]


def test_a_whole_training_notes_the_tokens_that_it_was_over(shipped, tmp_path, monkeypatch):
    rows = []
    trainer = trainer_of(
        shipped, tmp_path, steps=1, prompts_per_step=1, group_size=4, max_new_tokens=12
    )
    seen, update = [], trainer._update
    monkeypatch.setattr(
        trainer, "_update", lambda ts, a: seen.append(sum(len(t.ids) for t in ts)) or update(ts, a)
    )
    trainer.fit(log=rows.append)
    assert rows[0]["trained_tokens"] == seen[0]
    assert (
        rows[0]["latent_share"] == 0
        and rows[0]["mutual_information"] != rows[0]["mutual_information"]
    )


def test_a_job_for_verl_carries_the_reward_and_refuses_what_verl_cannot_sample(tmp_path):
    def job(reward):
        strategy = length_grpo(reward, CONFIG)
        model, folder = str(embedded("search")), str(tmp_path)
        return Job(model, folder, prompts="", validation="", rl=CONFIG, strategy=strategy)

    ours = job(ThinkPrune(token_limit=77))
    assert Job.read(ours.save()) == ours
    reached = Job.from_json(hydra_values(ours)["alar"])
    assert reached.strategy.reward == ThinkPrune(token_limit=77)
    with pytest.raises(ValueError, match="reference"):
        job(O1Pruner())
    job(O1Pruner(reference="means.jsonl"))


def test_prompts_without_reference_means_are_refused_before_anything_runs(shipped, tmp_path):
    asked = training_questions(4, worlds=1, seed=3)
    means = {question.id: Reference(100.0, 0.5) for question in asked}
    folders = [tmp_path / name for name in ("model", "job")]

    def under_verl(reward):
        strategy = length_grpo(reward, CONFIG)
        return verl_job(*folders, asked, [], CONFIG, strategy, environment={"domain": "search"})

    def in_one_process(reward):
        return trainer_of(shipped, tmp_path / "here", reward)

    for start in (under_verl, in_one_process):
        path = tmp_path / f"{start.__name__}.jsonl"
        reward = O1Pruner(reference=str(path))
        with pytest.raises(ValueError, match=f"there is no file {path}"):
            start(reward)
        write_references(path, dict(list(means.items())[:-1]))
        with pytest.raises(ValueError, match=f"1 of 4 questions, '{asked[-1].id}' first"):
            start(reward)
        write_references(path, means)
        start(reward)


@pytest.mark.skipif(
    importlib.util.find_spec("verl") is None,
    reason="verl is not installed: python run_all.py --install engines",
)
@pytest.mark.parametrize("kind", ["shorterbetter", "thinkprune", "o1pruner"])
def test_verls_trainer_gives_the_rewards_of_the_single_process_one(
    written, tmp_path, monkeypatch, kind
):
    """`_compute_advantage` on a step's rollouts as the queue holds them; no Ray."""
    from alar.engines.verl import trainer as module
    from alar.engines.verl.agent import to_output

    _, trajectories, groups = written
    codec, reward = written[0].engine.codec, REWARDS[kind]()
    if kind == "thinkprune":
        reward = ThinkPrune(token_limit=90)
    if kind == "o1pruner":
        path = write_references(
            tmp_path / "m.jsonl", {t.question.id: Reference(100.0, 0.5) for t in trajectories}
        )
        reward = replace(reward, reference=str(path))
    strategy = length_grpo(reward, CONFIG)
    outputs = [to_output(t, codec, step=1, p_latent=(), cached=False) for t in trajectories]
    fields = {"uid": [str(g) for g in groups], "extra_fields": [o.extra_fields for o in outputs]}
    masks = torch.nested.as_nested_tensor(
        [torch.tensor(o.response_mask) for o in outputs], layout=torch.jagged
    )
    listed = {name: SimpleNamespace(tolist=lambda v=v: v) for name, v in fields.items()} | {
        "response_mask": masks
    }
    written_back = {}
    monkeypatch.setattr(module.tq, "kv_batch_get", lambda **_: listed)
    monkeypatch.setattr(
        module.tq, "kv_batch_put", lambda *, fields, **_: written_back.update(fields.items())
    )
    trainer = object.__new__(module.VerlARGRPO)
    trainer.job = SimpleNamespace(rl=CONFIG, strategy=strategy)
    trainer.row, trainer.global_steps = {}, 1
    batch = SimpleNamespace(keys=fields["uid"], partition_id="train", tags=[{} for _ in outputs])
    trainer._compute_advantage(batch, {})
    summaries = [TrajectorySummary.of(t, codec) for t in trajectories]
    expected = reward.rewards(summaries, groups, 1, 2)
    assert [float(row[-1]) for row in written_back["rm_scores"].unbind()] == pytest.approx(
        expected, abs=1e-6
    )
    whole = strategy.credit.advantages(summaries, [1] * len(groups), expected, groups, 1, 2)
    found = written_back["advantages"].unbind()
    for row, (value,), output in zip(found, whole, outputs, strict=True):
        assert row.tolist() == pytest.approx([value * m for m in output.response_mask], abs=1e-6)
    assert trainer.row["trained_tokens"] == sum(len(t.ids) for t in trajectories)

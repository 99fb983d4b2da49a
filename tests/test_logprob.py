"""The log-prob reward: equal to a slow computation one by one, with z fed again as recorded."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from alar import protocol
from alar.domains.search.environment import SearchEnvironment
from alar.domains.search.questions import training_questions, validation_questions
from alar.domains.tool.protocol import TOOL
from alar.methods.dual.build import build_dual
from alar.methods.logprob import (
    INVALID,
    OPEN,
    LogProbReward,
    LogProbScorer,
    context_of,
    group_normalised,
    logprob_grpo,
    mixed_rewards,
)
from alar.model import load, load_base
from alar.records import Origin, Question, Trajectory, TurnRecord
from alar.rl.config import RLConfig
from alar.rl.strategy import GroupCredit, Sampler
from alar.rl.trainer import ARGRPO

PASSAGE = protocol.observation_text([("Peru", "Lima • is its capital.")])


def recorded(
    codec, modes, *, golds=("Peru",), width=64, seed=0, thought="Lima is in Peru."
) -> Trajectory:
    """A trajectory with one turn per mode, z drawn at random: not what the model would compute."""
    question = Question(f"q{seed}", "Where is Lima?", golds)
    ids = codec.prompt(question.text)
    origins, turns = [Origin.PROMPT] * len(ids), []
    for number, mode in enumerate(modes):
        action = "answer" if number == len(modes) - 1 else "search"
        if mode == "latent":
            written, marks = codec.latent_turn(action, "Bolivia", first=number == 0)
        else:
            written, marks = codec.think_turn(thought, action, "Bolivia", first=number == 0)
        turns.append(TurnRecord(len(ids), len(ids) + len(written), mode, action, "Bolivia", True))
        seen = [] if action == "answer" else codec.observation(PASSAGE)
        ids, origins = ids + written + seen, origins + marks + [Origin.OBSERVATION] * len(seen)
    count = sum(origin == Origin.LATENT for origin in origins)
    z = np.random.default_rng(seed).normal(size=(count, width)).astype(np.float32)
    return Trajectory(
        question,
        ids,
        [int(o) for o in origins],
        [float("nan")] * len(ids),
        z,
        turns,
        "Bolivia",
        False,
        "answer",
    )


def slow_score(model, codec, trajectory, gold, modes, thought="Lima is in Peru.") -> float:
    """The turn written anew with the gold as its answer, run alone through transformers, token by
    token."""
    last, text = trajectory.turns[-1], f"\n\n<answer>{gold}</answer>"
    if modes[-1] == "latent":
        written, _ = codec.latent_turn("answer", gold, first=len(modes) == 1)
    else:
        written, _ = codec.think_turn(thought, "answer", gold, first=len(modes) == 1)
        text = f"<think>{thought}</think>{text}"
    ids = trajectory.ids[: last.start] + written
    encoded = codec.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    assert ids[-len(encoded.input_ids) :] == encoded.input_ids
    begin = text.index("<answer>") + len("<answer>")
    total, scored = (
        0.0,
        [
            len(ids) - len(encoded.input_ids) + n
            for n, (start, end) in enumerate(encoded.offset_mapping)
            if end > begin and start < begin + len(gold)
        ],
    )
    with torch.no_grad():
        inputs = model.get_input_embeddings()(torch.tensor(ids))
        where = [n for n, token in enumerate(ids) if token == codec.latent_token_id]
        if where:
            inputs[where] = torch.as_tensor(trajectory.latents)
        logits = model.lm_head(
            model.model(inputs_embeds=inputs[None], use_cache=False).last_hidden_state[0]
        )
    for place in scored:
        allowed = (
            logits[place - 1]
            if codec.latent_token_id is None
            else logits[place - 1, : codec.latent_token_id]
        )
        total += float(torch.log_softmax(allowed, -1)[ids[place]])
    return total / len(scored)


@pytest.fixture(scope="module")
def scorer(random_model):
    return LogProbScorer(*random_model(), batch_tokens=700)


MODES = [
    ("think",),
    ("latent",),
    ("think", "latent"),
    ("latent", "think"),
    ("latent", "latent", "think"),
    ("think",) * 3,
]


@pytest.mark.parametrize("latent", [True, False])
def test_scores_equal_a_slow_computation_one_by_one(scorer, random_model, latent):
    if not latent:
        scorer = LogProbScorer(*load_base(random_model()[0].config._name_or_path), batch_tokens=700)
    golds = ("Peru", "República del Perú", "1994–1997", "answer")
    plans = [modes for modes in MODES if latent or "latent" not in modes]
    batch = [recorded(scorer.codec, modes, golds=golds, seed=n) for n, modes in enumerate(plans)]
    for modes, trajectory, score in zip(plans, batch, scorer.score(batch), strict=True):
        slow = {
            gold: slow_score(scorer.model, scorer.codec, trajectory, gold, modes) for gold in golds
        }
        assert score.gold == max(slow, key=slow.get)
        assert score.value == pytest.approx(max(slow.values()), abs=1e-5)
        for gold in golds:
            alone = replace(trajectory, question=replace(trajectory.question, answers=(gold,)))
            assert scorer.score([alone])[0].value == pytest.approx(slow[gold], abs=1e-5)


def test_answers_of_a_dual_vocabulary_have_the_probabilities_of_its_base(random_model, tmp_path):
    """Right for an untrained full copy only where mirrors have no probability: with them every
    answer token loses ln 2."""
    base = random_model()[0].config._name_or_path
    build_dual(base, tmp_path, think_missing="literal")
    ordinary, dual = LogProbScorer(*load_base(base)), LogProbScorer(*load(tmp_path))
    for modes in (("think",), ("think", "think")):
        mirrored = recorded(dual.codec, modes)
        plain = replace(mirrored, ids=dual.codec.dual.to_source(mirrored.ids))
        assert plain.ids != mirrored.ids
        assert dual.score([mirrored])[0].value == pytest.approx(
            ordinary.score([plain])[0].value, abs=1e-5
        )


def test_z_is_fed_as_recorded(scorer):
    one = recorded(scorer.codec, ("latent", "latent"), seed=1)
    other = replace(one, latents=one.latents + 0.1)
    first, second = scorer.score([one, other])
    assert abs(first.value - second.value) > 1e-3
    with pytest.raises(ValueError, match="4 latent vectors .* 8 latent positions"):
        scorer.score([replace(one, latents=one.latents[:4])])


def test_what_the_policy_answered_does_not_matter(scorer):
    trajectory = recorded(scorer.codec, ("latent", "think"))
    cut = replace(
        trajectory,
        ids=trajectory.ids[:-6],
        origins=trajectory.origins[:-6],
        logprobs=trajectory.logprobs[:-6],
    )
    cut.turns[-1] = replace(cut.turns[-1], end=len(cut.ids))
    assert scorer.score([cut]) == scorer.score([trajectory])


def test_another_domains_answer_stands_as_its_form_writes_it(scorer):
    trajectory = recorded(scorer.codec, ("think",))
    context = context_of(trajectory, scorer.codec, TOOL)
    assert (context.before[-3:], context.after) == (">\n\n", "")
    assert "<answer>" in context_of(trajectory, scorer.codec).before
    (score,) = LogProbScorer(scorer.model, scorer.codec.tokenizer, TOOL).score([trajectory])
    assert score.gold == "Peru" and score.value != scorer.score([trajectory])[0].value


def test_reasoning_that_never_closes_and_questions_without_an_answer_have_their_own_scores(scorer):
    good = recorded(scorer.codec, ("think",))
    open_turn = replace(good, turns=[replace(good.turns[0], mode="none", action=None)])
    no_turn = replace(good, turns=[])
    no_gold = replace(good, question=replace(good.question, answers=(" ",)))
    long = recorded(scorer.codec, ("think",), thought="Lima is in Peru. " * 900)
    scores = scorer.score([open_turn, no_turn, no_gold, long, good])
    assert (
        [score.value for score in scores[:4]]
        == [OPEN, OPEN, INVALID, INVALID]
        == [-2.0, -2.0, -100.0, -100.0]
    )
    assert (
        "never closes" in scores[0].problem
        and "no gold" in scores[2].problem
        and "positions" in scores[3].problem
    )
    assert scores[4] == scorer.score([good])[0] and scores[4].problem == ""


def test_group_normalisation_leaves_invalid_members_out():
    values, groups = (
        [-1.0, -3.0, -2.0, INVALID, -0.5, -7.0, -7.0, INVALID],
        [0, 0, 0, 0, "alone", 2, 2, 3],
    )
    three = (np.array([-1.0, -3.0, -2.0]) + 2) / np.std([-1.0, -3.0, -2.0], ddof=1)
    assert group_normalised(values, groups) == pytest.approx(
        [*three, 0.0, -0.5, 0.0, 0.0, 0.0], abs=1e-5
    )


def test_the_weight_mixes_exact_match_and_the_normalised_score():
    scores, correct, groups = [-1.0, -3.0, -2.0, -0.5], [True, False, False, True], [0, 0, 0, 1]
    mixed = partial(mixed_rewards, scores, correct, groups)
    assert mixed(LogProbReward(0.0)) == [1.0, 0.0, 0.0, 1.0]
    assert mixed(LogProbReward(1.0)) == pytest.approx([1.0, -1.0, 0.0, -0.5], abs=1e-5)
    assert mixed(LogProbReward(0.25)) == pytest.approx([1.0, -0.25, 0.0, 0.625], abs=1e-5)
    assert mixed(LogProbReward(0.25, normalise=False)) == pytest.approx([0.5, -0.75, -0.5, 0.625])
    repaired = LogProbReward(1.0, normalise=False, variant="repaired")
    assert mixed_rewards(
        [OPEN, -9.0, INVALID, OPEN, -1.0], [False] * 5, [0, 0, 0, 1, 1], repaired
    ) == [-9, -9, 0, -2, -1]
    assert mixed_rewards([INVALID], [True], [0], LogProbReward(0.5, normalise=False)) == [0.5]
    with pytest.raises(ValueError, match="no log-prob score"):
        mixed_rewards([float("nan")], [True], [0], LogProbReward(0.5))
    for field, value in {"weight": 1.5, "variant": "other"}.items():
        with pytest.raises(ValueError, match=field):
            LogProbReward(**{field: value})


CONFIG = RLConfig(
    steps=2,
    prompts_per_step=2,
    group_size=3,
    learning_rate=1e-3,
    validation_every=1,
    gradient_accumulation=1,
)
MIXTURE = LogProbReward(0.5)


class Alternating(Sampler):
    """Modes are forced everywhere: a random model opens no blocks itself."""

    def modes(self, step):
        return lambda row, turn: ("think", "latent")[(row + turn) % 2]


def test_the_trainer_is_rewarded_with_the_frozen_models_scores(random_model, tmp_path, monkeypatch):
    strategy, seen = logprob_grpo(MIXTURE, CONFIG), {}
    strategy = replace(strategy, sampler=Alternating(2, 3))
    questions = training_questions(4, worlds=1, seed=0), validation_questions(2)
    ours = ARGRPO(
        *random_model(),
        SearchEnvironment(),
        *questions,
        CONFIG,
        strategy,
        folder=tmp_path,
        max_turns=2,
        max_new_tokens=24,
    )
    monkeypatch.setattr(
        GroupCredit, "advantages", lambda self, s, n, rewards, *_: seen.update(rewards=rewards)
    )
    monkeypatch.setattr(Alternating, "kept", lambda self, rewards, groups: [False] * len(rewards))
    row = ours.step()
    trajectories, groups = ours.rollouts(1)
    scores = [score.value for score in LogProbScorer(*random_model()).score(trajectories)]
    assert any(len(t.latents) for t in trajectories) and len(set(scores)) > 2
    assert seen["rewards"] == pytest.approx(
        mixed_rewards(scores, [t.correct for t in trajectories], groups, MIXTURE)
    )
    assert row["score"] == pytest.approx(np.mean(scores), abs=1e-5)
    monkeypatch.undo()
    assert ours.step()["trained_share"] == 1 and 0 <= ours.validate()["validation_reward"] <= 1


def test_exact_match_alone_needs_no_scorer(scorer):
    alone = LogProbReward(0.0)
    assert alone.scorer(scorer.model, scorer.codec.tokenizer, scorer.form) is None

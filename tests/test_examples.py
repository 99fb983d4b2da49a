"""Training examples: where loss falls, whole blocks only, batches with every example once."""

from collections import Counter

import numpy as np
import pytest
import torch

from alar.domains.search.questions import conclusions, solved_questions
from alar.model import load_base, plain_latent_states
from alar.records import Origin, Question, Trajectory, TurnRecord
from alar.rollout.codec import Codec
from alar.train.config import Supervised
from alar.train.examples import (
    Example,
    SimilarBatches,
    aasd_examples,
    collate,
    thought_labels,
    warmup_examples,
    with_latent_turns,
)
from alar.train.labels import label_accuracy
from alar.train.supervised import labelled_loss, mark_trainable, train

OBSERVATION = "\n\n<information>Doc 1(Title: x) text</information>\n\n"


def expert_trajectory(codec, solved) -> Trajectory:
    ids = codec.prompt(solved.question.text)
    origins, turns = [int(Origin.PROMPT)] * len(ids), []
    for number, step in enumerate(solved.steps):
        written, marks = codec.think_turn(
            step.thought, step.action, step.argument, first=number == 0
        )
        turns.append(
            TurnRecord(len(ids), len(ids) + len(written), "think", step.action, step.argument, True)
        )
        ids, origins = ids + written, origins + [int(mark) for mark in marks]
        if step.action == "search":
            seen = codec.observation(OBSERVATION)
            ids, origins = ids + seen, origins + [int(Origin.OBSERVATION)] * len(seen)
    nothing = np.zeros((0, 0), np.float32)
    return Trajectory(
        solved.question, ids, origins, [0.0] * len(ids), nothing, turns, "x", True, "answer"
    )


@pytest.fixture(scope="module")
def codec(random_model):
    return Codec.of(*random_model())


@pytest.fixture(scope="module")
def trajectories(codec):
    return [expert_trajectory(codec, item) for item in solved_questions("counterfactual-3", 40, 0)]


def test_loss_falls_on_tags_separators_and_actions_only(codec, trajectories):
    for t, example in zip(trajectories, aasd_examples(trajectories, codec), strict=True):
        learned = codec.text([i for i, label in zip(example.ids, example.labels) if label != -100])
        expected = "\n\n" + "".join(
            f"<latent>\n\n<{turn.action}>{turn.argument}</{turn.action}>" for turn in t.turns
        )
        assert learned == expected
        assert all(label in (-100, token) for token, label in zip(example.ids, example.labels))
        assert (
            example.ids.count(codec.latent_token_id) == 4 * len(t.turns) == 4 * example.num_blocks
        )


def test_labelled_thoughts_hold_what_the_steps_of_their_text_conclude(codec, trajectories):
    for t, example in zip(trajectories, aasd_examples(trajectories, codec, conclusions)):
        plain = with_latent_turns(t, codec, [True] * len(t.turns))
        assert example.ids == plain.ids  # a label is never fed
        places = [place for place, i in enumerate(example.ids) if i == codec.latent_token_id]
        for number, turn in enumerate(t.turns):
            thought = codec.form.parse(codec.text(t.ids[turn.start : turn.end])).reasoning
            block = places[4 * number : 4 * number + 4]
            labels = [example.labels[place] for place in block]
            assert labels == thought_labels(conclusions(thought), codec)
            assert (-100 not in labels) == (number in t.question.hard_turns)
        others = set(range(len(plain.ids))) - set(places)
        assert all(example.labels[place] == plain.labels[place] for place in others)


def test_every_thought_has_a_label_where_something_is_concluded(random_model):
    codec = Codec.of(*random_model(num_latent=8))
    assert codec.tokenizer.decode(thought_labels(["=", "<", "<", "<", "9"], codec)) == "=<<<9999"
    assert codec.tokenizer.decode(thought_labels("0123456789", codec)) == "01245679"
    assert thought_labels([], codec) == [-100] * 8


def test_a_teacher_that_the_expert_cannot_read_is_an_error(codec, trajectories):
    with pytest.raises(ValueError, match="aasd.supervision: none"):
        aasd_examples(trajectories, codec, lambda thought: [])


def test_the_label_of_a_thought_is_read_from_the_state_before_it(random_model, trajectories):
    model, tokenizer = random_model()
    codec = Codec.of(model, tokenizer)
    labelled = next(
        example
        for example in aasd_examples(trajectories, codec, conclusions)
        if any(label not in (-100, token) for token, label in zip(example.ids, example.labels))
    )
    # One token after the other, each scored from the state before it.
    with torch.no_grad():
        hidden = plain_latent_states(model, torch.tensor(labelled.ids)).hidden
        costs = [
            torch.nn.functional.cross_entropy(model.lm_head(hidden[i - 1]), torch.tensor(label))
            for i, label in enumerate(labelled.labels)
            if label != -100
        ]
        loss = model(**collate([labelled], tokenizer.pad_token_id)).loss
    torch.testing.assert_close(loss, torch.stack(costs).mean())


def test_label_accuracy_is_the_share_of_first_choices_before_each_thought(
    random_model, trajectories
):
    model, tokenizer = random_model()
    codec = Codec.of(model, tokenizer)
    examples = aasd_examples(trajectories[:8], codec, conclusions)
    found = []  # (k, whether the label is the first choice), one sequence after the other
    for number, example in enumerate(examples):
        with torch.no_grad():
            hidden = plain_latent_states(model, torch.tensor(example.ids)).hidden
        choices = model.lm_head(hidden).argmax(-1).tolist()
        places = [place for place, i in enumerate(example.ids) if i == codec.latent_token_id]
        for n, place in enumerate(places):
            if example.labels[place] == -100:
                continue
            if n % 4 == 1:  # make some labels right, so that the shares are not all zero
                example.labels[place] = choices[place - 1] if number % 2 else 0
            found.append((n % 4 + 1, choices[place - 1] == example.labels[place]))
    table = label_accuracy(model, examples, codec, batch_size=3)
    for k in range(1, 5):
        hits = [hit for step, hit in found if step == k]
        assert table.loc[k, "n"] == len(hits) > 0
        assert table.loc[k, "label is read"] == pytest.approx(sum(hits) / len(hits))
    assert 0 < table.loc[2, "label is read"] < 1


def test_kept_thoughts_carry_loss_and_observations_never_do(codec, trajectories):
    t = trajectories[0]
    example = with_latent_turns(t, codec, [False] * len(t.turns))
    assert example.ids == t.ids
    assert [label != -100 for label in example.labels] == [o == Origin.SAMPLED for o in t.origins]


def test_the_warm_up_flips_a_coin_per_turn_and_repeats_itself(codec, trajectories):
    examples = warmup_examples(trajectories * 10, codec, 0.5, seed=1)
    again = warmup_examples(trajectories * 10, codec, 0.5, seed=1)
    assert examples == again != warmup_examples(trajectories * 10, codec, 0.5, seed=2)
    turns = sum(len(t.turns) for t in trajectories) * 10
    latent = sum(example.num_blocks for example in examples)
    assert abs(latent / turns - 0.5) < 4 * 0.5 / turns**0.5


def test_failed_or_malformed_trajectories_are_left_out_and_none_left_is_an_error(
    codec, trajectories
):
    failed = Trajectory(**{**vars(trajectories[0]), "correct": False})
    assert len(aasd_examples([failed, trajectories[1]], codec)) == 1
    with pytest.raises(ValueError, match="nothing to imitate"):
        aasd_examples([failed], codec)


def test_every_example_comes_once_per_epoch_and_batches_are_alike():
    examples = [Example([0] * (10 + n % 50), [1], n % 4) for n in range(333)]
    sampler = SimilarBatches(examples, 16, seed=0)
    first, second = list(sampler), list(sampler)
    for epoch in (first, second):
        assert Counter(i for batch in epoch for i in batch) == Counter(range(333))
    assert first != second and len(first) == len(sampler)
    mixed = sum(len({examples[i].num_blocks for i in batch}) > 1 for batch in first)
    assert mixed < len(first) / 2
    as_they_come = list(SimilarBatches(examples, 16, seed=0, pool=1))
    assert all(len({examples[i].num_blocks for i in batch}) > 1 for batch in as_they_come)


def test_padding_carries_neither_attention_nor_loss():
    batch = collate([Example([1, 2, 3], [-100, 2, 3], 0), Example([4], [4], 0)], pad_token_id=9)
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 2, 3], [4, -100, -100]]


def test_the_loss_is_the_mean_over_labelled_tokens(random_model, codec, trajectories):
    model, tokenizer = random_model()
    batch = collate(aasd_examples(trajectories[:4], codec), tokenizer.pad_token_id)
    with torch.no_grad():
        loss = model(**batch).loss
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        expected = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch["labels"][:, 1:].flatten()
        )
        count = int((batch["labels"] != -100).sum())
        halved = model(**batch, num_items_in_batch=2 * count).loss
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert halved.item() == pytest.approx(loss.item() / 2, rel=1e-5)


@pytest.mark.parametrize("trainable", ["lora", "full"])
def test_training_lowers_the_loss_and_gives_back_a_plain_model(
    random_model, codec, trajectories, trainable
):
    model, tokenizer = random_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    rows = []
    config = Supervised(learning_rate=3e-3, epochs=4, batch_size=8, trainable=trainable)
    trained = train(
        model, aasd_examples(trajectories, codec), tokenizer.pad_token_id, config, log=rows.append
    )
    assert rows[-1]["loss"] < 0.8 * rows[0]["loss"]
    after = dict(trained.named_parameters())
    assert after.keys() == before.keys()
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    assert {"model.projector.up.weight", "model.projector.norm.weight"} <= moved
    embeddings = "model.embed_tokens.weight" in moved
    assert embeddings == (trainable == "full") and any("q_proj.weight" in name for name in moved)


def test_lora_trains_attention_and_the_projector_and_nothing_else(random_model):
    model, _ = random_model()
    wrapped = mark_trainable(model, "lora", lora_rank=4, lora_alpha=8)
    names = {name for name, p in wrapped.named_parameters() if p.requires_grad}
    assert names and all("lora_" in name or ".projector." in name for name in names)
    assert {
        part for name in names for part in ("q_proj", "k_proj", "v_proj", "o_proj") if part in name
    } == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_too_long_examples_are_refused_instead_of_cut(random_model):
    model, tokenizer = random_model()
    with pytest.raises(ValueError, match="2048 positions"):
        train(model, [Example([5] * 3000, [5] * 3000, 0)], tokenizer.pad_token_id, Supervised())


def test_question_type_does_not_reach_examples(codec, trajectories):
    t = trajectories[0]
    hidden = Question(**{**vars(t.question), "type": "", "hard_turns": ()})
    assert with_latent_turns(
        Trajectory(**{**vars(t), "question": hidden}), codec, [True] * len(t.turns)
    ) == with_latent_turns(t, codec, [True] * len(t.turns))


def test_an_ordinary_model_has_the_loss_of_transformers_from_labelled_logits_alone():
    model, tokenizer = load_base("embedded")
    ids = tokenizer("The capital of France is Paris. " * 4)["input_ids"]
    rows = [Example(ids, [-100] * 9 + ids[9:], 0), Example(ids[:20], [-100] * 5 + ids[5:20], 0)]
    batch = collate(rows, tokenizer.pad_token_id)
    ours = labelled_loss(model, batch)
    ours.backward()
    gradient = model.get_input_embeddings().weight.grad.clone()
    model.zero_grad()
    theirs = model(**batch).loss
    theirs.backward()
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    torch.testing.assert_close(gradient, model.get_input_embeddings().weight.grad)
    labelled = int((batch["labels"][:, 1:] != -100).sum())
    torch.testing.assert_close(labelled_loss(model, batch, 2 * labelled), ours / 2)

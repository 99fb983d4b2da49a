"""Pretraining of the embedded base: a tokenizer that keeps ALAR's tags apart, and training that
resumes exactly."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from alar.rollout.codec import Codec
from alar.train import pretrain as module
from alar.train.config import PARTS, Pretrain
from alar.train.pretrain import Source, pretrain

TINY = Pretrain(
    steps=6, batch_size=4, questions_per_world=16, hidden_size=32, layers=1, vocabulary=1024
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    return folder, *pretrain(folder, TINY)


def test_the_folder_loads_with_auto_classes_and_has_spare_rows(trained):
    folder, model, tokenizer = trained
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.state_dict().values(), loaded.state_dict().values(), strict=True)
    )
    assert len(AutoTokenizer.from_pretrained(folder)) < loaded.config.vocab_size
    assert len(json.loads((folder / "training.jsonl").read_text().splitlines()[-1])) == 5


def test_tags_have_three_pieces_and_digits_stand_alone(trained):
    codec = Codec(trained[2])
    for tag in ("<latent>", "<think>", "</latent>", "</think>"):
        assert len(codec.trusted(tag)) == 3
    assert len(codec.trusted("1991")) == 4


def test_a_batch_that_cannot_be_divided_is_refused():
    with pytest.raises(ValueError, match="batch_size"):
        Pretrain(batch_size=30)


def test_an_interrupted_pretraining_goes_on_over_the_same_batches(trained, tmp_path, monkeypatch):
    _, whole, _ = trained
    monkeypatch.setattr(module, "SAVE_EVERY", 2)

    class Killed(Exception):
        pass

    losses = []
    original = module.summed_cross_entropy

    def dies_once(*args):
        losses.append(1)
        if len(losses) == 3 * PARTS + 2:  # in the middle of the fourth step's batch
            raise Killed
        return original(*args)

    monkeypatch.setattr(module, "summed_cross_entropy", dies_once)
    with pytest.raises(Killed):
        pretrain(tmp_path, TINY)
    resumed, _ = pretrain(tmp_path, TINY)
    assert len(losses) == 3 * PARTS + 2 + 4 * PARTS  # three steps and the kill, then steps 3 to 6
    for a, b in zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.parametrize(
    ("config", "source", "named"),
    [
        (TINY.model_copy(update={"hidden_size": 64}), Source(), "hidden_size"),
        (TINY, Source(seed=1), "seed"),
    ],
)
def test_resuming_with_other_settings_is_refused(trained, config, source, named):
    with pytest.raises(ValueError, match=named):
        pretrain(trained[0], config, source)


def test_only_what_the_policy_writes_carries_loss(trained):
    codec = Codec(trained[2])
    for question, turns in module.solved_texts("counterfactual-11", 12, 0, 2):
        ids, labels = module.encode_trajectory(codec, question, turns)
        learned = codec.text([i for i, label in zip(ids, labels) if label != -100])
        written = "".join(f"<think>{t}</think>\n\n<{a}>{x}</{a}>" for t, a, x, _ in turns)
        assert learned == "\n\n" + written

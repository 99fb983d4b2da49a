"""The tool base model: pretrained like the search one, as a Qwen3, and ready for the agent loop
with latent blocks."""

import pytest
from transformers import AutoModelForCausalLM

from alar.domains.tool import questions
from alar.domains.tool.environment import ToolEnvironment
from alar.domains.tool.protocol import TOOL
from alar.model import from_base
from alar.rollout.codec import Codec
from alar.rollout.engine import Sampling
from alar.rollout.hf import HFEngine
from alar.rollout.loop import run
from alar.rollout.modes import latent_probabilities
from alar.train import pretrain_tool
from alar.train.config import Pretrain
from alar.train.pretrain import LEAST_FREQUENT, Source, pretrain

TINY = Pretrain(
    steps=2, batch_size=4, questions_per_world=16, hidden_size=64, layers=1, vocabulary=2048
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder, texts = tmp_path_factory.mktemp("tool-base"), pretrain_tool.texts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain_tool, "texts", lambda count, seed: texts(count // 20, seed))
        patch.setitem(LEAST_FREQUENT, "tool", LEAST_FREQUENT["tool"] // 20)
        return folder, *pretrain(folder, TINY, Source("tool"))


def test_the_base_is_a_qwen3_whose_tags_have_three_pieces(trained):
    folder, _, tokenizer = trained
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert (
        model.config.model_type == "qwen3"
        and model.config.head_dim == 32
        and len(tokenizer) < model.config.vocab_size
    )
    codec = Codec(tokenizer, form=TOOL)
    for tag in ("<latent>", "<think>", "</latent>", "</think>"):
        assert len(codec.trusted(tag)) == 3, tag
    assert len(codec.trusted("2024")) == 4


def test_trajectories_average_at_most_400_tokens(trained):
    codec = Codec(trained[2], form=TOOL)
    lengths = [
        len(pretrain_tool.encode(codec, item)[0])
        for item in questions.solved_questions("test", 300, 0)
    ]
    assert sum(lengths) / len(lengths) <= 400 and max(lengths) < 1200


def test_any_model_goes_through_the_loop_with_real_execution(trained):
    model, tokenizer = from_base(trained[0], num_latent=2)
    environment, sampling = ToolEnvironment(), Sampling(24, 1.0, stop=())
    asked = questions.validation_questions(6)
    for mode in ("free", "latent", "think"):
        trajectories = run(
            asked, HFEngine(model, tokenizer), environment, sampling, modes=mode, max_turns=2
        )
        for t in trajectories:
            t.check()
            assert 1 <= len(t.turns) <= 2
            assert not t.correct or t.question.type == "irrelevance", (
                "any words without a call are right where nothing fits"
            )
        if mode != "free":
            assert all(
                turn.mode in (mode, "none") and turn.forced_mode == mode
                for t in trajectories
                for turn in t.turns
            )
    scores = latent_probabilities(model, Codec.of(model, tokenizer, TOOL), trajectories)
    assert [len(row) for row in scores] == [len(t.turns) for t in trajectories]
    assert all(0 <= p <= 1 for row in scores for p in row)
    environment.executor.close()

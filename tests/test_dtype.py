"""`model.dtype`: every engine computes in the dtype of the checkpoint. The projector, log-probs and
what an optimiser steps on are float32.

A bfloat16 number has 8 significant bits: one rounding changes it by at most u = 1/512 of itself.
"""

import importlib.util

import pytest
import torch
from safetensors.torch import load_file

from alar.engines.choice import opened_engine
from alar.engines.serve import server_arguments
from alar.engines.verl import Job
from alar.engines.verl.settings import hydra_values
from alar.model import from_base, load, plain_latent_states, resolved_dtype, save, stored_dtype
from alar.rl.config import RLConfig
from alar.rl.strategy import ar_grpo
from alar.rl.trainer import make_batch, token_logprobs
from alar.rollout.engine import Sampling, TurnRequest
from alar.rollout.hf import HFEngine, policy_logits
from alar.train.config import Supervised
from alar.train.masters import keep_masters
from alar.train.supervised import mark_trainable, train
from tests.distributed_ranks import PAD, training_examples
from tests.test_latent_states import AXES, inputs_of, plain
from tests.test_rl_trainer import Given
from tests.test_rl_trainer import make as make_trainer

U = 1 / 512


@pytest.fixture(scope="module")
def half_folder(tmp_path_factory):
    """The latent model of the embedded base, stored in bfloat16."""
    folder = tmp_path_factory.mktemp("half") / "checkpoint"
    return save(*from_base("embedded", dtype="bfloat16"), folder)


@pytest.mark.parametrize(("gpu", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_is_bfloat16_where_there_is_a_gpu(monkeypatch, gpu, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert resolved_dtype("auto") == expected
    assert resolved_dtype("float32") == torch.float32


def test_an_unknown_dtype_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ValueError, match="model.dtype 'half': expected one of auto, float32"):
        resolved_dtype("half")


def test_a_checkpoint_is_stored_in_the_dtype_of_the_model_and_loaded_in_it_again(half_folder):
    weights = load_file(half_folder / "model.safetensors")
    for name, weight in weights.items():
        expected = torch.float32 if ".projector." in name else torch.bfloat16
        assert weight.dtype == expected, name
    again, _ = load(half_folder, device="cpu")
    for name, weight in weights.items():
        assert torch.equal(again.state_dict()[name], weight), name
    assert stored_dtype(half_folder) == "bfloat16"
    # Angles of positions need their 24 bits.
    assert all(buffer.dtype == torch.float32 for buffer in again.buffers())


def test_every_engine_obeys_the_dtype_of_the_checkpoint(half_folder):
    with opened_engine(half_folder) as engine:
        assert engine.dtype == torch.bfloat16
    arguments = server_arguments([str(half_folder)])
    assert arguments[arguments.index("--dtype") + 1] == "bfloat16"
    rl = RLConfig(trainable="full", steps=2)
    job = Job(
        model=str(half_folder), folder="x", prompts="", validation="", rl=rl, strategy=ar_grpo(rl)
    )
    values = hydra_values(job)
    root = "actor_rollout_ref"
    assert values[f"{root}.rollout.dtype"] == "bfloat16"
    for part in ("actor", "ref"):
        assert values[f"{root}.{part}.fsdp_config.model_dtype"] == "fp32"  # master weights
        assert values[f"{root}.{part}.fsdp_config.mixed_precision"]["param_dtype"] == "bf16"


def test_verl_refuses_a_dtype_that_it_does_not_train_and_names_the_remedy(half_folder, tmp_path):
    (tmp_path / "config.json").write_text('{"dtype": "float16"}')
    rl = RLConfig()
    job = Job(
        model=str(tmp_path), folder="x", prompts="", validation="", rl=rl, strategy=ar_grpo(rl)
    )
    with pytest.raises(ValueError, match="stored in float16.*set model.dtype"):
        hydra_values(job)


@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vLLM is not installed: python run_all.py --install engines",
)
def test_vllm_has_an_attention_for_float32_that_tells_what_latent_blocks_need():
    """FlashAttention refuses float32. vLLM then takes the next of its list that does not."""
    import dataclasses

    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
    from vllm.v1.attention.backends.triton_attn import (
        TritonAttentionBackend,
        TritonAttentionMetadata,
    )

    assert not FlashAttentionBackend.supports_dtype(torch.float32)
    assert TritonAttentionBackend.supports_dtype(torch.float32)
    found = {field.name for field in dataclasses.fields(TritonAttentionMetadata)}
    assert found >= {"query_start_loc", "block_table", "slot_mapping"}


def relative(one, other) -> float:
    """|one − other| / |other| over all thoughts."""
    return ((one.double() - other.double()).norm() / other.double().norm()).item()


@pytest.mark.parametrize("layout", AXES["layout"])
@pytest.mark.parametrize("family", AXES["family"])
def test_z_of_packed_training_in_bfloat16_is_the_plain_one_within_its_rounding(
    random_model, family, layout
):
    """Up to three blocks of 4 thoughts in a row: 16 roundings of relative size u. The plain
    algorithm itself is as far from its own result in float64."""
    model, _ = random_model(family, dtype="bfloat16")
    inputs, _, rows = inputs_of(model, layout)
    with torch.no_grad():
        z = plain(model, rows)[1]
        trained = model.eval().latent_states(**inputs).latents
        exact = plain(model.double(), rows)[1]
    rounding = relative(z, exact)
    assert trained.dtype == z.dtype == torch.bfloat16
    assert U / 2 < rounding <= 16 * U  # so float64 has something to tell
    assert relative(trained, z) <= 16 * U


@pytest.mark.parametrize("family", AXES["family"])
def test_z_of_decoding_in_bfloat16_is_that_of_training_within_its_rounding(random_model, family):
    model, tokenizer = random_model(family, dtype="bfloat16")
    engine = HFEngine(model, tokenizer)
    codec = engine.codec
    prompts = [codec.prompt(text) for text in ("Peru currency", "Which languages has Chile")]
    opening = codec.separator + codec.latent_open
    requests = [TurnRequest(i, ids, [], opening) for i, ids in enumerate(prompts)]
    for request, output in zip(requests, engine.generate(requests, Sampling(24))):
        ids = torch.tensor([*request.ids, *output.ids])
        with torch.no_grad():
            trained = model.latent_states(ids[None]).latents
            z = plain_latent_states(model, ids).latents
        decoded = torch.stack([torch.as_tensor(one) for one in output.latents])
        # What was fed is what was recorded: float32 holds a bfloat16 number exactly.
        assert torch.equal(decoded.bfloat16().float(), decoded) and len(decoded) >= 4
        assert relative(decoded, trained) <= 16 * U
        assert relative(decoded, z) <= 16 * U


def test_log_probs_are_float32_where_the_model_computes_in_bfloat16(random_model, tmp_path):
    """Probabilities sum to 1 within 1e-5; rounded to bfloat16, log-probs near −7 would be off by
    0.03. Sampling and scoring see states that differ by bfloat16's rounding: ratios of 1 ± 0.05."""
    trainer = make_trainer(random_model, tmp_path, dtype="bfloat16")
    model = trainer.engine.model
    hidden = torch.randn(8, model.config.hidden_size, dtype=torch.bfloat16)
    logits = policy_logits(model, hidden)
    assert logits.dtype == torch.float32
    total = logits.log_softmax(-1).exp().sum(-1)
    assert (total - 1).abs().max() <= 1e-5
    trajectories, _ = trainer.rollouts(1)
    batch = make_batch(trajectories, [[0.0] * len(t.ids) for t in trajectories], 0)
    for latents in ("recomputed", "cached"):
        with torch.no_grad():
            logprobs = token_logprobs(model, batch, temperature=1.0, latents=latents)
        behaviour = batch.behaviour[:, 1:][batch.mask[:, 1:]]
        assert logprobs.dtype == torch.float32
        ratio = (logprobs - behaviour).exp()
        assert (ratio - 1).abs().max() <= 0.05


def test_master_weights_keep_the_updates_that_bfloat16_would_round_away():
    """A hundred steps of 1e-4 from 1.0, next to which bfloat16 knows 0.996 and 1.008."""

    def walked(dtype, masters):
        weight = torch.nn.Parameter(torch.ones(3, dtype=dtype))
        optimizer = torch.optim.AdamW([weight], lr=1e-4, weight_decay=0.0)
        if masters:
            keep_masters(optimizer)
        for _ in range(100):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        return weight.detach()

    exact = walked(torch.float32, False)
    assert (exact - 0.99).abs().max() <= 1e-5
    assert torch.equal(walked(torch.bfloat16, False), torch.ones(3).bfloat16())  # lost
    assert torch.equal(walked(torch.bfloat16, True), exact.bfloat16())
    assert torch.equal(walked(torch.float32, True), exact)


@pytest.mark.parametrize("trainable", ["full", "lora"])
def test_training_in_bfloat16_follows_float32_and_gives_back_bfloat16(random_model, trainable):
    config = Supervised(
        learning_rate=1e-3, epochs=12, batch_size=4, trainable=trainable, lora_rank=4
    )
    logs, changes = {}, {}
    for dtype in ("float32", "bfloat16"):
        model, _ = random_model(dtype="bfloat16")  # both start from the same weights
        model = load_as(model, dtype)
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        logs[dtype] = []
        model = train(model, training_examples(model), PAD, config, log=logs[dtype].append)
        for name, p in model.named_parameters():
            assert p.dtype == (torch.float32 if ".projector." in name else getattr(torch, dtype))
        after = dict(model.named_parameters())
        changes[dtype] = {n: (after[n].float() - start[n].float()).flatten() for n in start}
    for one, other in zip(logs["float32"], logs["bfloat16"], strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=0.02)
    assert logs["bfloat16"][-1]["loss"] < logs["bfloat16"][0]["loss"] - 0.5
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.projector.up.weight"):
        one, other = changes["float32"][name], changes["bfloat16"][name]
        assert torch.cosine_similarity(one, other, dim=0) >= 0.9


def load_as(model, dtype: str):
    """The same weights in another dtype, the angles of positions untouched."""
    for parameter in model.parameters():
        if parameter.dtype == torch.bfloat16:
            parameter.data = parameter.data.to(getattr(torch, dtype))
    return model


def test_adapters_are_float32_beside_a_bfloat16_trunk(random_model):
    model, _ = random_model(dtype="bfloat16")
    wrapped = mark_trainable(model, "lora", lora_rank=4, lora_alpha=8)
    trained = {name: p.dtype for name, p in wrapped.named_parameters() if p.requires_grad}
    assert set(trained.values()) == {torch.float32} and any("lora_A" in name for name in trained)
    assert wrapped.get_input_embeddings().weight.dtype == torch.bfloat16


def test_an_interrupted_rl_run_in_bfloat16_goes_on_from_its_float32_weights(random_model, tmp_path):
    """At this rate no step alone would move a bfloat16 weight by its rounding."""
    given = {"dtype": "bfloat16", "learning_rate": 2e-5, "reward": Given((0.0, 1.0, 0.5))}
    whole = make_trainer(random_model, tmp_path / "whole", **given)
    first = make_trainer(random_model, tmp_path / "cut", **given)
    for trainer in (whole, whole, whole, first, first):
        trainer.step()
    first._checkpoint()
    second = make_trainer(random_model, tmp_path / "cut", **given)
    second._resume(lambda row: None)
    second.step()
    weights, unrounded = dict(whole.model.named_parameters()), 0
    for name, master in whole._stepped().items():
        assert master.dtype == torch.float32
        assert torch.equal(master, second._stepped()[name]), name
        assert torch.equal(weights[name], master.to(weights[name].dtype)), name
        unrounded += int((master != weights[name]).sum())
    assert unrounded > 1000  # what only the masters know

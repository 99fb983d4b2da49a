"""z in training is z in decoding: `latent_states` against the plain recurrence, one token at a time."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import DynamicCache

from alar.model import LATENT_GRADIENTS

TEXT = 900  # ids below this are ordinary pieces


def step_by_step(model, ids: list[int], detach=lambda h, step: h):
    """(hidden states (T, H), z (N, H)) of one unpadded sequence, fed token by token."""
    cache, hidden, latents, step = DynamicCache(config=model.config), [], [], 0
    for token in ids:
        if token == model.config.latent_token_id:
            embedding = model.model.projector(detach(hidden[-1], step)[None], step)
            latents.append(embedding[0])
            step = (step + 1) % model.config.num_latent
        else:
            embedding = model.get_input_embeddings()(torch.tensor([token]))
        output = model.model(inputs_embeds=embedding[None], past_key_values=cache, use_cache=True)
        hidden.append(output.last_hidden_state[0, 0])
    return torch.stack(hidden), torch.stack(latents) if latents else torch.zeros(0, model.config.hidden_size)


def batch_of(model, layouts, side, seed=0):
    """Random sequences; a layout is (length, starts of blocks). Returns ids, mask and the unpadded sequences."""
    generator, num_latent = torch.Generator().manual_seed(seed), model.config.num_latent
    width, rows = max(length for length, _ in layouts), []
    for length, starts in layouts:
        row = torch.randint(3, TEXT, (length,), generator=generator)
        for start in starts:
            row[start : start + num_latent] = model.config.latent_token_id
        rows.append(row)
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for number, row in enumerate(rows):
        place = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
        ids[number, place], mask[number, place] = row, 1
    return ids, mask, [row.tolist() for row in rows]


LAYOUTS = [(41, (5, 18, 37)), (30, (9,)), (23, ()), (33, (1, 20))]


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_training_latents_equal_inference_latents(random_model, family, side, lora, attention):
    model, _ = random_model(family)
    model.set_attn_implementation(attention)
    if lora:
        wrapped = get_peft_model(
            model, LoraConfig(r=4, lora_alpha=1, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], init_lora_weights=False)
        )
        model = wrapped.get_base_model()
    model.train()
    ids, mask, rows = batch_of(model, LAYOUTS, side)
    states = model.latent_states(ids, mask)
    with torch.no_grad():
        expected = [step_by_step(model, row) for row in rows]
    z = torch.cat([latents for _, latents in expected])
    assert states.latents.shape == z.shape
    assert (states.latents - z).abs().max() <= 1e-5
    hidden = torch.cat([h for h, _ in expected])
    assert (states.hidden[mask.bool()] - hidden).abs().max() <= 1e-5


@pytest.mark.parametrize("num_latent", [1, 2, 8])
def test_latents_are_exact_for_other_k(random_model, num_latent):
    model, _ = random_model(num_latent=num_latent)
    ids, mask, rows = batch_of(model, [(40, (5, 25)), (20, (8,))], "right")
    with torch.no_grad():
        z = torch.cat([step_by_step(model, row)[1] for row in rows])
        assert (model.latent_states(ids, mask).latents - z).abs().max() <= 1e-5


def test_given_latents_reproduce_the_recomputed_hidden_states_in_one_forward(random_model, monkeypatch):
    model, _ = random_model()
    ids, mask, _ = batch_of(model, LAYOUTS, "right")
    with torch.no_grad():
        states = model.latent_states(ids, mask)
        calls = count_calls(model, monkeypatch)
        again = model.latent_states(ids, mask, latents=states.latents)
    assert calls == [1]
    assert (states.hidden - again.hidden)[mask.bool()].abs().max() <= 1e-5


def count_calls(model, monkeypatch) -> list[int]:
    calls, forward = [0], model.model.forward

    def counted(*args, **kwargs):
        calls[0] += 1
        return forward(*args, **kwargs)

    monkeypatch.setattr(model.model, "forward", counted)
    return calls


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_model_calls_do_not_grow_with_the_batch(random_model, monkeypatch, batch):
    model, _ = random_model()
    ids, mask, _ = batch_of(model, (LAYOUTS * 4)[:batch], "right")
    calls = count_calls(model, monkeypatch)
    model.latent_states(ids, mask)
    blocks = max(len(starts) for _, starts in (LAYOUTS * 4)[:batch])
    assert calls[0] <= (blocks + 1) + blocks * 4


@pytest.mark.parametrize("mode", LATENT_GRADIENTS)
def test_gradients_equal_autograd_through_the_unrolled_model(random_model, mode):
    def keep(h, step):
        attached = mode == "full" or (mode == "published" and step == 0)
        return h if attached else h.detach()

    gradients = []
    for run in ("batched", "unrolled"):
        model, _ = random_model()
        ids, mask, rows = batch_of(model, LAYOUTS, "right")
        if run == "batched":
            hidden = model.latent_states(ids, mask, latent_gradient=mode).hidden[mask.bool()]
        else:
            hidden = torch.cat([step_by_step(model, row, keep)[0] for row in rows])
        weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(5))
        (hidden * weights).sum().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    batched, unrolled = gradients
    assert batched.keys() == unrolled.keys()
    for name, gradient in unrolled.items():
        assert (batched[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-7, name


def test_a_cut_block_or_another_k_is_an_error(random_model):
    model, _ = random_model()
    ids, mask, _ = batch_of(model, [(30, (9,))], "right")
    ids[0, 12] = 7
    with pytest.raises(ValueError, match="K = 4"):
        model.latent_states(ids, mask)
    ids, mask, _ = batch_of(random_model(num_latent=2)[0], [(30, (9,))], "right")
    with pytest.raises(ValueError, match="K = 4"):
        model.latent_states(ids, mask)


def test_a_batch_without_any_loss_is_an_error_and_not_nan(random_model):
    model, _ = random_model()
    ids, mask, _ = batch_of(model, LAYOUTS, "right")
    with pytest.raises(ValueError, match="no token"):
        model(ids, attention_mask=mask, labels=torch.full_like(ids, -100))

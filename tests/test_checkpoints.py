"""One folder per checkpoint: bit-exact round trips, and clear errors instead of random weights."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from alar.model import embedded, from_base, load, save


def same_weights(one, other) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_save_and_load_are_bit_exact_and_auto_classes_know_the_folder(
    random_model, tmp_path, family
):
    model, tokenizer = random_model(family)
    folder = save(model, tokenizer, tmp_path / "checkpoint")
    again, tokenizer_again = load(folder)
    assert same_weights(model, again) and len(tokenizer_again) == len(tokenizer)
    assert type(AutoModelForCausalLM.from_pretrained(folder)) is type(model)
    assert json.loads((folder / "config.json").read_text())["model_type"] == f"latent_{family}"


def test_a_missing_projector_is_an_error(random_model, tmp_path):
    folder = save(*random_model(), tmp_path / "checkpoint")
    weights = load_file(folder / "model.safetensors")
    save_file(
        {k: v for k, v in weights.items() if "projector" not in k},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(ValueError, match="projector"):
        load(folder)


def test_another_k_than_asked_for_is_an_error(random_model, tmp_path):
    folder = save(*random_model(num_latent=2), tmp_path / "checkpoint")
    with pytest.raises(ValueError, match="K = 4"):
        load(folder, num_latent=4)


def test_a_missing_folder_names_itself(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load(tmp_path / "nowhere")


def test_an_unsupported_architecture_is_refused(tmp_path, tokenizer):
    GPT2LMHeadModel(GPT2Config(vocab_size=3072, n_embd=32, n_layer=1, n_head=2)).save_pretrained(
        tmp_path
    )
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="gpt2"):
        from_base(tmp_path)


def test_k_outside_its_range_is_refused():
    with pytest.raises(ValueError, match="0 to 16"):
        from_base("embedded", num_latent=17)


def test_the_latent_token_takes_the_first_spare_row_of_the_embedded_model():
    model, tokenizer = from_base("embedded")
    base = AutoModelForCausalLM.from_pretrained(embedded("search"))
    assert model.config.latent_token_id == len(tokenizer) - 1 < model.config.vocab_size
    assert model.config.vocab_size == base.config.vocab_size
    assert torch.equal(model.get_input_embeddings().weight, base.get_input_embeddings().weight)


def test_an_embedding_table_without_a_spare_row_is_refused(tmp_path, tokenizer):
    base = AutoModelForCausalLM.from_pretrained(embedded("search"))
    base.resize_token_embeddings(len(tokenizer))
    base.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="spare row"):
        from_base(tmp_path)


def test_the_same_seed_gives_the_same_projector(random_model):
    assert same_weights(random_model()[0], random_model()[0])


def test_output_scale_follows_the_embeddings(random_model):
    model, _ = random_model(projector_scale="embedding_rms")
    z = model.model.projector(torch.randn(500, model.config.hidden_size), 0)
    rms = model.get_input_embeddings().weight.pow(2).mean().sqrt()
    assert z.pow(2).mean().sqrt().item() == pytest.approx(rms.item(), rel=0.02)


def test_dtypes_survive_a_round_trip_and_the_projector_stays_float32(random_model, tmp_path):
    model, tokenizer = random_model()
    before = {name: p.clone() for name, p in model.model.projector.state_dict().items()}
    folder = save(model.to(torch.bfloat16), tokenizer, tmp_path / "checkpoint")
    again, _ = load(folder)
    assert same_weights(model, again)
    assert again.model.embed_tokens.weight.dtype == torch.bfloat16
    for name, weight in again.model.projector.state_dict().items():
        assert weight.dtype == torch.float32 and torch.equal(weight, before[name])
    base, _ = from_base(embedded("search"), dtype=torch.bfloat16)
    assert base.lm_head.weight.dtype == torch.bfloat16
    assert base.model.projector.up.weight.dtype == torch.float32


def test_a_wrapped_model_is_saved_with_its_adapters_merged(random_model, tmp_path):
    model, tokenizer = random_model()
    ids = torch.randint(3, 900, (2, 20))
    wrapped = get_peft_model(
        model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    ).eval()
    with torch.no_grad():
        expected = wrapped(input_ids=ids).logits
        again, _ = load(save(wrapped, tokenizer, tmp_path / "checkpoint"))
        assert (again(input_ids=ids).logits - expected).abs().max() <= 1e-4 * expected.abs().max()
        assert torch.equal(wrapped(input_ids=ids).logits, expected)
    assert not any("lora" in name for name in again.state_dict())
    with pytest.raises(ValueError, match="merge_and_unload"):
        save(model, tokenizer, tmp_path / "other")


def test_saving_replaces_whatever_stood_in_its_place(random_model, tmp_path):
    model, tokenizer = random_model()
    save(random_model(num_latent=2)[0], tokenizer, tmp_path / "checkpoint")
    for name in ("checkpoint", "checkpoint.partial"):
        (tmp_path / name / "nested").mkdir(parents=True)
        (tmp_path / name / "nested" / "file").write_text("old")
    folder = save(model, tokenizer, tmp_path / "checkpoint")
    assert not (folder / "nested").exists() and load(folder)[0].config.num_latent == 4
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    assert save(model, tokenizer, tmp_path / "new" / "deeper").is_dir()


def test_a_base_out_of_reach_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match="nobody/nothing"):
        from_base("nobody/nothing")
    with pytest.raises(OSError, match="config.json"):
        from_base(tmp_path)

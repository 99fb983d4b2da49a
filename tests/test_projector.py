"""The projector's options, each against its formula."""

import pytest
import torch


@pytest.mark.parametrize(
    "options",
    [
        {"projector_size": 24},
        {"projector_layer_norm": False},
        {"projector_residual": True},
        {"projector_scale": "embedding_rms"},
        {"projector_size": 100, "projector_residual": True, "projector_layer_norm": False},
    ],
)
def test_projector_options_give_the_formula(random_model, options):
    model, _ = random_model(**options)
    f, h = model.model.projector, torch.randn(5, model.config.hidden_size)
    y = torch.nn.functional.gelu(h @ f.up.weight.T + f.up.bias) @ f.down.weight.T + f.down.bias
    assert f.up.out_features == options.get("projector_size", model.config.hidden_size)
    if options.get("projector_residual"):
        y = y + h
    if options.get("projector_layer_norm", True):
        y = (y - y.mean(1, keepdim=True)) / (y.var(1, keepdim=True, correction=0) + 1e-5).sqrt()
    if options.get("projector_scale") == "embedding_rms":
        y = y * model.get_input_embeddings().weight.pow(2).mean().sqrt()
    assert (f(h, 0) - y).abs().max() <= 1e-5


def test_projector_dropout_acts_in_training_only(random_model):
    model, _ = random_model(projector_dropout=0.5)
    h = torch.randn(5, model.config.hidden_size)
    assert not torch.equal(model.train().model.projector(h, 0), model.model.projector(h, 0))
    assert torch.equal(model.eval().model.projector(h, 0), model.model.projector(h, 0))

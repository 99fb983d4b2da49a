"""z in training is z in decoding: every way of training against the plain algorithm, for hidden
states, z, logits and gradients.

The reference is `alar.model.recurrence`, which knows nothing of packing, stores or schedules.
"""

import gc
import itertools
import weakref

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.autograd.graph import saved_tensors_hooks
from transformers import MistralConfig, MistralForCausalLM, Qwen2Config

from alar.model.families import LatentQwen2Config, LatentQwen2ForCausalLM, family
from alar.model.packed_attention import KeyValueStore
from alar.model.recurrence import plain_latent_states, reaches_state
from alar.rollout.engine import Sampling, TurnRequest
from alar.rollout.hf import HFEngine

FAMILIES = ("qwen2", "qwen3", "llama")

AXES = {
    "path": ("segments", "cached"),
    "layout": ("right", "left", "packed"),
    "lora": (False, True),
    "checkpointing": (False, True),
    "family": FAMILIES,
    "num_latent": (1, 4, 8),
}
TEXT = 900  # ids below this are ordinary pieces
ALL = list(itertools.product(*AXES.values()))


def batch_of(model, layouts, side, seed=0):
    """Random sequences; a layout is (length, starts of blocks). Returns ids (B, T), mask (B, T) and
    the unpadded sequences (T,)."""
    generator, num_latent = torch.Generator().manual_seed(seed), model.config.num_latent
    rows = []
    for length, starts in layouts:
        row = torch.randint(3, TEXT, (length,), generator=generator)
        for start in starts:
            row[start : start + num_latent] = model.config.latent_token_id
        rows.append(row)
    width = max(map(len, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        place = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
        ids[number, place], mask[number, place] = row, 1
    return ids, mask, rows


LAYOUTS = [(41, (5, 18, 37)), (30, (9,)), (23, ()), (33, (1, 20))]


def pairwise(combinations: list[tuple]) -> list[tuple]:
    """A small choice of them in which every pair of values of two axes occurs (greedy)."""

    def pairs(combination):
        return set(itertools.combinations(enumerate(combination), 2))

    missing, chosen = set().union(*map(pairs, combinations)), []
    while missing:
        chosen.append(max(combinations, key=lambda c: len(pairs(c) & missing)))
        missing -= pairs(chosen[-1])
    return chosen


def inputs_of(model, layout: str):
    """(keyword arguments, places of the sequences' tokens in reading order, the sequences)."""
    long = 2 if model.config.num_latent > 4 else 1  # blocks of 8 need room
    layouts = [
        (length * long, tuple(start * long for start in starts)) for length, starts in LAYOUTS
    ]
    if layout != "packed":
        ids, mask, rows = batch_of(model, layouts, layout)
        return {"input_ids": ids, "attention_mask": mask}, mask.bool(), rows
    ids, mask, rows = batch_of(model, layouts, "right")
    width = len(rows[0]) + len(rows[1]) + 3
    ids = torch.zeros(2, width, dtype=torch.long)
    segments = torch.zeros_like(ids)
    for number, (one, two) in enumerate((rows[:2], rows[2:])):
        first = number * 2  # the second row of the grid starts with padding
        for segment, row in ((1, one), (2, two)):
            ids[number, first : first + len(row)] = row
            segments[number, first : first + len(row)] = segment
            first += len(row)
    return {"input_ids": ids, "segment_ids": segments}, segments > 0, rows


def make(
    random_model, family_name="qwen2", num_latent=4, lora=False, checkpointing=False, **options
):
    model, _ = random_model(family_name, num_latent, **options)
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    if lora:
        torch.manual_seed(2)
        targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
        get_peft_model(
            model, LoraConfig(r=4, lora_alpha=1, target_modules=targets, init_lora_weights=False)
        )
        model.model.projector.requires_grad_(True)
    return model


def plain(model, rows, mode="published"):
    """(hidden states (N, H) of all tokens, all z (M, H)) of the sequences, each on its own."""
    model.eval()  # the layers of transformers refuse a cache under checkpointing
    states = [plain_latent_states(model, row, latent_gradient=mode) for row in rows]
    model.train()
    return torch.cat([s.hidden for s in states]), torch.cat([s.latents for s in states])


def check_cell(random_model, path, layout, lora, checkpointing, family_name, num_latent):
    """In float32 up to its rounding; in float64, where rounding hides no error, to 1e-11."""
    model = make(random_model, family_name, num_latent, lora, checkpointing)
    inputs, real, rows = inputs_of(model, layout)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-11)):
        model.to(dtype)
        with torch.no_grad():
            hidden, z = plain(model, rows)
        states = model.latent_states(**inputs, latents=z if path == "cached" else None)
        assert (states.latents - z).abs().max() <= tolerance
        limit = tolerance * max(1, hidden.abs().max())
        assert (states.hidden[real] - hidden).abs().max() <= limit
        if path == "segments":
            logits = model(**inputs).logits[real]
            expected = model.lm_head(hidden)
            limit = tolerance * max(1, expected.abs().max())
            assert (logits - expected).abs().max() <= limit
        states.hidden[real].sum().backward()


@pytest.mark.parametrize(tuple(AXES), pairwise(ALL))
def test_training_equals_the_plain_algorithm(
    random_model, path, layout, lora, checkpointing, family, num_latent
):
    check_cell(random_model, path, layout, lora, checkpointing, family, num_latent)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_decodes_with_the_z_of_the_plain_algorithm_and_of_training(random_model, family):
    model, tokenizer = random_model(family)
    engine = HFEngine(model.double(), tokenizer)
    codec = engine.codec
    prompts = [codec.prompt(text) for text in ("Peru currency", "Which languages has Chile")]
    opening = codec.separator + codec.latent_open
    requests = [TurnRequest(i, ids, [], opening) for i, ids in enumerate(prompts)]
    for request, output in zip(requests, engine.generate(requests, Sampling(24))):
        ids = torch.tensor([*request.ids, *output.ids])
        with torch.no_grad():
            z = plain_latent_states(model, ids).latents
            trained = model.latent_states(ids[None]).latents
        assert len(z) >= 4 and (trained - z).abs().max() <= 1e-11
        decoded = torch.stack([torch.as_tensor(one) for one in output.latents])
        assert (decoded - z).abs().max() <= 1e-6  # the engine keeps z in float32


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("published", [True, False, False]),
        ("full", [True, True, True]),
        ("projector_only", [False, False, False]),
    ],
)
def test_the_gradient_of_z_reaches_the_states_that_the_mode_names(mode, expected):
    assert [reaches_state(mode, step) for step in range(3)] == expected


def test_an_unknown_gradient_mode_is_an_error(random_model):
    with pytest.raises(ValueError, match="publishd"):
        random_model()[0].latent_states(torch.ones(1, 3).long(), latent_gradient="publishd")


@pytest.mark.full
@pytest.mark.parametrize(tuple(AXES), ALL)
def test_training_equals_the_plain_algorithm_in_every_combination(
    random_model, path, layout, lora, checkpointing, family, num_latent
):
    check_cell(random_model, path, layout, lora, checkpointing, family, num_latent)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", AXES["layout"])
def test_bf16_training_equals_the_plain_algorithm_within_its_rounding(random_model, layout):
    """bf16 carries 8 bits: z of norm √H agrees to 0.1 in its largest element after three blocks,
    0.02 on average."""
    model = make(random_model, checkpointing=True).to("cuda", torch.bfloat16)
    inputs, real, rows = inputs_of(model, layout)
    with torch.device("cuda"), torch.no_grad():
        _, z = plain(model, [row.cuda() for row in rows])
        inputs = {name: tensor.cuda() for name, tensor in inputs.items()}
        again = model.latent_states(**inputs).latents
    assert (again - z).abs().max() <= 0.1 and (again - z).abs().float().mean() <= 0.02


def gradients_of(model) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def same_gradients(one, other, tolerance=1e-5) -> None:
    assert one.keys() == other.keys()
    for name, gradient in other.items():
        limit = tolerance * gradient.norm() + tolerance / 100
        assert (one[name] - gradient).norm() <= limit, name


@pytest.mark.parametrize(
    ("mode", "family_name", "layout", "checkpointing", "lora"),
    [
        ("published", "qwen2", "packed", True, False),
        ("published", "qwen3", "left", False, True),
        ("full", "qwen2", "left", True, True),
        ("full", "qwen3", "packed", False, False),
        ("full", "qwen3", "right", True, True),
        ("projector_only", "qwen2", "packed", False, True),
        ("projector_only", "qwen3", "right", True, False),
        ("published", "qwen3", "packed", True, True),
        ("published", "llama", "packed", True, False),
        ("full", "llama", "left", False, True),
    ],
)
def test_gradients_equal_autograd_through_the_unrolled_model(
    random_model, mode, family_name, layout, checkpointing, lora
):
    model = make(random_model, family_name, lora=lora, checkpointing=checkpointing)
    inputs, real, rows = inputs_of(model, layout)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        model.to(dtype)
        hidden, _ = plain(model, rows, mode)
        weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(5))
        (hidden * weights).sum().backward()
        unrolled = gradients_of(model)
        states = model.latent_states(**inputs, latent_gradient=mode)
        (states.hidden[real] * weights).sum().backward()
        same_gradients(gradients_of(model), unrolled, tolerance)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_only_the_projector_trains_under_a_frozen_trunk(random_model, checkpointing):
    model = make(random_model, checkpointing=checkpointing)
    model.requires_grad_(False)
    model.model.projector.requires_grad_(True)
    inputs, real, rows = inputs_of(model, "packed")
    hidden, _ = plain(model, rows, "full")
    hidden.pow(3).sum().backward()
    unrolled = gradients_of(model)
    model.latent_states(**inputs, latent_gradient="full").hidden[real].pow(3).sum().backward()
    same_gradients(gradients_of(model), unrolled)


def test_a_second_backward_through_the_same_graph_gives_the_same_gradients(random_model):
    for checkpointing in (False, True):
        model = make(random_model, checkpointing=checkpointing)
        inputs, real, _ = inputs_of(model, "right")
        loss = model.latent_states(**inputs).hidden[real].pow(3).sum()
        loss.backward(retain_graph=True)
        first = gradients_of(model)
        loss.backward()
        same_gradients(gradients_of(model), first)


def test_checkpointing_drops_the_activations_of_text_and_computes_them_once_more(random_model):
    saved, runs = {}, {}
    for checkpointing in (False, True):
        model = make(random_model, checkpointing=checkpointing)
        inputs, real, _ = inputs_of(model, "right")
        counts = []
        for layer in model.model.layers:
            layer.mlp.register_forward_pre_hook(
                lambda module, args: counts.append(args[0].shape[1])
            )
        held, weights = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}

        def pack(x):
            held[x.untyped_storage().data_ptr()] = x
            return x

        with saved_tensors_hooks(pack, lambda x: x):
            loss = model.latent_states(**inputs).hidden[real].sum()
        saved[checkpointing] = sum(
            x.untyped_storage().nbytes() for at, x in held.items() if at not in weights
        )
        loss.backward()
        runs[checkpointing] = sum(counts)
    tokens, latents = int(real.sum()), 4 * sum(len(starts) for _, starts in LAYOUTS)
    assert runs[False] == 2 * tokens and runs[True] == 2 * tokens + 2 * (tokens - latents)
    assert saved[True] < 0.5 * saved[False]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_discarded_graph_leaves_nothing_behind(random_model, checkpointing):
    model = make(random_model, checkpointing=checkpointing)
    inputs, _, _ = inputs_of(model, "right")
    others = {id(x) for x in gc.get_objects() if type(x) is KeyValueStore}  # of other tests
    states = model.latent_states(**inputs)
    found = [x for x in gc.get_objects() if type(x) is KeyValueStore and id(x) not in others]
    stores = [weakref.ref(x) for x in found]
    del found
    assert len(stores) == len(model.model.layers)
    del states
    assert not any(store() for store in stores)


def test_reentrant_checkpointing_is_refused(random_model):
    model, _ = random_model()
    with pytest.raises(ValueError, match="use_reentrant"):
        model.gradient_checkpointing_enable({"use_reentrant": True})


def test_projector_dropout_is_drawn_once_under_checkpointing(random_model):
    gradients = []
    for checkpointing in (False, True):
        model = make(random_model, checkpointing=checkpointing, projector_dropout=0.3)
        inputs, real, _ = inputs_of(model, "right")
        torch.manual_seed(7)
        model.latent_states(**inputs).hidden[real].pow(3).sum().backward()
        gradients.append(gradients_of(model))
    same_gradients(*gradients)


def test_the_loss_of_a_packed_grid_is_that_of_its_sequences(random_model):
    model = make(random_model)
    latent = model.config.latent_token_id
    losses = []
    for layout in ("packed", "right"):
        inputs, real, _ = inputs_of(model, layout)
        labels = inputs["input_ids"].masked_fill(~real | (inputs["input_ids"] == latent), -100)
        losses.append(model(**inputs, labels=labels, num_items_in_batch=1).loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_without_blocks_the_model_is_its_base_and_k_may_be_zero(random_model):
    model, _ = random_model(num_latent=0)
    ids = torch.randint(3, 900, (2, 20))
    states = model.latent_states(ids)
    assert states.latents.shape == (0, model.config.hidden_size)
    expected = model.model(input_ids=ids).last_hidden_state
    assert (states.hidden - expected).abs().max() <= 1e-5
    assert torch.isfinite(model(ids, labels=ids).loss)
    ids[0, 5] = model.config.latent_token_id
    with pytest.raises(ValueError, match="K = 0"):
        model.latent_states(ids)


def test_the_largest_k(random_model):
    model, _ = random_model(num_latent=16)
    ids, mask, rows = batch_of(model, [(60, (5, 30)), (40, (8,))], "left")
    with torch.no_grad():
        _, z = plain(model, rows)
        assert (model.latent_states(ids, mask).latents - z).abs().max() <= 1e-5


def test_a_further_family_is_one_line():
    config_class, model_class = family(MistralConfig, MistralForCausalLM)
    torch.manual_seed(0)
    config = config_class(
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=None,
        num_latent=4,
        latent_token_id=990,
        initializer_range=0.1,
    )
    model = model_class(config).train()
    inputs, real, rows = inputs_of(model, "packed")
    with torch.no_grad():
        hidden, z = plain(model, rows)
        states = model.latent_states(**inputs)
    assert config_class.model_type == "latent_mistral"
    assert (states.latents - z).abs().max() <= 1e-5
    assert (states.hidden[real] - hidden).abs().max() <= 1e-5


def test_sliding_window_layers_are_refused():
    base = Qwen2Config(
        use_sliding_window=True, sliding_window=16, max_window_layers=1, num_hidden_layers=2
    ).to_dict()
    base.pop("model_type")
    with pytest.raises(ValueError, match="sliding-window"):
        LatentQwen2ForCausalLM(LatentQwen2Config(**base, latent_token_id=5))


def test_the_projector_stays_float32_and_its_gain_moves_under_a_bf16_trunk_with_lora(random_model):
    model, _ = random_model()
    before = {name: p.clone() for name, p in model.model.projector.named_parameters()}
    model = model.to(torch.bfloat16).train()
    for name, parameter in model.model.projector.named_parameters():
        assert parameter.dtype == torch.float32 and torch.equal(parameter, before[name])
    wrapped = get_peft_model(
        model, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    )
    model.model.projector.requires_grad_(True)
    weights = [p for p in wrapped.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-4, weight_decay=0.0)
    ids, mask, _ = batch_of(model, LAYOUTS, "right")
    for _ in range(2):
        wrapped(
            input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)
        ).loss.backward()
        optimizer.step()
    assert model.model.embed_tokens.weight.dtype == torch.bfloat16
    moved = (model.model.projector.norm.weight - before["norm.weight"]).abs()
    assert (moved > 1e-5).float().mean() > 0.9


def test_given_latents_reproduce_the_recomputed_hidden_states_in_one_forward(
    random_model, monkeypatch
):
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

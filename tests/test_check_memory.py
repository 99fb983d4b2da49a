"""What `--check` says of memory: the tracker against real steps, extrapolation, and the headers."""

from dataclasses import replace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from alar.model.families import LatentQwen2Config, LatentQwen2ForCausalLM
from alar.study.check import header, memory, sizes, steps
from alar.study.check.fake import PeakTracker, fake_tensors
from alar.study.params import load_experiment
from alar.train.config import Aasd
from alar.train.examples import Example
from alar.train.supervised import train

GIB = 2**30
RESERVED = 2047
SMALL = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4}
LARGER = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6}


def config_of(widths, num_latent=4):
    return LatentQwen2Config(
        **widths,
        vocab_size=RESERVED + 1,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        num_latent=num_latent,
        latent_token_id=RESERVED,
    )


def step_of(config, **changed):
    usual = {"dtype": "float32", "rows": 1, "tokens": 512, "scored": 128, "trainable": "full"}
    named = {"family": "qwen2", "config": config.to_json_string()}
    return steps.MeasuredStep(**named | usual | changed)


def example(tokens, scored, blocks, num_latent):
    """A row of equal parts, each with a latent block; loss on the last tokens of every part."""
    ids, labels = [], []
    for _ in range(blocks):
        part = tokens // blocks
        text = part - num_latent - scored // blocks
        ids += [5] * text + [RESERVED] * num_latent + [6] * (scored // blocks)
        labels += [-100] * (text + num_latent) + [6] * (scored // blocks)
    return Example(ids, labels, blocks)


def allocated(run) -> int:
    """Most bytes above those held before: every request to the CPU's allocator, temporary memory of
    kernels included, as PyTorch's profiler notes them.

    The resident size of the process would also count libraries, and pages that are freed and kept.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as noted:
        run()
    events = [e for e in noted.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()  # negative where memory is freed
        most = max(most, held)
    return most


@pytest.mark.parametrize(
    ("widths", "rows", "tokens", "kind"),
    [(SMALL, 8, 256, "full"), (LARGER, 2, 1024, "full"), (LARGER, 4, 768, "lora")],
    ids=["small-8x256", "larger-2x1024", "larger-lora-4x768"],
)
def test_the_predicted_peak_of_training_is_within_a_tenth_of_what_the_allocator_gives(
    widths, rows, tokens, kind
):
    config, scored = config_of(widths), tokens // 4
    predicted = steps.peak_bytes(
        step_of(config, rows=rows, tokens=tokens, scored=scored, trainable=kind, lora_rank=16)
    )
    torch.manual_seed(0)
    model = LatentQwen2ForCausalLM(config)
    before = sum(p.nbytes for p in model.parameters())
    section = Aasd(batch_size=rows, trainable=kind, lora_rank=16, epochs=1.0)
    examples = [example(tokens, scored, 2, 4) for _ in range(2 * rows)]  # two steps
    measured = before + allocated(lambda: train(model, examples, 0, section, log=lambda row: None))
    print(f"predicted {predicted:,} bytes, measured {measured:,}: {predicted / measured:.3f}")
    assert predicted == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    "changed",
    [{"trainable": "lora", "accumulates": True}, {"trainable": "full"}, {"processes": 4}],
    ids=["lora", "full", "sharded"],
)
def test_more_layers_and_rows_than_are_run_give_what_running_them_gives(changed):
    step = step_of(config_of(LARGER), rows=3, **changed)
    whole = max(steps._phases(step, step.layers))
    assert steps.peak_bytes(step) == pytest.approx(whole, rel=0.01)


def test_one_latent_position_stands_for_the_blocks_of_every_turn():
    wide = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 2}
    config, turns = config_of(wide), example(1200, 300, 6, 4)
    with fake_tensors():
        model = LatentQwen2ForCausalLM(config).train()
        tracker = PeakTracker(model)
        with tracker:
            model(
                input_ids=torch.tensor([turns.ids]), labels=torch.tensor([turns.labels])
            ).loss.backward()
    one = steps._phases(step_of(config, tokens=1200, scored=300), 2)[2]
    states = 8 * sum(p.numel() for p in model.parameters())  # AdamW's, which `one` holds too
    assert one - states == pytest.approx(tracker.bytes, rel=0.02)


def test_values_of_fake_tensors_read_as_zero_and_integers_stay_real():
    with fake_tensors():
        ids = torch.arange(6).view(2, 3)
        numbers = torch.ones(2, 3, 4)
        chosen = numbers[ids > 2]
        assert (ids > 2).sum().item() == 3 and chosen.shape == (3, 4)
        assert numbers.sum().item() == 0.0
        assert ids.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_sharding_divides_weights_gradients_and_states():
    # Few tokens, so that little else is held.
    step = step_of(config_of(LARGER), tokens=8, scored=2)
    alone, shared = (steps.peak_bytes(replace(step, processes=count)) for count in (1, 8))
    assert shared < alone / 2  # what is gathered for a layer stays whole


def test_a_plain_model_without_blocks_is_measured_too():
    assert steps.peak_bytes(step_of(config_of(SMALL, num_latent=0))) > 0


@pytest.mark.parametrize("single", [True, False])
def test_the_disk_holds_the_states_of_verl_and_its_best_export(repository, single):
    experiment = load_experiment(
        repository / "params" / "paper-search-3b.yaml",
        ["rl.trainer=single"] if single else [],
        root=repository,
    )
    size = sizes.size_of(experiment, "search")
    found = memory.written_bytes(experiment, size, memory.Machine(8, 80 * GIB))
    rl = experiment.rl
    trained = rl.lora_rank * size.lora_per_rank
    checkpoints = 5 * 2 * size.parameters
    if single:
        assert found == checkpoints + 12 * trained
    else:
        # Two states, each with all weights in float32, and one more export in bfloat16.
        expected = checkpoints + 2 * 4 * size.parameters + 2 * size.parameters
        assert found == pytest.approx(expected, rel=0.01) and found > 55 * GIB


def test_the_cache_of_the_engine_in_this_process_is_counted_up_to_its_budget(repository):
    file = repository / "params" / "paper-search-3b.yaml"
    experiment = load_experiment(file, ["rollout.engine=hf"], root=repository)
    size = sizes.size_of(experiment, "search")
    machine = memory.Machine(1, 80 * GIB)
    need = next(memory.needs(experiment, size, "search", frozenset({"02"}), machine))
    weights = 2 * size.parameters
    assert need.bytes == weights + int(0.8 * (78 * GIB - weights)) and need.fits


PAPER = ("paper-search-3b.yaml", "paper-search-7b.yaml", "paper-tool-4b.yaml")


@pytest.mark.parametrize(
    "name", [PAPER[0], *(pytest.param(name, marks=pytest.mark.full) for name in PAPER[1:])]
)
def test_the_table_in_a_header_is_what_the_check_finds_and_every_stage_fits(repository, name):
    file = repository / "params" / name
    text = file.read_text(encoding="utf-8")
    assert header.block(file) in text
    assert header.machines_of(text, name) == ["1x80", "8x80"]
    assert "!" not in header.BLOCK.search(text)[0].split("fit)")[1]

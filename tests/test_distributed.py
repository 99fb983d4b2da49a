"""FSDP over two gloo processes on the CPU equals one process, whatever blocks the rows of each rank
have.

One torchrun computes all cases (tests/distributed_ranks.py); a deadlock runs into its time limit.
"""

import copy
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import yaml
from transformers import Qwen2Config, Qwen2ForCausalLM

from alar.domains.search.questions import solved_questions
from alar.domains.tool import questions as tool_questions
from alar.domains.tool.protocol import TOOL
from alar.model import from_base, load, save
from alar.model.outline import outline
from alar.model.packing import pack, sequence_ids, with_filler
from alar.records import write_trajectories
from alar.rollout.codec import Codec
from alar.study import params
from alar.study import train_stage as train_command
from alar.study.stage import repository
from alar.study.train_stage import parameters_of_study
from alar.train.config import Aasd, Supervised
from alar.train.examples import Example, SimilarBatches, aasd_examples, collate, with_prompt
from alar.train.supervised import train
from tests.distributed_ranks import CASES, PAD, ROWS, TRAINING, example, training_examples
from tests.test_examples import expert_trajectory


def torchrun(*arguments, limit: int, processes: int = 2):
    """Several processes; their output is shown where they fail, and they are ended after `limit`
    seconds."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(repository()),
    }
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(processes),
        *map(str, arguments),
    ]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        cwd=repository(),
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            process.terminate()  # the agent then ends its workers
            output, _ = process.communicate()
            pytest.fail(f"no end after {limit} s:\n{output[-4000:]}")
    assert process.returncode == 0, output[-4000:]


@pytest.fixture(scope="module")
def ranks(random_model, tmp_path_factory):
    """(what each rank found, the folder with the model and what was trained)."""
    folder = tmp_path_factory.mktemp("ranks")
    save(*random_model(), folder / "model")
    torchrun("tests/distributed_ranks.py", folder, limit=240)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)], folder


@pytest.fixture(scope="module")
def wide_model(random_model, tokenizer, tmp_path_factory):
    """Folder of a latent model of 60 M parameters (240 MB), where no single one is large, and of a
    small one."""
    base = tmp_path_factory.mktemp("base")
    config = Qwen2Config(
        vocab_size=len(tokenizer) + 16,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=14,
        num_attention_heads=8,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(base)
    tokenizer.save_pretrained(base)
    folder = tmp_path_factory.mktemp("wide")
    save(*from_base(base), folder / "model")
    save(*random_model(), folder / "small")
    return folder


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="counts memory as Linux does"
)
def test_four_processes_load_a_model_in_little_more_memory_than_its_checkpoint(wide_model):
    torchrun("tests/loading_ranks.py", wide_model, limit=240, processes=4)
    found = [json.loads((wide_model / f"loading-{rank}.json").read_text()) for rank in range(4)]
    stored = (wide_model / "model" / "model.safetensors").stat().st_size
    assert stored > 2e8
    # Here the shards are host memory too. On GPUs they are not, and hardly anything is left.
    assert sum(one["loading"] for one in found) < 1.3 * stored, found
    # The first process gets the whole model, the others hold one parameter at a time.
    assert found[0]["equal"] and found[0]["collecting"] < 1.3 * stored, found
    assert max(one["collecting"] for one in found[1:]) < 0.3 * stored, found


def test_an_outline_of_a_checkpoint_in_several_files_names_what_is_missing(wide_model, tmp_path):
    model, tokenizer = load(wide_model / "model", device="cpu")
    model.save_pretrained(tmp_path, max_shard_size="50MB")
    tokenizer.save_pretrained(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 4
    empty, _, weights = outline(tmp_path, num_latent=4)
    assert empty.lm_head.weight is empty.model.embed_tokens.weight
    for name, parameter in empty.named_parameters():
        whole = model.get_parameter(name)
        assert torch.equal(weights.rows(parameter, 1, 3), whole[1:3]), name
        assert parameter.dtype == whole.dtype and parameter.shape == whole.shape
        assert parameter.untyped_storage().nbytes() == parameter.itemsize
    with pytest.raises(ValueError, match="K = 4, but K = 2"):
        outline(tmp_path, num_latent=2)
    index = tmp_path / "model.safetensors.index.json"
    known = json.loads(index.read_text())
    known["weight_map"] = {
        name: file for name, file in known["weight_map"].items() if "projector" not in name
    }
    index.write_text(json.dumps(known))
    with pytest.raises(ValueError, match="the projector missing"):
        outline(tmp_path)


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_equal_one_process(ranks, case):
    for found in ranks[0]:
        assert found[case]["loss"] == pytest.approx(found[case]["expected_loss"], rel=1e-6)
        assert found[case]["worst_gradient"] <= 1e-5, found[case]["worst_name"]
        assert not found[case]["without_gradient"]


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_make_the_same_calls_in_the_same_order(ranks, case):
    calls = [found[case]["calls"] for found in ranks[0]]
    assert calls[0] == calls[1] and calls[0].count("projector") == 3 * 4


def test_the_schedules_of_these_rows_differ_and_a_filler_row_makes_them_equal(random_model):
    model, _ = random_model()
    blocks = (model.config.latent_token_id, model.config.num_latent)
    tables = [
        collate([example(model, *row, seed=0) for row in part], PAD)["input_ids"] for part in ROWS
    ]
    schedules = [pack(table, sequence_ids(table), *blocks) for table in tables]
    assert [len(schedule.calls) for schedule in schedules] == [16, 1]
    for calls in (1, 5, 6, 15, 16):  # ended by a text, and by a block at the end of all rows
        filled = pack(*with_filler(tables[1], sequence_ids(tables[1]), *blocks, calls), *blocks)
        assert [call.step for call in filled.calls] == [
            call.step for call in schedules[0].calls[:calls]
        ]


def test_the_projector_stays_float32_where_the_trunk_computes_in_bfloat16(ranks):
    for found in ranks[0]:
        assert (
            found["half"]["layer"] == "torch.bfloat16"
            and found["half"]["projector"] == "torch.float32"
        )
        assert found["half"]["gradients"] == ["torch.float32"] and found["half"]["finite"]


@pytest.mark.parametrize("trainable", ["full", "lora"])
def test_a_bfloat16_checkpoint_trains_as_in_one_process_and_comes_back_in_bfloat16(
    ranks, trainable
):
    """Within the rounding of bfloat16 gradients: 2 %."""
    found, folder = ranks
    start, _ = load(folder / "model", dtype="bfloat16")
    config = Supervised(
        **TRAINING | {"batch_size": 2 * TRAINING["batch_size"]}, trainable=trainable
    )
    log = []
    model = train(copy.deepcopy(start), training_examples(start), PAD, config, log=log.append)
    for one, many in zip(log, found[0][f"half {trainable}"], strict=True):
        assert many["loss"] == pytest.approx(one["loss"], rel=0.02)
        assert many["gradient_norm"] == pytest.approx(one["gradient_norm"], rel=0.02)
    saved, _ = load(folder / "half" / f"trained-{trainable}")
    for name, weight in saved.named_parameters():
        assert weight.dtype == (torch.float32 if ".projector." in name else torch.bfloat16), name
    name = "model.layers.0.self_attn.q_proj.weight"
    before, one, many = (dict(m.named_parameters())[name].float() for m in (start, model, saved))
    assert torch.cosine_similarity((one - before).ravel(), (many - before).ravel(), dim=0) >= 0.9


@pytest.mark.parametrize("trainable", ["full", "lora"])
def test_training_equals_one_process_with_batches_twice_as_large(ranks, trainable):
    found, folder = ranks
    model, _ = load(folder / "model")
    log = []
    config = Supervised(
        **TRAINING | {"batch_size": 2 * TRAINING["batch_size"]}, trainable=trainable
    )
    start = copy.deepcopy(model)
    model = train(model, training_examples(model), PAD, config, log=log.append)
    assert found[1][f"train {trainable}"] == [] and len(log) == 2
    for one, many in zip(log, found[0][f"train {trainable}"], strict=True):
        assert many == pytest.approx(one, rel=1e-4)
    saved, _ = load(folder / f"trained-{trainable}")
    before, one, many = (dict(m.named_parameters()) for m in (start, model, saved))
    assert one.keys() == many.keys()
    moved = [name for name in one if not torch.equal(before[name], one[name])]
    assert "model.projector.up.weight" in moved
    for name in (
        one
        # Adam turns rounding into steps where a gradient is zero but for it, as that of the keys'
        # bias
    ):
        if "bias" not in name:
            assert (one[name] - many[name]).norm() <= 1e-2 * max(
                (one[name] - before[name]).norm(), 1e-6
            ), name


def test_a_process_leaves_while_a_thread_is_alive_and_loses_no_output():
    script = """
import threading, time
from alar.train.distributed import leave
threading.Thread(target=time.sleep, args=(600,)).start()  # the interpreter would wait for it
print("written", flush=False)
leave(3)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": str(repository())},
    )
    assert (done.returncode, done.stdout) == (3, "written\n")


def test_processes_share_every_batch_and_make_the_same_number_of_steps():
    examples = [Example([0] * (10 + n % 50), [1], n % 4) for n in range(333)]
    whole = list(SimilarBatches(examples, 16, seed=0))
    shares = [
        list(SimilarBatches(examples, 4, seed=0, rank=rank, processes=4)) for rank in range(4)
    ]
    assert {len(share) for share in shares} == {len(whole)}
    for batch, *parts in zip(whole, *shares, strict=True):
        assert (
            Counter(batch) == Counter(sum(parts, []))
            and max(map(len, parts)) - min(map(len, parts)) <= 1
        )
    few = [
        list(SimilarBatches(examples[:2], 1, seed=0, rank=rank, processes=3)) for rank in range(3)
    ]
    assert all(len(batch) == 1 for share in few for batch in share)


def test_processes_take_together_the_batch_of_one():
    one = Aasd(batch_size=1, gradient_accumulation=64)
    eight = train_command.of_one_process(one, 8)
    assert (eight.batch_size, eight.gradient_accumulation) == (1, 8)
    assert eight.optimiser_steps(76_000, 8) == one.optimiser_steps(76_000)
    with pytest.raises(ValueError, match="64, which does not divide over 6 processes"):
        train_command.of_one_process(one, 6)


def test_a_parameter_file_of_run_all_gives_the_command_what_it_gives_the_notebook(repository):
    file, notebook = (
        repository / "params" / "paper-search-3b.yaml",
        repository / "notebooks" / "03_aasd.ipynb",
    )
    values = parameters_of_study("03_aasd", str(file))
    assert values == params.flatten(params.load_experiment(file), notebook)
    assert (values["run_dir"], values["learning_rate"], values["trainable"]) == (
        "runs/paper-search-3b/search",
        1e-4,
        "lora",
    )


def test_the_command_trains_a_variant_in_its_own_folder(repository):
    file = str(repository / "params" / "paper-k.yaml")
    values = parameters_of_study("03_aasd", file, "k8")
    assert (values["run_dir"], values["model_num_latent"]) == ("runs/paper-k/k8/search", 8)
    with pytest.raises(params.ParameterError, match="name one of its variants, k1, k2, k4, k8"):
        parameters_of_study("03_aasd", file)


def test_the_command_trains_on_the_turns_of_its_domain(random_model, tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    model, tokenizer = random_model()
    save(model, tokenizer, run_dir / "01_latent_model" / "latent")
    codec = Codec.of(model, tokenizer, TOOL)
    solved = tool_questions.solved_questions("train", 6, 0)
    (run_dir / "02_teacher_traces").mkdir()
    traces = [expert_trajectory(codec, item) for item in solved]
    write_trajectories(run_dir / "02_teacher_traces" / "traces.jsonl", traces)
    file = tmp_path / "03_aasd.params.yaml"
    file.write_text(yaml.safe_dump({"run_dir": str(run_dir), "domain": "tool"}))
    seen = []
    monkeypatch.setattr(
        train_command, "train", lambda model, examples, *_, **__: seen.extend(examples) or model
    )
    assert train_command.main(["03_aasd", "-f", str(file)]) == 0
    asked = [with_prompt(trace, codec) for trace in traces]
    assert [example.ids for example in seen] == [
        example.ids for example in aasd_examples(asked, codec)
    ]
    assert "<call>" not in "".join(codec.text(example.ids) for example in seen)


def test_the_command_trains_a_stage_from_the_notebooks_parameters(random_model, tmp_path):
    run_dir = tmp_path / "run"
    save(*random_model(), run_dir / "01_latent_model" / "latent")
    solved = solved_questions("counterfactual-3", 8, 0)
    codec = Codec.of(*load(run_dir / "01_latent_model" / "latent"))
    (run_dir / "02_teacher_traces").mkdir()
    write_trajectories(
        run_dir / "02_teacher_traces" / "traces.jsonl",
        [expert_trajectory(codec, item) for item in solved],
    )
    file = tmp_path / "03_aasd.params.yaml"
    given = {"run_dir": str(run_dir), "epochs": 1.0, "batch_size": 2, "gradient_accumulation": 2}
    file.write_text(yaml.safe_dump(given))
    torchrun("-m", "alar.study.train_stage", "03_aasd", "-f", file, limit=240)
    trained, _ = load(run_dir / "03_aasd" / "checkpoint")
    start, _ = load(run_dir / "01_latent_model" / "latent")
    assert not torch.equal(trained.model.projector.up.weight, start.model.projector.up.weight)
    assert [
        json.loads(line)["step"]
        for line in (run_dir / "03_aasd" / "loss.jsonl").read_text().splitlines()
    ] == [1, 2]

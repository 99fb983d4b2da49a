"""verl's engine and our single-process trainer do the same mathematics: log-probs, gradient and one
step of plain SGD.

All cases run in one process of their own (tests/verl_engine.py): verl chooses its platform when it
is imported.
"""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from alar.model import from_base, save
from alar.study.stage import repository

CASES = ["full-recomputed", "full-cached", "lora-recomputed", "lora-cached"]


pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("verl") is None,
    reason="verl is not installed: python run_all.py --install engines",
)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verl")
    save(*from_base("embedded"), folder / "model")
    process = subprocess.run(
        [sys.executable, "tests/verl_engine.py", str(folder / "model"), str(folder)],
        cwd=repository(),
        capture_output=True,
        text=True,
        timeout=1200,
        env=os.environ
        | {"PYTHONPATH": str(repository()), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return json.loads((folder / "result.json").read_text())


@pytest.mark.timeout(1300)
@pytest.mark.parametrize("case", CASES)
def test_the_first_ratio_is_one(results, case):
    assert results[case]["ratio_error"] <= 2e-5
    assert results[case]["verl"]["actor/ratio_error"] <= 2e-5
    assert results[case]["latent_positions"] >= 8


@pytest.mark.timeout(1300)
@pytest.mark.parametrize("case", CASES)
def test_gradients_and_one_sgd_step_equal_the_single_process_trainer(results, case):
    found = results[case]
    assert found["same_weights_train"]
    assert found["projector_trains"] == case.endswith("recomputed")
    assert found["gradient"] <= 1e-5
    assert found["update"] <= 1e-5
    assert found["weights"] <= 1e-6


@pytest.mark.timeout(1300)
@pytest.mark.parametrize("case", CASES)
def test_logits_exist_of_a_few_scored_tokens_at_a_time(results, case):
    """In log-probs of policy and reference, entropies and the update."""
    found = results[case]
    assert found["most_logits"] == 16 and found["tokens"] > found["scored"] > 4 * 16
    low, high = found["entropy_where_scored"]
    assert 0 < low <= high <= 8.1 and found["entropy_elsewhere"] == 0  # ln 3056 = 8.02


@pytest.mark.timeout(1300)
@pytest.mark.parametrize("case", CASES)
def test_both_report_the_same_loss_and_kl(results, case):
    single, verl = results[case]["single"], results[case]["verl"]
    assert verl["actor/pg_loss"] == pytest.approx(single["loss"], rel=1e-4, abs=1e-6)
    assert (
        verl["kl_loss"] == pytest.approx(single["kl"], rel=1e-4, abs=1e-7) and single["kl"] > 1e-6
    )


@pytest.mark.timeout(1300)
@pytest.mark.parametrize("case", CASES)
def test_verl_s_checkpoint_resumes_exactly_and_ours_holds_the_whole_policy(results, case):
    assert results[case]["resumed_equal"] and results[case]["resumed_rate"]
    assert results[case]["exported"] <= 1e-6


@pytest.mark.timeout(1300)
@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_is_exported_without_a_second_model_on_the_gpu(results, case):
    assert not results[case]["exported_on_the_usual_device"]

"""Runs of small studies through papermill: caching, resuming, refusal, failure, publishing.

The studies are made of tiny notebooks and a tiny copy of the package, so that every promise can be
broken on purpose.
"""

import importlib
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from alar import files, store
from alar.study import provenance, receipts, side_by_side
from alar.study.execution import all_cores
from alar.study.params.sections import Experiment, defaults
from alar.study.runner import run_study
from alar.study.selection import Command
from alar.study.stage import INPUTS, RunError, Stage, in_repository, open_stage
from alar.study.terminal import Terminal, bar_line, duration

EPOCHS = defaults()["aasd"]["epochs"]

ROOT = Path(__file__).resolve().parent.parent
PARAMETERS = "run_dir = 'runs/by-hand/search'\ndomain = 'search'\nseed = 0\nreport_to = 'none'\n"

MODEL = [
    """
from alar.study.stage import open_stage
from alar.domains.search.words import WORD
stage = open_stage('01_latent_model', run_dir)
""",
    "(stage.folder / 'model.txt').write_text(f'{WORD} {num_latent} {seed}')",
]
AASD = [
    """
from alar.study.stage import open_stage, progress
stage = open_stage('03_aasd', run_dir, report_to=report_to)
model = stage.input('01_latent_model', 'model.txt').read_text()
""",
    """
for step in progress(range(3), 'AASD'):
    stage.log({'step': step, 'loss': 1 / (step + 1)}, file='loss.jsonl')
""",
    """
(stage.folder / 'checkpoint').mkdir()
(stage.folder / 'checkpoint' / 'w.txt').write_text(f'{model} {epochs}')
""",
]
RL = [
    """
import json, time
from alar.files import rewind_jsonl, write_json
from alar.study.stage import open_stage
stage = open_stage('05_ar_grpo', run_dir)
total = int((stage.input('03_aasd', 'checkpoint') / 'w.txt').read_text().split()[1])
""",
    """
state = stage.folder / 'resume' / 'state.json'
start = 0
if state.exists():
    start, total = json.loads(state.read_text())
rewind_jsonl(stage.folder / 'metrics.jsonl', keep=lambda row: row['step'] <= start)
(stage.run_dir / 'starts.txt').open('a').write(f'{start}\\n')
""",
    """
for step in range(start + 1, steps + 1):
    total = total * 31 % 1009
    time.sleep(0.05)
    stage.log({'step': step, 'total': total})
    write_json(state, [step, total])
""",
    "(stage.folder / 'result.txt').write_text(str(total))",
]


class Study:
    """A small repository with its own `alar`, notebooks and parameter file."""

    def __init__(self, root: Path, write_notebook):
        self.root, self.write_notebook = root, write_notebook
        self.run_dir = root / "runs" / "tiny" / "search"
        package = root / "alar"
        for room in ("", "study", "domains", "domains/search"):
            (package / room).mkdir(parents=True)
            (package / room / "__init__.py").write_text("")
        for name in ("files.py", "store.py", "study/stage.py"):
            shutil.copy(ROOT / "alar" / name, package / name)
        self.search = package / "domains" / "search"
        (self.search / "words.py").write_text(
            "from alar.domains.search.letters import LETTER\nWORD = LETTER * 3\n"
        )
        (self.search / "letters.py").write_text("LETTER = 'a'\n")
        (package / "unused.py").write_text("X = 1\n")
        (root / "run_all.py").write_text("")
        self.notebook("01_latent_model", "num_latent = 4", MODEL)
        self.notebook("03_aasd", f"epochs = {EPOCHS}", AASD)
        self.params("run: {name: tiny}")

    def notebook(self, stem, parameters, cells):
        return self.write_notebook(
            self.root / "notebooks" / f"{stem}.ipynb", PARAMETERS + parameters, *cells
        )

    def params(self, text):
        (self.root / "p.yaml").write_text(text)

    def run(self, *overrides, list_only=False, **request):
        """(exit code, what the terminal showed)"""
        shown = io.StringIO()
        request = {"domains": ("search",)} | request  # one domain is enough here
        code = run_study(
            Command(self.root / "p.yaml", overrides=overrides, **request),
            root=self.root,
            list_only=list_only,
            terminal=Terminal(Console(file=shown, width=200)),
        )
        return code, shown.getvalue()

    def ran(self, *overrides, **request):
        """The stages that a run executed, not reused."""
        code, shown = self.run(*overrides, **request)
        assert code == 0, shown
        return [
            line.split()[1]
            for line in shown.splitlines()
            if line.startswith("[") and " done in " in line
        ]

    def tables(self):
        """Content of everything the stages wrote, without the records of when."""
        return {
            p.relative_to(self.run_dir).as_posix(): p.read_text()
            for p in sorted(self.run_dir.glob("[0-9]*/**/*"))
            if p.is_file() and not p.name.startswith(".") and p.name != store.RECEIPT
        }


@pytest.fixture
def study(tmp_path, write_notebook):
    return Study(tmp_path / "repository", write_notebook)


def test_a_finished_stage_runs_again_only_when_what_it_depends_on_changes(study, tmp_path):
    both = ["01_latent_model", "03_aasd"]
    assert study.ran() == both
    assert study.ran() == []
    assert study.tables()["03_aasd/checkpoint/w.txt"] == f"aaa 4 0 {EPOCHS}"

    # Where and how a run happens changes nothing.
    shutil.copytree(study.run_dir, tmp_path / "elsewhere" / "search")
    assert (
        study.ran("run.threads=1", "run.report_to=tensorboard", run_dir=tmp_path / "elsewhere")
        == []
    )

    # A module that nothing imports, and text cells, change nothing.
    (study.root / "alar" / "unused.py").write_text("X = 2\n")
    notebook = study.root / "notebooks" / "01_latent_model.ipynb"
    notebook.write_text(notebook.read_text().replace("# 01_latent_model", "# Another title"))
    assert study.ran() == []

    # A stage's own parameter; the other stage does not have it.
    assert study.ran("aasd.epochs=2.0") == ["03_aasd"]
    # A module imported by an imported module; its consumer follows because the input's content
    # changed.
    (study.search / "letters.py").write_text("LETTER = 'b'\n")
    assert study.ran("aasd.epochs=2.0") == both
    # Code that changes but computes the same: the consumer keeps its result.
    (study.search / "letters.py").write_text("LETTER = chr(98)\n")
    assert study.ran("aasd.epochs=2.0") == ["01_latent_model"]
    # Altered and missing outputs.
    (study.run_dir / "01_latent_model" / "model.txt").write_text("zzz 9 9")
    assert study.ran("aasd.epochs=2.0") == ["01_latent_model"]
    (study.run_dir / "03_aasd" / "loss.jsonl").unlink()
    assert study.ran("aasd.epochs=2.0") == ["03_aasd"]
    assert study.ran("aasd.epochs=2.0", only=("03",), force=True) == ["03_aasd"]


def test_a_run_leaves_flat_parameters_provenance_and_a_summary(study):
    results = study.root / "summary.csv"
    results.write_text(
        "system,question_type,em,em_low,em_high,tokens,token_reduction,latent_share\n"
        "alar,all,0.913,0.9,0.925,98.2,0.436,0.75\nalar,bridge,0.5,0.4,0.6,1,1,1\n"
    )
    study.notebook(
        "06_benchmark_eval",
        "",
        [
            f"""
import shutil
from alar.study.stage import open_stage
stage = open_stage('06_benchmark_eval', run_dir)
stage.input('03_aasd', 'checkpoint')
shutil.copy({str(results)!r}, stage.folder)
"""
        ],
    )
    code, shown = study.run()
    assert code == 0
    assert (
        "91.3 [90.0, 92.5]" in shown
        and "43.6" in shown
        and "bridge" not in shown
        and "earlier" not in shown
    )
    assert (study.run_dir / "summary.txt").read_text().count("91.3") == 1
    flat = yaml.safe_load((study.run_dir / "executed" / "03_aasd.params.yaml").read_text())
    assert flat == {
        "run_dir": "runs/tiny/search",
        "domain": "search",
        "seed": 0,
        "report_to": "none",
        "epochs": EPOCHS,
    }
    provenance = json.loads((study.run_dir / "provenance.json").read_text())
    assert provenance["parameters"] == json.loads(
        json.dumps(Experiment(run={"name": "tiny", "domains": ["search"]}).model_dump())
    )
    assert set(provenance["stages"]) == {"01_latent_model", "03_aasd", "06_benchmark_eval"}
    assert provenance["hardware"]["cores"] >= 1 and provenance["packages"]["torch"]
    code, shown = study.run("aasd.epochs=7.0", only=("03",))  # and no evaluation of what it trained
    assert code == 0 and "of an earlier run: input 03_aasd/checkpoint changed" in " ".join(
        shown.split()
    )
    loss = provenance["stages"]["03_aasd"]["outputs"]["loss.jsonl"]
    assert loss["bytes"] == (study.run_dir / "03_aasd" / "loss.jsonl").stat().st_size


def test_a_stage_repeats_under_plain_papermill_from_its_flat_file(study):
    assert study.ran() == ["01_latent_model", "03_aasd"]
    before = study.tables()
    shutil.rmtree(study.run_dir / "03_aasd")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "papermill",
            "notebooks/03_aasd.ipynb",
            "out.ipynb",
            "-f",
            str(study.run_dir / "executed" / "03_aasd.params.yaml"),
        ],
        cwd=study.root,
        env={**os.environ, "PYTHONPATH": str(study.root)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert study.tables() == before


def test_a_failing_cell_ends_the_run_and_is_named(study):
    study.notebook(
        "03_aasd",
        f"epochs = {EPOCHS}",
        ["x = 1", "print('before')\nraise ValueError('no loss here')", "y = 2"],
    )
    study.notebook("04_mode_warmup", "", ["z = 3"])
    code, shown = study.run()
    assert code == 1
    assert "03_aasd.ipynb, code cell 4 of 5: ValueError: no loss here" in shown
    executed = study.run_dir / "executed" / "03_aasd.ipynb"
    assert str(executed) in shown and "before" in executed.read_text()
    assert (study.run_dir / "01_latent_model" / "model.txt").exists()
    assert not (study.run_dir / "executed" / "04_mode_warmup.ipynb").exists()
    study.notebook("03_aasd", f"epochs = {EPOCHS}", ["x = 1"])
    assert study.ran() == ["03_aasd", "04_mode_warmup"], "the first stage is kept"


def test_a_kernel_that_dies_is_named(study):
    study.notebook(
        "03_aasd", "", ["import os\nos.write(2, b'out of luck\\n')\nos.kill(os.getpid(), 9)"]
    )
    code, shown = study.run(only=("03",))
    assert code == 1
    assert "03_aasd.ipynb, code cell 3 of 3: the kernel died" in shown and "out of luck" in shown


def test_the_kernel_is_the_running_interpreter_whatever_kernels_the_user_has(
    study, tmp_path, monkeypatch
):
    decoy = tmp_path / "home" / "kernels" / "python3"
    decoy.mkdir(parents=True)
    (decoy / "kernel.json").write_text(
        json.dumps({"argv": ["false"], "display_name": "x", "language": "python"})
    )
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "home"))
    study.notebook(
        "03_aasd",
        "threads = 0",
        [
            """
import os, sys
from alar.study.stage import open_stage
stage = open_stage('03_aasd', run_dir)
(stage.folder / 'where.txt').write_text(f"{sys.executable} {os.environ['OMP_NUM_THREADS']}")
"""
        ],
    )
    assert study.ran("run.threads=3", only=("03",)) == ["03_aasd"]
    assert study.tables()["03_aasd/where.txt"] == f"{sys.executable} 3"


def test_one_stage_alone_asks_for_its_inputs_only_when_it_needs_them(study):
    study.notebook(
        "06_benchmark_eval",
        "checkpoint = ''",
        [
            """
from pathlib import Path
from alar.study.stage import open_stage
stage = open_stage('06_benchmark_eval', run_dir)
""",
            "folder = Path(checkpoint) if checkpoint else stage.input('03_aasd', 'checkpoint')",
            "(stage.folder / 'seen.txt').write_text((folder / 'w.txt').read_text())",
        ],
    )
    code, shown = study.run(only=("06",))
    assert code == 1
    assert (
        "03_aasd/checkpoint does not exist (stage 03_aasd has not run here); run it first:" in shown
    )
    assert "the same command with --from 03" in shown
    model = study.root / "model"
    model.mkdir()
    (model / "w.txt").write_text("mine")
    assert study.ran(f"eval.checkpoint={model}", only=("06",)) == ["06_benchmark_eval"]
    assert study.ran(f"eval.checkpoint={model}", only=("06",)) == []
    (model / "w.txt").write_text("new!")
    assert study.ran(f"eval.checkpoint={model}", only=("06",)) == ["06_benchmark_eval"], (
        "the folder's content counts"
    )


def test_a_file_among_names_counts_by_its_content(study):
    stage = """
from alar.study.stage import open_stage
stage = open_stage('06_benchmark_eval', run_dir)
"""
    study.notebook("06_benchmark_eval", "sets = ['real']", [stage])
    mine = study.root / "mine.jsonl"
    mine.write_text("a")
    asked = f"eval.sets=[real, {mine}]"
    assert (
        study.ran(asked, only=("06",)) == ["06_benchmark_eval"]
        and study.ran(asked, only=("06",)) == []
    )
    mine.write_text("b")
    assert study.ran(asked, only=("06",)) == ["06_benchmark_eval"]


def test_an_input_that_appears_later_runs_the_stage_again(study):
    study.notebook(
        "07_figures",
        "",
        [
            """
from alar.study.stage import open_stage
stage = open_stage('07_figures', run_dir)
path = stage.input('06_benchmark_eval', 'table.csv', required=False)
(stage.folder / 'f.txt').write_text(str(path))
"""
        ],
    )
    assert study.ran(only=("07",)) == ["07_figures"]
    assert study.ran(only=("07",)) == []
    (study.run_dir / "06_benchmark_eval").mkdir()
    (study.run_dir / "06_benchmark_eval" / "table.csv").write_text("x")
    assert study.ran(only=("07",)) == ["07_figures"]


def test_selection_listing_and_variants(study):
    study.params(
        "run: {name: tiny, jobs: 1}\nvariants:\n  two: {model: {num_latent: 2}}\n"
        "  three: {only: ['01'], model: {num_latent: 3}}"
    )
    _, shown = study.run(list_only=True)
    assert [line.split() for line in shown.splitlines() if "to run" in line] == [
        ["01_latent_model", "to", "run:", "not", "run", "yet"],
        ["03_aasd", "to", "run:", "not", "run", "yet"],
        ["01_latent_model", "to", "run:", "not", "run", "yet"],
    ]
    assert not (study.root / "runs" / "tiny" / "two" / "search" / "01_latent_model").exists(), (
        "listing runs nothing"
    )
    assert study.ran(only=("1",)) == ["01_latent_model", "01_latent_model"]
    assert (
        study.root / "runs" / "tiny" / "three" / "search" / "01_latent_model" / "model.txt"
    ).read_text() == "aaa 3 0"
    assert study.ran(start="03", variants=("two",)) == ["03_aasd"]
    code, shown = study.run(only=("09",))
    assert (
        code == 2 and "no notebook has the number '09'; there are 01_latent_model, 03_aasd" in shown
    )
    code, shown = study.run(domains=("serch",))
    assert code == 2 and "did you mean search?" in shown
    study.run(domains=("tool",), only=("01",), variants=("two",))
    assert (
        study.root / "runs" / "tiny" / "two" / "tool" / "01_latent_model" / "model.txt"
    ).is_file()
    code, shown = study.run(variants=("tow",))
    assert code == 2 and "did you mean two?" in shown


def test_several_variants_of_a_domain_are_not_published_over_each_other(study):
    study.params("run: {name: tiny, jobs: 1}\nvariants:\n  one: {}\n  two: {aasd: {epochs: 2.0}}")
    code, shown = study.run(publish=True)
    assert code == 2 and "--publish writes one run of each domain" in shown and "--variant" in shown
    assert not (study.root / "runs").exists(), "nothing has run"


def test_a_stage_that_another_variant_has_finished_is_taken_from_there(study):
    study.params("run: {name: tiny, jobs: 1}\nvariants:\n  one: {}\n  two: {aasd: {epochs: 2.0}}")
    assert study.ran() == ["01_latent_model", "03_aasd", "03_aasd"]
    one, two = (study.root / "runs" / "tiny" / name / "search" for name in ("one", "two"))
    assert (two / "01_latent_model" / "model.txt").read_text() == (
        one / "01_latent_model" / "model.txt"
    ).read_text()
    assert (two / "executed" / "01_latent_model.ipynb").exists() and study.ran() == []
    assert json.loads((two / "provenance.json").read_text())["stages"]["01_latent_model"][
        "made_with"
    ]
    # Altered outputs and --force are no reason to take anything.
    (one / "03_aasd" / "checkpoint" / "w.txt").write_text("altered")
    assert study.ran(f"aasd.epochs={EPOCHS}", variants=("two",)) == ["03_aasd"]
    assert study.ran(variants=("two",), only=("01",), force=True) == ["01_latent_model"]


def test_a_twin_has_the_same_code_parameters_and_inputs_and_whole_outputs(tmp_path):
    parts = {"parameter epochs": "2"}

    def variant(name, source):
        """A run folder whose stage 03 has asked for a file of stage 01."""
        folder, given = (
            tmp_path / name / "03_aasd",
            tmp_path / name / "01_latent_model" / "model.txt",
        )
        given.parent.mkdir(parents=True)
        given.write_text(source)
        receipts.begin(folder, parts)
        name = "01_latent_model/model.txt"
        files.write_json(folder / INPUTS, {name: store.content(given)})
        return folder

    done = variant("done", "same")
    (done / "w.txt").write_text("weights")
    receipts.finish(done, parts, 1.0)
    alike, other = variant("alike", "same"), variant("other", "another")
    assert receipts.twin(alike, [other, done], parts) == done, "one that has not finished is none"
    assert receipts.twin(other, [done], parts) is None, "other inputs"
    assert receipts.twin(alike, [done], {"parameter epochs": "3"}) is None
    assert receipts.twin(done, [done], parts) is None
    (done / "w.txt").write_text("altered")
    assert receipts.twin(alike, [done], parts) is None


def test_nothing_runs_when_a_name_is_wrong(study):
    study.params("run: {name: tiny}\naasd: {epochs: 2.0, lora_rank: 4}")
    code, shown = study.run()
    assert code == 2 and "aasd.lora_rank: no notebook declares it" in shown
    assert not study.run_dir.exists()


SCRIPT = """
import sys
from pathlib import Path
from alar.study.runner import run_study
from alar.study.selection import Command
root = Path(sys.argv[1])
command = Command(root / "p.yaml", overrides=tuple(sys.argv[2:]), domains=("search",))
sys.exit(run_study(command, root=root))
"""


def heed_interrupts():
    """A shell that runs the tests in the background lets its children ignore SIGINT; the run under
    test must not."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def start(study, *overrides):
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(study.root), *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=heed_interrupts,
        start_new_session=True,
    )


def wait_for(condition, seconds=120):
    end = time.time() + seconds
    while not condition():
        assert time.time() < end, "waited in vain"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("anywhere", "while_training"), [(1, 2), pytest.param(8, 4, marks=pytest.mark.full)]
)
def test_killed_at_any_moment_it_completes_without_redoing_a_finished_stage(
    study, tmp_path, write_notebook, anywhere, while_training
):
    study.notebook("05_ar_grpo", "steps = 25", RL)
    study.params("run: {name: tiny}\nrl: {steps: 25}")
    reference = Study(tmp_path / "reference", write_notebook)
    reference.notebook("05_ar_grpo", "steps = 25", RL)
    reference.params("run: {name: tiny}\nrl: {steps: 25}")
    assert len(reference.ran()) == 3

    seed = int(time.time())
    dice, finished = random.Random(seed), {}
    rl = study.run_dir / "05_ar_grpo" / "metrics.jsonl"
    for attempt in range(anywhere + while_training):
        process = start(study)
        if attempt >= anywhere:
            steps = rl.read_bytes().count(b"\n") if rl.exists() else 0
            wait_for(
                lambda: (
                    process.poll() is not None
                    or (rl.exists() and rl.read_bytes().count(b"\n") > steps + 7)
                )
            )
            time.sleep(dice.uniform(0, 0.2))
        else:
            time.sleep(dice.uniform(0.5, 6))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        for path in study.run_dir.glob("*/stage.json"):
            record = path.read_text()
            assert finished.setdefault(path, record) == record, f"{path} was redone (seed {seed})"
    process = start(study)
    shown, _ = process.communicate(timeout=120)
    assert process.returncode == 0, f"{shown} (seed {seed})"
    for path, record in finished.items():
        assert path.read_text() == record, f"{path} was redone (seed {seed})"
    assert study.tables() == reference.tables(), f"seed {seed}"
    starts = (study.run_dir / "starts.txt").read_text().split()
    assert len(starts) == 1 or any(int(step) > 0 for step in starts), (
        f"training began anew each time: {starts} (seed {seed})"
    )


def test_a_second_run_in_the_same_folder_is_refused_by_name_and_process(study):
    study.notebook("01_latent_model", "num_latent = 4", ["import time\ntime.sleep(60)"])
    first = start(study)
    try:
        wait_for(lambda: (study.run_dir / ".locks" / "run.json").exists())
        second = start(study)
        shown, _ = second.communicate(timeout=60)
        assert second.returncode == 1
        assert f"{study.run_dir}: another run is at work here (process {first.pid}" in shown
        wait_for(lambda: (study.run_dir / "executed" / "01_latent_model.ipynb").exists())
        first.send_signal(signal.SIGINT)
        shown, _ = first.communicate(timeout=30)
        assert first.returncode == 130 and "Interrupted. Finished stages are kept" in shown
    finally:
        first.kill()


PAIR = "run: {name: tiny}\nvariants:\n  one: {aasd: {epochs: 1.0}}\n  two: {aasd: {epochs: 2.0}}\n"
MEET = """
import time
from pathlib import Path
meeting = Path(stage.run_dir).parents[1] / 'meeting'
meeting.mkdir(exist_ok=True)
(meeting / str(epochs)).touch()
end = time.time() + 60
while len(list(meeting.iterdir())) < 2:
    assert time.time() < end, 'nobody came'
    time.sleep(0.05)
"""
STAY = """
import os, time
(stage.folder / f'{os.getpid()}.pid').touch()
if not (stage.run_dir / 'go').exists():
    time.sleep(100)
"""


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr("alar.study.runner.all_cores", lambda: 2)
    monkeypatch.setattr("alar.study.provenance.nvidia_gpus", list)


def test_variants_run_side_by_side_and_share_what_is_equal(study, two_cores):
    study.notebook(
        "03_aasd", f"epochs = {EPOCHS}", [*AASD, MEET]
    )  # ends only if the other one is there at the same time
    study.params(PAIR)
    code, shown = study.run()
    assert code == 0, shown
    for variant, epochs in (("one", 1.0), ("two", 2.0)):
        home = study.root / "runs" / "tiny" / variant / "search"
        assert (home / "03_aasd" / "checkpoint" / "w.txt").read_text() == f"aaa 4 0 {epochs}"
        assert "03_aasd" in (home / "summary.txt").read_text()
        assert f"tiny · {variant} · search │ [2/2] 03_aasd  done in" in shown
    assert shown.count("01_latent_model  done in") == 1, "the shared stage is computed once"
    assert shown.count("01_latent_model  finished earlier") == 1
    assert shown.count("Time per stage") == 2 and shown.rindex(
        "│ [2/2] 03_aasd  done"
    ) < shown.index("Time per stage")
    code, shown = study.run()
    assert code == 0 and "done in" not in shown


def test_a_notebook_that_gathers_comes_after_the_variants_that_it_reads(study, two_cores):
    study.notebook(
        "17_ablations",
        "compared = []",
        [
            """
import os
from pathlib import Path
from alar.study.stage import open_stage
stage = open_stage('17_ablations', run_dir)
assert (stage.run_dir.parents[1] / 'one' / 'search' / '03_aasd' / 'stage.json').exists()
"""
        ],
    )
    slow = "import time\ntime.sleep(2)"
    study.notebook("03_aasd", f"epochs = {EPOCHS}", [*AASD, slow])
    study.params(
        "run: {name: tiny}\nvariants:\n  table: {only: ['17']}\n  one: {only: ['01', '03']}\n"
    )
    code, shown = study.run()
    assert code == 0, shown


def test_one_that_fails_does_not_end_the_one_beside_it(study, two_cores):
    study.notebook(
        "03_aasd", f"epochs = {EPOCHS}", [*AASD, MEET, "assert epochs != 1.0, 'out of luck'"]
    )
    study.params(PAIR)
    code, shown = study.run()
    assert code == 1
    assert re.search(
        r"tiny · one · search │ 03_aasd.ipynb, code cell \d+ of \d+: AssertionError: out of luck",
        shown,
    ), shown
    assert "tiny · two · search │ [2/2] 03_aasd  done in" in shown
    assert "tiny · one · search ended with exit code 1" in shown


@pytest.mark.skipif(all_cores() < 2 or provenance.nvidia_gpus(), reason="here, one run at a time")
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.full)]
)
def test_runs_side_by_side_end_with_the_one_that_started_them(study, number):
    study.notebook("03_aasd", f"epochs = {EPOCHS}", [*AASD, STAY])
    study.params(PAIR)
    homes = [study.root / "runs" / "tiny" / variant / "search" for variant in ("one", "two")]

    def kernels():
        return [int(path.stem) for home in homes for path in home.glob("03_aasd/*.pid")]

    process = start(study)
    try:
        wait_for(lambda: len(kernels()) == 2)
        # Ctrl-C in a terminal reaches the whole group.
        os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
        process.communicate(timeout=30)
        assert process.returncode == (130 if number == signal.SIGINT else -9)
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in kernels()), seconds=20)
    finally:
        process.kill()
    for home in homes:
        (home / "go").touch()
    process = start(study)
    shown, _ = process.communicate(timeout=120)
    assert process.returncode == 0, shown
    assert shown.count("01_latent_model  finished earlier") == 2


def test_an_interrupted_stage_resumes_only_under_the_same_conditions(tmp_path):
    folder, given = tmp_path / "05_ar_grpo", tmp_path / "03_aasd" / "w.txt"
    before, after = {"parameter steps": "25"}, {"parameter steps": "30"}
    files.write_json(given, 1)

    def interrupted():
        receipts.begin(folder, before)
        Stage("05_ar_grpo", tmp_path, "none").input("03_aasd", "w.txt")
        files.write_json(folder / "resume" / "state.json", 7)

    interrupted()
    assert receipts.begin(folder, before) and (folder / "resume" / "state.json").exists()
    assert not receipts.begin(folder, after) and not (folder / "resume").exists()
    interrupted()
    assert not receipts.begin(folder, before, fresh=True) and not (folder / "resume").exists()
    interrupted()
    files.write_json(given, 2)
    assert not receipts.begin(folder, before), "another input"


def test_an_interrupted_stage_is_no_input(tmp_path):
    receipts.begin(tmp_path / "02_teacher_traces", {})
    (tmp_path / "02_teacher_traces" / "traces.jsonl").write_text("{}\n")
    with pytest.raises(RunError, match="stage 02_teacher_traces was interrupted"):
        Stage("03_aasd", tmp_path, "none").input("02_teacher_traces", "traces.jsonl")


def test_a_half_written_result_is_never_taken_for_a_whole_one(tmp_path):
    kept = store.Store(tmp_path)
    folder, file = store.key("model", {"step": 1}), store.key("rows.jsonl", {"step": 1})
    with pytest.raises(OSError), kept.writing(folder) as aside:
        aside.mkdir()
        (aside / "x").write_text("half")
        raise OSError
    with pytest.raises(OSError), kept.writing(file) as aside:
        aside.write_text("half")
        raise OSError
    assert kept.get(folder) is None and kept.get(file) is None and not list(tmp_path.iterdir())
    (tmp_path / f".{folder}.{os.getpid()}.tmp").mkdir()  # of a killed process with this number

    def make(path):
        path.mkdir()
        (path / "x").write_text("whole")

    assert (kept.once(folder, make) / "x").read_text() == "whole"
    assert kept.once(folder, None) == tmp_path / folder, "what is there is not made again"
    assert [path.name for path in tmp_path.iterdir()] == [folder]


def test_keys_follow_the_ingredients_and_content_follows_the_files(tmp_path):
    assert store.key("a.jsonl", {"x": 1, "y": 2}) == store.key("a.jsonl", {"y": 2, "x": 1})
    assert store.key("a.jsonl", {"x": 1}) != store.key("a.jsonl", {"x": 2})
    folder = tmp_path / "checkpoint"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "w.bin").write_text("1")
    before = store.content(folder)
    for note in ("stage.json", ".inputs.json", "resume"):
        (folder / note).write_text("notes of a stage are no content")
    assert store.content(folder) == before
    (folder / "deep" / "w.bin").write_text("22")
    assert store.content(folder) != before
    assert store.content(shutil.copytree(folder, tmp_path / "copy")) == store.content(folder)


def test_modules_count_however_they_are_imported(tmp_path):
    package = tmp_path / "alar"
    for name, text in {
        "__init__.py": "",
        "a.py": "import alar.b",
        "b.py": "def f():\n    from alar import c",
        "c.py": "from .deep import d",
        "deep/__init__.py": "from . import e",
        "deep/d.py": "from ..f import x",
        "deep/e.py": "LAZY = 'alar.g'",
        "f.py": "x = 1",
        "g.py": "",
        "unused.py": "",
        "deep/data/weights.bin": "1",
        "deep/__pycache__/d.pyc": "2",
    }.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    found = store.closure({"alar", "alar.a", "torch", "alar.a.some_function"}, package)
    assert set(found) == {
        "alar",
        "alar.a",
        "alar.b",
        "alar.c",
        "alar.deep",
        "alar.deep.d",
        "alar.deep.e",
        "alar.f",
        "alar.g",
        "alar.deep: data/weights.bin",
    }


def test_truncated_and_broken_lines_are_errors_that_name_the_line(tmp_path):
    path = tmp_path / "traces.jsonl"
    files.write_jsonl(path, [{"a": 1}, {"a": 2}])
    assert files.read_jsonl(path) == [{"a": 1}, {"a": 2}]
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(
        files.TruncatedFile, match=r"traces.jsonl, line 2: the last line is cut off"
    ):
        files.read_jsonl(path)
    path.write_text('{"a": 1}\n{"a":\n{"a": 3}\n')
    with pytest.raises(files.TruncatedFile, match=r"traces.jsonl, line 2: is not JSON"):
        files.read_jsonl(path)


def test_rewinding_drops_what_came_after_the_saved_state(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    assert files.rewind_jsonl(path, keep=lambda row: row["step"] <= 2) == 2
    assert files.read_jsonl(path) == [{"step": 1}, {"step": 2}]
    assert files.rewind_jsonl(tmp_path / "new.jsonl", keep=lambda row: True) == 0


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "table.jsonl"
    files.write_jsonl(path, [{"a": 1}])
    with pytest.raises(TypeError):
        files.write_jsonl(path, [{"a": 2}, {"a": object()}])
    assert files.read_jsonl(path) == [{"a": 1}]
    assert list(tmp_path.iterdir()) == [path]


def test_metrics_reach_tensorboard(tmp_path):
    stage = open_stage("03_aasd", tmp_path, report_to="tensorboard")
    stage.log({"step": 3, "loss": 0.25, "note": "text"}, file="loss.jsonl")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard" / "03_aasd"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss/loss")] == [(3, 0.25)]


def test_wandb_missing_is_an_error_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(RunError, match="pip install wandb"):
        open_stage("03_aasd", tmp_path, report_to="wandb").log({"step": 1, "loss": 0.5})


def test_progress_shows_the_time_left():
    row = {
        "bar": "AASD",
        "done": 25,
        "total": 100,
        "started": 1000.0,
        "note": "loss 0.41",
        "closed": False,
    }
    assert bar_line(row, now=1010.0, width=4) == "AASD  █░░░  25/100  30 s left  loss 0.41"
    assert [duration(s) for s in (4.4, 125, 3725)] == ["4 s", "2:05", "1:02:05"]


def test_relative_run_folders_belong_to_the_repository(tmp_path, monkeypatch):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "alar").mkdir()
    (tmp_path / "run_all.py").touch()
    monkeypatch.chdir(tmp_path / "notebooks")
    assert in_repository("runs/by-hand/search") == tmp_path / "runs" / "by-hand" / "search"


def test_publishing_writes_figures_and_small_pages(study, tmp_path):
    study.notebook(
        "07_figures",
        "",
        [
            """
from alar.study.stage import open_stage
stage = open_stage('07_figures', run_dir)
for name in ('a.png', 'a.svg', 'a.csv', 'note.txt'):
    (stage.folder / name).write_text('x')
""",
            """
import matplotlib.pyplot as plt
print(stage.folder)
plt.figure(figsize=(20, 5), dpi=100)
plt.plot([1, 2]);
""",
        ],
    )
    study.notebook(
        "08_latent_inspector",
        "",
        [
            """
from alar.study.stage import open_stage
stage = open_stage('08_latent_inspector', run_dir)
(stage.folder / 'z.csv').write_text('x')
(stage.folder / 'report.html').write_text('x')
"""
        ],
    )
    (study.root / "figures").mkdir()
    (study.root / "figures" / "old.png").write_text("gone")
    elsewhere = {"publish": True, "run_dir": tmp_path / "elsewhere"}
    code, shown = study.run(**elsewhere)
    assert code == 0, shown
    assert sorted(p.name for p in (study.root / "figures").iterdir()) == [
        "a.csv",
        "a.png",
        "a.svg",
        "z.csv",
    ]
    pages = sorted((study.root / "notebooks" / "executed").iterdir())
    assert [p.name[:2] for p in pages] == ["01", "03", "07", "08", "la"], (
        "the last one is the report"
    )
    text = pages[2].read_text()
    assert "data:image/png;base64" in text and "<title>07_figures</title>" in text
    assert (
        str(tmp_path) not in "".join(p.read_text() for p in pages)
        and "runs/elsewhere/search/07_figures" in text
    )
    before = [p.read_bytes() for p in pages]
    assert study.run(**elsewhere)[0] == 0
    assert [p.read_bytes() for p in pages] == before, "publishing twice changes nothing"


def test_a_notebook_on_request_is_published_beside_the_study_and_leaves_it_alone(study):
    from alar.study import publish

    study.write_notebook(study.run_dir / "executed" / "17_ablations.ipynb", PARAMETERS)
    drawn = study.run_dir / "17_ablations"
    drawn.mkdir()
    for name in ("ablations_figure.png", "ablations_figure.csv", "types.csv"):
        (drawn / name).write_text("x")
    mine = study.root / "figures"
    (mine / "17_ablations").mkdir(parents=True)
    (mine / "17_ablations" / "old.svg").write_text("gone")
    (mine / "stages.png").write_text("the study's")
    publish.publish([("search", study.run_dir)], study.root)
    assert sorted(p.name for p in mine.iterdir()) == ["17_ablations", "stages.png"]
    assert sorted(p.name for p in (mine / "17_ablations").iterdir()) == [
        "ablations_figure.csv",
        "ablations_figure.png",
    ]
    assert [p.name for p in (study.root / "notebooks" / "executed").iterdir()] == [
        "17_ablations.html"
    ]


def test_the_compared_methods_run_in_both_domains_and_a_benchmark_in_one(study):
    for name in ("09_benchmarks", "12_tokenskip"):
        study.notebook(name, "", ["1"])
    both = {"domains": ("search", "tool"), "only": ("09", "12")}
    assert sorted(study.ran("run.jobs=1", **both)) == [
        "09_benchmarks",
        "12_tokenskip",
        "12_tokenskip",
    ]
    code, shown = study.run(domains=("tool",), only=("09",))
    assert code == 2 and "run in the search domain: choose --domain search" in shown


def test_a_run_without_figures_says_how_to_draw_them(study):
    from alar.study import publish

    (study.run_dir / "08_latent_inspector").mkdir(parents=True)
    (study.run_dir / "08_latent_inspector" / "lens.png").write_text(
        "the study's, which notebook 07 has not drawn"
    )
    with pytest.raises(RunError, match="run stage 07 first"):
        publish.publish([("search", study.run_dir)], study.root)


def test_publishing_too_much_is_refused(study, monkeypatch):
    from alar.study import publish

    monkeypatch.setattr(publish, "LIMIT", 1000)
    study.write_notebook(study.run_dir / "executed" / "03_aasd.ipynb", PARAMETERS)
    with pytest.raises(RunError, match="so nothing was published.*03_aasd.html"):
        publish.publish([("search", study.run_dir)], study.root)
    assert not (study.root / "figures").exists()


PART = """
import time

def counts(terminal):
    terminal.stage_starts(1, 2, "03_aasd", "not run yet")
    terminal.cell(4, 9)
    row = {"bar": "steps", "done": 5, "total": 10, "note": "", "closed": False}
    terminal.bar(row | {"started": time.time() - 10})
    for _ in range(10):
        terminal.tick()
        time.sleep(0.05)
    terminal.stage_ends()
    return 0
"""


def test_a_terminal_shows_what_each_of_two_parts_is_doing(tmp_path, monkeypatch):
    (tmp_path / "part_of_a_test.py").write_text(PART)
    monkeypatch.syspath_prepend(tmp_path)  # their processes get this path
    counts = importlib.import_module("part_of_a_test").counts
    shown = io.StringIO()
    terminal = Terminal(Console(file=shown, width=150, force_terminal=True))
    assert side_by_side.run_beside({"search": counts, "tool": counts}, 2, terminal) == {
        "search": 0,
        "tool": 0,
    }
    for name in ("search", "tool"):
        state = rf"{name} │ \[1/2\] 03_aasd  cell 4/9, \d+ s so far, steps  5/10  \d+ s left"
        assert re.search(state, shown.getvalue()), shown.getvalue()
        assert f"{name} │ [1/2] 03_aasd  done in" in shown.getvalue()

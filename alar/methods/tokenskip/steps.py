"""Steps of the notebook, each with a file of its own: taken over where they are finished, repeated
where they are not.

    steps = Steps(stage, settings, skip=["collect", "compress"],
    reuse_from="runs/laptop/search/12_tokenskip") collected = steps.run("collect", lambda path:
    write_trajectories(path, collect()))

A step in `skip` is copied from `reuse_from`, the folder of an earlier run of the notebook. Without
that, a stage that was interrupted goes on behind its last finished step, if `settings` are the
same.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from alar.files import write_json
from alar.study.stage import Stage, resolve

FILES = {
    "collect": "collected.jsonl",
    "compress": "compressed.jsonl",
    "prepare": "examples.jsonl",
    "train": "checkpoint",
}
RECORD = "steps.json"


class Steps:
    """`seconds` holds what each step took, in the run that did it. Raises ValueError for names that
    are no steps, and for `skip` without a folder; FileNotFoundError where that folder lacks a step.
    """

    def __init__(
        self,
        stage: Stage,
        settings: Mapping[str, Any],
        *,
        skip: Sequence[str] = (),
        reuse_from: str | Path = "",
    ):
        unknown = sorted(set(skip) - FILES.keys())
        if unknown:
            raise ValueError(
                f"tokenskip.skip: {', '.join(unknown)} is no step; the steps are {', '.join(FILES)}"
            )
        if skip and not reuse_from:
            raise ValueError(
                "tokenskip.skip names finished steps: say in tokenskip.reuse_from which folder"
                " holds them"
            )
        self.stage, self.skip, self.source = (
            stage,
            set(skip),
            resolve(reuse_from) if reuse_from else None,
        )
        taken = {"skip": sorted(self.skip), "reuse_from": str(self.source or "")}
        self.settings = json.loads(json.dumps({**settings, **taken}))
        self.seconds: dict[str, float] = {}
        found = stage.resume_from()
        before = json.loads((found[0] / RECORD).read_text(encoding="utf-8")) if found else {}
        self.finished = before["seconds"] if before.get("settings") == self.settings else {}

    def run(self, name: str, make: Callable[[Path], Any]) -> Path:
        """The step's file or folder; `make(path)` writes it, in one step, if it has to be made."""
        path = self.stage.folder / FILES[name]
        if name in self.skip:
            self._copy(name, path)
            print(f"{name}: taken from {self.source.name}")
        elif name in self.finished and path.exists():
            self.seconds[name] = self.finished[name]
            print(f"{name}: finished before the interruption")
        else:
            self.finished = {}  # what follows from this step is made anew too
            started = time.perf_counter()
            make(path)
            self.seconds[name] = time.perf_counter() - started
        record = {"settings": self.settings, "seconds": self.seconds}
        self.stage.save_resume(
            lambda folder: write_json(folder / RECORD, record), len(self.seconds)
        )
        write_json(self.stage.folder / RECORD, record)
        return path

    def _copy(self, name: str, path: Path) -> None:
        origin = self.source / FILES[name]
        if not origin.exists():
            raise FileNotFoundError(
                f"{origin} does not exist, so step {name} cannot be skipped; take it out of"
                " tokenskip.skip"
            )
        if origin.resolve() != path.resolve():
            if origin.is_dir():
                shutil.rmtree(path, ignore_errors=True)
                shutil.copytree(origin, path)
            else:
                shutil.copyfile(origin, path)
        record = self.source / RECORD
        known = json.loads(record.read_text(encoding="utf-8"))["seconds"] if record.exists() else {}
        self.seconds[name] = known.get(name, float("nan"))

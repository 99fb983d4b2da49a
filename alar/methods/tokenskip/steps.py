"""Steps of notebook 12, each with a file of its own: a finished step is not done again.

    steps = Steps(stage, settings, skip=["collect", "compress"],
                  reuse_from="runs/laptop/search/12_tokenskip")
    collected = steps.run("collect", lambda path: write_trajectories(path, collect()))

A step in `skip` is copied from `reuse_from`, the folder of an earlier run of the notebook. For the
other steps, an interrupted stage goes on after its last finished step if `settings` are the same.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from alar.files import write_json
from alar.store import RESUME, Store, content, key, remove, whole

FILES = {  # step → what it leaves in the stage's folder
    "collect": "collected.jsonl",
    "compress": "compressed.jsonl",
    "prepare": "examples.jsonl",
    "train": "checkpoint",
}
SECONDS = "steps.json"


class Steps:
    """`seconds` holds what each step took, in the run that did it.

    stage: the notebook's `alar.study.stage.Stage`. Raises ValueError for names that are no steps,
    and for `skip` without a folder; FileNotFoundError where that folder lacks a step.
    """

    def __init__(
        self,
        stage,
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
        self.folder, self.skip, self.source = stage.folder, set(skip), Path(reuse_from)
        # What is kept here lets the stage go on after a kill, and is removed when it is finished.
        self.store = Store(stage.folder / RESUME)
        # All that decides the next step.
        self.ingredients = [dict(settings), sorted(self.skip), str(reuse_from)]
        self.seconds: dict[str, float] = {}

    def run(self, name: str, make: Callable[[Path], Any]) -> Path:
        """The step's file or folder; `make(path)` writes it if it has to be made."""
        path = self.folder / FILES[name]
        # The steps before belong to the ingredients: what follows from another one is made anew.
        receipt = key(f"{name}.json", self.ingredients)
        finished = self.store.get(receipt)
        note = json.loads(finished.read_text(encoding="utf-8")) if finished else {}
        if name in self.skip:
            self._copy(name, path)
            print(f"{name}: taken from {self.source.name}")
        # The content too: somebody may have changed the file.
        elif note and path.exists() and content(path) == note["content"]:
            self.seconds[name] = note["seconds"]
            print(f"{name}: finished before the interruption")
        else:
            started = time.perf_counter()
            with whole(path) as aside:  # a kill leaves no half-written file
                make(aside)
            self.seconds[name] = time.perf_counter() - started
        made = content(path)
        self.ingredients.append(made)
        with self.store.writing(receipt) as aside:
            write_json(aside, {"content": made, "seconds": self.seconds[name]})
        write_json(self.folder / SECONDS, {"seconds": self.seconds})
        return path

    def _copy(self, name: str, path: Path) -> None:
        origin = self.source / FILES[name]
        if not origin.exists():
            raise FileNotFoundError(
                f"{origin} does not exist, so step {name} cannot be skipped; take it out of"
                " tokenskip.skip"
            )
        if origin.resolve() != path.resolve():  # a folder may be its own source
            remove(path)
            if origin.is_dir():
                shutil.copytree(origin, path)
            else:
                shutil.copyfile(origin, path)
        noted = self.source / SECONDS
        # Step → seconds.
        known = json.loads(noted.read_text(encoding="utf-8"))["seconds"] if noted.exists() else {}
        self.seconds[name] = known.get(name, float("nan"))

"""What a notebook needs of its run: a folder, the earlier stages' files, a log, a progress bar.

    stage = open_stage("03_aasd", run_dir, report_to=report_to)
    traces = stage.input("02_teacher_traces", "traces.jsonl")
    with stage.training("AASD, steps", steps) as report:
        report({"step": step, "loss": loss})

The same calls work by hand in JupyterLab, under papermill and under `run_all.py`. `input` notes the
content hash of each file that it returns in `.inputs.json`. These notes, the code and the
parameters decide whether a finished stage may be reused (`alar.study.receipts`). A stage that can
resume keeps its state in its subfolder `resume`. Every other stage starts from an empty folder.
"""

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import filelock

from alar.files import append_jsonl, write_json
from alar.store import RECEIPT, RESUME, content

# The runner sets this variable for its kernels; it is not a parameter. It names the file to which
# `progress` reports instead of drawing a bar.
PROGRESS_CHANNEL = "ALAR_PROGRESS"
# Hidden, so that they are no part of a stage's content (`alar.store.file_names`).
UNFINISHED, INPUTS, LOCKS = ".unfinished.json", ".inputs.json", ".locks"

# stage folder → its lock, which this process keeps until it ends
_held: dict[Path, filelock.BaseFileLock] = {}


class RunError(RuntimeError):
    """The state of the run folder does not let the run continue; the message says what to do."""


def open_stage(name: str, run_dir: str | Path, *, report_to: str = "none") -> "Stage":
    """Open the folder of one stage, `run_dir/name`, for this process."""
    return Stage(name, in_repository(run_dir), report_to)


def in_repository(path: str | Path) -> Path:
    """The path made absolute. A relative path starts at the repository's root, wherever the
    notebook runs."""
    path = Path(path).expanduser()
    return path if path.is_absolute() else repository() / path


def repository() -> Path:
    """The folder that holds `run_all.py`.

    It is the current folder or one above it, else the one above this package, else the current one.
    """
    here = Path.cwd()
    # parents[2] is the folder that holds `alar/`.
    for folder in (here, *here.parents, Path(__file__).resolve().parents[2]):
        if (folder / "run_all.py").is_file() and (folder / "alar").is_dir():
            return folder
    return here


class Stage:
    """One stage of one run. `folder` is where it writes."""

    def __init__(self, name: str, run_dir: Path, report_to: str):
        if report_to not in ("none", "tensorboard", "wandb"):
            raise RunError(f"report_to = {report_to!r}: use none, tensorboard or wandb")
        self.name, self.run_dir, self.report_to = name, run_dir, report_to
        self.folder = run_dir / name
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.folder not in _held:  # else an earlier cell of the same notebook has opened it
            _held[self.folder] = lock_stage(run_dir, name)
        self._reporter = None  # opened at the first `log`

    def input(self, stage_name: str, file: str = "", *, required: bool = True) -> Path | None:
        """The file or folder that an earlier stage of this run wrote ("" = its whole folder).

        Raises RunError if it is missing. With required=False the result is None instead, and the
        stage runs again once the file appears.
        """
        path = self.run_dir / stage_name / file
        problem = _missing(self.run_dir / stage_name, path)
        if problem and required:
            number = stage_name[:2]  # "02" of "02_teacher_traces"
            raise RunError(
                f"{problem}; run it first: the same command with --from {number}, "
                f"or notebook {number} with run_dir = {str(self.run_dir)!r}"
            )
        name = f"{stage_name}/{file}" if file else stage_name
        noted = read_inputs(self.folder)
        # None says that it was missing; if it appears, the stage runs again.
        now = content(path) if path.exists() else None
        saved = any((self.folder / RESUME).glob("[!.]*"))
        if saved and noted.get(name, now) != now:
            raise RunError(
                f"{path} has changed since the interrupted training in {self.folder / RESUME} saved"
                " its state; remove that folder to start anew"
            )
        noted[name] = now
        write_json(self.folder / INPUTS, dict(sorted(noted.items())))
        return None if problem else path

    def seconds(self, *names: str) -> float:
        """Wall time of these stages together, from their receipts; NaN if one has no receipt."""
        receipts = [read_note(self.run_dir / name / RECEIPT) for name in names]
        return sum(receipt["seconds"] for receipt in receipts) if all(receipts) else math.nan

    @property
    def scale(self) -> str:
        """A label for figures: the numbers are measured, and how large the model is, if notebook 01
        has noted it."""
        noted = self.input("01_latent_model", "model.json", required=False)
        if noted is None:
            return "measured"
        millions = read_note(noted)["parameters"] / 1e6
        return f"measured, {millions:,.1f} M parameters"

    def log(self, row: dict[str, Any], file: str = "metrics.jsonl") -> None:
        """Append one record to `folder/file`, and its numbers to TensorBoard or W&B if `report_to`
        says so."""
        append_jsonl(self.folder / file, row)
        if self.report_to != "none":
            if self._reporter is None:
                self._reporter = _reporter(self.report_to, self.run_dir, self.name)
            prefix = Path(file).stem  # "loss" of loss.jsonl groups the curves in TensorBoard
            numbers = {
                f"{prefix}/{key}": float(value)
                for key, value in row.items()
                # A bool counts as an int in Python.
                if key != "step" and isinstance(value, int | float) and not isinstance(value, bool)
            }
            self._reporter(numbers, int(row.get("step", 0)))

    @contextlib.contextmanager
    def training(
        self, description: str, steps: int, file: str = "loss.jsonl"
    ) -> Iterator[Callable[[dict[str, Any]], None]]:
        """Yield `report(row)` for a training loop that starts from step 0. A row holds "step" and
        "loss".

        Each row is logged with the seconds since the start, and moves a bar of `steps` steps.
        """
        # Rows of an earlier start would stand before the new ones.
        (self.folder / file).unlink(missing_ok=True)
        started, done = time.perf_counter(), 0  # done: steps that the bar has shown
        with progress(description=description, total=steps) as bar:

            def report(row: dict[str, Any]) -> None:
                nonlocal done
                self.log(row | {"seconds": round(time.perf_counter() - started, 2)}, file=file)
                # Rows may be several steps apart.
                bar.update(row["step"] - done, note=f"loss {row['loss']:.3f}")
                done = row["step"]

            yield report


def _missing(folder: Path, path: Path) -> str:
    """ "" if `path` is there and its stage was not interrupted, else what is wrong."""
    if (folder / UNFINISHED).exists() and not (folder / RECEIPT).exists():
        return f"{path}: stage {folder.name} was interrupted, so its files may be incomplete"
    if path.exists():
        return ""
    there = ", ".join(sorted(entry.name for entry in folder.glob("[!.]*")))  # without hidden notes
    found = f"has {there}" if there else "has not run here"
    return f"{path} does not exist (stage {folder.name} {found})"


def lock_stage(run_dir: Path, name: str, wait: float = 20.0) -> filelock.BaseFileLock:
    """Make this process the only one that writes the stage. The system releases the lock when the
    process ends.

    wait: seconds. The kernel of a killed run needs a second or two to notice that its parent is
    gone; only then it releases its lock. Raises RunError if the stage stays in use.
    """
    path = run_dir / LOCKS / name  # outside the stage's folder, which is emptied before a run
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=wait)
    except filelock.Timeout:
        raise RunError(
            f"{run_dir / name} is in use by another process (a notebook that is still open?); "
            "shut its kernel down, or use another run_dir"
        ) from None
    return lock


def read_note(path: Path) -> dict[str, Any] | None:
    """The JSON document in `path`, or None if there is no file.

    Notes are written in one step, so a broken one is an error (RunError).
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise RunError(f"{path}: is not whole JSON ({error}); delete it and run again") from None


def read_inputs(folder: Path) -> dict[str, str | None]:
    """The inputs that the stage in `folder` asked for: "stage/file" → content hash, or None if it
    was missing."""
    noted = read_note(folder / INPUTS)
    return noted if isinstance(noted, dict) else {}  # another version noted names alone


def changed_input(run_dir: Path, inputs: dict[str, str | None]) -> str:
    """ "" if all inputs still have the noted content, else the name of one that changed."""
    for name, noted in inputs.items():
        path = run_dir / name
        # A file that has appeared differs too.
        if noted != (content(path) if path.exists() else None):
            return f"input {name} changed"
    return ""


class progress:
    """A bar with the time left: `for x in progress(items, "AASD")`, or `with progress(total=60) as
    bar: bar.update()`.

    By hand it shows tqdm's bar. Under `run_all.py` it reports to the terminal that started the run.
    """

    def __init__(
        self, iterable: Iterable | None = None, description: str = "", *, total: int | None = None
    ):
        if total is None and hasattr(iterable, "__len__"):
            total = len(iterable)
        self._iterable, self._description, self._total, self._done = iterable, description, total, 0
        self._started, self._reported, self._note = time.time(), 0.0, ""  # seconds since 1970
        # The channel is a file of JSON lines; by hand there is none.
        self._channel, self._bar = os.environ.get(PROGRESS_CHANNEL), None
        if self._channel is None:
            from tqdm.auto import tqdm

            self._bar = tqdm(total=total, desc=description)

    def __iter__(self) -> Iterator:
        try:
            for item in self._iterable:
                yield item
                self.update()
        finally:
            self.close()

    def update(self, count: int = 1, note: str = "") -> None:
        """Advance; `note` is shown behind the bar, such as the current loss."""
        self._done += count
        self._note = note or self._note
        if self._bar is not None:
            if note:
                self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(count)
        # In seconds: a fast loop must not spend its time on reports.
        elif time.time() - self._reported >= 0.2:
            self._report()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        else:
            self._report(closed=True)

    def __enter__(self) -> "progress":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _report(self, closed: bool = False) -> None:
        self._reported = time.time()
        append_jsonl(
            self._channel,
            {
                "bar": self._description,
                "done": self._done,
                "total": self._total,
                "started": self._started,
                "note": self._note,
                "closed": closed,
            },
        )


def _reporter(report_to: str, run_dir: Path, name: str) -> Callable[[dict[str, float], int], None]:
    """A function (numbers, step) that sends scalars to the chosen tool, which is imported here."""
    if report_to == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(run_dir / "tensorboard" / name)

        def report(numbers, step):
            for key, value in numbers.items():
                writer.add_scalar(key, value, step)
            writer.flush()  # a reader sees the curve while the stage runs

        return report
    try:
        import wandb
    except ImportError:
        raise RunError(
            "run.report_to: wandb is chosen but not installed: pip install wandb, "
            "or use run.report_to=tensorboard"
        ) from None
    run = wandb.init(
        project="alar", name=f"{run_dir.parent.name}-{run_dir.name}-{name}", dir=str(run_dir)
    )
    return lambda numbers, step: run.log({**numbers, "step": step})

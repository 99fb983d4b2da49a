"""What a notebook needs of its run: a folder, the earlier stages' files, a log, a progress bar.

    stage = open_stage("03_aasd", run_dir, report_to=report_to)
    traces = stage.input("02_teacher_traces", "traces.jsonl")
    with stage.training("AASD, steps", steps) as report:
        report({"step": step, "loss": loss})

The same calls work by hand in JupyterLab, under papermill and under `run_all.py`. Each file that
`input` hands out is noted in `inputs.json`; with the code and the parameters these notes decide
whether a finished stage may be reused (`alar.study.cache`). A stage that can resume writes its
state with `save_resume`; everything else starts from an empty folder.
"""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import filelock

from alar.files import append_jsonl, write_json

# A channel set by the runner for its kernels, not a parameter: where `progress` reports instead of
# drawing.
PROGRESS_CHANNEL = "ALAR_PROGRESS"
FINISHED, UNFINISHED, INPUTS, RESUME = "stage.json", ".unfinished.json", ".inputs.json", "resume"
LOCKS = ".locks"

_held: dict[Path, filelock.BaseFileLock] = {}  # one lock per stage folder, until this process ends
_asked: dict[Path, set[str]] = {}  # what this process asked for, per stage folder


class RunError(RuntimeError):
    """Something about the run folder prevents going on; the message says what to do."""


def open_stage(name: str, run_dir: str | Path, *, report_to: str = "none") -> "Stage":
    """Open the folder of one stage, `run_dir/name`, for this process. Relative folders belong to
    the repository."""
    return Stage(name, resolve(run_dir), report_to)


def resolve(path: str | Path) -> Path:
    """An absolute path; a relative one is taken from the repository's root, wherever the notebook
    runs."""
    path = Path(path).expanduser()
    return path if path.is_absolute() else repository() / path


def scale_of(run_dir: Path) -> str:
    """That a run's numbers are measured, and with how large a model where notebook 01 has noted it."""
    noted = run_dir / "01_latent_model" / "model.json"
    if not noted.exists():
        return "measured"
    return (
        f"measured, {json.loads(noted.read_text(encoding='utf-8'))['parameters'] / 1e6:,.1f} M"
        " parameters"
    )


def repository() -> Path:
    """The folder that holds `run_all.py`: above the current one, else above this package, else the
    current one."""
    here = Path.cwd()
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
        hold_stage(run_dir, name)
        self._inputs = _asked.setdefault(self.folder, set())
        self._reporter = None
        self._note_inputs()

    def input(self, stage_name: str, file: str = "", *, required: bool = True) -> Path | None:
        """The file (or folder; "" = the whole folder) that an earlier stage of this run wrote.

        required=False gives None where it is missing; the stage runs again once it appears.
        """
        folder = self.run_dir / stage_name
        path = folder / file if file else folder
        key = f"{stage_name}/{file}" if file else stage_name
        remedy = (
            f"the same command with --from {stage_name[:2]}, or notebook {stage_name[:2]} with"
            f" run_dir = {str(self.run_dir)!r}"
        )
        if (folder / UNFINISHED).exists() and not (folder / FINISHED).exists():
            if required:
                raise RunError(
                    f"{path}: stage {stage_name} was interrupted, so its files may be incomplete; "
                    f"run it first: {remedy}"
                )
            path = None
        elif not path.exists():
            if required:
                have = sorted(p.name for p in folder.glob("[!.]*")) if folder.is_dir() else []
                raise RunError(
                    f"{path} does not exist (stage {stage_name}"
                    f" {'has ' + ', '.join(have) if have else 'has not run here'}); run it first:"
                    f" {remedy}"
                )
            path = None
        self._inputs.add(key)
        self._note_inputs()
        return path

    @property
    def scale(self) -> str:
        """What figures say of this run's numbers."""
        self.input("01_latent_model", "model.json", required=False)
        return scale_of(self.run_dir)

    def log(self, row: dict[str, Any], file: str = "metrics.jsonl") -> None:
        """Append one record to `folder/file`, and its numbers to TensorBoard or W&B if `report_to`
        says so."""
        append_jsonl(self.folder / file, row)
        if self.report_to != "none":
            if self._reporter is None:
                self._reporter = _reporter(self.report_to, self.run_dir, self.name)
            prefix = Path(file).stem
            numbers = {
                f"{prefix}/{key}": float(value)
                for key, value in row.items()
                if key != "step" and isinstance(value, int | float) and not isinstance(value, bool)
            }
            self._reporter(numbers, int(row.get("step", 0)))

    @contextlib.contextmanager
    def training(
        self, description: str, steps: int, file: str = "loss.jsonl"
    ) -> Iterator[Callable[[dict[str, Any]], None]]:
        """For a training loop that starts anew: yields `report(row)`, where row holds "step" and
        "loss".

        Each row is logged with the seconds since the start, and moves a bar of `steps` steps.
        """
        (self.folder / file).unlink(missing_ok=True)
        started, done = time.perf_counter(), 0
        with progress(description=description, total=steps) as bar:

            def report(row: dict[str, Any]) -> None:
                nonlocal done
                self.log(row | {"seconds": round(time.perf_counter() - started, 2)}, file=file)
                bar.update(row["step"] - done, note=f"loss {row['loss']:.3f}")
                done = row["step"]

            yield report

    def save_resume(self, write: Callable[[Path], None], step: int) -> None:
        """Keep the state at `step`: `write(folder)` fills a fresh folder, which then replaces the
        previous state."""
        home = self.folder / RESUME
        aside, final = home / f".writing-{step:08d}", home / f"{step:08d}"
        for leftover in (aside, final):
            shutil.rmtree(leftover, ignore_errors=True)
        aside.mkdir(parents=True)
        write(aside)
        aside.rename(final)
        for other in home.iterdir():
            if other != final:
                shutil.rmtree(other)

    def resume_from(self) -> tuple[Path, int] | None:
        """(folder, step) of the newest whole state, or None to start from the beginning."""
        states = sorted((self.folder / RESUME).glob("[0-9]*"))
        return (states[-1], int(states[-1].name)) if states else None

    def _note_inputs(self) -> None:
        write_json(self.folder / INPUTS, sorted(self._inputs))


def hold_stage(run_dir: Path, name: str, wait: float = 20.0) -> filelock.BaseFileLock:
    """Make this process the only one that writes the stage; the system releases it when the process
    ends.

    The wait covers the second or two in which the kernel of a killed run notices that it is an
    orphan.
    """
    path = run_dir / LOCKS / name
    if path in _held:
        return _held[path]
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=wait)
    except filelock.Timeout:
        raise RunError(
            f"{run_dir / name} is in use by another process (a notebook that is still open?); "
            "shut its kernel down, or use another run_dir"
        ) from None
    _held[path] = lock
    return lock


def let_go_of_stage(run_dir: Path, name: str) -> None:
    """Hand the stage over, from the runner to the kernel that it is about to start."""
    lock = _held.pop(run_dir / LOCKS / name, None)
    if lock is not None:
        lock.release(force=True)


class progress:
    """A bar with the time left: `for x in progress(items, "AASD")`, or `with progress(total=60) as
    bar: bar.update()`.

    By hand it is tqdm's bar; under `run_all.py` it reports to the terminal that started the run.
    """

    def __init__(
        self, iterable: Iterable | None = None, description: str = "", *, total: int | None = None
    ):
        if total is None and hasattr(iterable, "__len__"):
            total = len(iterable)
        self._iterable, self._description, self._total, self._done = iterable, description, total, 0
        self._started, self._reported, self._note = time.time(), 0.0, ""
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
    """A function (numbers, step) that sends scalars to the chosen tool, imported only now."""
    if report_to == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(run_dir / "tensorboard" / name)

        def report(numbers, step):
            for key, value in numbers.items():
                writer.add_scalar(key, value, step)
            writer.flush()

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


def read_inputs(folder: Path) -> list[str]:
    """The "stage/file" names that the stage in `folder` asked for the last time it ran."""
    path = folder / INPUTS
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []

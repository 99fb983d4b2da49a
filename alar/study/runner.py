"""Runs the numbered notebooks of an experiment in order; `run_all.py` calls it.

Variants and domains run side by side. A finished stage that still holds is skipped. A stage that
another run has finished with the same code, parameters and inputs is copied from there. Finished
stages are kept after a failure, an interrupt or a kill. Exit codes: 0 done, 1 a cell failed, 2 the
command or its parameters are wrong, 130 interrupted.
"""

import contextlib
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from alar.files import replacing
from alar.store import RECEIPT
from alar.study import locks, params, provenance, receipts, side_by_side
from alar.study.execution import CellFailed, all_cores, execute
from alar.study.params.notebooks import NotebookError
from alar.study.selection import Command, RunFolder, run_folders
from alar.study.stage import RunError, lock_stage, read_note
from alar.study.terminal import SUMMARY, Terminal, duration

GOES_ON = "Finished stages are kept; the same command goes on from here."


def run_study(
    command: Command,
    *,
    root: Path,
    notebooks_dir: Path | None = None,
    list_only: bool = False,
    terminal: Terminal | None = None,
) -> int:
    """Carry out the command; returns the exit code."""
    terminal = terminal or Terminal()

    def work() -> int:
        runs = run_folders(command, root, notebooks_dir or root / "notebooks")
        if list_only:
            for run in runs:
                _list(run, root, terminal)
            return 0
        beside = [run for run in runs if not run.gathers]  # those that do not wait for others
        at_once = _at_once(beside)
        if at_once > 1:
            if code := _run_beside(beside, at_once, command, root, terminal):
                return code
        with contextlib.ExitStack() as held:
            # After the others, in this process: those that gather, or all of them.
            alone = [run for run in runs if run.gathers or at_once == 1]
            for run in alone:
                # All locks before the first stage: a study must not stop half-way at a folder in
                # use.
                held.enter_context(locks.whole_run(run.run_dir))
            for run in alone:
                _Runner(run, command, root, terminal).run()
        if command.publish:
            from alar.study.publish import publish

            for line in publish([(run.domain, run.run_dir) for run in runs], root):
                terminal.say(line)
        return 0

    return _exit_code(work, terminal)


def _exit_code(work: Callable[[], int], terminal: Terminal) -> int:
    """Do the work. Whatever ends it early is shown and becomes an exit code."""
    try:
        with _ending_on_terminate():
            return work()
    except (params.ParameterError, NotebookError) as error:
        terminal.say(str(error))
        return 2
    except CellFailed as failure:
        terminal.say(f"\n{failure}\n{GOES_ON}")
        return 1
    except RunError as error:
        terminal.say(str(error))
        return 1
    except KeyboardInterrupt:
        terminal.say(f"\nInterrupted. {GOES_ON}")
        return side_by_side.INTERRUPTED


def _at_once(runs: list[RunFolder]) -> int:
    """How many run folders are worked on at the same time. With a GPU it is one: parameters are
    chosen so that one run fits on it."""
    wanted = min(runs[0].experiment.run.jobs, len(runs), all_cores()) if runs else 1
    # The driver is asked only if it matters.
    return 1 if wanted > 1 and provenance.nvidia_gpus() else wanted


def _run_beside(
    runs: list[RunFolder], at_once: int, command: Command, root: Path, terminal: Terminal
) -> int:
    """Work on every run folder in a process of its own; returns the exit code."""
    threads = max(1, all_cores() // at_once)  # for each process
    work = {run.label: partial(_run_in_process, run, command, root, threads) for run in runs}
    codes = side_by_side.run_beside(work, at_once, terminal)
    for run in runs:
        if codes[run.label] == 0:
            terminal.say(f"\n{run.label}\n{(run.run_dir / SUMMARY).read_text(encoding='utf-8')}")
    failed = {label: code for label, code in codes.items() if code}
    for label, code in failed.items():
        if code < 0:  # −n: signal n killed it
            terminal.say(
                f"{label} was killed (signal {-code}), most often because memory ran out;"
                " --set run.jobs=1 needs less"
            )
        else:
            terminal.say(f"{label} ended with exit code {code}: its lines above say why")
    if failed:
        terminal.say(GOES_ON)
    return max(1, next(iter(failed.values()))) if failed else 0  # a signal's −n is no exit code


def _run_in_process(
    run: RunFolder, command: Command, root: Path, threads: int, terminal: Terminal
) -> int:
    """Work on one of several run folders; called in its own process. Returns the exit code."""

    def work() -> int:
        with locks.whole_run(run.run_dir):
            _Runner(run, command, root, terminal, threads).run()
        return 0

    return _exit_code(work, terminal)


class _Runner:
    """The stages of one run folder. `threads` is used if `run.threads` is 0; 0 = all cores."""

    def __init__(
        self, run: RunFolder, command: Command, root: Path, terminal: Terminal, threads: int = 0
    ):
        self.folder, self.experiment, self.domain = run.run_dir, run.experiment, run.domain
        self.notebooks, self.label = run.notebooks, run.label
        self.force, self.parameter_file = command.force, str(command.params)
        self.home = command.run_dir or root / "runs"  # stages are taken over from runs below it
        self.root, self.terminal, self.threads = root, terminal, threads

    def run(self) -> None:
        """Run the stages that have no valid result yet, and show the summary."""
        self.terminal.say(f"{self.label}: {self.folder}")
        seconds = {}  # stage → (wall time in seconds, whether it was reused)
        for k, notebook in enumerate(self.notebooks, start=1):
            seconds[notebook.stem] = self._stage(k, notebook)
        self.terminal.summary(self.folder, seconds)

    def _stage(self, k: int, notebook: Path) -> tuple[float, bool]:
        """Do the k-th stage, counted from 1: (its wall time in seconds, whether an earlier result
        was reused)."""
        stem, count = notebook.stem, len(self.notebooks)
        folder = self.folder / stem
        # name → what decides the result
        parts = receipts.fingerprint(self.experiment, notebook, self.domain, self.root / "alar")
        reason = "forced" if self.force else receipts.reason_to_run(folder, parts)
        # Readers and `--publish` want the executed notebook too, which lies outside the folder.
        if not reason and not self._executed(notebook).exists():
            reason = "its executed notebook is missing"
        if not reason:
            seconds = read_note(folder / RECEIPT)["seconds"]
            self.terminal.stage_skipped(k, count, stem, seconds)
            return seconds, True
        with contextlib.ExitStack() as held:
            if not self.force:
                # Variants with the same first stages reach a stage at the same time. One of them
                # computes it; the others wait here and then copy its result.
                work = receipts.work_of(folder, parts)  # equal in runs with equal earlier stages
                held.enter_context(locks.same_work(self.home, work, self.terminal.say))
                if taken := self._take_over(notebook, parts):
                    other, receipt = taken
                    self._note(stem, receipt)
                    self.terminal.stage_skipped(k, count, stem, receipt["seconds"], other)
                    return receipt["seconds"], True
            receipt = self._execute(k, notebook, parts, reason)
        self._note(stem, receipt)
        return receipt["seconds"], False

    def _take_over(
        self, notebook: Path, parts: dict[str, Any]
    ) -> tuple[Path, dict[str, Any]] | None:
        """Copy the stage from a run below `home` that has finished the same work.

        Returns (that run's folder, the stage's receipt), or None if there is no such run.
        """
        stem = notebook.stem
        found = [
            *self.home.glob(f"*/{self.domain}/{stem}"),  # runs without variants
            *self.home.glob(f"*/*/{self.domain}/{stem}"),  # variants
        ]
        page = Path("executed") / notebook.name
        # A stage is taken over only together with its executed notebook.
        others = [folder for folder in sorted(found) if (folder.parent / page).exists()]
        other = receipts.twin(self.folder / stem, others, parts)
        receipt = receipts.take_over(self.folder / stem, other, parts) if other else None
        if receipt is None:
            return None
        (self.folder / page).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(other.parent / page, self.folder / page)
        return other.parent, receipt

    def _execute(
        self, k: int, notebook: Path, parts: dict[str, Any], reason: str
    ) -> dict[str, Any]:
        """Run the notebook; returns the stage's receipt."""
        stem, terminal = notebook.stem, self.terminal
        # Nobody may write into the folder while `begin` empties it.
        lock = lock_stage(self.folder, stem)
        if receipts.begin(self.folder / stem, parts, fresh=self.force):
            reason = "resumed where it was interrupted"
        where = _portable(self.folder, self.root)
        flat = params.flatten(self.experiment, notebook, domain=self.domain, run_dir=where)
        self._write_flat(notebook, flat)
        lock.release()  # the kernel takes it in `open_stage`
        terminal.stage_starts(k, len(self.notebooks), stem, reason)
        began, outcome = time.time(), "failed"  # until something else is known
        try:
            execute(
                notebook,
                self._executed(notebook),
                flat,
                root=self.root,
                # The file wins; 0 leaves it to our share.
                threads=self.experiment.run.threads or self.threads,
                on_cell=terminal.cell,
                on_progress=terminal.bar,
                on_tick=terminal.tick,
            )
            outcome = "done"
        except KeyboardInterrupt:
            outcome = "interrupted"
            raise
        finally:
            terminal.stage_ends(outcome)
        return receipts.finish(self.folder / stem, parts, time.time() - began)

    def _executed(self, notebook: Path) -> Path:
        return self.folder / "executed" / notebook.name

    def _note(self, stem: str, receipt: dict[str, Any]) -> None:
        provenance.update(
            self.folder, self.experiment, self.domain, self.parameter_file, stem, receipt, self.root
        )

    def _write_flat(self, notebook: Path, flat: dict[str, Any]) -> None:
        """The stage's parameters as a file that plain papermill takes."""
        path = self._executed(notebook).with_suffix(".params.yaml")
        shown = _portable(notebook, self.root), _portable(path, self.root)
        text = f"# papermill {shown[0]} out.ipynb -f {shown[1]}\n"
        text += yaml.safe_dump(flat, sort_keys=False, allow_unicode=True)
        with replacing(path) as aside:
            aside.write_text(text, encoding="utf-8")


def _list(run: RunFolder, root: Path, terminal: Terminal) -> None:
    terminal.say(f"{run.label}: {run.run_dir}")
    for notebook in run.notebooks:
        folder = run.run_dir / notebook.stem
        parts = receipts.fingerprint(run.experiment, notebook, run.domain, root / "alar")
        if reason := receipts.reason_to_run(folder, parts):
            state = f"to run: {reason}"
        else:
            state = f"finished ({duration(read_note(folder / RECEIPT)['seconds'])})"
        terminal.say(f"  {notebook.stem:<22}{state}")


@contextlib.contextmanager
def _ending_on_terminate() -> Iterator[None]:
    """Let SIGTERM end the run, and its kernel, in the same way as Ctrl-C."""

    def interrupt(*_):
        raise KeyboardInterrupt

    try:
        # Batch systems end a job with SIGTERM.
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not in the main thread, where signals arrive
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _portable(path: Path, root: Path) -> str:
    """The path relative to the repository if it lies inside, so that a run can move with it."""
    path, root = path.resolve(), root.resolve()
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)

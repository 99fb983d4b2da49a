"""Runs the numbered notebooks of an experiment in order, its variants and domains side by side:
what `run_all.py` calls.

Everything is checked before anything runs; finished stages that still hold are skipped; what was
done before a failure, an interrupt or a kill is kept. Exit codes: 0 done, 1 a cell failed, 2 the
request or its parameters are wrong, 130 interrupted.
"""

import contextlib
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import yaml

from alar.files import replacing
from alar.study import cache, locks, params, provenance, side_by_side
from alar.study.execution import CellFailed, all_cores, execute
from alar.study.params.notebooks import NotebookError, numbered
from alar.study.params.sections import GATHERING, ON_REQUEST, SEARCH_ONLY, Experiment
from alar.study.stage import FINISHED, RunError, hold_stage, let_go_of_stage, read_inputs
from alar.study.terminal import SUMMARY, Terminal, duration


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    params: Path
    overrides: tuple[str, ...] = ()
    domains: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    start: str = ""
    force: bool = False
    run_dir: Path | None = None
    publish: bool = False


@dataclass(frozen=True)
class _Job:
    """One run folder: a variant in a domain."""

    label: str
    experiment: Experiment
    domain: str
    run_dir: Path
    notebooks: tuple[Path, ...]

    @property
    def gathers(self) -> bool:
        """Whether it reads what other variants have computed, and so comes after them."""
        return any(notebook.stem in GATHERING for notebook in self.notebooks)


def main(
    request: Request,
    *,
    root: Path,
    notebooks_dir: Path | None = None,
    list_only: bool = False,
    terminal: Terminal | None = None,
) -> int:
    """Carry out the request; returns the exit code."""
    terminal = terminal or Terminal()

    def work() -> int:
        jobs = plan(request, root, notebooks_dir or root / "notebooks")
        if list_only:
            for job in jobs:
                _list(job, root, terminal)
            return 0
        beside = [job for job in jobs if not job.gathers]
        at_once = _at_once(beside)
        if at_once > 1:
            if code := _run_side_by_side(beside, at_once, request, root, terminal):
                return code
        with contextlib.ExitStack() as held:
            alone = [job for job in jobs if job.gathers or at_once == 1]
            for job in alone:
                held.enter_context(locks.run_folder(job.run_dir))
            for job in alone:
                run(job, request, root, terminal)
        if request.publish:
            from alar.study.publish import publish

            for line in publish([(job.domain, job.run_dir) for job in jobs], root):
                terminal.say(line)
        return 0

    return _exit_code(work, terminal)


def _exit_code(work: Callable[[], int], terminal: Terminal) -> int:
    """Do the work; what ends it early is said, and becomes an exit code."""
    try:
        with _ending_on_terminate():
            return work()
    except (params.ParameterError, NotebookError) as error:
        terminal.say(str(error))
        return 2
    except CellFailed as failure:
        terminal.say(f"\n{failure}\nFinished stages are kept; the same command goes on from here.")
        return 1
    except RunError as error:
        terminal.say(str(error))
        return 1
    except KeyboardInterrupt:
        terminal.say("\nInterrupted. Finished stages are kept; the same command goes on from here.")
        return 130


def plan(
    request: Request, root: Path, notebooks_dir: Path, *, absent: list[params.Absent] | None = None
) -> list[_Job]:
    """The run folders of a request with their notebooks, after checking all parameters and names
    (absent: `params.load`)."""
    overrides = list(request.overrides)
    if request.domains:
        overrides.append(f"run.domains=[{', '.join(request.domains)}]")
    experiments = params.load_variants(request.params, overrides, root=root, absent=absent)
    unknown = [v for v in request.variants if v not in experiments]
    if unknown:
        params.load_experiment(request.params, overrides, variant=unknown[0], root=root, absent=absent)
    available = numbered(notebooks_dir)
    if not available:
        raise NotebookError(f"{notebooks_dir}: holds no notebook named NN_name.ipynb")
    problems = []
    for experiment in (
        experiment for domains in experiments.values() for experiment in domains.values()
    ):
        try:
            params.check_notebooks(experiment, notebooks_dir)
        except params.ParameterError as error:
            problems += [problem for problem in error.problems if problem not in problems]
    if problems:
        raise params.ParameterError(problems)
    jobs = []
    for name, domains in experiments.items():
        if request.variants and name not in request.variants:
            continue
        for domain, experiment in domains.items():
            chosen = _choose(available, request.only, request.start, experiment.only, domain)
            home = (request.run_dir or root / "runs" / experiment.run.name) / name
            label = " · ".join(filter(None, [experiment.run.name, name, domain]))
            if chosen:
                jobs.append(_Job(label, experiment, domain, home / domain, chosen))
    if not jobs:
        if any(domain == "search" for domains in experiments.values() for domain in domains):
            raise NotebookError(
                f"none of the chosen notebooks is among those that {request.params.name} names in"
                " `only`"
            )
        raise NotebookError(
            f"the notebooks {', '.join(SEARCH_ONLY)} run in the search domain: choose --domain"
            " search"
        )
    if request.publish and len({job.domain for job in jobs}) < len(jobs):
        raise NotebookError(
            "--publish writes one run of each domain, and these are several variants: name one with"
            " --variant"
        )
    return sorted(jobs, key=lambda job: job.gathers)


def _at_once(jobs: list[_Job]) -> int:
    """How many run folders are worked on at the same time: two would not fit on a GPU that one was
    measured for."""
    wanted = min(jobs[0].experiment.run.jobs, len(jobs), all_cores()) if jobs else 1
    return 1 if wanted > 1 and provenance.nvidia_gpus() else wanted


def _run_side_by_side(
    jobs: list[_Job], at_once: int, request: Request, root: Path, terminal: Terminal
) -> int:
    """Every run folder in a process of its own; returns the exit code."""
    threads = max(1, all_cores() // at_once)
    codes = side_by_side.run(
        {job.label: partial(_part, job, request, root, threads) for job in jobs}, at_once, terminal
    )
    for job in jobs:
        if codes[job.label] == 0:
            terminal.say(f"\n{job.label}\n{(job.run_dir / SUMMARY).read_text(encoding='utf-8')}")
    failed = [label for label, code in codes.items() if code]
    for label in failed:
        killed = (
            f"was killed (signal {-codes[label]}), most often because memory ran out; --set"
            " run.jobs=1 needs less"
        )
        terminal.say(
            f"{label}"
            f" {killed if codes[label] < 0 else f'ended with exit code {codes[label]}: its lines above say why'}"
        )
    if failed:
        terminal.say("Finished stages are kept; the same command goes on from here.")
    return max(1, codes[failed[0]]) if failed else 0


def _part(job: _Job, request: Request, root: Path, threads: int, terminal: Terminal) -> int:
    """One of several run folders, in its own process."""

    def work() -> int:
        with locks.run_folder(job.run_dir):
            run(job, request, root, terminal, threads)
        return 0

    return _exit_code(work, terminal)


def run(job: _Job, request: Request, root: Path, terminal: Terminal, threads: int = 0) -> None:
    """Run the stages of one run folder that have no valid result yet; threads: where `run.threads`
    leaves them open, 0 = all."""
    terminal.say(f"{job.label}: {job.run_dir}")
    seconds = {
        notebook.stem: _stage(job, k, request, root, terminal, threads)
        for k, notebook in enumerate(job.notebooks, start=1)
    }
    terminal.summary(job.run_dir, seconds)


def _stage(
    job: _Job, k: int, request: Request, root: Path, terminal: Terminal, threads: int
) -> tuple[float, bool]:
    """The k-th stage of a job, counted from 1: its wall time, and whether an earlier result was
    reused."""
    notebook, n = job.notebooks[k - 1], len(job.notebooks)
    stem, folder = notebook.stem, job.run_dir / notebook.stem
    executed = job.run_dir / "executed" / notebook.name
    parts = cache.fingerprint(job.experiment, notebook, job.domain, root / "alar")
    reason = "forced" if request.force else cache.reason_to_run(folder, parts)
    if not reason and not executed.exists():
        reason = "its executed notebook is missing"
    if not reason:
        record = cache.read_record(folder / FINISHED)
        terminal.stage_skipped(k, n, stem, record["seconds"])
        return record["seconds"], True

    home = request.run_dir or root / "runs"
    with (
        contextlib.nullcontext()
        if request.force
        else locks.sole(home, cache.work_of(folder, parts), terminal.say)
    ):
        others = [] if request.force else _stages_elsewhere(job, stem, home)
        if (other := cache.twin(folder, others, parts)) and (
            record := cache.adopt(folder, other, parts)
        ):
            executed.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(other.parent / "executed" / notebook.name, executed)
            provenance.update(
                job.run_dir, job.experiment, job.domain, str(request.params), stem, record, root
            )
            terminal.stage_skipped(k, n, stem, record["seconds"], other.parent)
            return record["seconds"], True
        hold_stage(job.run_dir, stem)
        if cache.begin(folder, parts, fresh=request.force):
            reason = "resumed where it was interrupted"
        flat = params.flatten(
            job.experiment, notebook, domain=job.domain, run_dir=_portable(job.run_dir, root)
        )
        _write_flat(job.run_dir / "executed" / f"{stem}.params.yaml", notebook, flat, root)
        let_go_of_stage(job.run_dir, stem)
        terminal.stage_starts(k, n, stem, reason)
        began, outcome = time.time(), "failed"

        def tick():
            cache.note_inputs(folder, read_inputs(folder))
            terminal.tick()

        try:
            execute(
                notebook,
                executed,
                flat,
                root=root,
                threads=job.experiment.run.threads or threads,
                on_cell=terminal.cell,
                on_progress=terminal.bar,
                on_tick=tick,
            )
            outcome = "done"
        except KeyboardInterrupt:
            outcome = "interrupted"
            raise
        finally:
            terminal.stage_ends(outcome)
        record = cache.finish(folder, parts, time.time() - began)
        provenance.update(
            job.run_dir, job.experiment, job.domain, str(request.params), stem, record, root
        )
        return record["seconds"], False


def _stages_elsewhere(job: _Job, stem: str, home: Path) -> list[Path]:
    """The same stage in the run folders of other variants and experiments below `home`, those with
    its executed notebook."""
    found = [*home.glob(f"*/{job.domain}/{stem}"), *home.glob(f"*/*/{job.domain}/{stem}")]
    return [
        folder
        for folder in sorted(found)
        if (folder.parent / "executed" / f"{stem}.ipynb").exists()
    ]


def _choose(
    available: list[Path], only: tuple[str, ...], start: str, limited: tuple[str, ...], domain: str
) -> tuple[Path, ...]:
    def check(given):
        if not any(_is(notebook, given) for notebook in available):
            raise NotebookError(
                f"no notebook has the number {given!r}; there are "
                + ", ".join(notebook.stem for notebook in available)
            )

    for given in (*only, *limited, *filter(None, [start])):
        check(given)
    chosen = [n for n in available if not limited or any(_is(n, given) for given in limited)]
    if only:
        chosen = [n for n in chosen if any(_is(n, given) for given in only)]
    elif not limited:
        chosen = [n for n in chosen if n.stem not in ON_REQUEST or _is(n, start)]
    if start:
        first = next(i for i, n in enumerate(available) if _is(n, start))
        chosen = [n for n in chosen if n in available[first:]]
    return tuple(n for n in chosen if domain == "search" or n.stem not in SEARCH_ONLY)


def _is(notebook: Path, given: str) -> bool:
    return given in (notebook.stem, notebook.name) or (
        given.isdigit() and notebook.name[:2] == given.zfill(2)
    )


def _list(job: _Job, root: Path, terminal: Terminal) -> None:
    terminal.say(f"{job.label}: {job.run_dir}")
    for notebook in job.notebooks:
        folder = job.run_dir / notebook.stem
        reason = cache.reason_to_run(
            folder, cache.fingerprint(job.experiment, notebook, job.domain, root / "alar")
        )
        record = None if reason else cache.read_record(folder / FINISHED)
        terminal.say(
            f"  {notebook.stem:<22}"
            + (f"to run: {reason}" if reason else f"finished ({duration(record['seconds'])})")
        )


@contextlib.contextmanager
def _ending_on_terminate() -> Iterator[None]:
    """Let SIGTERM end the run as Ctrl-C does, with its kernel."""

    def interrupt(*_):
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not in the main thread, where signals arrive
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _write_flat(path: Path, notebook: Path, flat: dict, root: Path) -> None:
    with replacing(path) as aside:
        aside.write_text(
            f"# papermill {_portable(notebook, root)} out.ipynb -f {_portable(path, root)}\n"
            + yaml.safe_dump(flat, sort_keys=False, allow_unicode=True),
            encoding="utf-8",
        )


def _portable(run_dir: Path, root: Path) -> str:
    """Relative to the repository if inside it, so that a run folder can move with the repository."""
    run_dir = run_dir.resolve()
    return (
        run_dir.relative_to(root.resolve()).as_posix()
        if run_dir.is_relative_to(root.resolve())
        else str(run_dir)
    )

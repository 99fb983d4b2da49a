"""Running one notebook headless: papermill with the kernel of the running interpreter, watched from
outside.

papermill works in a thread while the calling thread looks after the terminal, so that Ctrl-C ends
the kernel at once. Kernels get their own `python3` kernelspec, because one in the user's home would
otherwise take precedence over the running interpreter. If this process is killed the kernel notices
within a second and ends too (ipykernel polls its parent); until then it holds the lock of its stage
(`alar.study.stage.hold_stage`).
"""

import contextlib
import json
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alar.study.params import notebooks
from alar.study.provenance import available_cores
from alar.study.stage import PROGRESS_CHANNEL

TICK = 0.25  # seconds between two looks at the kernel's progress
TRACEBACK_LINES = 25


@dataclass
class CellFailed(Exception):
    """A notebook that stopped at an error."""

    notebook: Path
    cell: int  # counted among the code cells, from 1
    cells: int
    error: str
    traceback: list[str]
    executed: Path

    def __str__(self) -> str:
        shown = "\n".join("    " + line for line in self.traceback[-TRACEBACK_LINES:])
        return (
            f"{self.notebook.name}, code cell {self.cell} of {self.cells}: {self.error}\n{shown}\n"
            f"The notebook as far as it ran: {self.executed}"
        )


@dataclass
class _Watch:
    """What the papermill thread tells the calling thread."""

    kernel_log: Path  # what the kernel's process itself writes, such as the message of a crash
    started_cells: list[int] = field(default_factory=list)
    client: Any = None
    error: BaseException | None = None

    def kill_kernel(self) -> None:
        manager = getattr(self.client, "km", None)
        provisioner = getattr(manager, "provisioner", None)
        if provisioner is not None and getattr(provisioner, "process", None) is not None:
            with contextlib.suppress(ProcessLookupError):
                provisioner.process.kill()


def execute(
    notebook: Path,
    executed: Path,
    parameters: dict[str, Any],
    *,
    root: Path,
    threads: int,
    on_cell: Callable[[int, int], None],
    on_progress: Callable[[dict], None],
    on_tick: Callable[[], None],
) -> None:
    """Run `notebook` with flat `parameters`, writing the executed copy as it goes.

    on_cell(k, n): the k-th of n code cells starts; on_progress(row): a bar moved; on_tick: about
    four times a second, all in the calling thread. Raises CellFailed.
    """
    executed.parent.mkdir(parents=True, exist_ok=True)
    watch = _Watch(kernel_log=executed.with_suffix(".log"))
    with tempfile.TemporaryDirectory(prefix="alar-") as folder:
        channel = Path(folder) / "progress.jsonl"
        channel.touch()
        events = _tail(channel)
        with _kernelspec(Path(folder), kernel_environment(root, threads, channel)):
            thread = threading.Thread(
                target=_papermill, args=(notebook, executed, parameters, watch), daemon=True
            )
            thread.start()
            total, seen = (
                sum(cell.is_code for cell in notebooks.cells_of(notebook)) + bool(parameters),
                0,
            )
            try:
                while thread.is_alive():
                    thread.join(TICK)
                    for _ in watch.started_cells[seen:]:
                        seen += 1
                        on_cell(seen, total)
                    for row in next(events):
                        on_progress(row)
                    on_tick()
            finally:
                if thread.is_alive():
                    watch.kill_kernel()
                    thread.join(20)
    if watch.error is not None:
        raise _as_failure(watch, notebook, executed, total) from None
    watch.kernel_log.unlink(missing_ok=True)


def kernel_environment(root: Path, threads: int, channel: Path) -> dict[str, str]:
    """Variables for the kernel: this repository first on the path, and as many threads as asked for
    (0 = all cores)."""
    count = str(threads or all_cores())
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OPENBLAS_NUM_THREADS": count,
        PROGRESS_CHANNEL: str(channel),
    }


def all_cores() -> int:
    """Physical cores, within what this process may use: a second thread per core slows dense
    kernels down."""
    import psutil

    available = available_cores()
    return min(available, max(2, psutil.cpu_count(logical=False) or available))


def _papermill(notebook: Path, executed: Path, parameters: dict[str, Any], watch: _Watch) -> None:
    import papermill
    from papermill.clientwrap import PapermillNotebookClient
    from papermill.engines import NBClientEngine, papermill_engines
    from papermill.log import logger

    class WatchedEngine(NBClientEngine):
        @classmethod
        def execute_managed_notebook(cls, nb_man, kernel_name, **_):
            start = nb_man.cell_start

            def cell_start(cell, cell_index=None, **kwargs):
                if cell.cell_type == "code":
                    watch.started_cells.append(cell_index)
                return start(cell, cell_index, **kwargs)

            nb_man.cell_start = cell_start
            watch.client = PapermillNotebookClient(
                nb_man, kernel_name=kernel_name, startup_timeout=180, timeout=None, log=logger
            )
            with watch.kernel_log.open("wb") as log:
                return watch.client.execute(stdout=log, stderr=log)

    papermill_engines.register("alar", WatchedEngine)
    try:
        papermill.execute_notebook(
            notebook,
            executed,
            parameters,
            engine_name="alar",
            kernel_name="python3",
            progress_bar=False,
            cwd=notebook.parent,
        )
    except BaseException as error:
        watch.error = error


def _as_failure(watch: _Watch, notebook: Path, executed: Path, cells: int) -> BaseException:
    from nbclient.exceptions import DeadKernelError
    from papermill.exceptions import PapermillExecutionError

    error, cell = watch.error, len(watch.started_cells)
    if isinstance(error, PapermillExecutionError):
        lines = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error.traceback)).splitlines()
        return CellFailed(notebook, cell, cells, f"{error.ename}: {error.evalue}", lines, executed)
    if isinstance(error, DeadKernelError):
        lines = watch.kernel_log.read_text(encoding="utf-8", errors="replace").splitlines()
        return CellFailed(
            notebook,
            cell,
            cells,
            "the kernel died, most often because memory ran out; smaller batch sizes need less",
            lines,
            executed,
        )
    return error


@contextlib.contextmanager
def _kernelspec(folder: Path, environment: dict[str, str]) -> Iterator[None]:
    """A `python3` kernelspec for the running interpreter, found before any other while the context
    lasts."""
    home = folder / "kernels" / "python3"
    home.mkdir(parents=True)
    (home / "kernel.json").write_text(
        json.dumps(
            {
                "argv": [
                    sys.executable,
                    "-Xfrozen_modules=off",
                    "-m",
                    "ipykernel_launcher",
                    "--log-level=ERROR",
                    "-f",
                    "{connection_file}",
                ],
                "display_name": "Python 3",
                "language": "python",
                "env": environment,
            }
        )
    )
    before = os.environ.get("JUPYTER_PATH")
    os.environ["JUPYTER_PATH"] = os.pathsep.join([str(folder), *filter(None, [before])])
    try:
        yield
    finally:
        if before is None:
            del os.environ["JUPYTER_PATH"]
        else:
            os.environ["JUPYTER_PATH"] = before


def _tail(path: Path) -> Iterator[list[dict]]:
    """Each step gives the whole lines that were appended since the last one."""
    with path.open("rb") as stream:
        pending = b""
        while True:
            *lines, pending = (pending + stream.read()).split(b"\n")
            yield [json.loads(line) for line in lines if line]

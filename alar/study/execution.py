"""Runs one notebook headless, by papermill, with the running interpreter as its kernel.

papermill works in a thread and the calling thread looks after the terminal, so Ctrl-C ends the
kernel at once. We start the kernel from our own specification, because a `python3` kernel in the
user's home would take precedence over the running interpreter. If this process is killed, the
kernel notices within a second and ends too (ipykernel polls its parent). Until then it holds the
lock of its stage (`alar.study.stage.lock_stage`).
"""

import contextlib
import json
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alar.study.params import notebooks
from alar.study.provenance import available_cores
from alar.study.stage import PROGRESS_CHANNEL

TICK = 0.25  # seconds between two looks at the kernel's progress
KERNEL_STARTS = 180  # seconds that a kernel may take to answer; a busy machine is slow
TRACEBACK_LINES = 25  # the last ones, which name the cause


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

    on_cell(k, n): the k-th of n code cells starts. on_progress(row): a bar moved. on_tick(): about
    four times a second. All three are called in the calling thread. threads: 0 = all cores. Raises
    CellFailed.
    """
    executed.parent.mkdir(parents=True, exist_ok=True)
    code_cells = sum(cell.is_code for cell in notebooks.cells_of(notebook))
    total = code_cells + bool(parameters)  # papermill adds a cell that sets them
    seen = 0  # code cells that `on_cell` has been told of
    with tempfile.TemporaryDirectory(prefix="alar-") as folder:
        channel = Path(folder) / "progress.jsonl"
        channel.touch()
        work = _Papermill(executed, kernel_environment(root, threads, channel))
        # Daemon: a papermill that hangs must not keep this process alive.
        thread = threading.Thread(target=work.run, args=(notebook, parameters), daemon=True)
        thread.start()
        rows = _tail(channel)
        try:
            while thread.is_alive():
                thread.join(TICK)
                while seen < work.started_cells:  # counted by the other thread
                    seen += 1
                    on_cell(seen, total)
                for row in next(rows):
                    on_progress(row)
                on_tick()
        finally:
            if thread.is_alive():  # Ctrl-C arrived here
                work.kill_kernel()
                thread.join(20)  # seconds for papermill to notice and to write the notebook
    if work.error is not None:
        raise work.failure(notebook, total) from None
    work.kernel_log.unlink(missing_ok=True)  # of interest only after a failure


def kernel_environment(root: Path, threads: int, channel: Path) -> dict[str, str]:
    """Variables for the kernel: this repository comes first on the path, and `threads` are used
    (0 = all cores)."""
    count = str(threads or all_cores())
    # First, so that an installed `alar` does not hide this one.
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONHASHSEED": "0",  # sets have the same order in every run
        "OMP_NUM_THREADS": count,  # read when torch is imported, so set from outside
        "MKL_NUM_THREADS": count,
        "OPENBLAS_NUM_THREADS": count,
        PROGRESS_CHANNEL: str(channel),
    }


def all_cores() -> int:
    """Physical cores that this process may use. A second thread per core slows dense kernels
    down."""
    import psutil

    available = available_cores()
    return min(available, max(2, psutil.cpu_count(logical=False) or available))


class _Papermill:
    """papermill in a thread, and what the calling thread sees of it."""

    def __init__(self, executed: Path, environment: dict[str, str]):
        self.executed, self.environment = executed, environment
        self.kernel_log = executed.with_suffix(".log")  # what the kernel's process itself writes
        self.started_cells = 0
        self.manager: Any = None  # of the kernel, once it has started
        self.error: BaseException | None = None

    def run(self, notebook: Path, parameters: dict[str, Any]) -> None:
        import papermill

        try:
            with self.kernel_log.open("wb") as log:
                papermill.execute_notebook(
                    notebook,
                    self.executed,
                    parameters,
                    kernel_name="python3",
                    kernel_manager_class=self._kernel_manager(log),
                    on_cell_start=self._cell_starts,
                    start_timeout=KERNEL_STARTS,
                    progress_bar=False,
                    cwd=notebook.parent,
                )
        # Nothing may end this thread unseen; the calling thread raises it again.
        except BaseException as error:
            self.error = error

    def _cell_starts(self, cell: Any, cell_index: int) -> None:
        self.started_cells += cell.cell_type == "code"  # Markdown cells start too

    def _kernel_manager(self, log: Any) -> type:
        """A manager that starts the running interpreter. The process's own output goes to `log`."""
        from jupyter_client.kernelspec import KernelSpec
        from jupyter_client.manager import AsyncKernelManager

        # Frozen modules make the debugger of ipykernel print a warning into every notebook.
        argv = [sys.executable, "-Xfrozen_modules=off", "-m", "ipykernel_launcher"]
        argv += ["--log-level=ERROR", "-f", "{connection_file}"]
        spec = KernelSpec(
            argv=argv, display_name="Python 3", language="python", env=self.environment
        )
        watch = self

        class OwnKernel(AsyncKernelManager):
            kernel_spec = spec

            async def start_kernel(self, **options):
                watch.manager = self  # so that `kill_kernel` finds the process
                await super().start_kernel(**options | {"stdout": log, "stderr": log})

        return OwnKernel

    def kill_kernel(self) -> None:
        provisioner = getattr(self.manager, "provisioner", None)
        process = getattr(provisioner, "process", None)
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    def failure(self, notebook: Path, cells: int) -> BaseException:
        """What ended the notebook: CellFailed for a failed cell or a dead kernel, else the
        error."""
        from nbclient.exceptions import DeadKernelError
        from papermill.exceptions import PapermillExecutionError

        error = self.error
        if isinstance(error, PapermillExecutionError):
            what = f"{error.ename}: {error.evalue}"
            text = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error.traceback))  # without colours
        elif isinstance(error, DeadKernelError):
            what = (
                "the kernel died, most often because memory ran out; smaller batch sizes need less"
            )
            text = self.kernel_log.read_text(encoding="utf-8", errors="replace")
        else:
            return error
        lines = text.splitlines()
        return CellFailed(notebook, self.started_cells, cells, what, lines, self.executed)


def _tail(path: Path) -> Iterator[list[dict]]:
    """Each `next` gives the whole lines appended since the one before, parsed as JSON."""
    with path.open("rb") as stream:
        pending = b""
        while True:
            # The last piece may be half a line.
            *lines, pending = (pending + stream.read()).split(b"\n")
            yield [json.loads(line) for line in lines if line]

"""Several run folders at a time, each in a process of its own with its share of the cores.

A small model gains little from a second thread, so two runs beside each other take hardly longer
than the longer one. What a run says appears line by line, led by its name; in a terminal, a line
for each shows what it is doing.

One thread per run starts its process and reads what it sends. (A `ProcessPoolExecutor` would end
all runs when the system kills one of them for want of memory.)
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from multiprocessing.connection import Connection, wait
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from alar.study.terminal import Terminal

INTERRUPTED = 130  # exit code
LINE, STATE = "line", "state"  # what a run sends
Work = Callable[..., int]  # work(terminal=…) → exit code; it is pickled


def run_beside(works: Mapping[str, Work], at_once: int, terminal: Terminal) -> dict[str, int]:
    """Do all works, `at_once` at a time; returns their exit codes, −n for one that signal n killed.

    One that fails does not end the others. Whatever ends this process's part of it, such as an
    interrupt, ends all of them and is raised again.
    """
    with _Watch(terminal) as watch, ThreadPoolExecutor(at_once) as pool:
        codes = {name: pool.submit(watch.do, name, work) for name, work in works.items()}
        try:
            codes = {name: code.result() for name, code in codes.items()}
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            watch.end_all()
            raise
    if INTERRUPTED in codes.values():
        raise KeyboardInterrupt
    return codes


class _Watch:
    """The processes that are at work, and the screen that shows them all."""

    def __init__(self, terminal: Terminal):
        self.terminal, self.live = terminal, terminal.console.is_terminal
        screen = Live(console=terminal.console, auto_refresh=False, transient=True)
        self.screen = screen if self.live else nullcontext()
        self.processes: dict[str, multiprocessing.process.BaseProcess] = {}
        self.states: dict[str, str] = {}
        self.lock, self.ending = threading.Lock(), False

    def __enter__(self) -> _Watch:
        self.screen.__enter__()
        return self

    def __exit__(self, *raised) -> None:
        self.screen.__exit__(*raised)

    def do(self, name: str, work: Work) -> int:
        """In a thread: run the work in a process until it ends, and show what it sends."""
        # Not "fork": this process has threads, and torch may be loaded.
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_obey, args=(work, theirs, self.live), name=name)
        with self.lock:
            if self.ending:
                return INTERRUPTED
            process.start()
            self.processes[name] = process
        theirs.close()  # so that the process's end is the end of what can be received
        while True:
            try:
                kind, text = ours.recv()
            except (EOFError, OSError):
                break
            self.show(name, kind, text)
        process.join()
        self.show(name, STATE, "")
        return process.exitcode

    def show(self, name: str, kind: str, text: str) -> None:
        with self.lock:
            if kind == LINE:
                self.terminal.say(f"{name} │ {text}")
            else:
                self.states[name] = text
            if self.live:
                lines = [f"{name} │ {state}" for name, state in self.states.items() if state]
                self.screen.update(Group(*map(Text, lines)), refresh=True)

    def end_all(self) -> None:
        with self.lock:
            self.ending = True
            for process in self.processes.values():
                process.terminate()


def _obey(work: Work, connection: Connection, live: bool) -> None:
    """The process of one run."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.exit(work(terminal=_SendingTerminal(connection, live)))


def _end_with_parent() -> None:
    """A run must not outlive a killed parent: the next one would find its folder in use."""
    wait([multiprocessing.parent_process().sentinel])
    os.kill(os.getpid(), signal.SIGTERM)


class _SendingTerminal(Terminal):
    """Sends lines to the process that shows them; the summary, many lines long, only goes to its
    file. `live`: what it is doing is shown as it changes, not noted now and then."""

    def __init__(self, connection: Connection, live: bool):
        lines = _Lines(connection)
        super().__init__(Console(file=lines, highlight=False, soft_wrap=True, force_terminal=False))
        self.connection, self.live = connection, live

    def tick(self) -> None:
        if self.live:
            self.connection.send((STATE, self.state(time.time())))
        else:
            super().tick()

    def stage_ends(self, outcome: str = "done") -> None:
        super().stage_ends(outcome)
        if self.live:
            self.connection.send((STATE, ""))

    def summary(self, run_dir: Path, seconds: dict[str, tuple[float, bool]]) -> None:
        self.write_summary(run_dir, seconds)


class _Lines:
    """A text stream that sends whole lines."""

    def __init__(self, connection: Connection):
        self.connection, self.pending = connection, ""

    def write(self, text: str) -> int:
        *lines, self.pending = (self.pending + text).split("\n")
        for line in lines:
            self.connection.send((LINE, line))
        return len(text)

    def flush(self) -> None:
        pass

"""Works on several run folders at a time, each in a process of its own with its share of the cores.

A small model gains little from a second thread, so two runs side by side take hardly longer than
the longer one alone. The output of a run appears line by line, each line after the run's name. In a
terminal, one more line per run shows what it is doing.

One thread per run starts its process and reads what it sends. (A `ProcessPoolExecutor` would end
all runs if the system killed one of them because memory ran out.)
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

INTERRUPTED = 130  # exit code; shells use 128 + 2, the number of SIGINT
LINE, STATE = "line", "state"  # kinds of message that a run sends
Work = Callable[..., int]  # work(terminal=…) → exit code; it is pickled


def run_beside(works: Mapping[str, Work], at_once: int, terminal: Terminal) -> dict[str, int]:
    """Do all works, `at_once` at a time. Returns name → exit code, −n if signal n killed the work.

    A work that fails does not end the others. An exception in this process, such as an interrupt,
    ends all works and is raised again.
    """
    with _Watch(terminal) as watch, ThreadPoolExecutor(at_once) as pool:
        codes = {name: pool.submit(watch.do, name, work) for name, work in works.items()}
        try:
            codes = {name: code.result() for name, code in codes.items()}
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # those that have not begun never will
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
        self.processes: dict[str, multiprocessing.process.BaseProcess] = {}  # run → its process
        self.states: dict[str, str] = {}  # run → what it is doing now
        self.lock, self.ending = threading.Lock(), False  # several threads show and start

    def __enter__(self) -> _Watch:
        self.screen.__enter__()
        return self

    def __exit__(self, *raised) -> None:
        self.screen.__exit__(*raised)

    def do(self, name: str, work: Work) -> int:
        """In a thread: run the work in a process until it ends, and show what it sends."""
        # Not "fork": this process has threads, perhaps torch's too, and they do not survive a fork.
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_obey, args=(work, theirs, self.live), name=name)
        with self.lock:
            if self.ending:  # an interrupt came before this one started
                return INTERRUPTED
            process.start()
            self.processes[name] = process
        theirs.close()  # only the process holds it now, so `recv` fails when the process ends
        while True:
            try:
                kind, text = ours.recv()
            except (EOFError, OSError):  # the process has ended
                break
            self.show(name, kind, text)
        process.join()
        self.show(name, STATE, "")
        return process.exitcode  # −n after signal n

    def show(self, name: str, kind: str, text: str) -> None:
        with self.lock:
            if kind == LINE:
                self.terminal.say(f"{name} │ {text}")
            else:
                self.states[name] = text
            if self.live:
                # A run that has ended shows nothing.
                lines = [f"{name} │ {state}" for name, state in self.states.items() if state]
                self.screen.update(Group(*map(Text, lines)), refresh=True)

    def end_all(self) -> None:
        with self.lock:
            self.ending = True
            for process in self.processes.values():
                process.terminate()  # SIGTERM, which the runner treats as Ctrl-C


def _obey(work: Work, connection: Connection, live: bool) -> None:
    """What the process of one run executes."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.exit(work(terminal=_SendingTerminal(connection, live)))


def _end_with_parent() -> None:
    """End this run when its parent is gone: the next run would find the folder in use."""
    wait([multiprocessing.parent_process().sentinel])  # ready when the parent has ended
    os.kill(os.getpid(), signal.SIGTERM)


class _SendingTerminal(Terminal):
    """Sends lines to the process that shows them. The summary has many lines and only goes to its
    file. `live`: send what the run is doing at every tick, instead of a line now and then."""

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
        self.connection, self.pending = connection, ""  # pending: a line without its end

    def write(self, text: str) -> int:
        *lines, self.pending = (self.pending + text).split("\n")
        for line in lines:
            self.connection.send((LINE, line))
        return len(text)  # what a text stream returns

    def flush(self) -> None:
        pass

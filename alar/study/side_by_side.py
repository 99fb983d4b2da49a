"""Several run folders at a time, each in a process of its own with its share of the cores.

A small model gains little from a second thread, so two studies beside each other take hardly longer
than the longer one. What a run says appears line by line, led by its name; in a terminal, a line
for each shows what it is doing.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from multiprocessing.connection import Connection, wait
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from alar.study.terminal import Terminal

INTERRUPTED = 130  # exit code
LINE, STATE = "line", "state"  # what a part sends
Work = Callable[..., int]  # work(terminal=…) → exit code; it is pickled


def run(parts: Mapping[str, Work], at_once: int, terminal: Terminal) -> dict[str, int]:
    """Do all parts, `at_once` of them at a time; returns their exit codes, −n for one that signal n
    killed.

    One that fails does not end the others. Whatever ends this process's part of it, such as an
    interrupt, ends all of them.
    """
    context = multiprocessing.get_context("spawn")
    waiting, running, codes = list(parts), {}, {}  # running: connection → (name, process)
    states: dict[str, str] = {}
    live = terminal.console.is_terminal
    try:
        with (
            Live(console=terminal.console, auto_refresh=False, transient=True)
            if live
            else nullcontext()
        ) as screen:
            while waiting or running:
                while waiting and len(running) < at_once:
                    name = waiting.pop(0)
                    ours, theirs = context.Pipe(duplex=False)
                    process = context.Process(
                        target=_obey, args=(parts[name], theirs, live), name=name
                    )
                    process.start()
                    theirs.close()
                    running[ours] = name, process
                for connection in wait(running):
                    name, process = running[connection]
                    try:
                        kind, text = connection.recv()
                    except (EOFError, OSError):
                        del running[connection]
                        states.pop(name, None)
                        process.join()
                        codes[name] = process.exitcode
                        continue
                    if kind == STATE:
                        states[name] = text
                    else:
                        terminal.say(f"{name} │ {text}")
                if live:
                    screen.update(
                        Group(*(Text(f"{name} │ {text}") for name, text in states.items() if text)),
                        refresh=True,
                    )
    except BaseException:
        for connection, (_, process) in running.items():
            process.terminate()
            connection.close()
        for _, process in running.values():
            process.join()
        raise
    if INTERRUPTED in codes.values():
        raise KeyboardInterrupt
    return {name: codes[name] for name in parts}


def _obey(work: Work, connection: Connection, live: bool) -> None:
    """The process of one part."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.exit(work(terminal=_PartTerminal(connection, live)))


def _end_with_parent() -> None:
    """A part must not outlive a killed run: the next one would find its folder in use."""
    wait([multiprocessing.parent_process().sentinel])
    os.kill(os.getpid(), signal.SIGTERM)


class _PartTerminal(Terminal):
    """Sends lines to the process that shows them; the summary, many lines long, only goes to its
    file. `live`: what it is doing is shown as it changes, not noted now and then."""

    def __init__(self, connection: Connection, live: bool):
        super().__init__(
            Console(file=_Lines(connection), highlight=False, soft_wrap=True, force_terminal=False)
        )
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

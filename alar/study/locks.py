"""Locks: one process per run folder, and one run at a time on the same stage with equal inputs.

They are locks of the operating system, which frees them however their process ends.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import filelock

from alar.files import write_json
from alar.study.stage import LOCKS, RunError, read_note

RUN = "run"
ORPHAN = 3.0  # seconds; by then a process has noticed that its parent was killed


@contextlib.contextmanager
def whole_run(run_dir: Path) -> Iterator[None]:
    """Be the only process in this run folder. Raises RunError if another is at work there."""
    home = run_dir / LOCKS
    home.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(home / RUN)
    holder = home / f"{RUN}.json"  # who holds the lock, for the message of the next one
    try:
        lock.acquire(timeout=ORPHAN)
    except filelock.Timeout:
        held = read_note(holder) or {"pid": "unknown", "since": "unknown"}
        raise RunError(
            f"{run_dir}: another run is at work here (process {held['pid']}, since"
            f" {held['since']}); wait for it, or choose another folder with --run-dir"
        ) from None
    try:
        # After the lock is ours, so that it names the right process.
        write_json(holder, {"pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")})
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def same_work(home: Path, work: str, say: Callable[[str], None]) -> Iterator[None]:
    """Only one run below `home` does this work (`receipts.work_of`) at a time.

    The others wait, and then find it finished.
    """
    path = home / LOCKS / work
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=0)  # only to learn whether to say that we wait
    except filelock.Timeout:
        say(
            f"{work.rpartition('-')[0]} is at work in another run, with equal inputs; waiting for"
            " its result"
        )
        lock.acquire()  # without a limit: the other run may train for hours
    try:
        yield
    finally:
        lock.release()

"""Execution of calls: a whitelist, bounded arguments, and a child process with limits.

There are two walls, because each alone has a hole. Bounded, literal arguments
(`alar.domains.tool.schema`) make every function of the whitelist finish at once, but a bound that
somebody forgets would hang a whole rollout. So calls run in a child process. If the child works on
a call for longer than `cpu_seconds`, it ends, the model reads an error, and the next call gets a
fresh child. The limit counts the child's own processor time, so that results do not depend on what
else the machine is doing. `timeout`, in seconds of the clock, is only for a function that waits.
Nothing is ever evaluated: arguments are what `json.loads` returned, and names are looked up in a
dictionary.

The child speaks JSON lines: it reads [name, arguments] and writes ["ok", result] or
["error", text].
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import subprocess
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alar.domains.tool.schema import Tool

WHITELIST = "alar.domains.tool.functions:CALLABLE"  # module:name of a dict, name → Tool
MAX_RESPONSE = 400  # characters of one response in the prompt
MEMORY = 2**30  # bytes of address space of the child


class Executor:
    """Runs calls of the functions in `whitelist`, the "module:name" of a dict.

    `cpu_seconds` and `timeout` bound one call, `startup` the start of a child; all are seconds. Use
    it from one thread only.
    """

    def __init__(
        self,
        whitelist: str = WHITELIST,
        *,
        cpu_seconds: float = 1.0,
        timeout: float = 60.0,
        startup: float = 300.0,
    ):
        self.whitelist = whitelist
        self.cpu_seconds = cpu_seconds
        self.timeout = timeout
        self.startup = startup
        self.tools: dict[str, Tool] = _load(whitelist)
        self._child: subprocess.Popen | None = None  # started at the first call
        self._unread = b""  # what the child wrote after the last line that was read
        self._finalizer = None

    def run(self, calls: Sequence[dict], offered: Sequence[str] | None = None) -> list[str]:
        """One response per call, in order. No call makes it raise.

        `offered` names the functions that this request may use; by default all. A response is the
        result as text (JSON unless it is text itself), or {"error": …}.
        """
        return [self._respond(call, self.tools if offered is None else offered) for call in calls]

    def close(self) -> None:
        if self._child is not None:
            self._finalizer()
            self._child, self._unread = None, b""

    def _respond(self, call: dict, offered) -> str:
        name, arguments = call["name"], call["arguments"]
        if name not in offered or name not in self.tools:
            # a policy may write a name of any length
            return error_text(f"there is no function {name[:60]!r}")
        problem = self.tools[name].problem(arguments)
        if problem:
            return error_text(problem)
        status, value = self._ask(name, arguments)
        return response_text(value) if status == "ok" else error_text(value)

    def _ask(self, name: str, arguments: dict) -> tuple[str, Any]:
        try:
            if self._child is None:
                self._start()
            self._child.stdin.write(json.dumps([name, arguments]).encode() + b"\n")
            self._child.stdin.flush()
            line = self._line(self.timeout)
        except OSError:  # the child is gone, or did not start
            line = None
        if line is None:
            self.close()  # the next call gets a fresh child
            return "error", f"{name} took too long or too much memory"
        return tuple(json.loads(line))

    def _start(self) -> None:
        # The child finds what this process finds, whatever folder it was started in.
        root = str(Path(__file__).resolve().parents[3])
        known = [root, os.environ.get("PYTHONPATH"), *sys.path]
        paths = os.pathsep.join(path for path in known if path)
        module = ["-m", "alar.domains.tool.execution"]
        self._child = subprocess.Popen(
            [sys.executable, *module, self.whitelist, str(self.cpu_seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # What a function prints goes to stderr, and nobody reads it.
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        )
        # Ends the child with the executor, or with the interpreter.
        self._finalizer = weakref.finalize(self, _end, self._child)
        if self._line(self.startup) != b"ready":
            self.close()
            raise OSError("the child did not start")

    def _line(self, timeout: float) -> bytes | None:
        """The child's next line; None if it does not come in time or the child is gone."""
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._child.stdout], [], [], timeout)
            chunk = os.read(self._child.stdout.fileno(), 65536) if ready else b""
            if not chunk:  # late, or the end of the file: the child has ended
                return None
            self._unread += chunk
        line, self._unread = self._unread.split(b"\n", 1)
        return line


def response_text(result: Any) -> str:
    """What the model reads: text as it is, anything else as JSON.

    It is cut at `MAX_RESPONSE`, and it cannot hold a tag.
    """
    shown = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    # Half a surrogate pair becomes "?": no tokenizer reads it.
    shown = shown.encode("utf-8", "replace").decode("utf-8").replace("<", "\\u003c")
    return shown if len(shown) <= MAX_RESPONSE else f"{shown[:MAX_RESPONSE]}…"


def error_text(problem: str) -> str:
    return response_text({"error": problem})


def _load(whitelist: str) -> dict[str, Tool]:
    module, _, name = whitelist.partition(":")
    return getattr(importlib.import_module(module), name)


def _end(child: subprocess.Popen) -> None:
    child.kill()
    child.wait()
    child.stdin.close()
    child.stdout.close()


def _serve(whitelist: str, cpu_seconds: float) -> None:
    """What the child does: answer calls until its input ends or a call outlasts its timer."""
    tools = _load(whitelist)
    try:
        import resource  # only on Unix

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    except (ImportError, ValueError, OSError):
        pass  # this system has no such limit; time is limited all the same
    sys.set_int_max_str_digits(5000)  # writing a number takes quadratic time
    answers = sys.stdout.buffer
    sys.stdout = sys.stderr  # nothing that a function prints may look like an answer
    answers.write(b"ready\n")
    answers.flush()
    for line in sys.stdin.buffer:
        name, arguments = json.loads(line)
        _set_timer(cpu_seconds)
        # The timer also covers the writing of the result, which may be long.
        try:
            answer = json.dumps(["ok", tools[name].run(**arguments)], allow_nan=False)
        except Exception as error:  # the model reads whatever a function raises
            answer = json.dumps(["error", f"{type(error).__name__}: {error}"[:200]])
        _set_timer(0)  # off: waiting for the next call costs nothing
        answers.write(answer.encode() + b"\n")
        answers.flush()


def _set_timer(cpu_seconds: float) -> None:
    """SIGVTALRM has no handler here, so it ends the process, even in the middle of a C function."""
    # Windows has no such timer; there `timeout` alone bounds a call.
    if hasattr(signal, "ITIMER_VIRTUAL"):
        signal.setitimer(signal.ITIMER_VIRTUAL, cpu_seconds)


if __name__ == "__main__":
    _serve(sys.argv[1], float(sys.argv[2]))

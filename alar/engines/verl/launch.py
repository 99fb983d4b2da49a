"""Starting, following, resuming and ending a verl job.

    from alar.engines.verl.launch import run_job
    folder = run_job(Job(...), log=print)     # a subprocess; prints rows of metrics.jsonl

The same job by hand, or on a cluster's head node:

    python -m alar.engines.verl.launch FOLDER/job.json

If a stopped job is started again with the same settings, it goes on from `FOLDER/state`. It ends
with the checkpoint folder `FOLDER/checkpoint`, which `alar.model.load` reads.

Several nodes. Install the package and its engines on all of them, and put the model, the prompts
and FOLDER on a shared file system. Start Ray first; the job then joins it:

    head    ray start --head --port=6379                       (it prints its address)
    others  ray start --address=HEAD:6379
    head    RAY_ADDRESS=HEAD:6379 python -m alar.engines.verl.launch FOLDER/job.json

with `rl.nodes` and `gpus` in job.json. Every node that runs an agent loop worker must reach the
retrieval server: give its host name in `retrieval.url`, never 127.0.0.1.

How failures show:

    a node without the package   `ModuleNotFoundError: alar` in the job's log
    too few GPUs                 verl waits for resources, then says how many it found
    a server out of reach        the job ends with the retriever's error, which names the url
    a lost node                  the job ends with RayActorError
    a dead raylet                the job is started once more, then ends with code 75

Started again, it goes on from the last checkpoint. The log is `FOLDER/job.log`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from alar.engines.verl.data import write_prompts
from alar.engines.verl.settings import Job, compose, environment_variables, require_verl
from alar.files import read_jsonl
from alar.records import Question
from alar.rl.config import RLConfig
from alar.rl.strategy import Strategy

FOLLOWED = "--followed"  # tells the driver that `run_job` watches it
RAY_DIED = 75  # exit code of a job that cannot go on, but may if it is started again
TAIL = 25  # lines of the log that an error shows
# Settings of the machines. They may differ when a job is started again.
MACHINES = {"overrides", "gpus", "nodes", "processes", "tensor_parallel", "rollout", "threads"}


class JobFailed(RuntimeError):
    """The job ended with an error. The message gives the end of its log and says how to go on."""


def run_job(job: Job, log: Callable[[dict], None] = print, *, poll: float = 0.5) -> Path:
    """Run a job to its end and return its checkpoint folder.

    `log` gets every row of metrics, also those from before a resume. A job whose Ray has died is
    started once more. Raises VerlUnavailable without verl, ValueError if the folder holds a job
    with other settings, and JobFailed if the job fails.
    """
    require_verl()
    folder, seen = Path(job.folder), 0  # rows of metrics that `log` has had
    _prepare(job, folder)
    start, code, seen = _follow(job, log, poll, seen)
    if code == RAY_DIED:
        start, code, seen = _follow(job, log, poll, seen)
    if code or not job.checkpoint.exists():
        raise JobFailed(
            f"the verl job in {folder} ended with code {code}. The end of"
            f" {folder / 'job.log'}:\n{_tail(folder / 'job.log', start)}\nStarted again, it goes on"
            f" from its last checkpoint in {job.state}"
        )
    return job.checkpoint


def _follow(job: Job, log: Callable[[dict], None], poll: float, seen: int) -> tuple[int, int, int]:
    """Run the job's process to its end. Returns where its part of the job's log starts, its exit
    code, and how many rows of metrics `log` has had."""
    folder = Path(job.folder)
    with (folder / "job.log").open("ab") as output:
        start = output.tell()  # bytes; a resumed job appends to the log of the first
        process = subprocess.Popen(
            [sys.executable, "-m", "alar.engines.verl.launch", str(job.save()), FOLLOWED],
            env=os.environ | environment_variables(job) | {"PYTHONPATH": _python_path()},
            stdin=subprocess.PIPE,  # closed by the system when this process dies, however it dies
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that all processes of the job can be ended together
        )
    try:
        while process.poll() is None:
            time.sleep(poll)
            for row in _new_rows(job, seen):
                seen += 1
                log(row)
    finally:
        _end(process)
    for row in _new_rows(job, seen):
        seen += 1
        log(row)
    return start, process.returncode, seen


def verl_job(
    model: str | Path,
    folder: str | Path,
    questions: Sequence[Question],
    validation: Sequence[Question],
    rl: RLConfig,
    strategy: Strategy,
    *,
    environment: dict[str, Any],
    engine: str = "hf",
    **limits: int,
) -> Job:
    """A job on all GPUs of this machine and of `rl.nodes` like it, or in one CPU process.

    It writes the prompts to `folder`. `environment` gives the `domain`, the source of its `prompt`
    and the settings of its environment (`alar.domains.catalogue`). `engine` is "hf", the in-process
    engine, or "vllm".
    `limits` are `max_turns`, `max_new_tokens` and `batch_size`, as `ARGRPO` takes them. Raises
    ValueError for questions that the strategy cannot ask or reward, and for a checkpoint with its
    own codec, because verl's log-probs do not know its constraint.
    """
    folder = Path(folder)
    config = Path(model) / "config.json"
    if config.exists() and "codec_class" in json.loads(config.read_text(encoding="utf-8")):
        raise ValueError(
            f"{model}: has a codec of its own, which verl does not know; set rl.trainer to single"
        )
    strategy.reward.require(questions)
    ordered = []  # the questions of step 1, then those of step 2, …
    for step in range(1, rl.steps + 1):
        ordered += strategy.sampler.prompts(questions, step)
    return Job(
        model=str(model),
        folder=str(folder),
        prompts=str(write_prompts(folder / "prompts.parquet", ordered)),
        # verl wants a validation file even where nothing is validated.
        validation=str(write_prompts(folder / "validation.parquet", validation or ordered[:1])),
        rl=rl,
        strategy=strategy,
        environment=environment,
        gpus=torch.cuda.device_count(),
        rollout=f"alar_{engine}",
        **limits,
    )


def _prepare(job: Job, folder: Path) -> None:
    """Refuse the folder of another job. Clear what an earlier end of this job left."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "job.json").exists() and job.state.exists():
        before, now = _algorithm(Job.read(folder / "job.json")), _algorithm(job)
        changed = sorted(key for key in now if before.get(key) != now[key])
        if changed:
            raise ValueError(
                f"{folder}: the job there was started with another {', '.join(changed)}; remove"
                f" {job.state} to start anew"
            )
    # Without this, a job that fails now would return the checkpoint of an earlier run.
    shutil.rmtree(job.checkpoint, ignore_errors=True)
    if not job.state.exists():
        job.metrics.unlink(missing_ok=True)  # the job starts anew, at step 1


def _algorithm(job: Job) -> dict[str, Any]:
    """The settings that must stay the same when a job is started again. Its machines may change."""
    plain = job.to_json()
    plain["rl"] = {key: value for key, value in plain["rl"].items() if key not in MACHINES}
    return {key: value for key, value in plain.items() if key not in MACHINES}


def _new_rows(job: Job, seen: int) -> Iterator[dict]:
    """The rows beyond the first `seen`. A line that is half written waits for the next look."""
    try:
        yield from read_jsonl(job.metrics)[seen:]
    except (FileNotFoundError, ValueError):
        return


def _end(process: subprocess.Popen, patience: float = 20.0) -> None:
    """End the whole process group of the job. The driver ends first, so that it can shut Ray down.

    `patience` is in seconds.
    """
    for number, wait in ((signal.SIGTERM, patience), (signal.SIGKILL, 5.0)):
        if process.poll() is None:
            process.send_signal(number)
            try:
                process.wait(wait)
            except subprocess.TimeoutExpired:
                continue
    try:
        os.killpg(process.pid, signal.SIGKILL)  # Ray's processes that outlived the driver
    except ProcessLookupError:
        pass


def _tail(path: Path, start: int) -> str:
    with path.open("rb") as stream:
        stream.seek(start)
        return "\n".join(stream.read().decode(errors="replace").splitlines()[-TAIL:])


def _python_path() -> str:
    """The PYTHONPATH of the job and its workers. This package comes first, installed or not."""
    return os.pathsep.join(
        filter(None, (str(Path(__file__).resolve().parents[3]), os.environ.get("PYTHONPATH", "")))
    )


def _end_with_parent() -> None:
    """End this job when the process that follows it, such as a notebook's kernel, is gone."""

    def wait():
        # stdin ends when that process dies. `os.read` avoids sys.stdin, whose lock a daemon thread
        # would still hold when the interpreter ends.
        while os.read(0, 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def _end_with_ray() -> threading.Event:
    """End this job when the raylet that it has started is gone: whoever asks it then waits for
    ever. That happens while Ray starts, where a busy machine takes over 30 seconds for a process.

    Returns what to set before Ray is shut down.
    """
    shutting_down, own = threading.Event(), psutil.Process()

    def watch():
        while not shutting_down.wait(2.0):  # seconds
            states = []
            for child in own.children():
                with suppress(psutil.NoSuchProcess):  # it has ended since
                    states.append(child.as_dict(["name", "status"]))
            if {"name": "raylet", "status": psutil.STATUS_ZOMBIE} in states:
                print("Ray's raylet has died: see the logs of its session", file=sys.stderr)
                os._exit(RAY_DIED)

    threading.Thread(target=watch, daemon=True).start()
    return shutting_down


def drive(path: str, *options: str) -> None:
    """The driver of a job. It composes verl's configuration, starts or joins Ray, runs the task."""
    require_verl()
    job = Job.read(path)
    # This must come before the import of verl, which chooses verl's platform.
    os.environ.update(environment_variables(job))
    if FOLLOWED in options:
        _end_with_parent()
    import ray
    from verl.trainer.main_ppo import run_ppo

    from alar.engines.verl.trainer import LatentTaskRunner

    # As an exception, so that `finally` runs. 143 = 128 + SIGTERM, as a shell reports it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    shutting_down = _end_with_ray()
    try:
        config = compose(job)
        if os.environ.get("RAY_ADDRESS"):  # a running cluster has its own resources
            config.ray_kwargs.ray_init = {"runtime_env": config.ray_kwargs.ray_init.runtime_env}
        run_ppo(config, task_runner_class=ray.remote(num_cpus=1)(LatentTaskRunner))
    finally:
        shutting_down.set()
        ray.shutdown()


if __name__ == "__main__":
    drive(*sys.argv[1:])

"""vLLM's OpenAI-compatible server on an ALAR checkpoint.

    python -m alar.engines.serve FOLDER --port 8000 [any option of vLLM's server]

It sets the scheduler class, the logits processor, the worker extension and the chat history.
Everything else is vLLM's. A request chooses its mode with `vllm_xargs`: {"latent_mode": "free" |
"latent" | "think" | "off"}. It asks for its z with {"latent_record": KEY}; then they can be fetched
once from GET /v1/latents/KEY. `alar.engines.vllm.turns` lists the other options.

From Python, the same server runs as a process that ends with this one:

    with Server(FOLDER, log="server.log") as server:
        httpx.get(f"{server.address}/v1/models")
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import httpx

from alar.engines.vllm.checks import (
    FORCER,
    ROOM,
    SCHEDULERS,
    WORKER,
    EngineRefused,
    require_entry_point,
    require_vllm,
)
from alar.model.dtype import stored_dtype

SET_HERE = {  # option of vLLM's server → its value
    "--scheduler-cls": SCHEDULERS[True],
    "--logits-processors": FORCER,
    "--worker-extension-cls": WORKER,
}
# A user may not give these options: latent blocks are exact only with the values set here.
REFUSED = ("--model", "--async-scheduling", "--no-async-scheduling", *SET_HERE)
WITH_PARENT = "--end-with-parent"  # ours, for `Server`; vLLM does not see it
PR_SET_PDEATHSIG = 1  # prctl's "signal me when my parent dies", from linux/prctl.h


class Server:
    """`python -m alar.engines.serve FOLDER OPTIONS` as a process of its own.

    It answers once this object exists. It ends when it is closed or when this process ends, however
    that happens. What it prints goes to `log`. Raises EngineRefused with the end of the log if it
    stops before it answers, or does not answer within `patience` seconds.
    """

    def __init__(
        self,
        folder: str | Path,
        *options: str,
        log: str | Path,
        environment: Mapping[str, str] = {},
        patience: float = 600,
    ):
        with socket.socket() as free:  # port 0: the system chooses one
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "alar.engines.serve", str(folder), WITH_PARENT]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        self.address, self.log = f"http://127.0.0.1:{port}", Path(log)
        with self.log.open("w") as stream:
            self.process = subprocess.Popen(
                [*command, *options],
                env={**os.environ, **environment},
                stdout=stream,
                stderr=stream,
                start_new_session=True,  # so that `close` can end vLLM's workers as one group
            )
        try:
            self._wait(time.monotonic() + patience)
        except BaseException:  # an interrupt too must not leave a server behind
            self.close()
            raise

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def _wait(self, until: float) -> None:
        while not self._answers():
            ended = self.process.poll()
            if ended is not None or time.monotonic() > until:
                why = "does not answer" if ended is None else f"ended with exit code {ended}"
                raise EngineRefused(
                    f"the server {why}; the end of {self.log}:\n{self.log.read_text()[-3000:]}"
                )
            time.sleep(0.5)

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.address}/health", timeout=5).is_success
        except httpx.TransportError:  # not listening yet, or not ready
            return False

    def close(self) -> None:
        """End the server and its workers."""
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(self.process.pid, signal.SIGKILL)  # what is left of its session
        except ProcessLookupError:
            pass
        self.process.wait()


def server_arguments(argv: list[str]) -> list[str]:
    """The arguments of vLLM's server for `FOLDER [options]`.

    Raises EngineRefused for options that this module sets, and for a folder without a latent
    checkpoint.
    """
    if not argv or argv[0].startswith("-"):
        raise EngineRefused("usage: python -m alar.engines.serve FOLDER [options of vLLM's server]")
    folder, options = argv[0], argv[1:]
    for option in options:
        # vLLM takes --a_b for --a-b, and --a=b for --a b.
        if option.split("=")[0].replace("_", "-") in REFUSED:
            raise EngineRefused(
                f"{option} is set by alar.engines.serve; latent blocks are exact with its value"
                " only"
            )
    config = Path(folder) / "config.json"
    if not config.exists():
        raise EngineRefused(
            f"{folder}: no checkpoint here (no config.json); run the stage that writes it first"
        )
    if not json.loads(config.read_text(encoding="utf-8"))["model_type"].startswith("latent_"):
        raise EngineRefused(
            f"{folder}: an ordinary model; serve it with vLLM itself, or make it latent with"
            " alar.model.from_base"
        )
    ours = ["--model", folder, "--async-scheduling"]
    for option, value in SET_HERE.items():
        ours += [option, value]
    ours += ["--middleware", f"{ROOM}.history.LatentHistory"]
    given = {option.split("=")[0] for option in options}
    # A user may override these two. By default vLLM would take sampling parameters from the
    # checkpoint, and narrow float32 to 16 bits.
    for option, value in {"--generation-config": "vllm", "--dtype": stored_dtype(folder)}.items():
        if option not in given:
            ours += [option, value]
    return ours + options


def main(argv: list[str] | None = None) -> None:
    try:
        require_vllm()
        require_entry_point()
        arguments = list(sys.argv[1:] if argv is None else argv)
        if WITH_PARENT in arguments:
            arguments.remove(WITH_PARENT)
            # Linux sends us this signal when the parent dies, even if that is killed.
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        arguments = server_arguments(arguments)
    except EngineRefused as error:
        raise SystemExit(f"alar.engines.serve: {error}") from None
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from alar.engines.vllm.plugin import register

    cli_env_setup()
    register(imported=current_platform.is_cpu())
    options = make_arg_parser(FlexibleArgumentParser(prog="alar.engines.serve")).parse_args(
        arguments
    )
    validate_parsed_serve_args(options)
    uvloop.run(run_server(options))


if __name__ == "__main__":
    main()

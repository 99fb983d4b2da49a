"""vLLM's OpenAI-compatible server on an ALAR checkpoint.

    python -m alar.serve FOLDER --port 8000 [any option of vLLM's server]

Sets the scheduler class, the logits processor, the worker extension and the chat history; everything else is vLLM's. A
request chooses its mode with `vllm_xargs`: {"latent_mode": "free" | "latent" | "think" | "off"}, and asks for its z with
{"latent_record": KEY}, to be fetched once from GET /latents/KEY. The other options: `alar.rollout.vllm.turns`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from alar.rollout.vllm.checks import FORCER, ROOM, SCHEDULERS, WORKER, EngineRefused, require_entry_point, require_vllm

MIDDLEWARE = f"{ROOM}.history.LatentHistory"
OURS = (
    "--model", "--scheduler-cls", "--logits-processors", "--worker-extension-cls", "--async-scheduling", "--no-async-scheduling"
)


def server_arguments(argv: list[str]) -> list[str]:
    """Arguments of vLLM's server for `FOLDER [options]`. Raises EngineRefused for options that are set here."""
    if not argv or argv[0].startswith("-"):
        raise EngineRefused("usage: python -m alar.serve FOLDER [options of vLLM's server]")
    folder, options = argv[0], argv[1:]
    for option in options:
        if option.split("=")[0].replace("_", "-") in OURS:
            raise EngineRefused(f"{option} is set by alar.serve; latent blocks are exact with its value only")
    config = Path(folder) / "config.json"
    if not config.exists():
        raise EngineRefused(f"{folder}: no checkpoint here (no config.json); run the stage that writes it first")
    if not json.loads(config.read_text(encoding="utf-8"))["model_type"].startswith("latent_"):
        raise EngineRefused(f"{folder}: an ordinary model; serve it with vLLM itself, or make it latent with alar.model.from_base")
    ours = [
        "--model", folder, "--scheduler-cls", SCHEDULERS[True], "--async-scheduling", "--logits-processors", FORCER,
        "--worker-extension-cls", WORKER, "--middleware", MIDDLEWARE,
    ]
    if not any(option.split("=")[0] == "--generation-config" for option in options):
        ours += ["--generation-config", "vllm"]
    return ours + options


def main(argv: list[str] | None = None) -> None:
    try:
        require_vllm()
        require_entry_point()
        arguments = server_arguments(sys.argv[1:] if argv is None else argv)
    except EngineRefused as error:
        raise SystemExit(f"alar.serve: {error}") from None
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from alar.rollout.vllm.plugin import register

    cli_env_setup()
    register(imported=current_platform.is_cpu())
    options = make_arg_parser(FlexibleArgumentParser(prog="alar.serve")).parse_args(arguments)
    validate_parsed_serve_args(options)
    uvloop.run(run_server(options))


if __name__ == "__main__":
    main()

"""The commands of `alar.study.teacher`: `sample` one shard, `merge` all of them.

    python -m alar.study.teacher sample data/toolmind traces \\
        --student Qwen/Qwen3-4B-Thinking-2507 --engine vllm --shard 1/8
    python -m alar.study.teacher merge traces -o traces.jsonl

With --endpoint the teacher is the model NAME of any OpenAI-compatible server. The student then only
gives its tokenizer and its number of positions. The server's key is read from the environment
variable that --key-variable names, and it is not stored.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields

from alar.domains.tool.protocol import TOOL
from alar.engines.choice import ENGINES, opened_engine
from alar.engines.endpoint import Endpoint, EndpointEngine
from alar.engines.tool_chat import tool_chat
from alar.rollout.codec import Codec
from alar.rollout.engine import Engine
from alar.rollout.loop import MODES
from alar.store import checkpoint_content
from alar.study.teacher import Plan, Shard, sample_shard
from alar.study.teacher.merging import merge_shards


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        if options.command == "merge":
            summary = merge_shards(options.folders, options.output)
            print(
                f"{options.output}: {summary['kept']} of {summary['questions']} trajectories are"
                " kept"
            )
            for reason, count in summary["dropped"].items():
                print(f"{count:8} dropped: {reason}")
        else:
            print(f"{_sample(options)}: sampled; merge all shards when they are")
    except (OSError, ValueError, RuntimeError) as error:  # a message is enough; no traceback
        print(error, file=sys.stderr)
        return 1
    return 0


def _sample(options: argparse.Namespace):
    from tqdm import tqdm
    from transformers import AutoConfig

    if not options.context:  # 0: the student's own number of positions
        options.context = AutoConfig.from_pretrained(options.student).max_position_embeddings
    # Every field of the plan has an option of its name.
    plan = Plan(**{field.name: getattr(options, field.name) for field in fields(Plan)})
    with opened_teacher(options) as (engine, teacher):  # teacher: goes into each chunk's key
        return sample_shard(
            engine,
            options.source,
            options.folder,
            plan,
            teacher=teacher,
            shard=Shard.of(options.shard),
            batch_size=options.batch_size,
            progress=lambda chunks: tqdm(chunks, unit="chunk"),  # on stderr
        )


@contextmanager
def opened_teacher(options: argparse.Namespace) -> Iterator[tuple[Engine, dict]]:
    """The engine that the options name, and a description of its model as JSON."""
    if not options.endpoint:
        with opened_engine(options.student, options.engine) as engine:
            yield engine, {"checkpoint": checkpoint_content(options.student)}
        return
    from transformers import AutoTokenizer  # only an endpoint needs it

    if not options.model:
        # `main` shows the text and ends with exit code 1.
        raise ValueError(
            "--endpoint needs --model, the name under which the server knows its model"
        )
    endpoint = Endpoint(
        options.endpoint,
        options.model,
        key=os.environ.get(options.key_variable, ""),  # a server of one's own needs no key
        extra=options.extra,
        timeout=options.timeout,
        retries=options.retries,
    )
    # The server answers in text; traces need the student's ids.
    codec = Codec(AutoTokenizer.from_pretrained(options.student), form=TOOL)
    with EndpointEngine(endpoint, codec, tool_chat, concurrent=options.concurrent) as engine:
        yield (
            engine,
            {
                "model": options.model,
                "extra": options.extra,
                "student": checkpoint_content(options.student),  # its tokenizer decides the ids
            },
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m alar.study.teacher", description=__doc__.partition("\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    merging = commands.add_parser(
        "merge", help="write the kept trajectories of all shards as one file"
    )
    merging.add_argument(
        "folders", nargs="+", help="what was given to `sample`, or shards themselves"
    )
    merging.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="FILE",
        help="JSON lines; teacher.json is written beside it",
    )
    sampling = commands.add_parser("sample", help="sample one shard; started again, it goes on")
    sampling.add_argument(
        "source", help="ToolMind's JSON lines, a folder of them, or the name Nanbeige/ToolMind"
    )
    sampling.add_argument("folder", help="the shard gets a folder of its own below")
    sampling.add_argument(
        "--student",
        required=True,
        help="checkpoint folder, or hub name with --engine vllm or --endpoint",
    )
    sampling.add_argument(
        "--shard", default="1/1", metavar="I/N", help="from 1/N to N/N (default: all in one)"
    )
    sampling.add_argument(
        "--batch-size", type=int, default=256, help="trajectories under way at once"
    )
    sampling.add_argument(
        "--engine", choices=ENGINES, default="hf", help="what runs the student as its own teacher"
    )
    server = sampling.add_argument_group("a server as the teacher")
    server.add_argument(
        "--endpoint", metavar="URL", help="of the API, such as http://127.0.0.1:8000/v1"
    )
    server.add_argument("--model", metavar="NAME")
    server.add_argument("--key-variable", default="OPENAI_API_KEY", metavar="NAME")
    server.add_argument(
        "--extra",
        type=json.loads,  # a dict of JSON values
        default={},
        metavar="JSON",
        help="fields of every request; null removes one",
    )
    server.add_argument("--concurrent", type=int, default=16, help="requests under way at once")
    server.add_argument("--timeout", type=float, default=600.0, help="seconds for one answer")
    server.add_argument("--retries", type=int, default=6)
    plan = sampling.add_argument_group("what is asked, and how; the same for all shards")
    plan.add_argument("--split", default=Plan.split, choices=("train", "validation", "test"))
    plan.add_argument(
        "--whole",
        action="store_true",
        help="whole episodes with recorded responses, in place of single turns",
    )
    plan.add_argument(
        "--mode",
        default=Plan.mode,
        choices=MODES,
        help="`think` opens the block for models that would not",
    )
    plan.add_argument("--context", type=int, default=0, help="positions (default: the student's)")
    for name in (
        "questions",
        "temperature",
        "top_p",
        "max_new_tokens",
        "max_turns",
        "seed",
        "chunk",
    ):
        default = getattr(Plan, name)  # a dataclass keeps its defaults on the class
        plan.add_argument(
            f"--{name.replace('_', '-')}",
            type=type(default),  # int or float
            default=default,
            help=f"(default: {default})",
        )
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""Build or verify a dual checkpoint: see `python -m alar.baselines.dual --help`."""

from __future__ import annotations

import argparse

from alar.baselines.dual.build import THINK_MISSING, build, verify


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m alar.baselines.dual", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("build", help="write a full copy of a base")
    making.add_argument("base", help="embedded, a hub id or a folder")
    making.add_argument("folder")
    making.add_argument("--think-missing", choices=THINK_MISSING, default="error")
    making.add_argument("--think-end-bias", type=float, default=5.0)
    checking = commands.add_parser("verify", help="check a folder against its meta file")
    checking.add_argument("folder")
    checking.add_argument("--untrained", action="store_true", help="mirrors must still equal their sources")
    options = parser.parse_args(arguments)
    if options.command == "build":
        build(options.base, options.folder, think_missing=options.think_missing, think_end_bias=options.think_end_bias)
        dual = verify(options.folder, untrained=True)
    else:
        dual = verify(options.folder, untrained=options.untrained)
    print(f"{options.folder}: V = {dual.V}, L = {dual.L} ({dual.mode}), think tags {dual.think_made} {dual.cloned_from}".rstrip())


if __name__ == "__main__":
    main()

"""Build or verify a dual checkpoint: see `python -m alar.methods.dual --help`."""

from __future__ import annotations

import argparse
from pathlib import Path

from alar.methods.dual.build import THINK_MISSING, build_dual, verify
from alar.methods.dual.vocabulary import MODES


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m alar.methods.dual", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("build", help="write a dual checkpoint of a base")
    making.add_argument("base", help="embedded, a hub id or a folder")
    making.add_argument("folder")
    making.add_argument("--think-missing", choices=THINK_MISSING, default="error")
    making.add_argument("--think-end-bias", type=float, default=5.0)
    making.add_argument("--mode", choices=MODES, default="full_copy", help="which ids get a mirror")
    making.add_argument(
        "--texts",
        type=Path,
        metavar="FILE",
        help="subset: chains of thought, one a line, whose ids get mirrors",
    )
    making.add_argument(
        "--size", type=int, default=0, help="subset: only so many ids, the most frequent"
    )
    making.add_argument(
        "--source-ids", type=Path, metavar="FILE", help="custom: the ids, separated by white space"
    )
    checking = commands.add_parser("verify", help="check a folder against its meta file")
    checking.add_argument("folder")
    checking.add_argument(
        "--untrained", action="store_true", help="mirrors must still equal their sources"
    )
    options = parser.parse_args(arguments)
    if options.command == "build":
        try:
            texts = source_ids = None  # build_dual refuses a pair that does not fit the mode
            if options.texts:
                texts = options.texts.read_text(encoding="utf-8").splitlines()
            if options.source_ids:
                source_ids = [int(word) for word in options.source_ids.read_text().split()]
            build_dual(
                options.base,
                options.folder,
                mode=options.mode,
                texts=texts,
                size=options.size,
                source_ids=source_ids,
                think_missing=options.think_missing,
                think_end_bias=options.think_end_bias,
            )
        except (OSError, ValueError) as error:  # a message instead of a traceback
            parser.error(str(error))  # exits with status 2
        dual = verify(options.folder, untrained=True)  # read back from the disk
    else:
        dual = verify(options.folder, untrained=options.untrained)
    print(
        f"{options.folder}: V = {dual.V}, L = {dual.L} ({dual.mode}), think tags {dual.think_made}"
        f" {dual.cloned_from}".rstrip()  # empty unless the tags were cloned
    )


if __name__ == "__main__":
    main()

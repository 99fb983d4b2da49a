"""`python -m alar.inspector RUN`: the HTML report of a run's trajectories, for people without
Jupyter.

    python -m alar.inspector runs/laptop/search -o report.html
    python -m alar.inspector --checkpoint FOLDER --trajectories FILE.jsonl -o report.html

RUN is a run folder in which notebook 08 has been run; its trajectories are read with the checkpoint
that wrote them: the one that notebook 08 was given, else the last one that the run trained.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import yaml

STAGE = "08_latent_inspector"
CHECKPOINTS = ("05_ar_grpo", "04_mode_warmup", "03_aasd")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m alar.inspector",
        description="Write one HTML file about a run's trajectories.",
    )
    parser.add_argument("run", type=Path, nargs="?", help="run folder, such as runs/laptop/search")
    parser.add_argument("-o", "--output", type=Path, default=Path("report.html"))
    parser.add_argument(
        "--checkpoint", type=Path, help="model folder (default: the one that notebook 08 inspected)"
    )
    parser.add_argument(
        "--trajectories", type=Path, help="JSON lines (default: those of notebook 08)"
    )
    parser.add_argument("--count", type=int, default=50, help="trajectories to show (default: 50)")
    options = parser.parse_args(argv)
    try:
        checkpoint, trajectories = _sources(options)
        path = write_report(checkpoint, trajectories, options.output, options.count)
    except (FileNotFoundError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{path}: {path.stat().st_size / 2**20:.2f} MB")
    return 0


def write_report(checkpoint: Path, trajectories: Path, output: Path, count: int) -> Path:
    """Read the first `count` trajectories with the model that wrote them, and write their report."""
    from alar.inspector import inspect, report
    from alar.model import load
    from alar.records import read_trajectories
    from alar.rollout.codec import Codec
    from alar.rollout.modes import latent_probabilities

    model, tokenizer = load(checkpoint)
    codec, shown = Codec.of(model, tokenizer), read_trajectories(trajectories)[:count]
    records = {
        index: inspect(t, model, tokenizer) for index, t in enumerate(shown) if len(t.latents)
    }
    return report.write(
        output,
        shown,
        codec,
        records=records,
        p_latent=latent_probabilities(model, codec, shown),
        facts={
            "checkpoint": (
                checkpoint.name if checkpoint.name != "checkpoint" else checkpoint.parent.name
            )
        },
    )


def _sources(options) -> tuple[Path, Path]:
    run, checkpoint, trajectories = options.run, options.checkpoint, options.trajectories
    if run is None and not (checkpoint and trajectories):
        raise ValueError("name a run folder, or both --checkpoint and --trajectories")
    if trajectories is None:
        trajectories = run / STAGE / "trajectories.jsonl"
        if not trajectories.exists():
            raise FileNotFoundError(
                f"{trajectories} does not exist; run notebook 08 in this folder first"
            )
    if checkpoint is None:
        asked = run / "executed" / f"{STAGE}.params.yaml"
        given = (
            yaml.safe_load(asked.read_text(encoding="utf-8"))["checkpoint"]
            if asked.exists()
            else ""
        )
        trained = [Path(given)] if given else [run / stage / "checkpoint" for stage in CHECKPOINTS]
        found = [folder for folder in trained if folder.exists()]
        if not found:
            tried = ", ".join(map(str, trained))
            raise FileNotFoundError(f"{run}: no checkpoint at {tried}; name one with --checkpoint")
        checkpoint = found[0]
    return checkpoint, trajectories


if __name__ == "__main__":
    sys.exit(main())

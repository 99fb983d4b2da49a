"""`python -m alar.inspector RUN`: the HTML report of a run's trajectories, for people without
Jupyter.

    python -m alar.inspector runs/laptop/search -o report.html
    python -m alar.inspector --checkpoint FOLDER --trajectories FILE.jsonl -o report.html

RUN is a run folder in which notebook 08 has been run. The checkpoint that wrote the trajectories
reads them: the one that notebook 08 was given, else the last one that the run trained.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import yaml

STAGE = "08_latent_inspector"
CHECKPOINTS = ("05_ar_grpo", "04_mode_warmup", "03_aasd")  # stages that train, the last one first


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m alar.inspector",
        description="Write one HTML file about a run's trajectories.",
    )
    add = parser.add_argument
    add("run", type=Path, nargs="?", help="run folder, such as runs/laptop/search")
    add("-o", "--output", type=Path, default=Path("report.html"))
    add("--checkpoint", type=Path, help="model folder (default: the one of notebook 08)")
    add("--trajectories", type=Path, help="JSON lines (default: those of notebook 08)")
    add("--count", type=int, default=50, help="trajectories to show (default: 50)")
    options = parser.parse_args(argv)
    try:
        # Without a run folder there is nothing to take either default from.
        if options.run is None and not (options.checkpoint and options.trajectories):
            raise ValueError("name a run folder, or both --checkpoint and --trajectories")
        trajectories = options.trajectories or options.run / STAGE / "trajectories.jsonl"
        if not trajectories.exists():
            raise FileNotFoundError(f"{trajectories} does not exist; run notebook 08 first")
        checkpoint = options.checkpoint or _checkpoint(options.run)
        path = report_of_run(checkpoint, trajectories, options.output, options.count)
    except (FileNotFoundError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{path}: {path.stat().st_size / 2**20:.2f} MB")
    return 0


def report_of_run(checkpoint: Path, trajectories: Path, output: Path, count: int) -> Path:
    """Read the first `count` trajectories with the model that wrote them, and write their report.

    Returns the path of the report.
    """
    from alar.inspector import inspect
    from alar.inspector.report import write_report
    from alar.model import load
    from alar.records import read_trajectories
    from alar.rollout.codec import Codec
    from alar.rollout.modes import latent_probabilities

    model, tokenizer = load(checkpoint)
    codec, shown = Codec.of(model, tokenizer), read_trajectories(trajectories)[:count]
    readings = {  # index into `shown` → LatentReadings
        index: inspect(trajectory, model, codec)
        for index, trajectory in enumerate(shown)
        if len(trajectory.latents)  # `inspect` refuses a trajectory without latent blocks
    }
    # A stage keeps its model in <stage>/checkpoint, so there the parent has the telling name.
    name = checkpoint.parent.name if checkpoint.name == "checkpoint" else checkpoint.name
    chances = latent_probabilities(model, codec, shown)
    return write_report(
        output, shown, codec, readings=readings, p_latent=chances, facts={"checkpoint": name}
    )


def _checkpoint(run: Path) -> Path:
    """The checkpoint that notebook 08 was given, else the last one of the run.

    FileNotFoundError if there is none.
    """
    tried = [run / stage / "checkpoint" for stage in CHECKPOINTS]
    asked = run / "executed" / f"{STAGE}.params.yaml"
    if asked.exists():
        given = yaml.safe_load(asked.read_text(encoding="utf-8"))["checkpoint"]
        tried = [Path(given)] if given else tried  # empty: the notebook took the default as well
    for folder in tried:
        if folder.exists():
            return folder
    names = ", ".join(map(str, tried))
    raise FileNotFoundError(f"{run}: no checkpoint at {names}; name one with --checkpoint")


if __name__ == "__main__":
    sys.exit(main())

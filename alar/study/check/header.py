"""Writes the memory table into the headers of parameter files.

    python -m alar.study.check.header params/paper-search-3b.yaml …

A header names its machines in a line such as `# Memory:     1x80 8x80`. The table below it, down to
the next line without a text, is replaced by what `--check --gpus` finds for these machines.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from alar.files import replacing
from alar.study.check import known_size, machine
from alar.study.check.memory import Machine, Need, gib, needs
from alar.study.params import ParameterError, load_experiment
from alar.study.stage import repository

BLOCK = re.compile(r"^# Memory: +((?:\d+x\d+ ?)+)\b.*\n(?:#  .*\n)*", re.MULTILINE)
STAGES = frozenset({"01", "02", "03", "04", "05", "06"})


def machines_of(text: str, file: str) -> list[str]:
    """The machines that a header names, such as ["1x80", "8x80"]. ValueError if it names none."""
    found = BLOCK.search(text)
    if found is None:
        raise ValueError(f"{file}: no line `# Memory:     1x80 8x80` in its header")
    return found[1].split()


def peaks(file: Path, gpus: str) -> list[Need]:
    """The peaks of a file's stages in its first domain, on GPUs such as "8x80".

    Raises ParameterError, and ValueError where nothing is known about the model.
    """
    # Data need not be here to know the model's memory.
    experiment = load_experiment(file, root=repository(), absent=[])
    domain = experiment.run.domains[0]
    size, about = known_size(experiment, domain)
    if size is None:
        raise ValueError(f"{file}: {about.text}")
    found = machine.described(gpus)
    stages = frozenset(name[:2] for name in experiment.only) or STAGES
    return list(needs(experiment, size, domain, stages, Machine(len(found), found[0].memory)))


def block(file: Path) -> str:
    """The lines of the header that this module writes."""
    machines = machines_of(file.read_text(encoding="utf-8"), str(file))
    columns = [{need.stage: need for need in peaks(file, gpus)} for gpus in machines]
    # Stages in order of appearance; torchrun's are only there with several GPUs.
    stages = list(dict.fromkeys(stage for column in columns for stage in column))
    lines = [
        f"# Memory:     {' '.join(machines)} GiB, peak on each GPU; ~ estimated, else measured",
        "#             (written by python -m alar.study.check.header; ! does not fit)",
    ]
    for stage in sorted(stages):
        cells = []
        for column in columns:
            need = column.get(stage)
            cells.append("" if need is None else _cell(need))
        lines.append(f"#   {stage:<26}" + "".join(f"{cell:>9}" for cell in cells).rstrip())
    return "\n".join(lines) + "\n"


def _cell(need: Need) -> str:
    mark = "~" if need.source == "estimated" else ""
    return f"{mark}{gib(need.bytes)}{'' if need.fits else '!'}"


def main(arguments: Sequence[str] | None = None) -> int:
    for name in sys.argv[1:] if arguments is None else arguments:
        file = Path(name)
        try:
            new = block(file)
        except (ParameterError, ValueError) as error:
            print(error, file=sys.stderr)
            return 2
        text = file.read_text(encoding="utf-8")
        with replacing(file) as partial:
            partial.write_text(BLOCK.sub(lambda _, new=new: new, text, count=1), encoding="utf-8")
        print(new, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())

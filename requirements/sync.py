"""Writes the pins of core.txt into environment.yml, so that conda users get the same set.

python requirements/sync.py
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

HEADER = """\
# conda env create -f environment.yml && conda activate alar
# pip install --no-deps -r requirements/core-nodeps.txt
# The pins are those of requirements/core.txt, written here by requirements/sync.py.
name: alar
channels:
  - conda-forge
dependencies:
  - python=3.11
  - pip
  - pip:
"""


def pins() -> list[str]:
    lines = (ROOT / "requirements" / "core.txt").read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def environment() -> str:
    return HEADER + "".join(f"      - {line}\n" for line in [*pins(), "-e ."])


if __name__ == "__main__":
    (ROOT / "environment.yml").write_text(environment(), encoding="utf-8")

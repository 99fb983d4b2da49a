"""One line of the report of `--check`."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Finding:
    """What was looked at, and what helps if something is missing.

    `remedy` is "" where all is well, else a command or an act. `bytes` is what the remedy
    downloads, to `place`.
    """

    subject: str
    text: str
    remedy: str = ""
    bytes: int = 0
    place: Path | None = None

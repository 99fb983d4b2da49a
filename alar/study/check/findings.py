"""One line of the report of `--check`."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Finding:
    """What was checked, and what helps if something is missing.

    `remedy` is "" if all is well, else a command or what to do. The remedy downloads `bytes` bytes
    to `place`.
    """

    subject: str  # "names", "model", "memory", "data", "port", "disk" or "engines"
    text: str
    remedy: str = ""
    bytes: int = 0  # 0 where nothing is downloaded
    place: Path | None = None

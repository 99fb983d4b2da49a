"""Results that are written part by part: the settings they belong to, and what a checkpoint is
whatever folder it lies in."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from alar.files import write_json
from alar.study.cache import content


def same_settings(path: str | Path, settings: dict) -> None:
    """Write the settings of the results in this folder, or compare them with those that are there.
    ValueError if they differ."""
    path = Path(path)
    if not path.exists():
        return write_json(path, settings)
    found = json.loads(path.read_text(encoding="utf-8"))
    if different := differences(found, settings):
        raise ValueError(
            f"{path}: holds results of other settings, {different}; choose another folder or remove"
            " this one"
        )


def differences(one: dict, other: dict) -> dict:
    """Key → (value in one, value in other) where they are not the same."""
    keys = dict.fromkeys((*one, *other))
    return {key: (one.get(key), other.get(key)) for key in keys if one.get(key) != other.get(key)}


def checkpoint_identity(checkpoint: str | Path) -> str:
    """A hash of a folder's files; a hub id as it is."""
    return content(Path(checkpoint)) if Path(checkpoint).is_dir() else str(checkpoint)


def files_identity(paths: list[Path]) -> str:
    """A hash of the names and the content of some files."""
    return hashlib.sha256(
        "".join(f"{path.name} {content(path)}\n" for path in paths).encode()
    ).hexdigest()

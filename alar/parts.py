"""Results that are written part by part: the settings they belong to, and what a checkpoint is whatever folder it lies in."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from alar.jsonl import write_json


def same_settings(path: str | Path, settings: dict) -> None:
    """Write the settings of the results in this folder, or compare them with those that are there. ValueError if they differ."""
    path = Path(path)
    if not path.exists():
        return write_json(path, settings)
    found = json.loads(path.read_text(encoding="utf-8"))
    if different := differences(found, settings):
        raise ValueError(f"{path}: holds results of other settings, {different}; choose another folder or remove this one")


def differences(one: dict, other: dict) -> dict:
    """Key → (value in one, value in other) where they are not the same."""
    keys = dict.fromkeys((*one, *other))
    return {key: (one.get(key), other.get(key)) for key in keys if one.get(key) != other.get(key)}


def checkpoint_identity(checkpoint: str | Path) -> str:
    """A hash of a folder's configuration and weights; a hub id as it is."""
    folder = Path(checkpoint)
    if not folder.is_dir():
        return str(checkpoint)
    return files_identity(sorted((*folder.glob("*.json"), *folder.glob("*.safetensors"))))


def files_identity(paths: list[Path]) -> str:
    """A hash of the names and the content of some files."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as stream:
            digest.update(path.name.encode() + hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:16]

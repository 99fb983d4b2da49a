"""Interrupted training: every trainer saves its state here and finds it again.

A state belongs to the settings that it was made with. With the same settings a trainer goes on
where it stopped, and ends with the numbers of an uninterrupted run. With other settings the state
is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from alar.files import replacing

STATE_FILE = "resume.pt"


def save_state(folder: str | Path, settings: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Replace the state in `folder` in one step: a kill leaves the old state or the new one.

    Both mappings hold plain values, tensors, and lists or mappings of them.
    """
    with replacing(Path(folder) / STATE_FILE) as aside:
        torch.save({"settings": dict(settings), "state": dict(state)}, aside)


def load_state(folder: str | Path, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """The state that `save_state` left in `folder`, or None where training has not begun.

    Raises ValueError if it belongs to other settings, and names those that differ.
    """
    path = Path(folder) / STATE_FILE
    if not path.exists():
        return None
    kept = torch.load(path, weights_only=True)  # weights_only: a state file cannot run code
    if "settings" not in kept:
        raise ValueError(f"{path}: another version wrote it; remove {path.parent} to start anew")
    before, now = kept["settings"], dict(settings)
    names = {*before, *now}  # a setting that only one side has differs too
    different = sorted(name for name in names if before.get(name) != now.get(name))
    if different:
        raise ValueError(
            f"{path}: belongs to a training with other settings ({', '.join(different)}); "
            f"restore them to go on, or remove {path.parent} to start anew"
        )
    return kept["state"]

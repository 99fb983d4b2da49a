"""From scores to what a group is compared by."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from alar.baselines.logprob.scoring import INVALID
from alar.rl.objective import group_advantages


def group_normalised(values: Sequence[float], groups: Sequence[Hashable]) -> list[float]:
    """(value − mean) / std over the values of its group; a group of one keeps its value.

    INVALID says nothing about a policy: such values take no part, and become 0.
    """
    numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    valid = [row for row, value in enumerate(values) if value != INVALID]
    normalised = [0.0] * len(values)
    if valid:
        members = torch.tensor([numbers[groups[row]] for row in valid])
        found = group_advantages(torch.tensor([values[row] for row in valid], dtype=torch.float64), members)
        for row, value in zip(valid, found.tolist()):
            normalised[row] = value
    return normalised

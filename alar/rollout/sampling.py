"""Drawing a token from a distribution with one uniform number a row, whatever the rest of the batch
is."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


def inverse_cdf(
    probabilities: Float[Tensor, "rows vocabulary"],
    draws: Float[Tensor, " rows"],
    top_p: float | Float[Tensor, " rows"] = 1.0,
) -> Int[Tensor, " rows"]:
    """Invert the cumulative distribution at `draws` in [0, 1), within the smallest set of tokens
    that holds `top_p`."""
    nucleus = torch.as_tensor(
        top_p, dtype=probabilities.dtype, device=probabilities.device
    ).reshape(-1, 1)
    if bool((nucleus < 1.0).any()):
        ranked, ids = probabilities.sort(dim=-1, descending=True)
        inside = (ranked.cumsum(-1) - ranked < nucleus) | (nucleus >= 1.0)
        ranked = ranked * inside
    else:
        ranked, ids = probabilities, None
    cumulative = ranked.double().cumsum(-1)
    column = torch.searchsorted(
        cumulative, (draws.double() * cumulative[:, -1])[:, None], right=True
    )
    column = column.clamp(max=ranked.shape[-1] - 1)
    return (column if ids is None else ids.gather(1, column))[:, 0]

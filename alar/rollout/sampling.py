"""Drawing tokens with one uniform number each, so that a draw does not depend on the batch."""

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
    nucleus = torch.as_tensor(top_p, dtype=probabilities.dtype, device=probabilities.device)
    nucleus = nucleus.reshape(-1, 1)  # (rows or 1, 1)
    ids = None
    if bool((nucleus < 1.0).any()):
        probabilities, ids = probabilities.sort(dim=-1, descending=True)
        before = probabilities.cumsum(-1) - probabilities  # mass of the likelier tokens
        probabilities = probabilities * ((before < nucleus) | (nucleus >= 1.0))
    cumulative = probabilities.double().cumsum(-1)
    points = (draws.double() * cumulative[:, -1])[:, None]  # of the mass that is left
    column = torch.searchsorted(cumulative, points, right=True)
    column = column.clamp(max=probabilities.shape[-1] - 1)
    return (column if ids is None else ids.gather(1, column))[:, 0]

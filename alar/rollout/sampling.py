"""Drawing tokens with one uniform number each, so that a draw does not depend on the batch."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

AT_ONCE = 2**23  # probabilities that are summed at a time: 64 MiB in float64


def inverse_cdf(
    probabilities: Float[Tensor, "rows vocabulary"],
    draws: Float[Tensor, " rows"],
    top_p: float | Float[Tensor, " rows"] = 1.0,
) -> Int[Tensor, " rows"]:
    """Invert the cumulative distribution at `draws` in [0, 1), within the smallest set of tokens
    that holds `top_p`.

    Sums are float64, of a few rows at a time: 1024 rows over 152 K tokens would take 1.2 GB for
    each step of the computation, which vLLM has not set aside.
    """
    nucleus = torch.as_tensor(top_p, dtype=probabilities.dtype, device=probabilities.device)
    nucleus = nucleus.reshape(-1, 1)  # (rows or 1, 1)
    ranked = bool((nucleus < 1.0).any())
    count, vocabulary = probabilities.shape
    rows = max(1, AT_ONCE // vocabulary)
    parts = zip(probabilities.split(rows), draws.split(rows), nucleus.expand(count, 1).split(rows))
    return torch.cat([_inverse_cdf(*part, ranked) for part in parts])


def _inverse_cdf(
    probabilities: Tensor, draws: Tensor, nucleus: Float[Tensor, "rows 1"], ranked: bool
) -> Int[Tensor, " rows"]:
    """`inverse_cdf` of some rows; `ranked` says whether tokens are to be sorted and cut."""
    ids = None
    if ranked:
        probabilities, ids = probabilities.sort(dim=-1, descending=True)
        before = probabilities.cumsum(-1) - probabilities  # mass of the likelier tokens
        probabilities = probabilities * ((before < nucleus) | (nucleus >= 1.0))
    cumulative = probabilities.double().cumsum(-1)
    points = (draws.double() * cumulative[:, -1])[:, None]  # of the mass that is left
    column = torch.searchsorted(cumulative, points, right=True)
    column = column.clamp(max=probabilities.shape[-1] - 1)
    return (column if ids is None else ids.gather(1, column))[:, 0]

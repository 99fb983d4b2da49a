"""Means with intervals, from plain numbers.

Bootstrap intervals are percentile intervals (Efron & Tibshirani 1993, ch. 13). They resample
*questions*, since turns of one question are not independent and systems are compared on the same
questions. The resamples are the very ones that `scipy.stats.bootstrap` draws for the same seed. The
size of the chunks of work does not change them.

Shares of a few turns are often exactly 0 or 1, and there a bootstrap interval has no width. They
get Wilson intervals instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import NormalDist
from typing import Any, NamedTuple, Self

import numpy as np
import pandas as pd

LEVEL = 0.95  # of all intervals
_CHUNK_CELLS = 2_000_000  # drawn indices held at once: 16 MB


class Estimate(NamedTuple):
    """A value with the lower and upper end of its interval.

    In a table it takes three columns: `name`, `name_low`, `name_high`.
    """

    value: float
    low: float
    high: float

    @staticmethod
    def names(name: str) -> tuple[str, str, str]:
        """The columns of an estimate."""
        return name, f"{name}_low", f"{name}_high"

    def columns(self, name: str) -> dict[str, float]:
        """The estimate as a part of a table's row."""
        return dict(zip(self.names(name), self, strict=True))

    @classmethod
    def read(cls, row: Mapping[str, Any] | pd.Series | pd.DataFrame, name: str) -> Self:
        """The estimate `name` of a row; of a whole table, its three columns."""
        return cls(*(row[column] for column in cls.names(name)))

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def bootstrap_mean(values, *, resamples: int = 10_000, seed: int = 0) -> Estimate:
    """Mean of the values with its percentile interval; ValueError when empty or not finite."""
    values = _finite(values, "values")
    draws = resampled_sums(values[:, None], resamples, seed)[:, 0] / len(values)
    return estimate(values.mean(), draws)


def paired_bootstrap(a, b, *, resamples: int = 10_000, seed: int = 0) -> Estimate:
    """Mean of a - b, where a[i] and b[i] belong to the same question."""
    a, b = _pair(a, b)
    return bootstrap_mean(a - b, resamples=resamples, seed=seed)


def token_reduction(base_tokens, tokens, *, resamples: int = 10_000, seed: int = 0) -> Estimate:
    """1 - mean(tokens) / mean(base_tokens), paired by question: 0.4 means 40 % fewer tokens."""
    base_tokens, tokens = _pair(base_tokens, tokens)
    both = np.stack([base_tokens, tokens], axis=1)  # (n, 2)
    draws = resampled_sums(both, resamples, seed)  # (resamples, 2)
    value = 1 - ratio(tokens.sum(), base_tokens.sum())
    return estimate(value, 1 - ratio(draws[:, 1], draws[:, 0]))


def wilson(successes: float, n: float) -> Estimate:
    """A proportion with Wilson's score interval (1927); NaN without trials."""
    if n == 0:
        return Estimate(np.nan, np.nan, np.nan)
    z = NormalDist().inv_cdf(0.5 + LEVEL / 2)
    p = successes / n
    # Centred between p and ½; the half width does not vanish at p = 0 and p = 1.
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return Estimate(p, max(0.0, centre - half), min(1.0, centre + half))


def running_mean(values, window: int) -> Estimate:
    """Centred running mean of a series with a normal interval, as an `Estimate` of three series.

    Windows shrink at the ends, and NaN values are skipped. The spread within a window contains any
    trend too, so the interval is rather too wide.
    """
    rolling = pd.Series(np.asarray(values, dtype=float)).rolling(window, center=True, min_periods=1)
    mean, count = rolling.mean(), rolling.count()
    half = NormalDist().inv_cdf(0.5 + LEVEL / 2) * rolling.std() / np.sqrt(count)
    return Estimate(mean, mean - half, mean + half)


def resampled_sums(values: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """Column sums of `resamples` draws of n rows with replacement: (n, m) → (resamples, m).

    A draw is kept as the number of times that each row occurs. So one matrix product does all
    columns; for whole numbers it is exact.
    """
    rng = np.random.default_rng(seed)
    n = len(values)
    rows = max(1, _CHUNK_CELLS // n)  # draws at once
    sums = []
    for start in range(0, resamples, rows):
        size = min(rows, resamples - start)
        drawn = rng.integers(0, n, size=(size, n))
        drawn += n * np.arange(size)[:, None]  # so that one bincount keeps the draws apart
        counts = np.bincount(drawn.ravel(), minlength=size * n).reshape(size, n)  # (draws, n)
        sums.append(counts.astype(float) @ values)
    return np.concatenate(sums)


def estimate(value: float, draws: np.ndarray) -> Estimate:
    """The value with the percentile interval of its draws.

    Draws whose value is not defined (such as a draw without a hard turn) are left out.
    """
    draws = draws[np.isfinite(draws)]  # (resamples,) or fewer
    if np.isnan(value) or not len(draws):
        return Estimate(float(value), np.nan, np.nan)
    low, high = np.percentile(draws, [50 * (1 - LEVEL), 50 * (1 + LEVEL)])
    return Estimate(float(value), float(low), float(high))


def ratio(numerator, denominator):
    """Numerator over denominator, NaN where the denominator is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        quotient = np.true_divide(numerator, denominator)
    return np.where(np.asarray(denominator) == 0, np.nan, quotient)[()]


def _finite(values, name: str) -> np.ndarray:
    values = np.asarray(values, dtype=float)
    if values.ndim != 1 or not len(values):
        raise ValueError(
            f"{name}: expected a list of at least one number, got shape {values.shape}"
        )
    if not np.isfinite(values).all():
        raise ValueError(
            f"{name}: {np.count_nonzero(~np.isfinite(values))} of {len(values)} are NaN or infinite"
        )
    return values


def _pair(a, b) -> tuple[np.ndarray, np.ndarray]:
    a, b = _finite(a, "first sample"), _finite(b, "second sample")
    if len(a) != len(b):
        raise ValueError(
            f"paired samples need the same questions: {len(a)} values against {len(b)}"
        )
    return a, b

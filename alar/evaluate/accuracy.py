"""Accuracy on BFCL's categories, with intervals."""

from __future__ import annotations

import numpy as np
import pandas as pd

from alar.evaluate.intervals import estimate, resampled_sums, wilson


def accuracy_table(
    results: pd.DataFrame, *, resamples: int = 10_000, seed: int = 0
) -> pd.DataFrame:
    """Accuracy per category with Wilson intervals, and their unweighted mean as the row "macro".

    `results` has the columns `category` and `correct`. The interval of the mean resamples questions
    within each category. There is no "overall" row: BFCL's overall score needs its multi-turn and
    agentic parts, which are not run here.
    """
    rows, means, draws = [], [], []
    for number, (category, part) in enumerate(results.groupby("category", sort=False)):
        correct = part["correct"].to_numpy(dtype=float)
        accuracy = wilson(correct.sum(), len(part)).columns("accuracy")
        rows.append({"category": category, "questions": len(part)} | accuracy)
        means.append(correct.mean())
        # Another seed for each category, so that their draws are independent.
        sums = resampled_sums(correct[:, None], resamples, seed + number)  # (resamples, 1)
        draws.append(sums[:, 0] / len(part))
    if not rows:
        raise ValueError("no results: a table of accuracies needs at least one question")
    macro = estimate(float(np.mean(means)), np.mean(draws, axis=0))
    rows.append({"category": "macro", "questions": len(results)} | macro.columns("accuracy"))
    return pd.DataFrame(rows)

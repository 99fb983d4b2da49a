"""Which words stay: LLMLingua-2's percentile rule (arXiv 2403.12968; library `llmlingua`,
`PromptCompressor.__compress`).

Within a chunk every word's score counts once per token. The threshold is a percentile of these
numbers, and what lies above it stays: so a rate is never a number of words to keep, and equal
scores stay or go together. Forced words score 1. The one deliberate difference to the library: it
forces single *tokens* and averages over the word, so that `x2` may be lost; here a word that holds
a digit is forced as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

OPERATORS = ("+", "-", "−", "*", "×", "/", "÷", "=", "<", ">", "≤", "≥", "%", "^")


@dataclass(frozen=True)
class Rules:
    """The library's force_tokens, force_reserve_digit and drop_consecutive.

    With `drop_consecutive`, a forced token that would directly follow the same one is dropped. Not
    the default: for the library nothing lies between two tokens that does not score *above* a
    percentile, which is 1 where many words are forced. So the second `>` of `2>1, so 2017>1728`
    goes at low rates, whatever digits are between.
    """

    force_tokens: tuple[str, ...] = OPERATORS
    force_digits: bool = True
    drop_consecutive: bool = False

    def forces(self, word: str) -> bool:
        return word.strip() in self.force_tokens or (
            self.force_digits and re.search(r"\d", word) is not None
        )


def kept_words(
    words: Sequence[str], scores: Sequence[float], counts: Sequence[int], rate: float, rules: Rules
) -> list[bool]:
    """For the words of one chunk, which stay. `counts` are tokens per word; `rate` is the share of
    tokens to keep, in (0, 1].

    Raises ValueError for another rate, or for lists of different lengths.
    """
    if not 0 < rate <= 1:
        raise ValueError(
            f"rate {rate}: expected more than 0 and at most 1, the share of tokens to keep"
        )
    if rate == 1 or not words:
        return [True] * len(words)
    dropped = 1 - rate
    names = [word.strip() for word in words]
    values = [
        1.0 if rules.forces(word) else float(score)
        for word, score in zip(words, scores, strict=True)
    ]
    if rules.drop_consecutive:
        values = _repeats_lowered(
            names, values, np.percentile(values, int(100 * dropped)), rules.force_tokens
        )
    threshold = np.percentile(np.repeat(values, counts), int(100 * dropped + 1))
    kept, last = [], None
    for name, value in zip(names, values):
        stays = value > threshold or value == threshold == 1.0
        stays &= not (rules.drop_consecutive and name in rules.force_tokens and name == last)
        last = name if stays else last
        kept.append(bool(stays))
    return kept


def _repeats_lowered(
    names: Sequence[str], values: Sequence[float], threshold: float, force_tokens: Sequence[str]
) -> list[float]:
    """0 for a forced token that repeats the one before it, with nothing above `threshold` between
    them."""
    lowered, previous, between = list(values), None, False
    for index, name in enumerate(names):
        if name in force_tokens:
            if between:
                between = False
            elif name == previous:
                lowered[index] = 0.0
            previous = name
        else:
            between |= values[index] > threshold
    return lowered

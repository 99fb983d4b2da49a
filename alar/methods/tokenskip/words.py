"""A text as words: what scores them, and which of them stay.

LLMLingua-2's percentile rule decides which stay (arXiv 2403.12968; library `llmlingua`,
`PromptCompressor.__compress`). Within a chunk, every word's score counts once per token. The
threshold is a percentile of these numbers, and what lies above it stays. So a rate is not a number
of words to keep, and equal scores stay or go together. Forced words score 1.

One difference to the library is deliberate. The library forces single *tokens* and averages over
the word, so `x2` may be lost. Here a word that holds a digit is forced as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

OPERATORS = ("+", "-", "−", "*", "×", "/", "÷", "=", "<", ">", "≤", "≥", "%", "^")
_WORD = re.compile(r"\s*(?:\d+(?:[.,]\d+)*(?!\w)|\w+(?:['’]\w+)*|[^\w\s])")


@dataclass(frozen=True)
class Thought:
    """The chain of thought of one turn."""

    text: str
    context: tuple[int, ...] = ()  # ids before its `<think>`; empty for a text without a question
    action: str = ""  # the text of the action that the turn ended in; empty if unknown


@dataclass(frozen=True)
class Word:
    text: str  # with the white space before it
    score: float  # how much it matters, 0 to 1
    chunk: int = 0


class WordScorer(Protocol):
    """What judges words. Words with higher scores stay longer."""

    name: str  # appears in every table

    def score_words(self, thoughts: Sequence[Thought]) -> list[list[Word]]:
        """The words of each thought, in order."""


def split_words(text: str) -> list[str]:
    """Numbers, words and single signs, each with the white space before it; together they are
    `text`.

    >>> split_words("So 2013-1986 is 27.")
    ['So', ' 2013', '-', '1986', ' is', ' 27', '.']
    """
    words = _WORD.findall(text)
    if not words:
        return [text] if text else []
    words[-1] += text[sum(map(len, words)) :]  # white space at the end
    return words


def in_chunks(words: Sequence[Word], counts: Sequence[int], limit: int) -> list[Word]:
    """The words with chunk numbers; a chunk has at most `limit` tokens (or a single word).

    A chunk ends behind a full stop or before a new line if it has one. `counts` are tokens per
    word.
    """
    numbered, chunk, start, size = [], 0, 0, 0  # start: first word of the chunk; size: its tokens
    for index, count in enumerate(counts):
        if size + count > limit and index > start:
            cut = index
            for end in range(index, start, -1):
                if words[end - 1].text.strip() == "." or "\n" in words[end].text:
                    cut = end
                    break
            numbered += [replace(word, chunk=chunk) for word in words[start:cut]]
            chunk, start, size = chunk + 1, cut, sum(counts[cut:index])
        size += count
    return numbered + [replace(word, chunk=chunk) for word in words[start:]]


def joined(words: Sequence[str]) -> str:
    """The text of the words that stay, with a space between two that dropping brought together."""
    text = ""
    for word in words:
        touching = text[-1:].isalnum() and word[:1].isalnum()
        text += f" {word}" if touching else word
    return text.lstrip()


@dataclass(frozen=True)
class Rules:
    """The library's force_tokens, force_reserve_digit and drop_consecutive.

    With `drop_consecutive`, a forced token that would directly follow the same one is dropped. This
    loses operators, so no parameter sets it; tests compare it with the library's. The library sees
    only words that score *above* a percentile as lying between two tokens, and where many words are
    forced that percentile is 1. So the second `>` of `2>1, so 2017>1728` goes at low rates,
    whatever digits are between.
    """

    force_tokens: tuple[str, ...] = OPERATORS
    force_digits: bool = True
    drop_consecutive: bool = False

    def forces(self, word: str) -> bool:
        if word.strip() in self.force_tokens:
            return True
        return self.force_digits and re.search(r"\d", word) is not None


def kept_words(
    words: Sequence[str], scores: Sequence[float], counts: Sequence[int], rate: float, rules: Rules
) -> list[bool]:
    """Which words of one chunk stay, at the share `rate` of tokens to keep, in (0, 1].

    `counts` are tokens per word. Raises ValueError for another rate, or for lists of different
    lengths.
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
    # The library adds 1 to the percent here.
    threshold = np.percentile(np.repeat(values, counts), int(100 * dropped + 1))
    kept, last = [], None
    for name, value in zip(names, values):
        # Forced words stay at a threshold of 1 too.
        stays = value > threshold or value == threshold == 1.0
        stays &= not (rules.drop_consecutive and name in rules.force_tokens and name == last)
        last = name if stays else last
        kept.append(bool(stays))
    return kept


def _repeats_lowered(
    names: Sequence[str], values: Sequence[float], threshold: float, force_tokens: Sequence[str]
) -> list[float]:
    """The values, 0 for a forced token that repeats the last one if none between is high enough.

    High enough is what lies above `threshold`.
    """
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

"""A text as words that join to it again, and the interface of everything that scores them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

_WORD = re.compile(r"\s*(?:\d+(?:[.,]\d+)*(?!\w)|\w+(?:['’]\w+)*|[^\w\s])")


@dataclass(frozen=True)
class Thought:
    """A chain of thought of one turn. `context` holds the ids before its `<think>`, empty for a
    text without a question; `action` is the text of the action that the turn ended in, empty if
    unknown."""

    text: str
    context: tuple[int, ...] = ()
    action: str = ""


@dataclass(frozen=True)
class Word:
    """A word with the white space before it, how much it matters (0 to 1), and the number of its
    chunk."""

    text: str
    score: float
    chunk: int = 0


class WordScorer(Protocol):
    """`name` appears in every table. Higher scores stay longer."""

    name: str

    def score_words(self, thoughts: Sequence[Thought]) -> list[list[Word]]:
        """The words of each thought, in order."""


def split_words(text: str) -> list[str]:
    """Numbers, words and single signs, each with the white space before it; together they are
    `text`.

    >>> split_words("So 2013-1986 is 27.")
    ['So', ' 2013', '-', '1986', ' is', ' 27', '.']
    """
    words = _WORD.findall(text)
    tail = text[sum(map(len, words)) :]
    return [*words[:-1], words[-1] + tail] if words else [text] if text else []


def in_chunks(words: Sequence[Word], counts: Sequence[int], limit: int) -> list[Word]:
    """The words with chunk numbers: at most `limit` tokens each, cut behind a full stop or before a
    new line if there is one."""
    numbered, chunk, start, size = [], 0, 0, 0
    for index, count in enumerate(counts):
        if size + count > limit and index > start:
            ends = (
                end
                for end in range(index, start, -1)
                if words[end - 1].text.strip() == "." or "\n" in words[end].text
            )
            cut = next(ends, index)
            numbered += [replace(word, chunk=chunk) for word in words[start:cut]]
            chunk, start, size = chunk + 1, cut, sum(counts[cut:index])
        size += count
    return numbered + [replace(word, chunk=chunk) for word in words[start:]]


def joined(words: Sequence[str]) -> str:
    """The text of some words of a text: a space where dropping has brought two words together, none
    in front."""
    text = ""
    for word in words:
        touching = text[-1:].isalnum() and word[:1].isalnum()
        text += f" {word}" if touching else word
    return text.lstrip()

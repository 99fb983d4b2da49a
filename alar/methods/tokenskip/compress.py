"""Thoughts compressed at several rates, and what became of the rates.

The achieved rate is counted in the policy's own tokens, of the compressed text against the whole
one. It is not the requested one because

- the percentile is a threshold, not a number of words: what is above it stays, ties fall together,
words go as a whole; - every chunk has its own threshold, and with few tokens a percentile is
coarse; - forced words stay whatever the rate, and repeated ones may go; - tokens are counted word
by word for the threshold, but the joined text is tokenised as a whole.

`Compression` holds the numbers that tell these apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import pandas as pd

from alar.methods.tokenskip.threshold import Rules, kept_words
from alar.methods.tokenskip.words import Thought, Word, WordScorer, joined
from alar.records import Trajectory
from alar.rollout.codec import Codec

CountTokens = Callable[[str], int]


@dataclass(frozen=True)
class Compression:
    """A text at one rate. `counts` are tokens per word, `original_tokens` and `tokens` those of the
    whole texts."""

    text: str
    rate: float
    words: tuple[Word, ...]
    kept: tuple[bool, ...]
    forced: tuple[bool, ...]
    counts: tuple[int, ...]
    original_tokens: int
    tokens: int

    @property
    def achieved(self) -> float:
        """Tokens of the compressed text over those of the whole one; 1 for an empty one."""
        return self.tokens / self.original_tokens if self.original_tokens else 1.0

    def share(self, marks: Iterable[bool]) -> float:
        """Of the tokens counted word by word, the share in the marked words."""
        total = sum(self.counts)
        return (
            sum(count for count, mark in zip(self.counts, marks, strict=True) if mark) / total
            if total
            else 0.0
        )

    @property
    def kept_share(self) -> float:
        return self.share(self.kept)

    @property
    def forced_share(self) -> float:
        return self.share(self.forced)


def compress(
    text: str, words: Sequence[Word], rate: float, rules: Rules, count_tokens: CountTokens
) -> Compression:
    """`text`, whose scored words are given, at one rate. Rate 1 gives the text itself."""
    counts = [max(1, count_tokens(word.text)) for word in words]
    kept: list[bool] = []
    for _, chunk in groupby(zip(words, counts), key=lambda pair: pair[0].chunk):
        inside, sizes = zip(*chunk)
        kept += kept_words(
            [word.text for word in inside], [word.score for word in inside], sizes, rate, rules
        )
    shorter = (
        text if rate == 1 else joined([word.text for word, stays in zip(words, kept) if stays])
    )
    forced = tuple(rules.forces(word.text) for word in words)
    return Compression(
        shorter,
        rate,
        tuple(words),
        tuple(kept),
        forced,
        tuple(counts),
        count_tokens(text),
        count_tokens(shorter),
    )


def token_counter(codec: Codec) -> CountTokens:
    """Tokens of a text by itself, remembered: the same words come again and again."""
    known: dict[str, int] = {}

    def count(text: str) -> int:
        if text not in known:
            known[text] = len(codec.untrusted(text))
        return known[text]

    return count


def thoughts_of(trajectory: Trajectory, codec: Codec) -> list[Thought]:
    """The chain of thought of every turn, with the ids before it and the action after it.

    Raises ValueError for a turn that did not reason in text.
    """
    thoughts = []
    for number, turn in enumerate(trajectory.turns):
        if turn.mode != "think":
            raise ValueError(
                f"{trajectory.question.id}, turn {number + 1} has no chain of thought (its mode is"
                f" {turn.mode!r})"
            )
        parsed = codec.form.parse(codec.text(trajectory.ids[turn.start : turn.end]))
        opening = codec.trusted(codec.form.opening) if number == 0 else []
        action = codec.form.action(turn.action, turn.argument) if turn.action else ""
        thoughts.append(
            Thought(parsed.reasoning, (*trajectory.ids[: turn.start], *opening), action)
        )
    return thoughts


def compressed_rows(
    trajectories: Sequence[Trajectory],
    scorer: WordScorer,
    codec: Codec,
    rates: Sequence[float],
    rules: Rules,
    *,
    batch: int = 64,
    progress: Callable[[Iterable], Iterable] = iter,
) -> list[dict]:
    """One row per trajectory, ready for a file: its thoughts, and for each rate what is left of
    them.

    A row is {"id", "scorer", "thoughts": [text, …], "tokens": count, "rates": {"0.5": {"thoughts":
    […], "tokens": …, "kept": tokens kept word by word, "forced": of these forced, "counted": all of
    them}}}.
    """
    count, rows = token_counter(codec), []
    for start in progress(range(0, len(trajectories), batch)):
        part = trajectories[start : start + batch]
        thoughts = [thoughts_of(trajectory, codec) for trajectory in part]
        scored = iter(scorer.score_words([thought for turns in thoughts for thought in turns]))
        for trajectory, turns in zip(part, thoughts):
            pairs = [(thought.text, next(scored)) for thought in turns]
            at = {
                str(rate): [compress(text, words, rate, rules, count) for text, words in pairs]
                for rate in rates
            }
            rows.append(
                {
                    "id": trajectory.question.id,
                    "scorer": scorer.name,
                    "thoughts": [text for text, _ in pairs],
                    "tokens": sum(count(text) for text, _ in pairs),
                    "rates": {rate: _summed(found) for rate, found in at.items()},
                }
            )
    return rows


def _summed(found: Sequence[Compression]) -> dict:
    return {
        "thoughts": [c.text for c in found],
        "tokens": sum(c.tokens for c in found),
        "kept": sum(n for c in found for n, stays in zip(c.counts, c.kept) if stays),
        "forced": sum(n for c in found for n, forced in zip(c.counts, c.forced) if forced),
        "counted": sum(n for c in found for n in c.counts),
    }


def achieved_rates(rows: Sequence[dict]) -> pd.DataFrame:
    """Per requested rate: what was achieved, what the threshold kept, and what was forced, as
    shares of all tokens."""
    sums: dict[str, Counter] = {}
    for row in rows:
        for rate, found in row["rates"].items():
            numbers = {key: found[key] for key in ("tokens", "kept", "forced", "counted")}
            sums.setdefault(rate, Counter()).update(
                numbers | {"original": row["tokens"], "samples": 1}
            )
    return pd.DataFrame(
        [
            {
                "scorer": rows[0]["scorer"],
                "requested": float(rate),
                "achieved": total["tokens"] / total["original"],
                "kept_share": total["kept"] / total["counted"],
                "forced_share": total["forced"] / total["counted"],
                "tokens_per_sample": total["tokens"] / total["samples"],
            }
            for rate, total in sums.items()
        ]
    )

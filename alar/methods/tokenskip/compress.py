"""Thoughts compressed at several rates, and the rates that result.

The achieved rate is the tokens of the compressed text over those of the whole one, counted in the
policy's own tokens. It differs from the requested rate, because

- the percentile is a threshold, not a number of words: what is above it stays, equal scores go
  together, words go as a whole;
- every chunk has its own threshold, and with few tokens a percentile is coarse;
- forced words stay at every rate, and repeated ones may go;
- tokens are counted word by word for the threshold, but the joined text is tokenised as a whole.

`Compression` holds the numbers that tell these apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby

import pandas as pd

from alar.methods.tokenskip.collect import thoughts_of
from alar.methods.tokenskip.words import Rules, Word, WordScorer, joined, kept_words
from alar.records import Trajectory
from alar.rollout.codec import Codec

CountTokens = Callable[[str], int]  # text → the policy's tokens


@dataclass(frozen=True)
class Compression:
    """A text at one rate."""

    text: str  # what is left
    rate: float
    words: tuple[Word, ...]
    kept: tuple[bool, ...]  # per word, as the next two
    forced: tuple[bool, ...]
    counts: tuple[int, ...]  # tokens
    original_tokens: int
    tokens: int

    @property
    def achieved(self) -> float:
        """Tokens of the compressed text over those of the whole one; 1 for an empty one."""
        return self.tokens / self.original_tokens if self.original_tokens else 1.0

    def share(self, marks: Iterable[bool]) -> float:
        """Share of the marked words in the tokens that are counted word by word."""
        if not self.counts:
            return 0.0
        return self.marked(marks) / sum(self.counts)

    def marked(self, marks: Iterable[bool]) -> int:
        """Tokens, counted word by word, of the marked words."""
        return sum(count for count, mark in zip(self.counts, marks, strict=True) if mark)

    @property
    def kept_share(self) -> float:
        return self.share(self.kept)

    @property
    def forced_share(self) -> float:
        return self.share(self.forced)


def compress(
    text: str, words: Sequence[Word], rate: float, rules: Rules, count_tokens: CountTokens
) -> Compression:
    """`text` at one rate, from its scored words. Rate 1 gives the text itself."""
    # 0 would take a word out of the percentile.
    counts = [max(1, count_tokens(word.text)) for word in words]
    kept: list[bool] = []
    # Each chunk has its own threshold.
    for _, chunk in groupby(zip(words, counts), key=lambda pair: pair[0].chunk):
        inside, sizes = zip(*chunk)
        texts, scores = [word.text for word in inside], [word.score for word in inside]
        kept += kept_words(texts, scores, sizes, rate, rules)
    shorter = text
    if rate != 1:  # joined drops white space at the start, so not at rate 1
        shorter = joined([word.text for word, stays in zip(words, kept) if stays])
    return Compression(
        text=shorter,
        rate=rate,
        words=tuple(words),
        kept=tuple(kept),
        forced=tuple(rules.forces(word.text) for word in words),
        counts=tuple(counts),
        original_tokens=count_tokens(text),
        tokens=count_tokens(shorter),
    )


def token_counter(codec: Codec) -> CountTokens:
    """A function that counts the tokens of a text, with a cache: the same words recur often."""
    known: dict[str, int] = {}

    def count(text: str) -> int:
        if text not in known:
            known[text] = len(codec.untrusted(text))
        return known[text]

    return count


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
    """One row per trajectory, ready for a file: its thoughts, and what each rate leaves of them.

    A row is {"id", "scorer", "thoughts": [text, …], "tokens", "rates": {"0.5": …}}; a rate holds
    {"thoughts": [text, …], "tokens"} and, in tokens counted word by word, {"kept", "forced",
    "counted": all}.
    """
    count, rows = token_counter(codec), []
    for start in progress(range(0, len(trajectories), batch)):
        part = trajectories[start : start + batch]
        thoughts = [thoughts_of(trajectory, codec) for trajectory in part]
        # One call for all turns of the part.
        scored = iter(scorer.score_words(list(chain.from_iterable(thoughts))))
        for trajectory, turns in zip(part, thoughts):
            pairs = [(thought.text, next(scored)) for thought in turns]
            at = {}  # rate, as JSON keys it → what is left
            for rate in rates:
                found = [compress(text, words, rate, rules, count) for text, words in pairs]
                at[str(rate)] = _summed(found)
            row = {
                "id": trajectory.question.id,
                "scorer": scorer.name,
                "thoughts": [text for text, _ in pairs],
                "tokens": sum(count(text) for text, _ in pairs),
                "rates": at,
            }
            rows.append(row)
    return rows


def _summed(found: Sequence[Compression]) -> dict:
    return {
        "thoughts": [c.text for c in found],
        "tokens": sum(c.tokens for c in found),
        "kept": sum(c.marked(c.kept) for c in found),
        "forced": sum(c.marked(c.forced) for c in found),
        "counted": sum(sum(c.counts) for c in found),
    }


def achieved_rates(rows: Sequence[dict]) -> pd.DataFrame:
    """Per requested rate, as shares of all tokens: achieved, kept by the threshold, forced."""
    sums: dict[str, Counter] = {}  # rate → totals over the samples
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

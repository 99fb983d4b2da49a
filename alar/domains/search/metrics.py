"""Exact match in the order of the SQuAD v1.1 evaluation script (Rajpurkar et al., 2016).

One function serves the reward, the filter of teacher traces and the evaluation. The order matters:
punctuation is removed before the articles, so "A-ha" equals "Aha" and "U.S.A." equals "USA". In the
other order, the "A" of "A-ha" would pass for an article.
"""

import re
import string
from collections.abc import Iterable

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalize_answer(text: str) -> str:
    """Lower-case, remove ASCII punctuation, replace articles by a space, collapse whitespace.

    >>> normalize_answer("The  U.S.A.!")
    'usa'
    """
    text = text.lower().translate(_PUNCTUATION)  # before the articles, see above
    return " ".join(_ARTICLES.sub(" ", text).split())


def exact_match(prediction: str | None, golds: str | Iterable[str]) -> bool:
    """Whether `prediction` equals any of `golds` (one string or several) after normalisation.

    A prediction is wrong if it is None (no answer was given) or normalises to nothing. That holds
    even if a gold answer normalises to nothing: an empty answer is never rewarded.

    >>> exact_match("Aha", ["A-ha", "a-ha band"])
    True
    """
    if prediction is None:
        return False
    golds = [golds] if isinstance(golds, str) else golds
    normalized = normalize_answer(prediction)
    return bool(normalized) and any(normalized == normalize_answer(gold) for gold in golds)

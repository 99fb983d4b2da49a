"""Scorers: is a predicted answer one of the accepted ones? Also: the answer stated in a solution.

    numeric   GSM8K: equal as rationals; `$`, `%`, thousands separators and units do not count
    math      MATH: equal after the usual clean-up of LaTeX, or as mathematics (`math-verify`)
    letter    MMLU: A, B, C or D, bare or as in "(B)", "B.", "B) text", "the answer is **B**"
    exact     SQuAD-order exact match, for everything else

A scorer takes (prediction, accepted answers) and returns a bool. It never raises, whatever a policy
wrote.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from fractions import Fraction

from alar.domains.search.metrics import exact_match

Scorer = Callable[[str, Sequence[str]], bool]
# Seconds for one comparison, so many that a busy machine does not change a verdict.
PATIENCE = 30
# Only so many characters of an answer are read: no gold answer is longer, and parsing takes time.
LONGEST = 400
# `1,234.5`, `3/4`, `-.5`: thousands separators, decimals and fractions.
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:\s*/\s*\d+)?|[-+]?\.\d+")
_LETTERS = (
    re.compile(r"answer\s+is\s*:?\s*\(?([A-J])\b", re.IGNORECASE),
    re.compile(r"\(?([A-J])(?=[.):,]|$)", re.IGNORECASE),
)


def last_boxed(text: str) -> str | None:
    r"""What the last `\boxed{…}` or `\fbox{…}` of a text holds; None if it is absent or not closed.

    >>> last_boxed(r"so \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    begin = text.index("{", start) + 1
    depth = 1  # of open braces: the content may hold braces of its own
    for place in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[begin:place].strip()
    return None


def after_hashes(text: str) -> str | None:
    """The line after the last `####`, with which GSM8K marks the final answer; None without it."""
    _, mark, rest = text.rpartition("####")
    found = rest.strip().split("\n")[0].strip() if mark else ""
    return found or None


def stated_answer(text: str) -> str | None:
    r"""The final answer of free text.

    It is in the last `\boxed{}`, else after the last `####`, else after the last "answer is".

    >>> stated_answer("3 + 4 = 7. The answer is 7.")
    '7'
    """
    found = last_boxed(text) or after_hashes(text)
    if found:
        return found
    stated = re.findall(r"answer\s+is\s*:?\s*([^\n]+)", text, re.IGNORECASE)
    if not stated:
        return None
    return stated[-1].strip().rstrip(".").strip() or None


def number_in(text: str) -> Fraction | None:
    """The only number in an answer, which may have a currency sign, a unit or words around it.

    None if there is no number, or more than one.

    >>> number_in("$1,234.50 dollars")
    Fraction(2469, 2)
    """
    # Without percent signs and LaTeX's `{,}` between thousands.
    found = _NUMBER.findall(re.sub(r"(?<=\d)\s*\\?%", " ", text[:LONGEST]).replace("{,}", ","))
    if len(found) != 1:
        return None
    try:
        return Fraction(re.sub(r"[\s,]", "", found[0]))
    except (ValueError, ZeroDivisionError):
        return None


def score_number(prediction: str, accepted: Sequence[str]) -> bool:
    """GSM8K's score. A prediction with two numbers in it is wrong."""
    value = number_in(stated_answer(prediction) or prediction)
    return value is not None and value in [number_in(gold) for gold in accepted]


def score_letter(prediction: str, accepted: Sequence[str]) -> bool:
    """MMLU's score."""
    text = re.sub(r"[*`_]+", "", last_boxed(prediction) or prediction).strip()  # **B**
    found = _LETTERS[0].search(text) or _LETTERS[1].match(text)
    return found is not None and found[1].upper() in {gold.strip().upper() for gold in accepted}


def score_mathematics(prediction: str, accepted: Sequence[str]) -> bool:
    """MATH's score: the cheap clean-up decides if it can, and `math-verify` if it cannot."""
    answer = stated_answer(prediction) or prediction.strip()
    if not answer or len(answer) > LONGEST:
        return False
    return any(_same_mathematics(answer, last_boxed(gold) or gold) for gold in accepted)


def clean_latex(text: str) -> str:
    r"""One spelling for all answers that MATH's own script takes as equal.

    It unifies sizes, spaces, units, signs, `\frac12`, `.5` and a leading `x =`.

    >>> clean_latex(r"x = \dfrac12\text{ cm}")
    '\\frac{1}{2}'
    """
    text = text.strip().strip("$").rstrip(".").replace("\n", "")
    text = re.sub(
        r"(?<!\\)\\(?:left|right|!|,|;|:| |quad|qquad|\$|displaystyle)(?![a-zA-Z])", "", text
    )
    text = re.sub(r"\\[dtc]frac(?![a-zA-Z])", r"\\frac", text)
    text = re.sub(r"\^\s*(?:\\circ|\{\\circ\})|\\degree(?![a-zA-Z])|\\?%|\$", "", text)
    # A unit behind a value.
    text = re.sub(r"(?<=[\w)}])\s*\\(?:text|mbox|mathrm)\{\s[^{}]*\}$", "", text)
    text = re.sub(r"\\(?:text|mbox|mathrm|textbf|mathbf)\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"^[a-zA-Z]\s*=\s*(?=.)", "", text)
    # \frac12 → \frac{1}2 → \frac{1}{2}
    text = re.sub(r"\\(frac|sqrt)\s*([0-9a-zA-Z])(?![a-zA-Z])", r"\\\1{\2}", text)
    text = re.sub(r"(\\frac\{[^{}]*\})\s*([0-9a-zA-Z])", r"\1{\2}", text)
    text = re.sub(r"(?<![\d.])\.(?=\d)", "0.", text)
    # Separators of thousands, but not the commas of tuples.
    text = re.sub(r"(?<=\d)(?:,|\{,\})(?=\d{3}(?!\d))(?![^(\[]*[)\]])", "", text)
    text = re.sub(r"^(-?\d+)\.0+$", r"\1", text)
    text = re.sub(r"^(-?)(\d+)/(\d+)$", r"\1\\frac{\2}{\3}", text)
    return re.sub(r"\s+", "", text)


def _same_mathematics(answer: str, gold: str) -> bool:
    ours, theirs = clean_latex(answer), clean_latex(gold)
    if ours.lower() == theirs.lower():
        return bool(ours)
    if re.fullmatch(r"[a-zA-Z]{2,}", theirs):  # a word, such as "even", is equal to itself only
        return False
    return _verified(ours, theirs)


def _verified(ours: str, theirs: str) -> bool:
    try:
        from math_verify import parse, verify
    except ImportError:
        raise ImportError(
            "answers of MATH are compared with the math-verify library, which is not installed:"
            " python run_all.py --install core"
        ) from None
    # The library's time limits are alarm signals, which only the main thread may set.
    limit = PATIENCE if threading.current_thread() is threading.main_thread() else None
    gold = parse(f"${theirs}$", parsing_timeout=limit)
    found = parse(f"${ours}$", parsing_timeout=limit)
    return bool(gold and found) and verify(gold, found, timeout_seconds=limit)


SCORERS: dict[str, Scorer] = {
    "numeric": score_number,
    "math": score_mathematics,
    "letter": score_letter,
    "exact": exact_match,
}

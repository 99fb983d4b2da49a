"""Sums, differences, products and dates, worked out digit by digit.

A small model can learn to write such workings. It cannot learn to say the result at once.
"""

from __future__ import annotations

import calendar
import re
from datetime import date, timedelta

COLUMNS = ("ones", "tens", "hundreds", "thousands")


def add_text(a: int, b: int, columns: int | None = None) -> str:
    """`47+85: ones 7+5=12, tens 4+8+1=13, so 132`; both numbers are below 10 000.

    There are as many columns as the longer number has digits, or `columns`. The last column then
    holds all digits that are left: `100+4: ones 0+4=4, tens 10+0=10, so 104` has two columns.
    """
    columns = columns or max(len(str(a)), len(str(b)))
    parts, carry = [], 0
    for place in range(columns):
        left, right = a // 10**place, b // 10**place
        if place < columns - 1:  # the last column keeps every digit that is left
            left, right = left % 10, right % 10
        total = left + right + carry
        parts.append(f"{COLUMNS[place]} {left}+{right}{'+1' if carry else ''}={total}")
        carry = total // 10
    return f"{a}+{b}: {', '.join(parts)}, so {a + b}"


def subtract_text(a: int, b: int, columns: int | None = None) -> str:
    """`132-47: ones 2+10-7=5, tens 3-1+10-4=8, hundreds 1-1-0=0, so 85`; a ≥ b.

    `+10` marks a column that borrows, `-1` the next one, which pays. There are as many columns as
    `a` has digits, or `columns`: leading digits that both numbers share can be left out.
    """
    parts, borrow = [], False
    for place in range(columns or len(str(a))):
        top, bottom = a // 10**place % 10, b // 10**place % 10
        borrows = top - borrow < bottom  # a bool counts as 0 or 1
        digit = top - borrow + 10 * borrows - bottom
        pays, gets = "-1" if borrow else "", "+10" if borrows else ""
        parts.append(f"{COLUMNS[place]} {top}{pays}{gets}-{bottom}={digit}")
        borrow = borrows
    return f"{a}-{b}: {', '.join(parts)}, so {a - b}"


def times_text(a: int, b: int) -> str:
    """`13*24: 13*4=52, 13*20=260, 260+52: …, so 312`; b below 100."""
    ones, tens = b % 10, b // 10 * 10  # 24 → 4, 20
    if not tens or not ones:  # a single product: nothing to add up
        return f"{a}*{b}, so {a * b}"
    return f"{a}*{b}: {a}*{ones}={a * ones}, {a}*{tens}={a * tens}, {add_text(a * tens, a * ones)}"


def later_text(start: date, days: int) -> str:
    """`2024-02-25 and 7 days: 25+7=32, the month has 29, 32-29=3, so 2024-03-03`.

    The day lies in the month of `start` or in the next one.
    """
    end, total = start + timedelta(days=days), start.day + days
    length = calendar.monthrange(start.year, start.month)[1]  # days of the month
    over = f", the month has {length}, {total}-{length}={total - length}" if total > length else ""
    return f"{start} and {days} days: {start.day}+{days}={total}{over}, so {end}"


# A column of a sum or difference with its value; any other value; the result at the end.
_STEP = re.compile(
    rf"(?:{'|'.join(COLUMNS)}) (?P<terms>[^=]+)=(?P<column>\d+)"
    r"|=(?P<value>\d+)"
    r"|so (?P<result>[\d-]+)"
)


def working_conclusions(working: str) -> list[str]:
    """What the steps of a working conclude, one symbol each; [] for a text without a working.

    A column gives its digit and whether it hands something on to the next one (+) or not (-), any
    other step the digits of its value, the end the digits of the result (of a date without its
    year): `132-47: ones 2+10-7=5, tens 3-1+10-4=8, hundreds 1-1-0=0, so 85` gives
    5 + 8 + 0 8 5. They follow from the text alone, whether it is right or wrong.
    """
    if ", so " not in working:
        return []
    found = []
    for step in _STEP.finditer(working):
        if step["column"]:
            hands_on = "+10" in step["terms"] or len(step["column"]) > 1
            found += [step["column"][-1], "+" if hands_on else "-"]
        elif step["value"]:
            found += step["value"]
        else:
            if found and found[-1] in "+-":  # after the last column there is no next one
                found.pop()
            found += re.sub(r"^\d+-|-", "", step["result"])
    return found

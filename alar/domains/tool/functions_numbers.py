"""Numbers: math, statistics, fractions, bisect, heapq, and the built-in functions on integers."""

from __future__ import annotations

import bisect
import heapq
import math
import statistics
from fractions import Fraction

from alar.domains.tool.schema import boolean, decimal, integer, numbers, text, tool, tools_by_name


def _whole(value: float) -> int | float:
    """A float without a fraction as an integer; any other float rounded to six decimals."""
    value = round(value, 6)
    return int(value) if value == int(value) else value


def _fraction(value: str) -> Fraction:
    return Fraction(value.replace(" ", ""))  # "1 / 3" is a fraction, too


# The bounds keep every result and the work for it small: 200! has 375 digits, 1000**60 has 181.
# An argument beyond its bounds never reaches the lambda.
TOOLS = tools_by_name(
    tool("gcd", "Greatest common divisor.", lambda a, b: math.gcd(a, b), a=integer(), b=integer()),
    tool("lcm", "Least common multiple.", lambda a, b: math.lcm(a, b), a=integer(), b=integer()),
    tool("factorial", "Factorial of n.", lambda n: math.factorial(n), n=integer(0, 200)),
    tool(
        "comb",
        "Ways to choose k of n items.",
        lambda n, k: math.comb(n, k),  # 0 if k > n
        n=integer(0, 500),
        k=integer(0, 500),
    ),
    tool(
        "perm",
        "Ordered choices of k of n items.",
        lambda n, k: math.perm(n, k),
        n=integer(0, 200),
        k=integer(0, 200),
    ),
    tool(
        "isqrt", "Integer square root.", lambda n: math.isqrt(n), n=integer(0)
    ),  # negative: refused
    tool("sqrt", "Square root.", lambda x: _whole(math.sqrt(x)), x=decimal(0)),
    tool(
        "hypot",
        "Length of the hypotenuse.",
        lambda a, b: _whole(math.hypot(a, b)),
        a=decimal(),
        b=decimal(),
    ),
    tool(
        "log",
        "Logarithm to a base.",
        lambda x, base=10: _whole(math.log(x) / math.log(base)),
        x=decimal(1e-9),  # there is no logarithm of 0
        base=integer(2, 1000, default=10),
    ),
    tool(
        "radians",
        "Degrees as radians.",
        lambda degrees: _whole(math.radians(degrees)),
        degrees=decimal(),
    ),
    tool("floor", "Round down.", lambda x: math.floor(x), x=decimal()),
    tool("ceil", "Round up.", lambda x: math.ceil(x), x=decimal()),
    tool(
        "round_to",
        "Round to some digits.",
        lambda x, digits=0: _whole(round(x, digits)),
        x=decimal(),
        digits=integer(0, 6, default=0),
    ),
    tool(
        "pow_mod",
        "Power modulo m.",
        lambda base, exponent, m: pow(base, exponent, m),
        base=integer(),
        exponent=integer(0),
        m=integer(1),  # no division by 0
    ),
    tool(
        "power",
        "Base to an exponent.",
        lambda base, exponent: base**exponent,
        base=integer(-1000, 1000),
        exponent=integer(0, 60),  # a negative one would give a float
    ),
    tool(
        "divide",
        "Quotient and remainder.",
        lambda a, b: list(divmod(a, b)),  # JSON has no tuples
        a=integer(),
        b=integer(1),
    ),
    tool(
        "mean",
        "Arithmetic mean.",
        lambda values: _whole(statistics.fmean(values)),
        values=numbers(),
    ),
    tool("median", "Median.", lambda values: _whole(statistics.median(values)), values=numbers()),
    tool(
        "mode",
        "Most frequent value.",
        lambda values: statistics.mode(values),  # of equally frequent values the first
        values=numbers("integer"),
    ),
    tool(
        "variance",
        "Population variance.",
        lambda values: _whole(statistics.pvariance(values)),
        values=numbers(),
    ),
    tool(
        "harmonic_mean",
        "Harmonic mean.",
        lambda values: _whole(statistics.harmonic_mean(values)),
        values=numbers(),
    ),
    tool("total", "Sum of values.", lambda values: _whole(math.fsum(values)), values=numbers()),
    tool(
        "product", "Product of values.", lambda values: _whole(math.prod(values)), values=numbers()
    ),
    tool(
        "sort_numbers",
        "Sort values.",
        lambda values, descending=False: sorted(values, reverse=descending),
        values=numbers("integer"),
        descending=boolean(default=False),
    ),
    tool(
        "largest",
        "The k largest values.",
        lambda values, k: heapq.nlargest(k, values),
        values=numbers("integer"),
        k=integer(1, 50),  # a list has at most 50 items
    ),
    tool(
        "rank",
        "Place of x among sorted values.",
        lambda values, x: bisect.bisect_left(sorted(values), x),  # 0 if none is smaller
        values=numbers("integer"),
        x=integer(),
    ),
    tool(
        "add_fractions",
        "Sum of two fractions.",
        lambda a, b: str(_fraction(a) + _fraction(b)),
        a=text("such as 1/3", 20),
        b=text(longest=20),
    ),
    tool(
        "simplify",
        "Fraction in lowest terms.",
        lambda numerator, denominator: str(Fraction(numerator, denominator)),  # 6, 3 → "2"
        numerator=integer(),
        denominator=integer(1),
    ),
    tool("to_binary", "Binary digits of n.", lambda n: format(n, "b"), n=integer()),
    tool("to_octal", "Octal digits of n.", lambda n: format(n, "o"), n=integer()),
    tool("to_hex", "Hexadecimal digits of n.", lambda n: format(n, "x"), n=integer()),
    tool(
        "from_base",
        "Number from digits in a base.",
        lambda digits, base: int(digits, base),
        digits=text(longest=30),  # 36**30 has 47 digits
        base=integer(2, 36),
    ),
    tool("bit_count", "Ones in binary.", lambda n: n.bit_count(), n=integer()),
    tool("bit_length", "Number of bits.", lambda n: n.bit_length(), n=integer()),
)

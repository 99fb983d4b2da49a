"""What people may ask of the tool world: noun phrases for 81 of its functions, and their values.

`the greatest common divisor of {a} and {b}` is a phrase. A question puts a phrase into a sentence,
joins it with others, or puts it in the place of an argument of another phrase. Values are drawn at
random. The functions themselves give the right results; no result is stored.
"""

from __future__ import annotations

import json
import keyword
import random
import re
import unicodedata
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any

from alar.domains.tool.execution import response_text
from alar.domains.tool.functions import CALLABLE, PROVIDERS, TOOLS
from alar.domains.tool.schema import Tool

WORDS = (  # drawn as texts; all plain English
    "river stone garden window yellow planet market silver bridge pencil summer winter island"
    " castle forest mirror kitchen button candle dragon engine feather guitar hammer jacket ladder"
    " magnet needle orange pepper rabbit saddle ticket umbrella valley wagon basket carpet dinner"
    " finger golden harbor insect jungle kettle lemon monkey napkin ocean"
).split()
ZONES = (  # names of the IANA time zone database
    "Asia/Tokyo",
    "Europe/Paris",
    "America/New_York",
    "Africa/Cairo",
    "Australia/Sydney",
    "Asia/Kolkata",
    "America/Lima",
    "Europe/London",
    "Africa/Nairobi",
    "America/Chicago",
    "Asia/Dubai",
    "Pacific/Auckland",
)
# Share of made-up words. With them a text can be any string, so no model knows it by heart.
MADE_UP_SHARE = 0.6
LONGEST_RESULT = 24  # characters; short, because the final answer repeats it


@dataclass(frozen=True)
class ArgumentSlot:
    """How the value of an argument is drawn.

    `kind` says what a question may write instead of the value: a computed "integer" between `low`
    and `high`, a computed "date", or nothing ("").
    """

    draw: Callable[[random.Random], Any]  # a fresh value at each call
    kind: str = ""
    low: int = 0  # `low` and `high` bound an earlier result that takes this place
    high: int = 0


@dataclass(frozen=True)
class Phrase:
    """One way to ask for one function. The wording itself says the `fixed` arguments."""

    tool: Tool
    wordings: tuple[str, ...]  # templates with {parameter}; the first also fits inside a sentence
    slots: dict[str, ArgumentSlot]  # parameter → how its value is drawn
    fixed: dict[str, Any]  # parameter → value, such as {"descending": True}


def _whole(low: int, high: int) -> ArgumentSlot:
    return ArgumentSlot(lambda rng: rng.randint(low, high), "integer", low, high)


def _one_of(*values) -> ArgumentSlot:
    return ArgumentSlot(lambda rng: rng.choice(values))


def _decimal(low: int, high: int) -> ArgumentSlot:
    return ArgumentSlot(lambda rng: round(rng.randint(low * 100, high * 100) / 100, 2))


def _list(low: int = 1, high: int = 99, sizes: tuple[int, int] = (3, 5)) -> ArgumentSlot:
    return ArgumentSlot(lambda rng: [rng.randint(low, high) for _ in range(rng.randint(*sizes))])


def _word(rng: random.Random) -> str:
    """An English word, or a made-up word of two or three syllables."""
    if rng.random() >= MADE_UP_SHARE:
        return rng.choice(WORDS)
    word = ""
    for _ in range(rng.randint(2, 3)):
        word += rng.choice("bdfgklmnprstvz")
        word += rng.choice("aeiou")
        word += rng.choice(("", "", "n", "r", "l"))  # two syllables in five stay open
    return word


def _text(fewest: int, most: int) -> ArgumentSlot:
    return ArgumentSlot(lambda rng: " ".join(_word(rng) for _ in range(rng.randint(fewest, most))))


def _path(rng: random.Random) -> str:
    return f"{_word(rng)}/{_word(rng)}.{rng.choice(('txt', 'csv', 'png', 'py'))}"


def _character(rng: random.Random) -> str:
    """A letter with a mark, a Greek or Cyrillic letter, or a sign.

    Its Unicode name is short enough for a final answer to repeat it.
    """
    while True:
        # Code points: Latin with marks, Greek, Cyrillic, arrows, mathematical operators.
        first, last = rng.choice(((192, 382), (913, 974), (1040, 1103), (8592, 8660), (8704, 8890)))
        character = chr(rng.randint(first, last))
        if 0 < len(unicodedata.name(character, "")) <= LONGEST_RESULT:  # some points have no name
            return character


def _address(rng: random.Random) -> str:
    # 10.x and 192.168.x are private, 8.x and 54.x public: `is_private` has both answers.
    first = rng.choice((10, 192, 8, 172, 203, 54))
    second = 168 if first == 192 and rng.random() < 0.7 else rng.randint(0, 255)
    return f"{first}.{second}.{rng.randint(0, 255)}.{rng.randint(1, 254)}"


def _network(rng: random.Random) -> str:
    # 8 to 256 addresses
    return f"10.{rng.randint(0, 255)}.{rng.randint(0, 255)}.0/{rng.randint(24, 29)}"


def _clock(rng: random.Random) -> str:
    return f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"


# Values that several phrases draw.
DAY = ArgumentSlot(
    # 1950-01-01 to 2049-12-30
    lambda rng: (date(1950, 1, 1) + timedelta(rng.randrange(36524))).isoformat(),
    "date",
)
CLOCK = ArgumentSlot(_clock)
ZONE = _one_of(*ZONES)
ADDRESS = ArgumentSlot(_address)
NETWORK = ArgumentSlot(_network)
WORD = _text(1, 1)
TEXT = _text(1, 2)
LETTER = _one_of(*"aeinorst")
DIGITS = ArgumentSlot(lambda rng: str(rng.randint(1, 9999)))  # text, for `pad_zeros`
YEAR = _whole(1900, 2099)
MONTH = _whole(1, 12)
BYTE = _whole(0, 255)
VALUES = _list()
CHARACTER = ArgumentSlot(_character)
PATH = ArgumentSlot(_path)


def _phrase(
    name: str, wordings: str, *, fixed: dict | None = None, **slots: ArgumentSlot
) -> Phrase:
    # `wordings` are separated by "|".
    return Phrase(TOOLS[name], tuple(wordings.split("|")), slots, fixed or {})


def _fraction(rng: random.Random) -> str:
    # A proper fraction, such as 3/8.
    bottom = rng.randint(2, 12)
    return f"{rng.randint(1, bottom - 1)}/{bottom}"


# 85 phrases for 81 of the 83 functions: a function with an optional argument may have two.
PHRASES = (
    _phrase(
        "gcd",
        "the greatest common divisor of {a} and {b}|the largest number that divides {a} and {b}",
        a=_whole(2, 400),
        b=_whole(2, 400),
    ),
    _phrase(
        "lcm",
        "the least common multiple of {a} and {b}|the smallest number that {a} and {b} divide",
        a=_whole(2, 90),
        b=_whole(2, 90),
    ),
    # 18! has 16 digits
    _phrase("factorial", "the factorial of {n}|{n} factorial", n=_whole(3, 18)),
    _phrase(
        "comb",
        "the number of ways to choose {k} of {n} things|the ways to pick {k} out of {n}",
        n=_whole(8, 40),
        k=_whole(2, 7),
    ),
    _phrase(
        "perm",
        "the number of ordered choices of {k} of {n} things|the ways to arrange {k} out of {n}",
        n=_whole(6, 30),
        k=_whole(2, 5),
    ),
    _phrase(
        "isqrt",
        "the integer square root of {n}|the whole part of the root of {n}",
        n=_whole(10, 999),
    ),
    _phrase("sqrt", "the square root of {x}|the root of {x}", x=_decimal(1, 90)),
    _phrase(
        "hypot",
        "the hypotenuse for sides {a} and {b}|the longest side of a right triangle with sides {a}"
        " and {b}",
        a=_whole(2, 60),
        b=_whole(2, 60),
    ),
    _phrase(
        "log",
        "the logarithm of {x} to base {base}|the log of {x} in base {base}",
        x=_whole(2, 999),
        base=_whole(2, 9),
    ),
    # leaves out `base`, which defaults to 10
    _phrase("log", "the decimal logarithm of {x}", x=_whole(2, 999)),
    _phrase(
        "radians",
        "{degrees} degrees in radians|an angle of {degrees} degrees as radians",
        degrees=_whole(1, 359),
    ),
    _phrase("floor", "{x} rounded down|the largest integer below {x}", x=_decimal(1, 99)),
    _phrase("ceil", "{x} rounded up|the smallest integer above {x}", x=_decimal(1, 99)),
    _phrase(
        "round_to",
        "{x} rounded to {digits} digit|the number {x} with {digits} digit",
        x=_decimal(1, 99),
        digits=_one_of(1),  # the wording has the singular
    ),
    _phrase("round_to", "{x} rounded to an integer", x=_decimal(1, 99)),  # leaves out `digits`
    _phrase(
        "pow_mod",
        "{base} to the power {exponent} modulo {m}|the rest of {base} to the power {exponent} after"
        " division by {m}",
        base=_whole(2, 99),
        exponent=_whole(2, 99),
        m=_whole(7, 99),
    ),
    _phrase(
        "power",
        "{base} to the power {exponent}|the power of {base} with exponent {exponent}",
        base=_whole(2, 30),
        exponent=_whole(2, 9),
    ),
    _phrase(
        "divide",
        "the quotient and remainder of {a} by {b}|{a} divided by {b} with remainder",
        a=_whole(50, 999),
        b=_whole(3, 40),
    ),
    _phrase("mean", "the mean of {values}|the average of {values}", values=VALUES),
    _phrase("median", "the median of {values}|the middle value of {values}", values=VALUES),
    _phrase(
        "mode",
        "the most frequent value of {values}|the mode of {values}",
        values=_list(1, 4, (5, 6)),  # few values in a longer list, so that one repeats
    ),
    _phrase(
        "variance",
        "the variance of {values}|the spread of {values} as a variance",
        values=_list(1, 20),
    ),
    _phrase("harmonic_mean", "the harmonic mean of {values}", values=_list(1, 20, (2, 3))),
    _phrase("total", "the total of {values}|all of {values} added up", values=VALUES),
    _phrase("product", "the product of {values}|all of {values} multiplied", values=_list(2, 20)),
    _phrase(
        "sort_numbers", "the numbers {values} in order|{values} sorted", values=_list(1, 99, (3, 4))
    ),
    _phrase(
        "sort_numbers",
        "the numbers {values} from high to low|{values} sorted downwards",
        values=_list(1, 99, (3, 4)),
        fixed={"descending": True},
    ),
    _phrase(
        "largest",
        "the {k} largest of {values}|the top {k} among {values}",
        k=_one_of(2, 3),
        values=_list(1, 99, (4, 5)),
    ),
    _phrase(
        "rank",
        "the place of {x} among {values} in order|where {x} falls among {values}",
        x=_whole(1, 99),
        values=_list(1, 99, (3, 4)),
    ),
    _phrase(
        "add_fractions",
        "the sum of the fractions {a} and {b}|{a} and {b} added as fractions",
        a=ArgumentSlot(_fraction),
        b=ArgumentSlot(_fraction),
    ),
    _phrase(
        "simplify",
        "the fraction {numerator} over {denominator} in lowest terms|{numerator} over {denominator}"
        " simplified",
        numerator=_whole(2, 400),
        denominator=_whole(2, 400),
    ),
    _phrase("to_binary", "{n} in binary|the binary digits of {n}", n=_whole(2, 999)),
    _phrase("to_octal", "{n} in octal|the octal digits of {n}", n=_whole(8, 999)),
    _phrase("to_hex", "{n} in hexadecimal|the hexadecimal digits of {n}", n=_whole(16, 999)),
    _phrase(
        "from_base",
        "the number with digits {digits} in base {base}|the value of {digits} in base {base}",
        digits=ArgumentSlot(
            # valid in every base
            lambda rng: "".join(rng.choice("01") for _ in range(rng.randint(4, 7)))
        ),
        base=_one_of(2, 3, 5, 7, 8),
    ),
    _phrase(
        "bit_count",
        "the number of ones in binary {n}|how many ones the binary form of {n} has",
        n=_whole(2, 999),
    ),
    _phrase("bit_length", "the number of bits of {n}|how many bits {n} needs", n=_whole(2, 999)),
    _phrase("weekday", "the day of the week of {date}|the weekday on {date}", date=DAY),
    _phrase(
        "is_leap", "whether {year} is a leap year|if the year {year} has a leap day", year=YEAR
    ),
    _phrase(
        "leap_days",
        "the number of leap years from {start} to {end}|how many leap years lie from {start} to"
        " {end}",
        start=_whole(1800, 1949),  # the ranges keep start before end
        end=_whole(1950, 2099),
    ),
    _phrase(
        "days_in_month",
        "the number of days in month {month} of {year}|how many days month {month} of {year} has",
        year=YEAR,
        month=MONTH,
    ),
    _phrase(
        "month_name", "the name of month {month}|how month number {month} is called", month=MONTH
    ),
    _phrase(
        "add_days",
        "the date {days} days after {date}|the day that is {days} days after {date}",
        date=DAY,
        days=_whole(30, 400),
    ),
    _phrase(
        "days_between",
        "the number of days from {start} to {end}|how many days pass from {start} to {end}",
        start=DAY,
        end=DAY,
    ),
    _phrase(
        "day_of_year",
        "the day number in the year of {date}|the place of {date} in its year",
        date=DAY,
    ),
    _phrase("iso_week", "the week number of {date}|the calendar week of {date}", date=DAY),
    _phrase(
        "from_timestamp",
        "the date of Unix time {seconds}|the day when Unix time was {seconds}",
        seconds=ArgumentSlot(lambda rng: rng.randrange(10**9)),  # up to 2001-09-09
    ),
    _phrase(
        "duration",
        "{seconds} seconds as hours and minutes|a time of {seconds} seconds written out",
        seconds=_whole(61, 999),
    ),
    _phrase(
        "add_minutes",
        "the time {minutes} minutes after {time}|what the clock shows {minutes} minutes after"
        " {time}",
        time=CLOCK,
        minutes=_whole(5, 600),
    ),
    _phrase(
        "utc_offset",
        "the UTC offset of {zone} on {date}|how far {zone} is from UTC on {date}",
        zone=ZONE,
        date=DAY,
    ),
    _phrase(
        "convert_time",
        "the time in {to} when it is {time} on {date} in {zone}|{time} on {date} of {zone} in {to}",
        time=CLOCK,
        date=DAY,
        zone=ZONE,
        to=ZONE,
    ),
    _phrase(
        "ip_version",
        "the version of the address {address}|which version of IP {address} is",
        address=ADDRESS,
    ),
    _phrase(
        "is_private",
        "whether the address {address} is private|if {address} is a private address",
        address=ADDRESS,
    ),
    _phrase(
        "ip_to_int",
        "the address {address} as a number|the number behind {address}",
        address=ADDRESS,
    ),
    _phrase(
        "int_to_ip",
        "the address with the number {n}|the number {n} as an address",
        n=ArgumentSlot(lambda rng: rng.randrange(2**24, 2**32)),  # from 1.0.0.0 on
    ),
    _phrase(
        "network_size",
        "the number of addresses in {network}|how many addresses {network} has",
        network=NETWORK,
    ),
    _phrase(
        "netmask",
        "the mask of the network {network}|the network mask of {network}",
        network=NETWORK,
    ),
    _phrase(
        "broadcast",
        "the broadcast address of {network}|the address for all of {network}",
        network=NETWORK,
    ),
    _phrase(
        "in_network",
        "whether {network} holds the address {address}|if {address} lies in {network}",
        network=NETWORK,
        address=ADDRESS,
    ),
    _phrase("upper", "'{text}' in upper case|'{text}' in capitals", text=TEXT),
    _phrase("title_case", "'{text}' with a capital at each word|'{text}' as a title", text=TEXT),
    _phrase("swap_case", "'{text}' with its case swapped|'{text}' in the other case", text=TEXT),
    _phrase("reverse_text", "'{text}' backwards|'{text}' reversed", text=WORD),
    _phrase("text_length", "the number of characters of '{text}'|how long '{text}' is", text=TEXT),
    _phrase(
        "count_letter",
        "how often '{text}' has the letter {letter}|the number of times {letter} is in '{text}'",
        text=TEXT,
        letter=LETTER,
    ),
    _phrase(
        "replace_letter",
        "'{text}' with {new} in place of {old}|'{text}' after changing {old} to {new}",
        text=WORD,
        old=LETTER,
        new=LETTER,
    ),
    _phrase(
        "repeat_text",
        "'{text}' written {times} times|'{text}' repeated {times} times",
        text=WORD,
        times=_whole(2, 3),
    ),
    _phrase(
        "shorten",
        "'{text}' cut at width {width}|'{text}' shortened to {width} characters",
        text=_text(2, 3),
        width=_whole(8, 14),
    ),
    _phrase(
        "pad_zeros",
        "{text} with zeros up to width {width}|{text} padded to {width} digits",
        text=DIGITS,
        width=_whole(5, 12),
    ),
    _phrase(
        "sort_words",
        "the words of '{text}' in order|'{text}' with its words sorted",
        text=_text(2, 3),
    ),
    _phrase(
        "sort_words",
        "the words of '{text}' from last to first|'{text}' with its words sorted downwards",
        text=_text(2, 3),
        fixed={"descending": True},
    ),
    _phrase("rot13", "'{text}' in ROT13|the ROT13 code of '{text}'", text=WORD),
    _phrase("base64_encode", "'{text}' in Base64|the Base64 code of '{text}'", text=WORD),
    _phrase("url_quote", "'{text}' for a URL|'{text}' escaped for a URL", text=_text(2, 2)),
    _phrase("crc32", "the CRC-32 of '{text}'|the checksum of '{text}'", text=WORD),
    _phrase(
        "similarity",
        "how similar '{a}' and '{b}' are|the similarity of '{a}' and '{b}'",
        a=WORD,
        b=WORD,
    ),
    _phrase(
        "is_keyword",
        "whether '{word}' is a Python keyword|if Python reserves '{word}'",
        word=ArgumentSlot(
            # both answers occur
            lambda rng: rng.choice(keyword.kwlist) if rng.random() < 0.5 else _word(rng)
        ),
    ),
    _phrase("file_extension", "the extension of {path}|what {path} ends in as a file", path=PATH),
    _phrase("base_name", "the last part of {path}|the file name in {path}", path=PATH),
    _phrase(
        "char_name",
        "the Unicode name of {character}|how Unicode calls {character}",
        character=CHARACTER,
    ),
    _phrase(
        "char_category",
        "the Unicode category of {character}|the class of {character} in Unicode",
        character=CHARACTER,
    ),
    _phrase(
        "code_point",
        "the Unicode number of {character}|the code point of {character}",
        character=CHARACTER,
    ),
    _phrase(
        "from_code_point",
        "the character with Unicode number {n}|the character at code point {n}",
        n=_whole(192, 900),
    ),
    _phrase(
        "rgb_to_hsv",
        "the colour red {red}, green {green}, blue {blue} as HSV|HSV for red {red}, green {green},"
        " blue {blue}",
        red=BYTE,
        green=BYTE,
        blue=BYTE,
    ),
    _phrase(
        "hsv_to_rgb",
        "the colour hue {hue}, saturation {saturation}, value {value} as RGB|"
        "RGB for hue {hue}, saturation {saturation}, value {value}",
        hue=_whole(0, 359),
        saturation=_whole(0, 100),
        value=_whole(0, 100),
    ),
)


def said(value: Any) -> str:
    """A value as a person writes it."""
    if isinstance(value, list):
        return ", ".join(map(str, value[:-1])) + f" and {value[-1]}"
    return str(value)


def noted(value: Any) -> str:
    """A value in a chain of thought.

    A text stands in quotes, as it does in a call. Both then have the same tokens, and copying is
    easy.
    """
    text = said(value)
    # Numbers, dates, times, addresses and lists of them go without quotes.
    if isinstance(value, list) or re.fullmatch(r"[-+\d.:/,\[\] ]+", text):
        return text
    return f'"{text}"'


def result_of(tool: Tool, arguments: dict) -> str | None:
    """What the model will observe.

    None if the call is refused or fails, or if the result is empty, too long or padded with blanks.
    """
    if tool.problem(arguments):
        return None
    try:
        result = response_text(tool.run(**arguments))
    except (ValueError, ArithmeticError, LookupError):
        return None
    # The parser strips a final answer, so blanks around a result would be lost.
    return result if 0 < len(result) <= LONGEST_RESULT and result == result.strip() else None


def offer(rng: random.Random) -> dict[str, Tool]:
    """Own name of each function → the function under a provider's name, drawn for this request."""
    return {name: CALLABLE[f"{name}_{rng.choice(PROVIDERS)}"] for name in TOOLS}  # "gcd" → gcd_oak


def split_of_call(tool: Tool, arguments: dict) -> str:
    """The split of a function with these arguments: "train", "validation" or "test".

    A hash decides: 20 % of all calls are for the test, 10 % for validation, the rest for training.
    """
    # CRC-32 and not `hash`, which differs from process to process.
    bucket = zlib.crc32(f"{tool.name} {json.dumps(arguments, sort_keys=True)}".encode()) % 10
    if bucket < 2:
        return "test"
    return "validation" if bucket == 2 else "train"


def accepted(tool: Tool, arguments: dict) -> dict:
    """The call as BFCL's ground truth has it: the accepted values of every parameter.

    "" among them means that the parameter may be left out.
    """
    values = {}  # parameter → accepted values
    for name, parameter in tool.parameters.items():
        if name not in arguments:
            values[name] = ["", parameter.default]  # either left out or given as its default
        elif arguments[name] == parameter.default:
            values[name] = [arguments[name], ""]
        else:
            values[name] = [arguments[name]]
    return {tool.name: values}

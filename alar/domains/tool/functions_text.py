"""Text, Unicode, codes, paths and colours, by the modules that are imported here."""

from __future__ import annotations

import base64
import codecs
import colorsys
import difflib
import html
import keyword
import posixpath
import string
import textwrap
import unicodedata
import zlib
from urllib.parse import quote

from alar.domains.tool.schema import boolean, choice, integer, text, tool, tools_by_name

_TEXT = text()
_CHARACTER = text(longest=1)
_BYTE = integer(0, 255)  # red, green or blue


def _hsv(red: int, green: int, blue: int) -> list[int]:
    # colorsys has all values in [0, 1]; people say degrees and percent.
    hue, saturation, value = colorsys.rgb_to_hsv(red / 255, green / 255, blue / 255)
    return [round(360 * hue), round(100 * saturation), round(100 * value)]


def _rgb(hue: int, saturation: int, value: int) -> list[int]:
    # colorsys returns red, green and blue in [0, 1].
    return [
        round(255 * part) for part in colorsys.hsv_to_rgb(hue / 360, saturation / 100, value / 100)
    ]


def _sort_words(text: str, descending: bool = False) -> str:
    return " ".join(sorted(text.split(), reverse=descending))


TOOLS = tools_by_name(
    tool("upper", "Upper case.", lambda text: text.upper(), text=_TEXT),
    tool("title_case", "Capital at each word.", lambda text: string.capwords(text), text=_TEXT),
    tool("swap_case", "Swap upper and lower case.", lambda text: text.swapcase(), text=_TEXT),
    tool("reverse_text", "Text backwards.", lambda text: text[::-1], text=_TEXT),
    tool("text_length", "Number of characters.", lambda text: len(text), text=_TEXT),
    tool(
        "count_letter",
        "How often a letter occurs.",
        lambda text, letter: text.count(letter),
        text=_TEXT,
        letter=_CHARACTER,
    ),
    tool(
        "replace_letter",
        "Replace a letter.",
        lambda text, old, new: text.replace(old, new),
        text=_TEXT,
        old=_CHARACTER,
        new=_CHARACTER,
    ),
    tool(
        "repeat_text",
        "Text several times.",
        lambda text, times: text * times,
        text=text(longest=50),
        times=integer(0, 20),  # at most 1000 characters
    ),
    tool(
        "shorten",
        "Cut text at a width.",
        # cuts between words only
        lambda text, width: textwrap.shorten(text, width, placeholder="…"),
        text=_TEXT,
        width=integer(1, 200),
    ),
    tool(
        "pad_zeros",
        "Zeros in front up to a width.",
        lambda text, width: text.zfill(width),
        text=text(longest=50),
        width=integer(1, 100),
    ),
    tool(
        "sort_words", "Words in order.", _sort_words, text=_TEXT, descending=boolean(default=False)
    ),
    tool("rot13", "ROT13 code.", lambda text: codecs.encode(text, "rot13"), text=_TEXT),
    tool(
        "base64_encode",
        "Base64 code.",
        lambda text: base64.b64encode(text.encode()).decode(),  # the code of the UTF-8 bytes
        text=_TEXT,
    ),
    tool("url_quote", "Escape text for a URL.", lambda text: quote(text), text=_TEXT),
    tool("html_escape", "Escape text for HTML.", lambda text: html.escape(text), text=_TEXT),
    tool("crc32", "CRC-32 checksum.", lambda text: zlib.crc32(text.encode()), text=_TEXT),
    tool(
        "similarity",
        "Similarity in percent.",
        # depends on the order of a and b
        lambda a, b: round(100 * difflib.SequenceMatcher(None, a, b).ratio()),
        a=_TEXT,
        b=_TEXT,
    ),
    tool(
        "is_keyword",
        "Whether Python reserves a word.",
        lambda word: keyword.iskeyword(word),
        word=_TEXT,
    ),
    tool(
        "file_extension",
        "Extension of a path.",
        lambda path: posixpath.splitext(path)[1],  # posixpath: the same on Windows
        path=_TEXT,
    ),
    tool("base_name", "Last part of a path.", lambda path: posixpath.basename(path), path=_TEXT),
    tool(
        "char_name",
        "Unicode name.",
        lambda character: unicodedata.name(character),  # an error for a character without a name
        character=_CHARACTER,
    ),
    tool(
        "char_category",
        "Unicode category.",
        lambda character: unicodedata.category(character),  # two letters, such as "Ll"
        character=_CHARACTER,
    ),
    tool("code_point", "Unicode number.", lambda character: ord(character), character=_CHARACTER),
    tool(
        # Surrogates begin at 0xD800, and they cannot be written as UTF-8.
        "from_code_point",
        "Character of a Unicode number.",
        lambda n: chr(n),
        n=integer(32, 0xD7FF),
    ),
    tool(
        "normalize",
        "Unicode normal form.",
        lambda text, form="NFC": unicodedata.normalize(form, text),
        text=_TEXT,
        form=choice("NFC", "NFD", "NFKC", "NFKD", default="NFC"),
    ),
    tool(
        "rgb_to_hsv", "Colour as hue, saturation, value.", _hsv, red=_BYTE, green=_BYTE, blue=_BYTE
    ),
    tool(
        "hsv_to_rgb",
        "Colour as red, green, blue.",
        _rgb,
        hue=integer(0, 360),
        saturation=integer(0, 100),
        value=integer(0, 100),
    ),
)

"""A compressed text to look at: dropped words struck through, and why the rate was not met.

`compression_view` is live; `struck` is its static twin, the same text at several rates.
"""

from __future__ import annotations

from collections.abc import Sequence

import ipywidgets
import pandas as pd
from matplotlib.figure import Figure

from alar.figures.style import BLACK, BLUE, GREY, PAGE, VERMILLION, footnote, new_figure, styled
from alar.inspector.fragments import boxed, escaped, table_html
from alar.inspector.tokens import shortened
from alar.inspector.widgets import View
from alar.methods.tokenskip.compress import Compression, CountTokens, compress
from alar.methods.tokenskip.words import Rules, Thought, Word, WordScorer

PASTED = -1  # the choice of the pasted text among the samples
EXAMPLE = (
    "Norway adopted its currency in 1875 and Kenya in 1966. 1966-1875 is 91, so the difference is"
    " 91 years."
)
COLUMNS, FONT = 104, 7.5  # characters of a line in the picture, and their size in points


def compression_view(
    samples: Sequence[Thought],
    scorers: Sequence[WordScorer],
    rules: Rules,
    count_tokens: CountTokens,
    *,
    pasted: str = EXAMPLE,
    twin: Figure | None = None,
) -> View:
    """A view to choose a text, a scorer and a rate.

    The text is one of the samples or pasted. It is scored once per scorer.
    """
    labels = [  # (what the menu shows, number of the sample)
        (f"{number + 1}. {shortened(sample.text, 80)}", number)
        for number, sample in enumerate(samples)
    ]
    wide = {"width": "46em"}
    sample = ipywidgets.Dropdown(
        description="sample", options=[*labels, ("the text below", PASTED)], layout=wide
    )
    text = ipywidgets.Textarea(
        description="or paste", value=pasted, continuous_update=False, layout=wide
    )
    scorer = ipywidgets.Dropdown(
        description="scorer", options=[(s.name, number) for number, s in enumerate(scorers)]
    )
    rate = ipywidgets.FloatSlider(description="rate", min=0.05, max=1.0, step=0.05, value=0.5)
    known: dict[tuple[int, Thought], list[Word]] = {}  # (scorer, thought) → scored words

    def draw(sample: int, text: str, scorer: int, rate: float) -> str:
        thought = Thought(text) if sample == PASTED else samples[sample]
        try:
            if (scorer, thought) not in known:
                known[scorer, thought] = scorers[scorer].score_words([thought])[0]
        except ValueError as problem:  # such as a pasted text for a scorer that needs its action
            return boxed(f'<p class="no">{escaped(problem)}</p>')
        # The slider's 0.15000000000000002 is 0.15.
        found = compress(thought.text, known[scorer, thought], round(rate, 2), rules, count_tokens)
        return boxed(marked(found), reasons(found))

    return View(
        "compression", {"sample": sample, "text": text, "scorer": scorer, "rate": rate}, draw, twin
    )


def marked(found: Compression) -> str:
    """The whole text: dropped words struck through, forced ones bold."""
    pieces = []
    for word, stays, forced in zip(found.words, found.kept, found.forced):
        inner = f"<b>{escaped(word.text)}</b>" if forced else escaped(word.text)
        pieces.append(inner if stays else f'<del style="color:#a03c00">{inner}</del>')
    return (
        f'<div class="tokens">{"".join(pieces)}</div><p>becomes</p><div'
        f' class="tokens">{escaped(found.text)}</div>'
    )


def reasons(found: Compression) -> str:
    """Requested against achieved, step by step, in tokens and as shares."""
    counted, chunks = sum(found.counts), len({word.chunk for word in found.words})
    kept, forced = round(found.kept_share * counted), round(found.forced_share * counted)
    percentile = (
        f"a percentile of {counted} numbers ({chunks} chunk{'s' * (chunks != 1)}), no word count:"
        " whole words, ties together"
    )
    bold = "bold, such as digits and operators: kept whatever the rate"
    whole = f"of {found.original_tokens}: the joined text is tokenised as a whole, not word by word"
    wanted = f"{found.rate * counted:.1f}"  # in tokens
    rows = [
        ("requested", wanted, f"{found.rate:.0%}", "of the tokens, counted word by word"),
        ("above the threshold", kept, f"{found.kept_share:.0%}", percentile),
        ("of all, forced", forced, f"{found.forced_share:.0%}", bold),
        ("achieved", found.tokens, f"{found.achieved:.0%}", whole),
    ]
    return table_html(("", "tokens", "share", "why"), rows)


@styled
def struck(
    text: str,
    words: Sequence[Word],
    rates: Sequence[float],
    rules: Rules,
    count_tokens: CountTokens,
    *,
    scorer: str,
):
    """(figure, table): the text once per rate. The table has one row per word and rate."""
    found = [compress(text, words, rate, rules, count_tokens) for rate in rates]
    placed = _placed([word.text for word in words])
    # Of the whole text; each rate gets as many.
    lines = 1 + max((line for line, _ in placed), default=0)
    # In inches: 0.145 a line, 1.6 lines for the head of a rate, 0.35 for the rest.
    figure = new_figure(PAGE, 0.35 + len(found) * (lines + 1.6) * 0.145)
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set_xlim(0, COLUMNS)  # axes count characters and lines
    axes.set_ylim(len(found) * (lines + 1.6), -0.5)  # upside down: line 0 is on top
    for block, compression in enumerate(found):
        top = block * (lines + 1.6)
        head = (
            f"rate {compression.rate:g} → {compression.achieved:.0%} of"
            f" {compression.original_tokens} tokens ({compression.forced_share:.0%} forced)"
        )
        axes.text(0, top, head, fontsize=FONT - 1, color=GREY, va="center", parse_math=False)
        for word, (line, column), stays, forced in zip(
            words, placed, compression.kept, compression.forced
        ):
            shown, y = word.text.strip(), top + 1 + line
            colour = BLUE if forced else BLACK
            if not stays:
                colour = VERMILLION
            style = {"family": "DejaVu Sans Mono", "fontsize": FONT, "color": colour}
            axes.text(column, y, shown, va="center", parse_math=False, **style)
            if not stays:
                axes.plot([column, column + len(shown)], [y, y], color=VERMILLION, linewidth=0.8)
    footnote(figure, f"scorer: {scorer}", "struck through: dropped", "blue: forced")
    parts = []
    for compression in found:
        about = {
            "rate": compression.rate,
            "word": [word.text for word in compression.words],
            "score": [word.score for word in compression.words],
            "forced": compression.forced,
            "kept": compression.kept,
        }
        parts.append(pd.DataFrame(about))
    return figure, pd.concat(parts, ignore_index=True)


def _placed(words: Sequence[str]) -> list[tuple[int, int]]:
    """(line, column) of every word, wrapped at `COLUMNS` characters."""
    places, line, column = [], 0, 0
    for word in words:
        shown = word.strip()
        # A space, but none at the start of a line.
        column += 1 if word != word.lstrip() and column else 0
        if column and column + len(shown) > COLUMNS:
            line, column = line + 1, 0
        places.append((line, column))
        column += len(shown)
    return places

"""Training examples as people read them: which tokens carry loss, which positions hold a latent."""

from __future__ import annotations

import html
from itertools import groupby

from IPython.display import HTML

from alar.rollout.codec import Codec
from alar.train.examples import Example

# Background of each kind.
COLOURS = {"loss": "#CDEBDF", "latent": "#CBE1F2", "context": "white"}


def coloured(example: Example, codec: Codec) -> HTML:
    """The text of an example, coloured by what each token is.

    Green tokens carry loss, blue positions hold a latent, everything else is white.
    """

    def kind(pair: tuple[int, int]) -> str:
        token, label = pair
        if codec.is_latent(token):
            return "latent"
        return "context" if label == -100 else "loss"  # -100 is the label that PyTorch ignores

    spans = []
    for name, run in groupby(zip(example.ids, example.labels), kind):
        # Decoded per run: one character may take several tokens.
        text = html.escape(codec.text([token for token, _ in run]))
        spans.append(f"<span style='background:{COLOURS[name]}'>{text}</span>")
    return HTML(f"<pre style='white-space:pre-wrap'>{''.join(spans)}</pre>")

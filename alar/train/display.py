"""Training examples as people read them: which tokens carry loss, which positions hold a latent."""

from __future__ import annotations

import html
from itertools import groupby

from IPython.display import HTML

from alar.rollout.codec import Codec
from alar.train.examples import Example

COLOURS = {"loss": "#CDEBDF", "latent": "#CBE1F2", "context": "white"}


def coloured(example: Example, codec: Codec) -> HTML:
    """The text of an example: green where the loss is, blue where a latent or a mirror is fed,
    white for everything else."""

    def kind(pair: tuple[int, int]) -> str:
        token, label = pair
        if token == codec.latent_token_id or (
            codec.dual is not None and codec.dual.is_mirror(token)
        ):
            return "latent"
        return "context" if label == -100 else "loss"

    spans = []
    for name, run in groupby(zip(example.ids, example.labels), kind):
        text = html.escape(codec.text([token for token, _ in run]))
        spans.append(f"<span style='background:{COLOURS[name]}'>{text}</span>")
    return HTML(f"<pre style='white-space:pre-wrap'>{''.join(spans)}</pre>")

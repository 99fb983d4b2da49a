"""A run's trajectories as one HTML file, for people without Jupyter.

The file holds everything it shows. It needs no script, font or picture from elsewhere, and its
content security policy forbids the browser to ask for any. Every text is escaped
(`alar.inspector.fragments`), so markup in a question is shown as text. At most `LENS_LAYERS` layers
and `LENS_TOKENS` candidates per latent step keep the file small and readable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from alar.files import replacing
from alar.inspector.fragments import (
    STYLE,
    escaped,
    headline_html,
    legend_html,
    table_html,
    timeline_html,
    tokens_html,
    turns_html,
)
from alar.inspector.readings import LatentReadings
from alar.inspector.tokens import visible
from alar.records import Trajectory
from alar.rollout.codec import Codec

LIMIT = 5 * 2**20  # bytes that a report of 50 trajectories stays under; a test checks it
LENS_LAYERS, LENS_TOKENS = 6, 4  # rows per block; candidates per cell

# What a page needs beyond `fragments.STYLE`.
PAGE_STYLE = """\
body{max-width:64rem;margin:1.5rem auto;padding:0 1rem;background:#fff}
details{margin:.35rem 0}
summary{cursor:pointer}
details.one{border-top:1px solid #ddd;padding:.4rem 0}
.inside{padding:.3rem 0 1rem 1.1rem}
.lens td{white-space:pre}
h1{font-size:1.4rem}
"""
# `data:,` is an empty icon: without one the browser would ask for a favicon.
HEAD = """\
<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy"
content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,"><title>{title}</title><style>{style}</style></head>
<body class="alar">
"""


def write_report(
    path: str | Path,
    trajectories: Sequence[Trajectory],
    codec: Codec,
    *,
    readings: Mapping[int, LatentReadings] | None = None,
    p_latent: Sequence[Sequence[float]] | None = None,
    title: str = "Latent trajectories",
    facts: Mapping[str, object] | None = None,
) -> Path:
    """Write the report of some trajectories and return its path.

    `readings` maps a trajectory's index to what was read in its thoughts. `p_latent` has one list
    per trajectory with p(latent | state) of every turn. `facts` (checkpoint, scale, …) stand at the
    top. Raises ValueError if there are no trajectories.
    """
    if not trajectories:
        raise ValueError(f"{path}: no trajectories to report on; run the stage that writes them")
    # Written piece by piece, so that a long report need not fit in memory.
    with replacing(path) as aside, aside.open("w", encoding="utf-8") as stream:
        stream.write(HEAD.format(title=escaped(title), style=STYLE + PAGE_STYLE))
        stream.write(f"<h1>{escaped(title)}</h1>")
        stream.write(table_html(("", ""), _facts(trajectories, facts or {})) + legend_html())
        for index, trajectory in enumerate(trajectories):
            scores = None if p_latent is None else p_latent[index]
            stream.writelines(_entry(trajectory, codec, (readings or {}).get(index), scores))
        stream.write("</body></html>\n")
    return Path(path)


def _facts(trajectories: Sequence[Trajectory], facts: Mapping[str, object]) -> list[tuple]:
    turns = sum(len(t.turns) for t in trajectories)
    latent = sum(t.num_latent_turns for t in trajectories)
    correct = [t.correct for t in trajectories]
    return [
        *facts.items(),
        ("trajectories", len(trajectories)),
        ("correct", f"{sum(correct)} ({np.mean(correct):.0%})"),
        ("generated tokens, mean", f"{np.mean([t.generated_tokens for t in trajectories]):.1f}"),
        ("turns", f"{turns}, {latent} of them latent"),
    ]


def _entry(
    trajectory: Trajectory,
    codec: Codec,
    readings: LatentReadings | None,
    scores: Sequence[float] | None,
) -> Iterator[str]:
    head = headline_html(trajectory) + timeline_html(trajectory)
    yield f'\n<details class="one"><summary>{head}</summary><div class="inside">'
    yield turns_html(trajectory, scores)
    tokens = tokens_html(trajectory, codec)
    yield f"<details open><summary>tokens</summary>{tokens}</details>"
    for turn in readings.latent_turns if readings is not None else ():  # from 0
        name = f"what the logit lens reads in turn {turn + 1}"
        yield f"<details><summary>{name}</summary>{lens_html(readings, turn)}</details>"
    yield "</div></details>"


def lens_html(readings: LatentReadings, turn: int) -> str:
    """One block as a table: a column per latent step, a row per layer.

    A cell holds the first candidates with their probabilities. Nearest embeddings, norm and entropy
    follow below. `turn` counts from 0.
    """
    steps = readings.rows(turn)  # (K,), row numbers of the readings
    # Evenly spaced, with layer 0 and the last one. `unique`: a small model has fewer layers.
    layers = np.unique(np.linspace(0, readings.num_layers, LENS_LAYERS).round().astype(int))
    head = ["", *(f"k = {k}" for k in range(1, len(steps) + 1))]
    rows = []
    for layer in layers:
        name = f"layer {layer}" if layer else "input z"
        rows.append([name, *(_candidates(readings.lens(step, layer)) for step in steps)])
    near = [_candidates(readings.nearest(step)) for step in steps]
    rows.append(["nearest embeddings (cosine)", *near])
    numbers = [
        f"{readings.norm_ratio[step]:.2f} · {readings.lens_entropy[step, -1]:.2f}" for step in steps
    ]
    rows.append(["‖z‖ / median embedding · entropy", *numbers])
    return f'<div class="lens">{table_html(head, rows)}</div>'


def _candidates(found: Sequence[tuple[str, float]]) -> str:
    return "\n".join(f"{value:.2f} {visible(token)}" for token, value in found[:LENS_TOKENS])

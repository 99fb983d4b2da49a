"""A run's trajectories as one HTML file, for people without Jupyter.

The file holds everything it shows: no script, no font, no picture from elsewhere; its content
security policy forbids the browser to ask for anything. Every text is escaped
(`alar.inspector.fragments`), so a question that contains markup is shown as the text it is. At most
`LENS_LAYERS` layers and `LENS_TOKENS` candidates per latent step keep it small and readable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from alar.files import replacing
from alar.inspector import fragments
from alar.inspector.fragments import STYLE, escaped
from alar.inspector.record import LatentRecord
from alar.inspector.tokens import visible
from alar.records import Trajectory
from alar.rollout.codec import Codec

LIMIT = 5 * 2**20  # bytes, for 50 trajectories
LENS_LAYERS, LENS_TOKENS = 6, 4

PAGE_STYLE = (
    "body{max-width:64rem;margin:1.5rem auto;padding:0 1rem;background:#fff}details{margin:.35rem"
    " 0}summary{cursor:pointer}details.one{border-top:1px solid #ddd;padding:.4rem"
    " 0}.inside{padding:.3rem 0 1rem 1.1rem}td.cell{white-space:pre}h1{font-size:1.4rem}"
)
HEAD = (
    '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta'
    ' http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src'
    ' \'unsafe-inline\'; img-src data:"><meta name="viewport" content="width=device-width,'
    ' initial-scale=1"><link rel="icon"'
    ' href="data:,"><title>{title}</title><style>{style}</style></head><body class="alar">\n'
)


def write(
    path: str | Path,
    trajectories: Sequence[Trajectory],
    codec: Codec,
    *,
    records: Mapping[int, LatentRecord] | None = None,
    p_latent: Sequence[Sequence[float]] | None = None,
    title: str = "Latent trajectories",
    facts: Mapping[str, object] | None = None,
) -> Path:
    """Write the report of some trajectories; `records` maps a trajectory's index to its latent
    record.

    `facts` (checkpoint, scale, …) stand at the top. Raises ValueError for no trajectories.
    """
    if not trajectories:
        raise ValueError(
            f"{path}: no trajectories to report on; run the stage that writes them first"
        )
    with replacing(path) as aside, aside.open("w", encoding="utf-8") as stream:
        stream.write(HEAD.format(title=escaped(title), style=STYLE + PAGE_STYLE))
        stream.write(
            f"<h1>{escaped(title)}</h1>{_facts(trajectories, facts or {})}{fragments.legend()}\n"
        )
        for index, trajectory in enumerate(trajectories):
            scores = p_latent[index] if p_latent is not None else None
            for part in _entry(trajectory, codec, (records or {}).get(index), scores):
                stream.write(part)
        stream.write("</body></html>\n")
    return Path(path)


def _facts(trajectories: Sequence[Trajectory], facts: Mapping[str, object]) -> str:
    turns = sum(len(t.turns) for t in trajectories)
    latent = sum(t.num_latent_turns for t in trajectories)
    rows = list(facts.items()) + [
        ("trajectories", len(trajectories)),
        (
            "correct",
            (
                f"{sum(t.correct for t in trajectories)}"
                f" ({np.mean([t.correct for t in trajectories]):.0%})"
            ),
        ),
        ("generated tokens, mean", f"{np.mean([t.generated_tokens for t in trajectories]):.1f}"),
        ("turns", f"{turns}, {latent} of them latent"),
    ]
    return fragments.table(("", ""), rows)


def _entry(
    trajectory: Trajectory, codec: Codec, record: LatentRecord | None, scores
) -> Iterator[str]:
    yield (
        "<details"
        f' class="one"><summary>{fragments.headline(trajectory)}{fragments.timeline(trajectory)}</summary>'
    )
    yield '<div class="inside">' + fragments.turns(trajectory, scores)
    yield f"<details open><summary>tokens</summary>{fragments.tokens(trajectory, codec)}</details>"
    for turn in record.latent_turns if record is not None else ():
        yield (
            "<details><summary>what the logit lens reads in turn"
            f" {turn + 1}</summary>{lens(record, turn)}</details>"
        )
    yield "</div></details>\n"


def lens(record: LatentRecord, turn: int) -> str:
    """One block: a column per latent step, a row per layer, the first candidates with their
    probabilities."""
    rows = record.rows(turn)
    layers = np.unique(np.linspace(0, record.num_layers, LENS_LAYERS).round().astype(int))
    head = "".join(f"<th>k = {k}</th>" for k in range(1, len(rows) + 1))
    lines = [f"<tr><th></th>{head}</tr>"]
    for layer in layers:
        cells = "".join(
            f'<td class="cell">{_candidates(record.lens(row, layer))}</td>' for row in rows
        )
        lines.append(f"<tr><th>{'input z' if layer == 0 else f'layer {layer}'}</th>{cells}</tr>")
    near = "".join(f'<td class="cell">{_candidates(record.nearest(row))}</td>' for row in rows)
    lines.append(f"<tr><th>nearest embeddings (cosine)</th>{near}</tr>")
    numbers = "".join(
        f"<td>{record.norm_ratio[row]:.2f} · {record.lens_entropy[row, -1]:.2f}</td>"
        for row in rows
    )
    lines.append(f"<tr><th>‖z‖ / median embedding · entropy</th>{numbers}</tr>")
    return f"<table>{''.join(lines)}</table>"


def _candidates(found: Sequence[tuple[str, float]]) -> str:
    return "\n".join(
        f"{value:.2f} {escaped(visible(token))}" for token, value in found[:LENS_TOKENS]
    )

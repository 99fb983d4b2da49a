"""What one forward pass shows, as figures: the lens, norms, cosines, attention."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from jaxtyping import Float
from matplotlib.figure import Figure

from alar.figures.style import MEASURED, PAGE, VERMILLION, footnote, new_figure, styled
from alar.inspector.plots.shared import boxes, cells
from alar.inspector.readings import LatentReadings
from alar.inspector.tokens import one_line, visible

SEGMENT_COLOURS = {  # what a latent step can look at
    "prompt": "#BBBBBB",
    "earlier text": "#E69F00",
    "earlier latent": "#56B4E9",
    "observation": "#009E73",
    "this turn": "#F0E442",
    "this block": "#0072B2",
}


@styled
def draw_lens(readings: LatentReadings, turn: int) -> tuple[Figure, pd.DataFrame]:
    """The logit lens in one block: layers upwards, latent steps to the right; darker is surer.

    Each cell holds the lens's first token and its probability. The labels below name the token
    whose embedding has the largest cosine to z. `turn` counts from 0.
    """
    rows = readings.rows(turn)
    entropy = readings.lens_entropy[rows].T  # (L + 1, K)
    layers = ["input z", *(f"layer {layer}" for layer in range(1, len(entropy)))]
    figure = new_figure(PAGE, 1.1 + 0.27 * len(layers))
    axes = figure.subplots()
    tops = np.empty(entropy.shape, dtype=object)
    for layer, k in np.ndindex(tops.shape):
        token, probability = readings.lens(rows[k], layer)[0]
        tops[layer, k] = f"{one_line(visible(token), 14)}  {probability:.2f}"
    most = max(1e-6, float(entropy.max()))  # nats; a colour scale needs a width
    options = {"cmap": "Blues_r", "vmin": 0, "aspect": "auto", "origin": "lower"}
    image = cells(axes, entropy, tops, most, **options)
    labels = []
    for k, row in enumerate(rows, start=1):
        near = one_line(visible(readings.nearest(row)[0][0]), 12)
        labels.append(f"k = {k}\n‖z‖ {readings.norm_ratio[row]:.2f}\nnear {near}")
    axes.set_xticks(range(len(rows)), labels, parse_math=False)
    axes.set_yticks(range(len(layers)), layers)
    axes.set_title(f"Logit lens of the block of turn {turn + 1}")
    figure.colorbar(image, ax=axes, label="Entropy (nats)", fraction=0.03, pad=0.01)
    footnote(
        figure,
        "‖z‖ over the median embedding norm · near: embedding of the largest cosine",
        "a lens reads structure in any model: only interventions show use",
    )
    return figure, _lens_table(readings, rows)


def _lens_table(readings: LatentReadings, rows: np.ndarray) -> pd.DataFrame:
    """Every candidate that the lens reads in one block; entropy in nats."""
    found = []
    for k, row in enumerate(rows, start=1):
        for layer, entropy in enumerate(readings.lens_entropy[row].tolist()):
            for rank, (token, probability) in enumerate(readings.lens(row, layer), start=1):
                found.append((k, layer, rank, token, probability, entropy))
    return pd.DataFrame(found, columns=["k", "layer", "rank", "token", "probability", "entropy"])


@styled
def draw_vectors(
    readings: Sequence[LatentReadings], *, scale: str = MEASURED
) -> tuple[Figure, pd.DataFrame]:
    """Norms of z over the median norm of the embeddings, per step, and the mean cosine between the
    steps of a block."""
    table = pd.DataFrame(
        {
            "k": np.concatenate([each.step for each in readings]) + 1,
            "norm_ratio": np.concatenate([each.norm_ratio for each in readings]),
            "norm_quantile": np.concatenate([each.norm_quantile for each in readings]),
        }
    )
    figure = new_figure(PAGE, 2.2)
    left, right = figure.subplots(1, 2, width_ratios=[1.5, 1])
    steps = len(boxes(left, table, "norm_ratio", by="k"))
    left.axhline(1, color=VERMILLION, linewidth=0.9)
    note = {"color": VERMILLION, "fontsize": 6, "ha": "right", "va": "bottom"}
    left.text(steps + 0.45, 1, "median embedding", **note)
    left.set(title="a   Norms", xlabel="Latent step k", ylabel="‖z‖ / median ‖embedding‖")
    left.set_ylim(0, None)
    # A block that was cut has fewer steps and is left out of the mean.
    blocks = [each.block_cosines(turn) for each in readings for turn in each.latent_turns]
    mean = np.mean([block for block in blocks if len(block) == steps], axis=0)  # (K, K)
    cells(right, mean, np.vectorize("{:.2f}".format)(mean), 1)
    for axis in (right.xaxis, right.yaxis):
        axis.set_ticks(range(steps), [str(k) for k in range(1, steps + 1)])
        axis.set_label_text("Latent step k")
    right.set_title("b   Cosines within a block")
    counts = f"{len(readings)} trajectories, {len(table)} latent steps"
    footnote(figure, scale, f"{counts} · boxes: quartiles, whiskers: 1.5 IQR")
    pairs = [(i + 1, j + 1, cosine) for (i, j), cosine in np.ndenumerate(mean)]
    cosines = pd.DataFrame(pairs, columns=["k", "other_k", "cosine"])
    return figure, cosines.merge(table.groupby("k").median().reset_index(), on="k")


@styled
def draw_attention(
    readings: Sequence[LatentReadings], *, scale: str = MEASURED
) -> tuple[Figure, pd.DataFrame]:
    """Where the action looks in its block, and where a latent step looks.

    Left: the weight that the action's tokens put on each z of their turn's block, per layer; mean
    over trajectories, heads and tokens. Right: the weight that a latent step puts on the segments
    of the conversation; mean over trajectories, heads and layers.
    """
    step = np.concatenate([each.step for each in readings])  # (rows,)
    onto = np.concatenate([each.action_attention for each in readings])  # (rows, L)
    shares = np.concatenate([_shares(each) for each in readings])  # (rows, kinds)
    steps, layers = range(1, 2 + step.max()), range(1, 1 + readings[0].num_layers)
    action = np.stack([onto[step == k - 1].mean(0) for k in steps])  # (K, L)
    looks = np.stack([shares[step == k - 1].mean(0) for k in steps])  # (K, kinds)
    figure = new_figure(PAGE, 2.2)
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.35])
    image = left.imshow(action.T, cmap="Blues", aspect="auto", origin="lower", vmin=0)
    left.set_xticks(range(len(steps)), steps)
    left.set_yticks(range(len(layers)), layers)
    left.grid(False)
    left.set(title="a   Attention of the action on $z_k$", xlabel="Latent step k", ylabel="Layer")
    figure.colorbar(image, ax=left, fraction=0.05, pad=0.02)
    bottom = np.zeros(len(steps))  # (K,), where the next bar begins
    for (kind, colour), height in zip(SEGMENT_COLOURS.items(), looks.T, strict=True):
        right.bar(steps, height, 0.7, bottom=bottom, color=colour, label=kind)
        bottom += height
    right.set(title="b   What a latent step looks at", xlabel="Latent step k", ylim=(0, 1))
    right.set_ylabel("Share of attention")
    right.set_xticks(steps)
    right.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    footnote(
        figure,
        scale,
        f"{len(readings)} trajectories · a: mean over heads and the tokens of the action",
        "b: summed per segment, mean over heads and layers",
    )
    rows = [
        ("action", f"layer {layer + 1}", k + 1, weight)
        for (k, layer), weight in np.ndenumerate(action)
    ]
    kinds = list(SEGMENT_COLOURS)
    rows += [
        ("latent step", kinds[kind], k + 1, weight) for (k, kind), weight in np.ndenumerate(looks)
    ]
    return figure, pd.DataFrame(rows, columns=["from", "part", "k", "weight"])


def _shares(readings: LatentReadings) -> Float[np.ndarray, "N kinds"]:
    """The attention of each latent step on the kinds of `SEGMENT_COLOURS`, mean over layers.

    A row sums to 1.
    """
    weights = readings.segment_attention().mean(1)  # (N, segments)
    shares = pd.DataFrame(0.0, index=range(len(readings)), columns=list(SEGMENT_COLOURS))
    # first word of a segment's name → (kind in the step's own turn, kind in another turn)
    names = {"turn": ("this turn", "earlier text"), "latent": ("this block", "earlier latent")}
    for column, segment in enumerate(readings.segments):
        word, _, number = segment.partition(" ")  # "latent 2" → "latent", "2"; "prompt" → no number
        own, earlier = names.get(word, (word, word))  # prompt and observation have one kind
        mine = readings.turn + 1 == int(number or 0)  # (N,)
        shares[own] += np.where(mine, weights[:, column], 0)
        shares[earlier] += np.where(mine, 0, weights[:, column])
    return shares.to_numpy()

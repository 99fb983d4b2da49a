"""Latent records as figures: what the lens reads, norms, cosines, attention. Each function returns
(figure, its table)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from alar.figures.style import BLUE, MEASURED, PAGE, VERMILLION, footnote, new_figure, styled
from alar.inspector.record import LatentRecord
from alar.inspector.tokens import shortened, visible

SEGMENT_KINDS = (
    "prompt",
    "earlier text",
    "earlier latent",
    "observation",
    "this turn",
    "this block",
)


@styled
def lens(record: LatentRecord, turn: int) -> tuple[Figure, pd.DataFrame]:
    """The logit lens in one block: layers upwards, latent steps to the right; darker is surer.

    Each cell holds the lens's first token and its probability, the row below the first token
    embedding in the direction of z. `turn` counts from 0.
    """
    rows = record.rows(turn)
    table = lens_table(record, turn)
    entropy = record.lens_entropy[rows].T  # (L + 1, K)
    figure = new_figure(PAGE, 1.1 + 0.27 * len(entropy))
    axes = figure.subplots()
    image = axes.imshow(
        entropy,
        cmap="Blues_r",
        aspect="auto",
        origin="lower",
        vmin=0,
        vmax=max(1e-6, float(entropy.max())),
    )
    for cell in table[table["rank"] == 1].itertuples():
        dark = entropy[cell.layer, cell.k - 1] < 0.5 * entropy.max()
        axes.text(
            cell.k - 1,
            cell.layer,
            f"{shortened(visible(cell.token), 14)}  {cell.probability:.2f}",
            ha="center",
            va="center",
            fontsize=6,
            color="white" if dark else "black",
            parse_math=False,
        )
    near = [shortened(visible(record.nearest(row)[0][0]), 12) for row in rows]
    labels = [
        f"k = {k + 1}\n‖z‖ {record.norm_ratio[row]:.2f}\nnear {text}"
        for k, (row, text) in enumerate(zip(rows, near))
    ]
    axes.set_xticks(range(len(rows)), labels, parse_math=False)
    axes.set_yticks(
        range(len(entropy)), ["input z", *(f"layer {n}" for n in range(1, len(entropy)))]
    )
    axes.grid(False)
    axes.set_title(f"Logit lens of the block of turn {turn + 1}")
    figure.colorbar(image, ax=axes, label="Entropy (nats)", fraction=0.03, pad=0.01)
    footnote(
        figure,
        "‖z‖ over the median embedding norm · near: embedding of the largest cosine",
        "a lens reads structure in any model: only interventions show use",
    )
    return figure, table


def lens_table(record: LatentRecord, turn: int) -> pd.DataFrame:
    """Every candidate that the lens reads in one block: k, layer, rank, token, probability, entropy
    (nats)."""
    cells = [
        (k, layer, rank, token, probability, float(record.lens_entropy[row, layer]))
        for k, row in enumerate(record.rows(turn), start=1)
        for layer in range(record.lens_ids.shape[1])
        for rank, (token, probability) in enumerate(record.lens(row, layer), start=1)
    ]
    return pd.DataFrame(cells, columns=["k", "layer", "rank", "token", "probability", "entropy"])


@styled
def vectors(
    records: Sequence[LatentRecord], *, scale: str = MEASURED
) -> tuple[Figure, pd.DataFrame]:
    """Norms of z against the embeddings', per step, and the mean cosine between the steps of a
    block."""
    steps = 1 + max(int(record.step.max()) for record in records)
    figure = new_figure(PAGE, 2.2)
    left, right = figure.subplots(1, 2, width_ratios=[1.5, 1])
    table = pd.DataFrame(
        {
            "k": np.concatenate([record.step for record in records]) + 1,
            "norm_ratio": np.concatenate([record.norm_ratio for record in records]),
            "norm_quantile": np.concatenate([record.norm_quantile for record in records]),
        }
    )
    groups = [table.loc[table["k"] == k, "norm_ratio"] for k in range(1, steps + 1)]
    left.boxplot(
        groups,
        positions=range(1, steps + 1),
        widths=0.5,
        showfliers=False,
        medianprops={"color": BLUE},
    )
    left.axhline(1, color=VERMILLION, linewidth=0.9)
    left.text(
        steps + 0.45, 1, "median embedding", color=VERMILLION, fontsize=6, ha="right", va="bottom"
    )
    left.set(
        xlabel="Latent step k", ylabel="‖z‖ / median ‖embedding‖", ylim=(0, None), title="a   Norms"
    )
    mean = _mean_cosines(records, steps)
    _square(right, mean, "b   Cosines within a block")
    footnote(
        figure,
        scale,
        f"{len(records)} trajectories, {len(table)} latent steps · boxes: quartiles, whiskers:"
        " 1.5 IQR",
    )
    cosines = pd.DataFrame(
        [(i + 1, j + 1, mean[i, j]) for i in range(steps) for j in range(steps)],
        columns=["k", "other_k", "cosine"],
    )
    summary = table.groupby("k").median().reset_index()
    return figure, cosines.merge(summary, on="k")


@styled
def attention(
    records: Sequence[LatentRecord], *, scale: str = MEASURED
) -> tuple[Figure, pd.DataFrame]:
    """Where the action looks in its block, and where a latent step looks; mean over records, heads
    and tokens.

    Left: weight on each z of the turn's block from the tokens behind it, per layer. Right: the
    weight of a latent step over the segments of the conversation, mean over layers.
    """
    steps = 1 + max(int(record.step.max()) for record in records)
    layers = records[0].num_layers
    step = np.concatenate([record.step for record in records])
    onto = np.concatenate([record.action_attention for record in records])  # (rows, L)
    action = np.stack([onto[step == k].mean(0) for k in range(steps)])  # (K, L)
    shares = np.concatenate([_shares(record) for record in records])  # (rows, kinds)
    looks = np.stack([shares[step == k].mean(0) for k in range(steps)])  # (K, kinds)
    figure = new_figure(PAGE, 2.2)
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.35])
    image = left.imshow(action.T, cmap="Blues", aspect="auto", origin="lower", vmin=0)
    left.set_xticks(range(steps), range(1, steps + 1))
    left.set_yticks(range(layers), range(1, layers + 1))
    left.grid(False)
    left.set(
        xlabel="Latent step k",
        ylabel="Layer",
        title="a   Attention of the action on z_k".replace("z_k", "$z_k$"),
    )
    figure.colorbar(image, ax=left, fraction=0.05, pad=0.02)
    bottom = np.zeros(steps)
    colours = ("#BBBBBB", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2")
    for kind, colour, height in zip(SEGMENT_KINDS, colours, looks.T, strict=True):
        right.bar(range(1, steps + 1), height, 0.7, bottom=bottom, color=colour, label=kind)
        bottom += height
    right.set(
        xlabel="Latent step k",
        ylabel="Share of attention",
        title="b   What a latent step looks at",
        ylim=(0, 1),
    )
    right.set_xticks(range(1, steps + 1))
    right.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    footnote(
        figure,
        scale,
        f"{len(records)} trajectories · a: mean over heads and the tokens of the action · "
        "b: summed per segment, mean over heads and layers",
    )
    rows = [
        ("action", f"layer {layer + 1}", k + 1, action[k, layer])
        for k in range(steps)
        for layer in range(layers)
    ]
    rows += [
        ("latent step", kind, k + 1, looks[k, i])
        for k in range(steps)
        for i, kind in enumerate(SEGMENT_KINDS)
    ]
    return figure, pd.DataFrame(rows, columns=["from", "part", "k", "weight"])


def _shares(record: LatentRecord) -> np.ndarray:
    """(N, kinds): the attention of each latent step over SEGMENT_KINDS, mean over layers; sums to
    1."""
    weights = record.segment_attention().mean(1)  # (N, segments)
    shares = np.zeros((len(record), len(SEGMENT_KINDS)))
    for column, name in enumerate(record.segments):
        word, _, number = name.partition(" ")
        own = record.turn + 1 == int(number or 0)
        kinds = {
            "prompt": ("prompt", "prompt"),
            "observation": ("observation", "observation"),
            "turn": ("this turn", "earlier text"),
            "latent": ("this block", "earlier latent"),
        }[word]
        for row in range(len(record)):
            shares[row, SEGMENT_KINDS.index(kinds[0] if own[row] else kinds[1])] += weights[
                row, column
            ]
    return shares


def _mean_cosines(records: Sequence[LatentRecord], steps: int) -> np.ndarray:
    """(K, K): mean over all blocks that have K steps."""
    blocks = [record.block_cosines(turn) for record in records for turn in record.latent_turns]
    whole = [block for block in blocks if len(block) == steps]
    return np.mean(whole, axis=0)


def _square(axes, matrix: np.ndarray, title: str) -> None:
    axes.imshow(matrix, cmap="RdBu_r", vmin=-1, vmax=1)
    for (i, j), value in np.ndenumerate(matrix):
        axes.text(
            j,
            i,
            f"{value:.2f}",
            ha="center",
            va="center",
            fontsize=6,
            color="white" if abs(value) > 0.6 else "black",
        )
    names = [f"{k + 1}" for k in range(len(matrix))]
    axes.set_xticks(range(len(matrix)), names)
    axes.set_yticks(range(len(matrix)), names)
    axes.grid(False)
    axes.set(title=title, xlabel="Latent step k", ylabel="Latent step k")

"""Every figure of the study, drawn from tables only.

A drawing function takes the table (a data frame or a file), checks it, and returns the figure with
the table of the numbers in it. `save_figure` writes both. Colours, sizes and file formats are in
`style`; published numbers come from `alar.evaluate.published`. The small print of each figure says
whether its numbers were measured, and at which scale, or published.

    figure, table = figures.stages("runs/laptop/search/06_benchmark_eval/summary.csv")
    figures.save_figure(figure, table, "figures", "stages")
"""

from alar.figures.ablations import ablations_figure
from alar.figures.methods import methods_figure, ratios
from alar.figures.modes import latent_share, trajectory_figure
from alar.figures.results import (
    accuracy_against_tokens,
    controls_figure,
    oracle_figure,
    question_types,
    stages,
)
from alar.figures.schematic import method
from alar.figures.speed import speed, throughput
from alar.figures.style import save_figure
from alar.figures.training import LiveDynamics, dynamics, lengths, losses, reward_shapes

__all__ = [
    "LiveDynamics",
    "ablations_figure",
    "accuracy_against_tokens",
    "controls_figure",
    "dynamics",
    "latent_share",
    "lengths",
    "losses",
    "method",
    "methods_figure",
    "oracle_figure",
    "question_types",
    "ratios",
    "reward_shapes",
    "save_figure",
    "speed",
    "stages",
    "throughput",
    "trajectory_figure",
]

"""Every figure of the study, drawn from tables only.

A drawing function takes the table (a data frame or a file), checks it, and returns the figure with
the table of the numbers in it; `save` writes both. Colours, sizes and the file formats are in
`style`, the paper's numbers in `published`. Each figure says in small print whether it was
measured, and at which scale, or published.

    figure, table = figures.stages("runs/laptop/search/06_benchmark_eval/summary.csv")
    figures.save(figure, table, "figures", "stages")
"""

from alar.figures.ablations import ablations
from alar.figures.methods import methods, ratios
from alar.figures.modes import latent_share, trajectory
from alar.figures.results import accuracy_against_tokens, controls, oracle, question_types, stages
from alar.figures.schematic import method
from alar.figures.speed import speed, throughput
from alar.figures.style import save
from alar.figures.training import LiveDynamics, dynamics, lengths, losses, reward_shapes

__all__ = [
    "LiveDynamics",
    "ablations",
    "accuracy_against_tokens",
    "controls",
    "dynamics",
    "latent_share",
    "lengths",
    "losses",
    "method",
    "methods",
    "oracle",
    "question_types",
    "ratios",
    "reward_shapes",
    "save",
    "speed",
    "stages",
    "throughput",
    "trajectory",
]

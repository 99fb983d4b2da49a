"""The static views of the inspector: a picture and its table for everything that the widgets show.

`trajectories` draws time lines and tokens; `readings` what one forward pass shows; `effects` what
interventions do; `spaces` probes, geometry and modes. All functions take plain values and tables,
return (figure, table), and share the style of `alar.figures`.
"""

from alar.inspector.plots.effects import draw_causal_map, draw_interventions, draw_panel
from alar.inspector.plots.readings import draw_attention, draw_lens, draw_vectors
from alar.inspector.plots.spaces import draw_components, draw_probes, draw_recurrence
from alar.inspector.plots.trajectories import draw_comparison, draw_trajectory

__all__ = [
    "draw_attention",
    "draw_causal_map",
    "draw_comparison",
    "draw_components",
    "draw_interventions",
    "draw_lens",
    "draw_panel",
    "draw_probes",
    "draw_recurrence",
    "draw_trajectory",
    "draw_vectors",
]

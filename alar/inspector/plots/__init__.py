"""The static views of the inspector: a picture and its table for everything that the widgets show.

`trajectories` draws time lines and tokens, `records` what one forward pass shows, `effects` what
interventions do, `spaces` probes, geometry and modes. All take plain records and tables, and share
the style of `alar.figures`.
"""

from alar.inspector.plots.effects import causal_map, interventions, panel
from alar.inspector.plots.records import attention, lens, vectors
from alar.inspector.plots.spaces import components, probes, recurrence
from alar.inspector.plots.trajectories import comparison, trajectory

__all__ = [
    "attention",
    "causal_map",
    "comparison",
    "components",
    "interventions",
    "lens",
    "panel",
    "probes",
    "recurrence",
    "trajectory",
    "vectors",
]

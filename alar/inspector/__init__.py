"""The latent inspector: what the latent thoughts of a trajectory hold, and whether the action
depends on them.

readings       inspect(trajectory, model, codec) → LatentReadings: lens, nearest tokens, norms,
               cosines, attention
interventions  replace z in one block and write the action again, beside a random control
effects        many interventions, as tables with intervals
probes         what a linear probe reads in z, beside two controls
geometry       principal components of z, step sizes, p(latent | state)
explain        a block as pseudo-text, beside an explicit chain of thought from the same state
plots          all of it as pictures, each with its table
conclusions    the tables in words, by stated rules
widgets        the same as live views, each with its static picture
report         one HTML file for people without Jupyter

Readings show structure in any model, so they prove nothing alone; only interventions show use. The
code counts turns and steps from 0; whatever is shown or written to a table counts them from 1.
"""

from alar.inspector.readings import LatentReadings, inspect

__all__ = ["LatentReadings", "inspect"]

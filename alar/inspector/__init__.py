"""The latent inspector: what is in the latent thoughts of a trajectory, and whether the action
depends on it.

readings       inspect(trajectory, model, codec) → LatentReadings: lens, nearest tokens, norms,
               cosines, attention
interventions  replace z in one block and write the action again, beside a random control
effects        many interventions, as tables with intervals
probes         what a linear probe reads in z, beside two controls
geometry       principal components of z, step sizes, p(latent | state)
explain        a block as pseudo-text, beside an explicit chain of thought from the same state
plots          all of it as pictures, each with its table
conclusions    the tables in words, by stated rules
widgets        the same live, every view with its picture
report         one HTML file for people without Jupyter

The readings alone show structure in any model; only the interventions show use. Code counts turns
and steps from 0; whatever is shown or written to a table counts them from 1.
"""

from alar.inspector.readings import LatentReadings, inspect

__all__ = ["LatentReadings", "inspect"]

"""The latent inspector: what is in the latent thoughts of a trajectory, and whether the action
depends on it.

    record         inspect(trajectory, model, tokenizer) → LatentRecord: lens, nearest tokens, norms, cosines, attention
    interventions  replace z and write the action again, each beside a random control; effects: many
    of them, in tables probes         what z encodes, by linear probes with controls geometry
    PCA of z, step sizes, p(latent | state) explain        a block as pseudo-text, beside an
    explicit chain of thought from the same state plots          all of it as pictures, each with
    its table; conclusions: the tables in words, by stated rules widgets        the same live, every
    view with its picture; report: one HTML file for people without Jupyter

The record alone shows structure in any model; only the interventions show use.
"""

from alar.inspector.record import LatentRecord, inspect

__all__ = ["LatentRecord", "inspect"]

"""Where the latent blocks of a trajectory stand, and which segment of the conversation every token
belongs to.

    … prompt … <latent> z₁ … z_K </latent> action </information> …
                        ^start    ^stop     ^action            (positions in `trajectory.ids`)

Pure index arithmetic on ids and origins, shared by the record, the interventions and the probes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Float

from alar.records import Origin, Trajectory
from alar.rollout.codec import Codec


@dataclass(frozen=True)
class Block:
    """The first latent block of a turn: positions [start, stop) hold z, `row` is the first one's
    row in `latents`.

    [action, end) is what the policy wrote behind `</latent>`; `turn` counts from 0.
    """

    turn: int
    start: int
    stop: int
    action: int
    end: int
    row: int

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + self.stop - self.start)


def check_trajectory(trajectory: Trajectory, config) -> None:
    """ValueError if this model cannot have written the trajectory's latents, or the record
    contradicts itself."""
    name, reserved = trajectory.question.id, getattr(config, "latent_token_id", None)
    if reserved is None:
        raise ValueError(
            f"{name}: the model has no latent token; load an ALAR checkpoint (alar.model.load)"
        )
    trajectory.check()
    if not trajectory.count(Origin.LATENT):
        raise ValueError(
            f"{name}: no latent block, so there is nothing to inspect; take a trajectory with a"
            " latent turn"
        )
    marked = trajectory.ids[trajectory.origins.index(Origin.LATENT)]
    if marked != reserved:
        raise ValueError(
            f"{name}: latent positions hold id {marked}, this model reserves {reserved}: another"
            " model wrote it"
        )
    width = np.asarray(trajectory.latents).shape[1]
    if width != config.hidden_size:
        raise ValueError(
            f"{name}: z has width {width}, the model's hidden size is {config.hidden_size}: another"
            " model wrote it"
        )
    if not np.isfinite(trajectory.latents).all():
        raise ValueError(f"{name}: z holds NaN or infinite numbers; record the trajectory again")


def latent_blocks(trajectory: Trajectory, codec: Codec) -> list[Block]:
    """The first latent block of every turn that has one."""
    close, blocks = len(codec.latent_close), []
    for number, turn in enumerate(trajectory.turns):
        origins = trajectory.origins[turn.start : turn.end]
        if Origin.LATENT not in origins:
            continue
        start = stop = turn.start + origins.index(Origin.LATENT)
        while stop < turn.end and trajectory.origins[stop] == Origin.LATENT:
            stop += 1
        action = min(stop + close, turn.end)
        blocks.append(
            Block(
                number,
                start,
                stop,
                action,
                turn.end,
                trajectory.count(Origin.LATENT, span=(0, start)),
            )
        )
    return blocks


@dataclass(frozen=True, eq=False)
class Site:
    """A latent turn with an action: where an intervention takes place, or the donor of one."""

    trajectory: Trajectory
    block: Block

    @property
    def z(self) -> Float[np.ndarray, "K H"]:
        return np.asarray(self.trajectory.latents[self.block.rows], dtype=np.float32)

    @property
    def earlier_z(self) -> list[np.ndarray]:
        """z of the blocks before this one."""
        return list(np.asarray(self.trajectory.latents[: self.block.row], dtype=np.float32))

    @property
    def prefix(self) -> list[int]:
        """Everything up to the last piece of `<latent>`."""
        return self.trajectory.ids[: self.block.start]

    @property
    def action_ids(self) -> list[int]:
        return self.trajectory.ids[self.block.action : self.block.end]


def sites(trajectories: Sequence[Trajectory], model_config, codec: Codec) -> list[Site]:
    """Every latent turn with an action and no second block, whose thoughts would be part of the
    action.

    ValueError if there is none, or if another model wrote the latents.
    """
    found = []
    for trajectory in trajectories:
        if trajectory.count(Origin.LATENT):
            check_trajectory(trajectory, model_config)
            found += [
                Site(trajectory, block)
                for block in latent_blocks(trajectory, codec)
                if block.action < block.end
                and not trajectory.count(Origin.LATENT, span=(block.action, block.end))
            ]
    if not found:
        raise ValueError(
            f"none of the {len(trajectories)} trajectories has a latent turn with an action"
        )
    return found


def segments(trajectory: Trajectory) -> tuple[list[str], np.ndarray]:
    """Names of the segments in reading order, and the segment (T,) of every token.

    prompt · per turn t (from 1): "turn t" (its text and tags), "latent t" (its z), "observation t"
    (what came back).
    """
    names, of = ["prompt"], np.zeros(len(trajectory.ids), dtype=np.int32)
    ends = [turn.start for turn in trajectory.turns[1:]] + [len(trajectory.ids)]
    for number, (turn, end) in enumerate(zip(trajectory.turns, ends), start=1):
        latent = np.array(
            [origin == Origin.LATENT for origin in trajectory.origins[turn.start : turn.end]],
            dtype=bool,
        )
        of[turn.start : turn.end] = len(names)
        names.append(f"turn {number}")
        if latent.any():
            of[turn.start : turn.end][latent] = len(names)
            names.append(f"latent {number}")
        if end > turn.end:
            of[turn.end : end] = len(names)
            names.append(f"observation {number}")
    return names, of


def turn_of(trajectory: Trajectory, position: int) -> int:
    """The turn (from 0) in which a position was written; ValueError if it is in none."""
    for number, turn in enumerate(trajectory.turns):
        if turn.start <= position < turn.end:
            return number
    raise ValueError(
        f"{trajectory.question.id}: position {position} belongs to no turn; the record of its turns"
        " is incomplete"
    )


def codec_of(model, tokenizer) -> Codec:
    """A codec that is kept: its table of pieces takes a moment to build for a large vocabulary."""
    return _codec(tokenizer, model.config.num_latent, model.config.latent_token_id)


@lru_cache(maxsize=4)
def _codec(tokenizer, num_latent: int, latent_token_id: int) -> Codec:
    return Codec(tokenizer, num_latent, latent_token_id)

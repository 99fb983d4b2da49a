"""Where the latent blocks of a trajectory stand, and which segment of the conversation each token
belongs to.

    … prompt … <latent> z₁ … z_K </latent> action </information> …
                        ^start    ^stop     ^action            (positions in `trajectory.ids`)

All of this is index arithmetic on ids and origins; no model is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from alar.records import Origin, Trajectory
from alar.rollout.codec import Codec


@dataclass(frozen=True)
class Block:
    """The first latent block of a turn (from 0): positions [start, stop) hold z.

    [action, end) is what the policy wrote behind `</latent>`. The block's first z is row `row` of
    the trajectory's `latents`.
    """

    turn: int
    start: int
    stop: int
    action: int
    end: int
    row: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + len(self))


def check_trajectory(trajectory: Trajectory, config) -> None:
    """ValueError if there is nothing to inspect, if this model cannot have written the latents, or
    if the trajectory contradicts itself.

    `config` is that of the model.
    """

    def refuse(problem: str):
        raise ValueError(f"{trajectory.question.id}: {problem}")

    reserved = getattr(config, "latent_token_id", None)
    if reserved is None:
        refuse("the model has no latent token; load an ALAR checkpoint (alar.model.load)")
    trajectory.check()
    if not trajectory.count(Origin.LATENT):
        refuse("no latent block to inspect; take a trajectory with a latent turn")
    marked = trajectory.ids[trajectory.origins.index(Origin.LATENT)]
    if marked != reserved:
        refuse(f"latent positions hold id {marked}, not {reserved}: another model wrote it")
    width = np.asarray(trajectory.latents).shape[1]  # of (N, H)
    if width != config.hidden_size:
        refuse(f"z has width {width}, not {config.hidden_size}: another model wrote it")
    if not np.isfinite(trajectory.latents).all():
        refuse("z holds NaN or infinite numbers; write the trajectory again")


def latent_blocks(trajectory: Trajectory, codec: Codec) -> list[Block]:
    """The first latent block of every turn that has one."""
    blocks = []
    for number, turn in enumerate(trajectory.turns):
        origins = trajectory.origins[turn.start : turn.end]
        if Origin.LATENT not in origins:
            continue
        start = stop = turn.start + origins.index(Origin.LATENT)
        while stop < turn.end and trajectory.origins[stop] == Origin.LATENT:
            stop += 1
        # A turn cut within `</latent>` has no action: then action = end.
        action = min(stop + len(codec.latent_close), turn.end)
        row = trajectory.count(Origin.LATENT, span=(0, start))  # `latents` has no row for text
        blocks.append(Block(number, start, stop, action, turn.end, row))
    return blocks


@dataclass(frozen=True, eq=False)
class Site:
    """A latent turn with an action: an intervention takes place in it, or borrows its z (a donor).

    Sites compare by identity, so they can be keys of a dict.
    """

    trajectory: Trajectory
    block: Block

    @property
    def z(self) -> Float[np.ndarray, "K H"]:
        return np.asarray(self.trajectory.latents[self.block.rows], dtype=np.float32)

    @property
    def earlier_z(self) -> list[np.ndarray]:
        """z (H,) of every latent position before this block."""
        return list(np.asarray(self.trajectory.latents[: self.block.row], dtype=np.float32))

    @property
    def prefix(self) -> list[int]:
        """The ids up to and including the last piece of `<latent>`."""
        return self.trajectory.ids[: self.block.start]

    @property
    def action_ids(self) -> list[int]:
        return self.trajectory.ids[self.block.action : self.block.end]


def sites(trajectories: Sequence[Trajectory], model_config, codec: Codec) -> list[Site]:
    """Every latent turn that has an action and only one block.

    The z of a second block would be part of the action, which is scored as text. ValueError if
    there is no such turn, or if another model wrote the latents.
    """
    found = []
    for trajectory in trajectories:
        if not trajectory.count(Origin.LATENT):
            continue
        check_trajectory(trajectory, model_config)
        for block in latent_blocks(trajectory, codec):
            second = trajectory.count(Origin.LATENT, span=(block.action, block.end))
            if block.action < block.end and not second:
                found.append(Site(trajectory, block))
    if not found:
        raise ValueError(
            f"none of the {len(trajectories)} trajectories has a latent turn with an action"
        )
    return found


def segments(trajectory: Trajectory) -> tuple[list[str], Int[np.ndarray, " T"]]:
    """Names of the segments in reading order, and for every token the index of its segment.

    "prompt", then for each turn t (from 1): "turn t" (its text and tags), "latent t" (its z) and
    "observation t" (what came back).
    """
    names, segment = ["prompt"], np.zeros(len(trajectory.ids), dtype=np.int32)  # (T,)

    def mark(name: str, places) -> None:
        segment[places] = len(names)
        names.append(name)

    # An observation ends where the next turn begins.
    latent = np.equal(trajectory.origins, Origin.LATENT)  # (T,)
    ends = [turn.start for turn in trajectory.turns[1:]] + [len(trajectory.ids)]
    for number, (turn, end) in enumerate(zip(trajectory.turns, ends), start=1):
        mark(f"turn {number}", slice(turn.start, turn.end))
        # Marked after the turn, so that z leaves the turn's segment for one of its own.
        thoughts = turn.start + np.flatnonzero(latent[turn.start : turn.end])
        if len(thoughts):
            mark(f"latent {number}", thoughts)
        if end > turn.end:
            mark(f"observation {number}", slice(turn.end, end))
    return names, segment


def latent_steps(trajectory: Trajectory) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Position, turn and k (from 0) of all N latent positions, each (N,).

    ValueError for a position outside all turns.
    """
    places = np.flatnonzero(np.equal(trajectory.origins, Origin.LATENT))
    turn_of = np.full(len(trajectory.ids), -1)  # (T,), −1 outside turns
    for number, turn in enumerate(trajectory.turns):
        turn_of[turn.start : turn.end] = number
    turns = turn_of[places]
    if (turns < 0).any():
        raise ValueError(
            f"{trajectory.question.id}: position {places[turns < 0][0]} belongs to no turn;"
            " the list of turns is incomplete"
        )
    count = np.arange(len(places))  # (N,)
    begins = np.diff(places, prepend=-2) > 1  # a gap before it: the first position of a block
    # k is the distance to the latest beginning of a block, which the running maximum carries on.
    return places, turns, count - np.maximum.accumulate(np.where(begins, count, 0))

"""Two ways to put a latent block into words: the tokens that the lens reads in it, and what the
model writes in its place.

The *pseudo-text* of a block is the lens's top token per step; it is a reading of z, not a
translation. The *explicit thought* is a chain of thought that the same model writes from the same
state, with `<think>` forced where `<latent>` stood.
"""

from __future__ import annotations

from dataclasses import dataclass

from alar import protocol
from alar.inspector.blocks import Site
from alar.inspector.interventions import InterventionLab
from alar.inspector.readings import LatentReadings
from alar.rollout.engine import Sampling, TurnRequest
from alar.rollout.modes import block_start


@dataclass(frozen=True)
class Explanation:
    """One latent turn (from 1) in words.

    `pseudo_text` is to be compared with `thought`, and the recorded `latent_action` with
    `thought_action`, which follows the thought.
    """

    turn: int
    pseudo_text: str
    thought: str
    latent_action: str  # with its tags; "" for a turn without an action
    thought_action: str  # the same

    @property
    def same_action(self) -> bool:
        return self.latent_action == self.thought_action


def pseudo_text(readings: LatentReadings, turn: int) -> str:
    """The lens's top token at the last layer for each step of `turn` (from 0), joined by " | "."""
    tops = [readings.lens(row)[0][0] for row in readings.rows(turn)]
    return " | ".join(token.strip() or "␣" for token in tops)


def explicit_thought(
    lab: InterventionLab, site: Site, *, max_new_tokens: int = 256
) -> tuple[str, protocol.Turn]:
    """What the policy writes greedily from the state before the block when it must think in text.

    Returns the thought, which `max_new_tokens` may have cut, and the whole turn, parsed.
    """
    trajectory, codec = site.trajectory, lab.codec
    start = block_start(trajectory, site.block.turn, codec)  # before `<latent>`, not behind it
    request = TurnRequest(0, trajectory.ids[:start], site.earlier_z, codec.think_open)
    sampling = Sampling(max_new_tokens, 0.0, stop=lab.sampling.stop)
    output = lab.engine.generate([request], sampling)[0]
    lab.engine.release([0])
    text = codec.text(output.ids)
    # Not from the parsed turn: a cut thought has no `</think>`, but it is worth showing.
    thought = text.partition(protocol.THINK_OPEN)[2].partition(protocol.THINK_CLOSE)[0]
    return thought, lab.form.parse(text)


def explain(
    readings: LatentReadings, lab: InterventionLab, site: Site, *, max_new_tokens: int = 256
) -> Explanation:
    """Both texts for one latent turn; ValueError if the readings are of another trajectory."""
    # Compared by ids, since several trajectories may answer the same question.
    if readings.ids.tolist() != list(site.trajectory.ids):
        raise ValueError(
            f"the readings are of {readings.about['question_id']}, the turn is of"
            f" {site.trajectory.question.id}"
        )
    thought, turn = explicit_thought(lab, site, max_new_tokens=max_new_tokens)
    recorded = site.trajectory.turns[site.block.turn]
    return Explanation(
        site.block.turn + 1,
        pseudo_text(readings, site.block.turn),
        thought,
        _action(lab.form, recorded.action, recorded.argument),
        _action(lab.form, turn.action, turn.argument),
    )


def _action(form: protocol.Form, action: str | None, argument: str) -> str:
    return "" if action is None else form.action(action, argument)

"""Two ways to put a latent block into words: its tokens, and what the model would have written
instead.

The *pseudo-text* of a block is the lens's top token per step; it is a reading of z, not a
translation. The *explicit thought* is a chain of thought that the same model writes from the same
state, with `<think>` forced where `<latent>` stood.
"""

from __future__ import annotations

from dataclasses import dataclass

from alar import protocol
from alar.inspector.blocks import Site
from alar.inspector.interventions import Bench
from alar.inspector.record import LatentRecord
from alar.rollout.engine import Sampling, TurnRequest
from alar.rollout.modes import block_start


@dataclass(frozen=True)
class Explanation:
    """`pseudo_text` beside `thought`, and the actions that follow: of the latent turn (as recorded)
    and of the thought."""

    turn: int
    pseudo_text: str
    thought: str
    latent_action: str
    thought_action: str

    @property
    def same_action(self) -> bool:
        return self.latent_action == self.thought_action


def pseudo_text(record: LatentRecord, turn: int, layer: int = -1) -> str:
    """Top token of the lens at each step of the block of `turn` (from 0), at one layer; steps are
    parted by " | "."""
    return " | ".join(record.lens(row, layer)[0][0].strip() or "␣" for row in record.rows(turn))


def explicit_thought(
    bench: Bench, site: Site, *, max_new_tokens: int = 256
) -> tuple[str, protocol.Turn]:
    """The thought, cut or not, and the whole turn that the policy writes greedily from the state
    before the block when it has to think in text."""
    trajectory, codec = site.trajectory, bench.codec
    start = block_start(trajectory, site.block.turn, codec)
    request = TurnRequest(0, trajectory.ids[:start], site.earlier_z, codec.think_open)
    output = bench.engine.generate(
        [request], Sampling(max_new_tokens, 0.0, stop=bench.sampling.stop)
    )[0]
    bench.engine.release([0])
    text = codec.text(output.ids)
    thought = text.partition(protocol.THINK_OPEN)[2].partition(protocol.THINK_CLOSE)[0]
    return thought, bench.form.parse(text)


def explain(
    record: LatentRecord, bench: Bench, site: Site, *, max_new_tokens: int = 256
) -> Explanation:
    """Both readings of one latent turn; `record` is that of the site's trajectory (ValueError
    otherwise)."""
    if record.about["question_id"] != site.trajectory.question.id or record.ids.tolist() != list(
        site.trajectory.ids
    ):
        raise ValueError(
            f"the record is of {record.about['question_id']}, the turn of"
            f" {site.trajectory.question.id}"
        )
    thought, turn = explicit_thought(bench, site, max_new_tokens=max_new_tokens)
    recorded = site.trajectory.turns[site.block.turn]
    return Explanation(
        site.block.turn,
        pseudo_text(record, site.block.turn),
        thought,
        _action(bench.form, recorded.action, recorded.argument),
        _action(bench.form, turn.action, turn.argument),
    )


def _action(form: protocol.Form, action: str | None, argument: str) -> str:
    return "" if action is None else form.action(action, argument)

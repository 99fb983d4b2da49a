"""The ratio in the prompt, and training examples of turns compressed at that ratio.

The prompt says `<eos>0.5<eos>` between the user's text and the template's own end of the turn, at
ratio 1.0 too. Each sample gets one ratio, drawn at random. At 1.0 its turns are the recorded
tokens. At other ratios they are written anew around the compressed thought, by the codec of the
trained model: with a dual vocabulary, thoughts are written in mirrors. The loss is on everything
that the policy wrote, never on the condition or an observation.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from alar.methods.dual.codec import DualCodec
from alar.protocol import Form, Prompted, Trusted
from alar.records import Environment, Origin, Question, Trajectory
from alar.rollout.codec import Codec
from alar.rollout.loop import with_form
from alar.train.examples import Example, labels_from_origins


def conditioned_form(form: Form, ratio: float, eos: str) -> Form:
    """A domain's form whose prompts state a ratio; `eos` is the text of that token.

    The prompts raise ValueError if the template does not close the user's turn with it.
    """

    def prompt(question: Question) -> Sequence[str]:
        pieces = list(form.prompt(question))
        closing = []  # places of the tokens that may close the user's turn
        for index, piece in enumerate(pieces):
            if isinstance(piece, Trusted) and piece.startswith(eos):
                closing.append(index)
        if not closing:
            raise ValueError(
                f"the prompt of {question.id} has no {eos} that ends the user's turn, so a ratio"
                " has no place in it: take a model whose end-of-sequence token closes a turn, as"
                " that of instruct models does"
            )
        # The last of them ends the turn that asks the question.
        pieces[closing[-1] : closing[-1]] = [Trusted(eos), str(ratio), Trusted(eos)]
        return pieces

    return Prompted(form, prompt)


def conditioned(environment: Environment, ratio: float, eos: str) -> Environment:
    """The environment with the ratio in its prompts."""
    return with_form(environment, conditioned_form(environment.form, ratio, eos))


def example_at(
    trajectory: Trajectory, thoughts: Sequence[str], ratio: float, codec: Codec
) -> Example:
    """A trajectory under the condition `ratio` with these thoughts, one for each turn.

    At ratio 1 the recorded tokens stay, unless `codec` writes thoughts in the mirrors of a dual
    vocabulary.
    """
    if len(thoughts) != len(trajectory.turns):
        raise ValueError(
            f"{trajectory.question.id}: {len(thoughts)} thoughts for {len(trajectory.turns)} turns"
        )
    recorded = ratio == 1 and not isinstance(codec, DualCodec)  # recorded ids hold no mirrors
    form = conditioned_form(codec.form, ratio, codec.tokenizer.eos_token)
    ids = codec.encode(form.prompt(trajectory.question))
    origins, cursor = [Origin.PROMPT] * len(ids), trajectory.turns[0].start
    for number, turn in enumerate(trajectory.turns):
        ids += trajectory.ids[cursor : turn.start]  # the observation; nothing before the first turn
        origins += trajectory.origins[cursor : turn.start]
        if recorded:
            written = trajectory.ids[turn.start : turn.end]
            marks = trajectory.origins[turn.start : turn.end]
        else:
            written, marks = codec.think_turn(
                thoughts[number], turn.action, turn.argument, first=number == 0
            )
        ids += written
        origins += marks
        cursor = turn.end
    return Example(ids, labels_from_origins(ids, origins), 0)


def drawn_ratios(count: int, ratios: Sequence[float], seed: int) -> list[float]:
    """One of `ratios` for each of `count` samples."""
    rng = random.Random(f"tokenskip ratios {seed}")
    return [rng.choice(list(ratios)) for _ in range(count)]


def prepared(
    trajectories: Sequence[Trajectory],
    rows: Sequence[dict],
    codec: Codec,
    ratios: Sequence[float],
    seed: int,
) -> tuple[list[Example], list[float]]:
    """(examples, their ratios) from trajectories and their rows of `compressed_rows`, in order.

    Raises ValueError for rows of other trajectories, or without one of the ratios.
    """
    chosen = drawn_ratios(len(trajectories), ratios, seed)  # one per trajectory
    examples = []
    for trajectory, row, ratio in zip(trajectories, rows, chosen, strict=True):
        if row["id"] != trajectory.question.id:
            raise ValueError(
                f"the compressed thoughts of {row['id']} stand where {trajectory.question.id}"
                " should: compress again"
            )
        if ratio != 1 and str(ratio) not in row["rates"]:
            raise ValueError(
                f"ratio {ratio} is to be trained, but the thoughts are compressed at"
                f" {', '.join(row['rates'])} only: add it to tokenskip.compress_ratios"
            )
        # One per turn.
        thoughts = row["thoughts"] if ratio == 1 else row["rates"][str(ratio)]["thoughts"]
        examples.append(example_at(trajectory, thoughts, ratio, codec))
    return examples, chosen

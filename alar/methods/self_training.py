"""Concise self-training (Munkhbat et al., arXiv 2502.20122) and direct SFT.

    N zero-shot samples  →  the shortest correct one of each question  →  some become exemplars
    N few-shot samples   →  the shortest correct one over both passes
                         →  SFT on the question's own prompt

*Direct* supervision keeps the actions and drops the reasoning. An empty `<think></think>` stands
before every action, because a turn without a block would count as malformed. The raw form of static
sets has no blocks, so there the answer stands alone. Direct supervision uses gold answers where
there are some (static sets), and the actions of correct rollouts where a turn is a search.

Everything goes through the ordinary agent loop and environments, so it works for one turn and for
several. The length of a rollout is the number of generated tokens in all its turns.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import chain, pairwise, zip_longest

import pandas as pd

from alar import protocol
from alar.domains.static.forms import EXCHANGE_END
from alar.records import Environment, Origin, Question, Trajectory
from alar.rollout.codec import Codec
from alar.rollout.loop import with_form
from alar.train.examples import Example, labels_from_origins

MARGIN = 32  # positions that engines keep free


def shortest(*passes: Sequence[Sequence[Trajectory]]) -> list[Trajectory | None]:
    """The shortest good rollout of each question over all passes, or None where there is none.

    Good is correct and well formed; shortest has the fewest generated tokens. Of equally short
    ones the earlier pass and sample wins.
    """
    best = []
    for groups in zip_longest(*passes, fillvalue=()):  # one question, its samples per pass
        every = chain.from_iterable(groups)
        good = [t for t in every if t.correct and t.well_formed]
        best.append(min(good, key=lambda t: t.generated_tokens, default=None))
    return best


def exemplar_room(
    samples: Sequence[Sequence[Trajectory]], positions: int, *, max_new_tokens: int, max_turns: int
) -> int:
    """Tokens that exemplars may take if a rollout of `max_turns` whole turns is to fit behind them.

    `positions` is how many the model has. Prompts and observations are assumed to be as long as the
    longest ones of the zero-shot samples.
    """
    found = list(chain.from_iterable(samples))
    prompt = max(t.turns[0].start for t in found)  # tokens before the first turn
    observed = max((b.start - a.end for t in found for a, b in pairwise(t.turns)), default=0)
    # An observation stands between two turns, so there is one less than turns.
    return positions - MARGIN - prompt - max_turns * max_new_tokens - (max_turns - 1) * observed


def choose_exemplars(
    found: Sequence[Trajectory | None], count: int, *, room: int, seed: int
) -> list[Trajectory]:
    """Draw at most `count` of the rollouts at random, question types in turn.

    Together they take at most `room` tokens; a rollout that does not fit is passed over. Raises
    ValueError if none fits.
    """
    rng, by_type = random.Random(f"exemplars {seed}"), {}
    for trajectory in filter(None, found):
        by_type.setdefault(trajectory.question.type, []).append(trajectory)
    for group in by_type.values():
        rng.shuffle(group)
    # One of each type, then the next of each.
    in_turn = [t for group in zip_longest(*by_type.values()) for t in group if t is not None]
    chosen, left = [], room
    for trajectory in in_turn:
        size = len(trajectory.ids) + len(EXCHANGE_END)
        if len(chosen) < count and size <= left:
            chosen.append(trajectory)
            left -= size
    if not chosen:
        raise ValueError(
            f"no exemplar: {len(in_turn)} correct rollouts, {room} tokens of room; take"
            " self_training.exemplars 0, a lower rollout.max_new_tokens, or a base that solves"
            " more questions in a longer context"
        )
    return chosen


def few_shot_form(
    form: protocol.Form, examples: Sequence[tuple[Question, Sequence[str]]]
) -> protocol.Form:
    """A form with solved examples before every question, each closed as in a chat.

    `examples` are (question, the pieces that were written and observed after its prompt). The
    pieces are encoded as text from outside, which cannot contain special tokens. So this works for
    forms whose turns and observations have none: search and static sets.
    """
    before = []
    for asked, said in examples:
        before += [*form.prompt(asked), *said, EXCHANGE_END]
    return protocol.Prompted(form, lambda question: [*before, *form.prompt(question)])


def few_shot(
    environment: Environment, codec: Codec, exemplars: Sequence[Trajectory]
) -> Environment:
    """The same environment, with the exemplars at the start of every prompt.

    Raises ValueError if observations are turns of the chat template, as in the tool domain. Inside
    the user's turn they would be plain text.
    """
    observed = environment.form.observation("")
    templated = any(isinstance(piece, protocol.Trusted) for piece in observed)
    if templated and any(len(t.turns) > 1 for t in exemplars):
        raise ValueError(
            "an exemplar of several turns holds the chat template's own tokens, which a prompt"
            " cannot show here: set self_training.exemplars to 0"
        )
    examples = [(t.question, _pieces(t, codec)) for t in exemplars]
    return with_form(environment, few_shot_form(environment.form, examples))


def _pieces(trajectory: Trajectory, codec: Codec) -> list[str]:
    """The texts of turns and observations in order, each as one piece, as they were encoded."""
    edges = []  # token positions where pieces meet
    for turn in trajectory.turns:
        edges += [turn.start, turn.end]
    edges.append(len(trajectory.ids))
    return [codec.text(trajectory.ids[start:end]) for start, end in pairwise(edges)]


def concise_examples(
    chosen: Sequence[Trajectory | None], codec: Codec, form: protocol.Form
) -> list[Example]:
    """Each rollout after its question's own prompt, without exemplars: they serve sampling only."""
    found = []
    for trajectory in filter(None, chosen):
        start = trajectory.turns[0].start  # before it stands the prompt that was sampled from
        prompt = codec.encode(form.prompt(trajectory.question))
        ids = prompt + trajectory.ids[start:]
        origins = [Origin.PROMPT] * len(prompt) + trajectory.origins[start:]
        found.append(Example(ids, labels_from_origins(ids, origins), 0))
    return _some(found)


def direct_examples(
    chosen: Sequence[Trajectory | None], codec: Codec, form: protocol.Form
) -> list[Example]:
    """The actions and observations of correct rollouts, without their reasoning."""
    found = []
    for trajectory in filter(None, chosen):
        # Where each observation ends.
        ends = [turn.start for turn in trajectory.turns[1:]] + [len(trajectory.ids)]
        turns = []
        for turn, end in zip(trajectory.turns, ends):
            turns.append((turn.action, turn.argument, trajectory.ids[turn.end : end]))
        found.append(_direct(trajectory.question, turns, codec, form))
    return _some(found)


def direct_gold(questions: Sequence[Question], codec: Codec, form: protocol.Form) -> list[Example]:
    """The gold answer of single-turn questions, without reasoning."""
    found = []
    for question in questions:
        found.append(_direct(question, [("answer", question.answers[0], [])], codec, form))
    return _some(found)


def direct_turn(
    action: str, argument: str, codec: Codec, form: protocol.Form, *, first: bool
) -> list[int]:
    """ids of a turn that only acts, with an empty block before the action if the form wants one.

    The open tag is encoded by itself, as the loop encodes a forced one.
    """
    written = form.action(action, argument)
    # A form that accepts the bare action has no blocks.
    if form.parse(written).well_formed:
        return codec.untrusted(written) + codec.trusted(form.closing)
    rest = protocol.THINK_CLOSE + protocol.BLOCK_SEPARATOR + written
    opening = codec.trusted(form.opening) if first else []
    return opening + codec.think_open + codec.untrusted(rest) + codec.trusted(form.closing)


def _direct(
    question: Question,
    turns: Sequence[tuple[str, str, list[int]]],
    codec: Codec,
    form: protocol.Form,
) -> Example:
    ids = codec.encode(form.prompt(question))
    labels = [-100] * len(ids)  # no loss on the prompt
    for number, (action, argument, observed) in enumerate(turns):
        turn = direct_turn(action, argument, codec, form, first=number == 0)
        ids, labels = ids + turn + observed, labels + turn + [-100] * len(observed)
    return Example(ids, labels, 0)


def _some(found: list[Example]) -> list[Example]:
    if not found:
        raise ValueError(
            "no question was answered correctly: there is nothing to train on; give more questions,"
            " more samples or a better base"
        )
    return found


def sampling_table(passes: dict[str, Sequence[Sequence[Trajectory]]]) -> pd.DataFrame:
    """What each pass of samples found, and all of them together ("all"): one row per pass.

    `accuracy`, `tokens` and `prompt` (its length) are means over samples. `solved` is the share of
    questions with a correct, well-formed sample, `shortest` the mean generated tokens of the
    shortest one of each. `kept` counts the questions whose overall shortest comes from this pass.
    """
    overall = shortest(*passes.values())
    rows = {}
    for name, groups in passes.items():
        found = list(chain.from_iterable(groups))
        best = [t for t in shortest(groups) if t]
        own = {id(t) for t in found}  # identity: equal answers of two passes must not count twice
        rows[name] = {
            "samples": len(found),
            "accuracy": sum(t.correct for t in found) / len(found),
            "tokens": sum(t.generated_tokens for t in found) / len(found),
            "prompt": sum(t.turns[0].start for t in found) / len(found),
            "solved": len(best) / len(groups),
            "shortest": sum(t.generated_tokens for t in best) / max(1, len(best)),
            "kept": sum(id(t) in own for t in overall if t),
        }
    kept = [t for t in overall if t]  # one per solved question
    rows["all"] = {
        "samples": sum(row["samples"] for row in rows.values()),
        "solved": len(kept) / len(overall),
        "shortest": sum(t.generated_tokens for t in kept) / max(1, len(kept)),
        "kept": len(kept),
    }
    return pd.DataFrame(rows).T.rename_axis("pass")

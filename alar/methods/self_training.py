"""Concise self-training (Munkhbat et al., arXiv 2502.20122) and direct SFT.

    N zero-shot samples  →  the shortest correct one of each question  →  some become exemplars
    N few-shot samples   →  the shortest correct one over both passes
                         →  SFT on the question's own prompt

*Direct* supervision keeps the actions and drops the reasoning. An empty `<think></think>` stands
before every action, because a turn without a block would count as malformed; in the raw form of
static sets, which has no blocks, the answer stands alone. It is trained on gold answers where there
are some (static sets), and on the actions of correct rollouts where a turn is a search.

Everything goes through the agent loop and the environments as they are, so it holds for one turn
and for several. What a question costs is the generated tokens of all its turns.
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
    """The correct, well-formed rollout of each question with the fewest generated tokens, over all
    passes; None if there is none.

    Of equally short ones the earlier pass and sample wins.
    """
    best = []
    for groups in zip_longest(*passes, fillvalue=()):
        every = chain.from_iterable(groups)
        good = [t for t in every if t.correct and t.well_formed]
        best.append(min(good, key=lambda t: t.generated_tokens, default=None))
    return best


def exemplar_room(
    samples: Sequence[Sequence[Trajectory]], positions: int, *, max_new_tokens: int, max_turns: int
) -> int:
    """Tokens that exemplars may take if a rollout of `max_turns` whole turns is to fit behind them.

    `positions` are the model's. Prompts and observations count as long as the longest ones of the
    zero-shot samples.
    """
    found = list(chain.from_iterable(samples))
    prompt = max(t.turns[0].start for t in found)
    observed = max((b.start - a.end for t in found for a, b in pairwise(t.turns)), default=0)
    return positions - MARGIN - prompt - max_turns * max_new_tokens - (max_turns - 1) * observed


def choose_exemplars(
    found: Sequence[Trajectory | None], count: int, *, room: int, seed: int
) -> list[Trajectory]:
    """At most `count` of the rollouts, drawn at random, question types in turn.

    Together they take at most `room` tokens; one that does not fit is passed over. Raises
    ValueError if none fits.
    """
    rng, by_type = random.Random(f"exemplars {seed}"), {}
    for trajectory in filter(None, found):
        by_type.setdefault(trajectory.question.type, []).append(trajectory)
    for group in by_type.values():
        rng.shuffle(group)
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

    `examples` are (question, what was written and observed after its prompt, piece by piece). The
    pieces are encoded as text from outside. So this is for forms whose turns and observations hold
    no special tokens of their own: search and static sets.
    """
    before = []
    for asked, said in examples:
        before += [*form.prompt(asked), *said, EXCHANGE_END]
    return protocol.Prompted(form, lambda question: [*before, *form.prompt(question)])


def few_shot(
    environment: Environment, codec: Codec, exemplars: Sequence[Trajectory]
) -> Environment:
    """The same environment, whose prompts begin with the exemplars.

    Raises ValueError if observations are turns of the chat template, as in the tool domain: inside
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
    """Texts of turns and observations in order, apart, as they were encoded."""
    edges = []
    for turn in trajectory.turns:
        edges += [turn.start, turn.end]
    edges.append(len(trajectory.ids))
    return [codec.text(trajectory.ids[start:end]) for start, end in pairwise(edges)]


def concise_examples(
    chosen: Sequence[Trajectory | None], codec: Codec, form: protocol.Form
) -> list[Example]:
    """What was written, after the question's own prompt: exemplars serve sampling only."""
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
    labels = [-100] * len(ids)
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
        own = {id(t) for t in found}
        rows[name] = {
            "samples": len(found),
            "accuracy": sum(t.correct for t in found) / len(found),
            "tokens": sum(t.generated_tokens for t in found) / len(found),
            "prompt": sum(t.turns[0].start for t in found) / len(found),
            "solved": len(best) / len(groups),
            "shortest": sum(t.generated_tokens for t in best) / max(1, len(best)),
            "kept": sum(id(t) in own for t in overall if t),
        }
    kept = [t for t in overall if t]
    rows["all"] = {
        "samples": sum(row["samples"] for row in rows.values()),
        "solved": len(kept) / len(overall),
        "shortest": sum(t.generated_tokens for t in kept) / max(1, len(kept)),
        "kept": len(kept),
    }
    return pd.DataFrame(rows).T.rename_axis("pass")

"""Concise self-training (Munkhbat et al., arXiv 2502.20122) and direct SFT: examples for the
supervised trainer.

    N zero-shot samples  →  the shortest correct one per question  →  some of them become exemplars
    N few-shot samples   →  the shortest correct one per question over both  →  SFT on the question's own prompt

*Direct* supervision has the same actions and no reasoning: an empty `<think></think>` before every
action, because the agent loop's turn is one closed block and one action, and a turn without a block
would count as malformed; in the raw-text form of static sets, where there are no blocks, the answer
alone. Its data are gold answers where there are some (static sets), and the actions of correct
rollouts where a turn is a search.

Everything goes through the agent loop and the environments as they are, so all of it holds for one
turn and for several. What a question costs is the generated tokens of all its turns.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise, zip_longest
from pathlib import Path

import pandas as pd
from transformers import AutoConfig

from alar import protocol
from alar.domains.static.forms import EXCHANGE_END
from alar.model import from_base, load
from alar.records import Environment, Origin, Question, Trajectory
from alar.rollout.codec import Codec
from alar.rollout.engine import Engine, Sampling
from alar.rollout.loop import run, with_form
from alar.train.examples import Example, labels_from_origins

MARGIN = 32  # positions that engines keep free


def sample(
    questions: Sequence[Question],
    engine: Engine,
    environment: Environment,
    sampling: Sampling,
    *,
    samples: int,
    max_turns: int,
    batch_size: int,
    seed: int,
    progress: Callable[[Iterable], Iterable] = iter,
) -> list[list[Trajectory]]:
    """`samples` explicit rollouts of every question."""
    asked = [question for question in questions for _ in range(samples)]
    limits = {"max_turns": max_turns, "batch_size": batch_size, "seed": seed}
    found = run(asked, engine, environment, sampling, modes="off", progress=progress, **limits)
    return [found[start : start + samples] for start in range(0, len(found), samples)]


def shortest(*passes: Sequence[Sequence[Trajectory]]) -> list[Trajectory | None]:
    """For every question the correct, well-formed rollout with the fewest generated tokens over all
    passes; None without one.

    Of equally short ones the earlier pass and sample wins.
    """
    groups = [[t for group in groups for t in group or ()] for groups in zip_longest(*passes)]
    good = [[t for t in group if t.correct and t.well_formed] for group in groups]
    return [min(group, key=lambda t: t.generated_tokens, default=None) for group in good]


def exemplar_room(
    samples: Sequence[Sequence[Trajectory]], positions: int, *, max_new_tokens: int, max_turns: int
) -> int:
    """Tokens that exemplars may take: a rollout that uses `max_turns` whole turns behind them still
    fits into `positions`.

    Prompts and observations are taken to be as long as the longest of the zero-shot samples.
    """
    found = [t for group in samples for t in group]
    prompt = max(t.turns[0].start for t in found)
    observed = max((b.start - a.end for t in found for a, b in pairwise(t.turns)), default=0)
    return positions - MARGIN - prompt - max_turns * max_new_tokens - (max_turns - 1) * observed


def choose_exemplars(
    found: Sequence[Trajectory | None], count: int, *, room: int, seed: int
) -> list[Trajectory]:
    """At most `count` of the shortest correct rollouts, drawn at random, question types in turn, in
    `room` tokens together.

    One that does not fit is passed over. Raises ValueError where none fits.
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
    """A form with solved examples before every question: whole exchanges, observations included,
    each closed as in a chat.

    `examples` are (question, what was written and observed after its prompt, piece by piece). The
    pieces are encoded as text from outside, so this is for forms whose turns and observations hold
    no special tokens of their own: search and static sets.
    """
    before = [
        piece for asked, said in examples for piece in (*form.prompt(asked), *said, EXCHANGE_END)
    ]
    return protocol.Prompted(form, lambda question: [*before, *form.prompt(question)])


def few_shot(
    environment: Environment, codec: Codec, exemplars: Sequence[Trajectory]
) -> Environment:
    """The same environment, whose prompts begin with the exemplars. Raises ValueError where
    observations are turns of the chat template, as in the tool domain: inside the user's turn these
    would be plain text."""
    templated = any(
        isinstance(piece, protocol.Trusted) for piece in environment.form.observation("")
    )
    if templated and any(len(t.turns) > 1 for t in exemplars):
        raise ValueError(
            "an exemplar of several turns holds the chat template's own tokens, which a prompt"
            " cannot show here: set self_training.exemplars to 0"
        )
    return with_form(
        environment,
        few_shot_form(environment.form, [(t.question, _pieces(t, codec)) for t in exemplars]),
    )


def _pieces(trajectory: Trajectory, codec: Codec) -> list[str]:
    """Turns and observations apart, as they were encoded."""
    edges = [edge for turn in trajectory.turns for edge in (turn.start, turn.end)] + [
        len(trajectory.ids)
    ]
    return [codec.text(trajectory.ids[start:end]) for start, end in pairwise(edges)]


def concise_examples(
    chosen: Sequence[Trajectory | None], codec: Codec, form: protocol.Form
) -> list[Example]:
    """What was written, after the question's own prompt: exemplars are for sampling only."""
    found = []
    for trajectory in filter(None, chosen):
        start, prompt = trajectory.turns[0].start, codec.encode(form.prompt(trajectory.question))
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
        turns = [
            (t.action, t.argument, trajectory.ids[t.end : end])
            for t, end in zip(trajectory.turns, ends)
        ]
        found.append(_direct(trajectory.question, turns, codec, form))
    return _some(found)


def direct_gold(questions: Sequence[Question], codec: Codec, form: protocol.Form) -> list[Example]:
    """The gold answer of single-turn questions, without reasoning."""
    return _some(
        [
            _direct(question, [("answer", question.answers[0], [])], codec, form)
            for question in questions
        ]
    )


def direct_turn(
    action: str, argument: str, codec: Codec, form: protocol.Form, *, first: bool
) -> list[int]:
    """ids of a turn that only acts: behind an empty block where the form wants one.

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


def trainable_model(folder: str | Path, *, seed: int = 0):
    """(model, tokenizer) for the supervised trainer, of an ordinary base or a latent checkpoint; it
    need not use its latents."""
    latent = AutoConfig.from_pretrained(folder).model_type.startswith("latent_")
    return load(folder) if latent else from_base(folder, seed=seed)


def sampling_table(passes: dict[str, Sequence[Sequence[Trajectory]]]) -> pd.DataFrame:
    """What each pass of samples found, and all of them together: one row per pass.

    `accuracy` and `tokens` are means over samples; `solved` is the share of questions with a
    correct, well-formed sample and `shortest` the mean generated tokens of each one's shortest;
    `prompt` is the mean length of the prompts. `kept` counts the questions whose overall shortest
    comes from this pass.
    """
    overall = shortest(*passes.values())
    rows = {}
    for name, groups in passes.items():
        found, best = [t for group in groups for t in group], [t for t in shortest(groups) if t]
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

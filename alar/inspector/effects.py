"""Interventions on many turns at once, and tables of what they do, with intervals.

`measure` gives one row per turn and intervention, its control beside it; `summarise` the means with
bootstrap intervals that resample questions; `causal_map` the same per turn and step. With an
environment, every changed turn's episode goes on to its answer in the ordinary agent loop
(`alar.rollout.loop`): what the intervention costs in accuracy.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from alar.evaluate.statistics import Estimate, bootstrap_mean, paired_bootstrap
from alar.inspector.blocks import Site
from alar.inspector.interventions import KINDS, Bench, Effect, Intervention
from alar.records import Environment, Origin
from alar.rollout.engine import Engine, Sampling, TurnOutput
from alar.rollout.loop import run

MEASURES = ("changed", "kl", "to_donor", "to_donor_kind", "donor_gain", "correct")
INTACT = Intervention("none")


def plan(
    num_latent: int, kinds: Sequence[str] = KINDS, *, per_step: bool = False
) -> list[Intervention]:
    """Interventions of these kinds on the whole block, or on each of its K steps; a block of one
    step has no other order."""
    steps = range(num_latent) if per_step else (None,)
    return [
        Intervention(kind, step)
        for kind in kinds
        if kind != "shuffle" or num_latent > 1
        for step in steps
    ]


def donors(
    sites: Sequence[Site], *, seed: int = 0, same_turn: bool = True, same_type: bool = True
) -> list[Site | None]:
    """A donor for every site, drawn at random: another question's block of equal length with
    another recorded action.

    `same_turn` and `same_type` (of question) say whether the donor shares these or differs in them:
    alike, the two actions differ in content only; unlike, in form too. None where there is no such
    turn.
    """
    rng, wanted = random.Random(f"donors {seed}"), (same_turn, same_type)
    pools = (
        [other for other in sites if _fits(site, other) and _alike(site, other) == wanted]
        for site in sites
    )
    return [rng.choice(pool) if pool else None for pool in pools]


def _fits(site: Site, other: Site) -> bool:
    return (
        other.trajectory.question.id != site.trajectory.question.id
        and other.block.stop - other.block.start == site.block.stop - site.block.start
        and other.action_ids != site.action_ids
    )


def _alike(site: Site, other: Site) -> tuple[bool, bool]:
    return (
        other.block.turn == site.block.turn,
        other.trajectory.question.type == site.trajectory.question.type,
    )


def measure(
    bench: Bench,
    sites: Sequence[Site],
    interventions: Sequence[Intervention],
    donors: Sequence[Site | None],
    *,
    environment: Environment | None = None,
    modes: str = "free",
    max_turns: int = 6,
    max_new_tokens: int = 128,
    chunk: int = 8,
    progress: Callable[[Iterable], Iterable] = iter,
) -> pd.DataFrame:
    """One row per site and intervention: the measures, and `control_…` for the same displacement in
    a random direction.

    A site without donor is left out of "patch". With `environment` the episodes go on, `chunk`
    sites at a time, in turns of at most `max_new_tokens` tokens and in `modes`, which should be
    those of the trajectories: then `correct`, `control_correct` and `reference_correct` say whether
    the answer is right. `progress` wraps an iteration over the chunks.
    """
    rows, pairs = [], list(zip(sites, donors, strict=True))
    for start in progress(range(0, len(pairs), chunk)):
        cases = [
            (*case, donor)
            for site, donor in pairs[start : start + chunk]
            for case in _cases(site, interventions, donor)
        ]
        effects = bench.effects(cases)
        right = [None] * len(effects)
        if environment is not None:
            right = _continued(bench, effects, environment, modes, max_turns, max_new_tokens)
        judged = list(zip(effects, right))
        for number, (effect, correct) in enumerate(judged):
            if effect.intervention == INTACT:
                reference = {} if correct is None else {"reference_correct": float(correct)}
            elif not effect.intervention.control:
                rows.append(_row(effect, correct, *judged[number + 1]) | reference)
    return pd.DataFrame(rows)


def _cases(
    site: Site, interventions: Sequence[Intervention], donor: Site | None
) -> list[tuple[Site, Intervention]]:
    """The intact turn, then each intervention with its control behind it."""
    used = [change for change in interventions if change.kind != "patch" or donor is not None]
    return [
        (site, change)
        for change in (
            INTACT,
            *(each for one in used for each in (one, replace(one, control=True))),
        )
    ]


def _row(
    effect: Effect, correct: bool | None, control: Effect, control_correct: bool | None
) -> dict:
    return (
        _place(effect.site, effect.intervention)
        | _numbers(effect, correct)
        | {f"control_{name}": value for name, value in _numbers(control, control_correct).items()}
        | {"action": effect.action, "control_action": control.action}
        | {"reference": effect.reference, "donor_action": effect.donor_action}
    )


def _place(site: Site, change: Intervention) -> dict:
    question, turn = site.trajectory.question, site.block.turn
    return {
        "question_id": question.id,
        "question_type": question.type,
        "turn": turn + 1,
        "hard": turn in question.hard_turns,
        "forced": bool(site.trajectory.turns[turn].forced_mode),
        "intervention": change.kind,
        "k": 0 if change.step is None else change.step + 1,  # 0: the whole block
    }


def _numbers(effect: Effect, correct: bool | None) -> dict:
    numbers = {
        "changed": float(effect.changed),
        "kl": effect.kl,
        "to_donor": float(effect.to_donor) if effect.donor_action else float("nan"),
        "to_donor_kind": effect.to_donor_kind,
        "donor_gain": effect.donor_gain,
        "distance": effect.distance,
    }
    return numbers if correct is None else numbers | {"correct": float(correct)}


def summarise(
    effects: pd.DataFrame,
    *,
    by: Sequence[str] = ("intervention", "k"),
    resamples: int = 10_000,
    seed: int = 0,
):
    """Means over questions (each the mean of its turns) with 95 % intervals, tidy: one row per
    group and measure.

    Columns: those of `by`, measure, questions, turns; mean, low, high; control, control_low,
    control_high; difference (own − control, paired by question), difference_low, difference_high.
    """
    rows, options = [], {"resamples": resamples, "seed": seed}
    for key, part in effects.groupby(list(by), sort=False):
        for name in (name for name in MEASURES if name in part):
            used = part.dropna(subset=[name, f"control_{name}"])
            if used.empty:
                continue
            means = used.groupby("question_id", sort=False)[[name, f"control_{name}"]].mean()
            own, control = means[name].to_numpy(), means[f"control_{name}"].to_numpy()
            rows.append(
                dict(zip(by, key))
                | {"measure": name, "questions": len(means), "turns": len(used)}
                | _columns(bootstrap_mean(own, **options), "mean", "low", "high")
                | _columns(
                    bootstrap_mean(control, **options), "control", "control_low", "control_high"
                )
                | _columns(
                    paired_bootstrap(own, control, **options),
                    "difference",
                    "difference_low",
                    "difference_high",
                )
            )
    return pd.DataFrame(rows)


def _columns(estimate: Estimate, *names: str) -> dict[str, float]:
    return dict(zip(names, estimate))


def causal_map(
    effects: pd.DataFrame, intervention: str = "patch", measure: str = "kl", **options
) -> pd.DataFrame:
    """Turn × k: the summary of one intervention and measure where single steps were replaced; for a
    heat map, pivot on `turn`, `k` and `mean` or `difference`. ValueError for effects without single
    steps."""
    chosen = effects[(effects["intervention"] == intervention) & (effects["k"] > 0)]
    if chosen.empty:
        raise ValueError(
            f"no {intervention!r} of single steps among these effects: measure with plan(K,"
            " per_step=True)"
        )
    table = summarise(chosen, by=("turn", "k"), **options)
    return table[table["measure"] == measure].reset_index(drop=True)


class Replay(Engine):
    """An engine that first gives the turns of a script, then lets the real one write: a changed
    episode goes on."""

    def __init__(self, engine: Engine, scripts: Sequence[Sequence[TurnOutput]]):
        self.engine, self.codec = engine, engine.codec
        self.scripts = [deque(script) for script in scripts]  # by session
        self.ready: list = []

    def submit(self, requests, sampling) -> None:
        writing = []
        for request in requests:
            script = self.scripts[request.session]
            if script:
                self.ready.append((request, script.popleft()))
            else:
                writing.append(request)
        self.engine.submit(writing, sampling)

    def step(self):
        ended, self.ready = self.ready, []
        return ended or (self.engine.step() if self.engine.busy else [])

    @property
    def busy(self) -> bool:
        return bool(self.ready) or self.engine.busy

    def release(self, sessions) -> None:
        self.engine.release(sessions)


def _continued(
    bench: Bench,
    effects: Sequence[Effect],
    environment,
    modes: str,
    max_turns: int,
    max_new_tokens: int,
):
    """Whether the answer is correct when each episode goes on from its rewritten turn."""
    replay = Replay(bench.engine, [_script(bench, effect) for effect in effects])
    questions = [effect.site.trajectory.question for effect in effects]
    sampling = Sampling(max_new_tokens, 0.0, stop=environment.stop)
    return [
        t.correct
        for t in run(questions, replay, environment, sampling, modes=modes, max_turns=max_turns)
    ]


def _script(bench: Bench, effect: Effect) -> list[TurnOutput]:
    """The recorded turns before the site, then the site's own with the z that were fed."""
    trajectory, block = effect.site.trajectory, effect.site.block
    script, row = [], 0
    for turn in trajectory.turns[: block.turn]:
        origins = trajectory.origins[turn.start : turn.end]
        z = np.asarray(trajectory.latents[row : row + origins.count(Origin.LATENT)])
        row += len(z)
        script.append(
            TurnOutput(
                trajectory.ids[turn.start : turn.end], origins, _no_logprobs(origins), list(z)
            )
        )
    start, close = trajectory.turns[block.turn].start, bench.codec.latent_close
    head = trajectory.ids[start : block.start]
    steps = len(effect.z)
    ids = [*head, *[bench.codec.latent_token_id] * steps, *close, *effect.output.ids]
    origins = [
        *trajectory.origins[start : block.start],
        *[int(Origin.LATENT)] * steps,
        *[int(Origin.FORCED)] * len(close),
    ]
    origins += effect.output.origins
    return [
        *script,
        TurnOutput(ids, origins, _no_logprobs(ids), [*effect.z, *effect.output.latents]),
    ]


def _no_logprobs(tokens: Sequence[int]) -> list[float]:
    return [float("nan")] * len(tokens)

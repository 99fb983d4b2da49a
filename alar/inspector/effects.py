"""Interventions on many turns at once, and tables of what they do, with intervals.

`measure_effects` gives one row per turn and intervention, with its control in the same row.
`mean_effects` gives the means with bootstrap intervals that resample questions, and `step_effects`
the same per turn and step. With an environment, the episode of every changed turn goes on to its
answer in the ordinary agent loop (`alar.rollout.loop`), which shows what the intervention costs in
accuracy.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from alar.evaluate.statistics import bootstrap_mean, paired_bootstrap
from alar.inspector.blocks import Site
from alar.inspector.interventions import KINDS, Effect, Intervention, InterventionLab
from alar.records import Environment, Origin
from alar.rollout.engine import Engine, Sampling, TurnOutput
from alar.rollout.loop import run

MEASURES = ("changed", "kl", "to_donor", "to_donor_kind", "donor_gain", "correct")
INTACT = Intervention("none")


def list_interventions(
    num_latent: int, kinds: Sequence[str] = KINDS, *, per_step: bool = False
) -> list[Intervention]:
    """Interventions of these kinds on the whole block, or on each of its K = `num_latent` steps.

    A block of one step gets no "shuffle", since it has no other order.
    """
    steps = range(num_latent) if per_step else (None,)
    kinds = [kind for kind in kinds if kind != "shuffle" or num_latent > 1]
    return [Intervention(kind, step) for kind in kinds for step in steps]


def donors(
    sites: Sequence[Site], *, seed: int = 0, same_turn: bool = True, same_type: bool = True
) -> list[Site | None]:
    """A donor for every site, drawn at random; None where no turn will do.

    A donor is another question's block of equal length with another recorded action. `same_turn`
    and `same_type` say whether it shares the turn number and the question type, or differs in them.
    If it shares both, the two actions differ in content only; otherwise in form too.
    """
    rng = random.Random(f"donors {seed}")
    chosen = []
    for site in sites:
        # The whole pool is listed before the draw, so that a seed gives the same donors.
        pool = [other for other in sites if _fits(site, other, same_turn, same_type)]
        chosen.append(rng.choice(pool) if pool else None)
    return chosen


def _fits(site: Site, other: Site, same_turn: bool, same_type: bool) -> bool:
    question, asked = site.trajectory.question, other.trajectory.question
    return (
        asked.id != question.id
        and len(other.block) == len(site.block)  # z′ must have the shape of z
        and (other.block.turn == site.block.turn) == same_turn
        and (asked.type == question.type) == same_type
        and other.action_ids != site.action_ids  # else "to_donor" could not be seen
    )


def measure_effects(
    lab: InterventionLab,
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
    """One row per site and intervention: the measures, and `control_…` for its random control.

    A site without donor is left out of "patch". With `environment` the episodes go on, and
    `correct`, `control_correct` and `reference_correct` say whether the answer is right. Their
    turns have at most `max_new_tokens` tokens; `modes` should be those of the trajectories. `chunk`
    sites are computed together, and `progress` wraps the iteration over the chunks.
    """
    rows, pairs = [], list(zip(sites, donors, strict=True))
    for start in progress(range(0, len(pairs), chunk)):
        cases = []  # for each site the intact turn, then every intervention before its control
        for site, donor in pairs[start : start + chunk]:
            cases.append((site, INTACT, donor))
            for change in interventions:
                if change.kind != "patch" or donor is not None:
                    cases += [(site, change, donor), (site, replace(change, control=True), donor)]
        effects = lab.effects(cases)  # one per case, in order
        right = [None] * len(effects)
        if environment is not None:
            right = _continued(lab, effects, environment, modes, max_turns, max_new_tokens)
        for index, effect in enumerate(effects):
            if effect.intervention == INTACT:
                intact = {} if right[index] is None else {"reference_correct": float(right[index])}
            elif not effect.intervention.control:  # whose control comes next
                rows.append(_row(*effects[index : index + 2], *right[index : index + 2]) | intact)
    return pd.DataFrame(rows)


def _row(effect: Effect, control: Effect, correct: bool | None, control_correct: bool | None):
    question, turn = effect.site.trajectory.question, effect.site.block.turn
    change = effect.intervention
    place = {
        "question_id": question.id,
        "question_type": question.type,
        "turn": turn + 1,
        "hard": turn in question.hard_turns,  # both from 0
        "forced": bool(effect.site.trajectory.turns[turn].forced_mode),
        "intervention": change.kind,
        "k": 0 if change.step is None else change.step + 1,  # 0: the whole block
    }
    controls = _numbers(control, control_correct)
    words = {
        "action": effect.action,
        "control_action": control.action,
        "reference": effect.reference,
        "donor_action": effect.donor_action,
    }
    own = _numbers(effect, correct)
    return place | own | {f"control_{name}": value for name, value in controls.items()} | words


def _numbers(effect: Effect, correct: bool | None) -> dict:
    numbers = {
        "changed": float(effect.changed),
        "kl": effect.kl,
        # NaN, not 0, without a donor: `mean_effects` leaves such turns out.
        "to_donor": float(effect.to_donor) if effect.donor_action else float("nan"),
        "to_donor_kind": effect.to_donor_kind,
        "donor_gain": effect.donor_gain,
        "distance": effect.distance,
    }
    return numbers if correct is None else numbers | {"correct": float(correct)}


def mean_effects(
    effects: pd.DataFrame,
    *,
    by: Sequence[str] = ("intervention", "k"),
    resamples: int = 10_000,
    seed: int = 0,
) -> pd.DataFrame:
    """Means with 95 % intervals: one row per group and measure. A question counts as the mean of
    its turns.

    Columns: those of `by`, measure, questions, turns; mean, low, high; control, control_low,
    control_high; difference (own − control, paired by question), difference_low, difference_high.
    """
    rows, options = [], {"resamples": resamples, "seed": seed}  # one draw serves all rows
    for key, part in effects.groupby(list(by), sort=False):
        for name in MEASURES:
            if name not in part:
                continue
            used = part.dropna(subset=[name, f"control_{name}"])  # both, so that they stay paired
            if used.empty:
                continue
            # Turns of one question are not independent, so a question counts once.
            means = used.groupby("question_id", sort=False)[[name, f"control_{name}"]].mean()
            own, control = means.to_numpy().T.copy()  # (questions,) each
            row = dict(zip(by, key))
            row |= {"measure": name, "questions": len(means), "turns": len(used)}
            row |= dict(zip(("mean", "low", "high"), bootstrap_mean(own, **options)))
            row |= bootstrap_mean(control, **options).columns("control")
            row |= paired_bootstrap(own, control, **options).columns("difference")
            rows.append(row)
    return pd.DataFrame(rows)


def step_effects(
    effects: pd.DataFrame, intervention: str = "patch", measure: str = "kl", **options
) -> pd.DataFrame:
    """`mean_effects` by turn and k, of one intervention and measure on single steps.

    ValueError for effects without single steps.
    """
    chosen = effects[(effects["intervention"] == intervention) & (effects["k"] > 0)]
    if chosen.empty:
        raise ValueError(
            f"no {intervention!r} of single steps among these effects: measure with"
            " list_interventions(K, per_step=True)"
        )
    table = mean_effects(chosen, by=("turn", "k"), **options)
    return table[table["measure"] == measure].reset_index(drop=True)


class Replay(Engine):
    """An engine that first gives the turns of a script, then lets the real engine write.

    So a changed episode goes on. There is one script per session; session i has `scripts[i]`.
    """

    def __init__(self, engine: Engine, scripts: Sequence[Sequence[TurnOutput]]):
        self.engine, self.codec = engine, engine.codec
        self.scripts = [deque(script) for script in scripts]
        self.ready: list = []  # (request, output) of scripted turns that the next step reports

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
        # Scripted turns cost nothing, so they are reported before the real engine works.
        ended, self.ready = self.ready, []
        return ended or (self.engine.step() if self.engine.busy else [])

    @property
    def busy(self) -> bool:
        return bool(self.ready) or self.engine.busy

    def release(self, sessions) -> None:
        self.engine.release(sessions)


def _continued(
    lab: InterventionLab,
    effects: Sequence[Effect],
    environment: Environment,
    modes: str,
    max_turns: int,
    max_new_tokens: int,
) -> list[bool]:
    """Whether the answer is correct when each episode goes on from its rewritten turn."""
    replay = Replay(lab.engine, [_script(lab, effect) for effect in effects])
    questions = [effect.site.trajectory.question for effect in effects]
    sampling = Sampling(max_new_tokens, 0.0, stop=environment.stop)  # greedy, as the action was
    ended = run(questions, replay, environment, sampling, modes=modes, max_turns=max_turns)
    return [trajectory.correct for trajectory in ended]


def _script(lab: InterventionLab, effect: Effect) -> list[TurnOutput]:
    """The recorded turns before the site, then the site's own turn with the z that were fed."""
    trajectory, block = effect.site.trajectory, effect.site.block
    ids, origins = trajectory.ids, trajectory.origins
    script, thoughts = [], iter(np.asarray(trajectory.latents))  # z in the order of the turns
    for turn in trajectory.turns[: block.turn]:
        marks = origins[turn.start : turn.end]
        z = [next(thoughts) for _ in range(marks.count(Origin.LATENT))]
        script.append(_output(ids[turn.start : turn.end], marks, z))
    head = slice(trajectory.turns[block.turn].start, block.start)  # up to `<latent>`
    close, steps = lab.codec.latent_close, len(effect.z)  # K′: "drop" takes positions out
    written = [*ids[head], *[lab.codec.latent_token_id] * steps, *close, *effect.output.ids]
    marks = origins[head] + [int(Origin.LATENT)] * steps + [int(Origin.FORCED)] * len(close)
    marks += effect.output.origins
    return [*script, _output(written, marks, [*effect.z, *effect.output.latents])]


def _output(ids: list[int], origins: list[int], latents: list[np.ndarray]) -> TurnOutput:
    # Nothing reads log-probs in a replay, and the recorded ones do not fit the new z.
    return TurnOutput(ids, origins, [float("nan")] * len(ids), latents)

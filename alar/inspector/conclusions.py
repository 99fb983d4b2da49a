"""What the tables say, in words that follow from the numbers by stated rules.

An effect counts as *shown* by `RULE` and not otherwise; a missing effect is worded as not shown,
never as absent. "Most" means more than half.
"""

from __future__ import annotations

import pandas as pd

from alar.inspector.plots.effects import ENOUGH, KIND_NAMES
from alar.inspector.plots.spaces import TARGET_NAMES

LEAST_KL = 0.01  # nats: less is no difference that anyone would notice in an action
RULE = (
    "A difference counts as shown when its 95 % interval (bootstrap over questions) excludes 0 and"
    f" it rests on at least {ENOUGH} questions; a difference in KL must also be at least {LEAST_KL}"
    " nats per token."
)


def interventions(summary: pd.DataFrame) -> list[str]:
    """Sentences about whole blocks, from `alar.inspector.effects.summarise`: use, identity,
    content, order, cost."""
    found = [_use(summary), _which(summary), _content(summary), _order(summary), _cost(summary)]
    return [sentence for sentence in found if sentence]


def causal_map(table: pd.DataFrame) -> str:
    """Which single steps matter, from `alar.inspector.effects.causal_map`."""
    shown = table[_above(table, LEAST_KL)]
    if shown.empty:
        return "No single latent step changes the action more than its random control does."
    best = shown.loc[shown["difference"].idxmax()]
    return (
        f"Single steps matter in {len(shown)} of {len(table)} places (turn × k); most at turn"
        f" {int(best['turn'])}, k = {int(best['k'])}:"
        f" {_span(best, 'difference', 'difference_low', 'difference_high', 1)} nats above the"
        " control."
    )


def kinds(summary: pd.DataFrame) -> list[str]:
    """Whether the kind of the action follows z, from a summary of patches whose donors acted
    differently."""
    rows = _whole(summary, "to_donor_kind")
    if rows.empty:
        return []
    row = rows.iloc[0]
    moved = (
        "With the z of a turn that searched or called where this one answers, or the reverse, the"
        f" policy does as the donor did in {_percent(row)} of the turns (random control"
        f" {_percent(row, 'control', 'control_low', 'control_high')})"
    )
    if _above(rows)[row.name]:
        return [f"{moved}: z carries what kind of action comes next."]
    return [f"{moved}: that z carries the kind of the next action is not shown."]


def probes(table: pd.DataFrame) -> list[str]:
    """What z holds beyond the words of the question, from `alar.inspector.probes.probe_table`: one
    sentence per target."""
    said = []
    for target, rows in table.groupby("target", sort=False):
        name = TARGET_NAMES.get(target, target)
        best = rows.loc[rows["difference"].idxmax()]
        scores = (
            f"{_percent(best, 'accuracy', 'accuracy_low', 'accuracy_high')} from z at its best"
            f" place, turn {int(best['turn'])}, k = {int(best['k'])}; {100 * best['embedding']:.0f}"
            f" % from the question's words, {100 * best['shuffled']:.0f} % with shuffled labels"
        )
        if _above(rows)[best.name] and best["accuracy_low"] > best["shuffled_high"]:
            said.append(
                f"{name}: a linear probe reads it in z better than in the words of the question"
                f" ({scores})."
            )
        else:
            said.append(
                f"{name}: that z holds more of it than the words of the question is not shown"
                f" ({scores})."
            )
    return said


def _use(summary: pd.DataFrame) -> str:
    rows = _whole(summary, "kl")
    rows = rows[rows["intervention"] != "shuffle"]
    if rows.empty:
        return ""
    shown = rows[_above(rows, LEAST_KL)]
    if shown.empty:
        return (
            "No replacement of z changes the distribution of the action more than an equally long"
            " random step does: that the action uses what z says is not shown."
        )
    names = ", ".join(KIND_NAMES[kind] for kind in shown["intervention"])
    best = shown.loc[shown["difference"].idxmax()]
    changed = _whole(summary, "changed").set_index("intervention").loc[best["intervention"]]
    return (
        f"The action depends on z: {len(shown)} of {len(rows)} replacements change its distribution"
        f" beyond their random control ({names}), most of all {KIND_NAMES[best['intervention']]},"
        f" which changes the action itself in {_percent(changed)} of the turns (control"
        f" {_percent(changed, 'control', 'control_low', 'control_high')})."
    )


def _which(summary: pd.DataFrame) -> str:
    """Whether it matters which thought it is, or only that there is one."""
    rows = _whole(summary, "kl")
    patched, others = (
        rows[rows["intervention"] == "patch"],
        rows[~rows["intervention"].isin(("patch", "shuffle"))],
    )
    if patched.empty:
        return ""
    row = patched.iloc[0]
    values = _nats(row)
    if _above(patched, LEAST_KL)[row.name]:
        return (
            "It matters which thought it is: another question's z changes the distribution of the"
            f" action ({values})."
        )
    if _above(others, LEAST_KL).any():
        return (
            "In these turns it matters that there is a thought; that it matters which one is not"
            f" shown: another question's z leaves the action as it is ({values})."
        )
    return ""


def _content(summary: pd.DataFrame) -> str:
    rows = _whole(summary, "to_donor")
    rows = rows[rows["intervention"] == "patch"]
    if rows.empty:
        return ""
    row = rows.iloc[0]
    moved = (
        f"With another question's z the policy writes that question's action in {_percent(row)} of"
        f" the turns (random control {_percent(row, 'control', 'control_low', 'control_high')})"
    )
    if _above(rows)[row.name]:
        return (
            f"{moved}: z carries {'most' if row['mean'] > 0.5 else 'a part'} of what the next"
            " action is about."
        )
    return f"{moved}: that z carries the content of the action is not shown."


def _order(summary: pd.DataFrame) -> str:
    rows = _whole(summary, "kl")
    rows = rows[rows["intervention"] == "shuffle"]
    if rows.empty:
        return ""
    row = rows.iloc[0]
    values = _nats(row)
    if _above(rows, LEAST_KL)[row.name]:
        return (
            "The order of the steps matters: reordering them changes the action beyond its control"
            f" ({values})."
        )
    return f"That the order of the steps matters is not shown ({values})."


def _cost(summary: pd.DataFrame) -> str:
    rows = _whole(summary, "correct")
    if rows.empty:
        return ""
    shown = rows[(rows["difference_high"] < 0) & (rows["questions"] >= ENOUGH)]
    if shown.empty:
        return "No replacement lowers the share of correct answers below its random control's."
    worst = shown.loc[shown["difference"].idxmin()]
    return (
        f"{KIND_NAMES[worst['intervention']].capitalize()} costs most: {_percent(worst)} of the"
        f" answers are correct then, {_percent(worst, 'control', 'control_low', 'control_high')}"
        " under its control."
    )


def _above(rows: pd.DataFrame, least: float = 0.0) -> pd.Series:
    """Where a difference counts as shown."""
    return (
        (rows["difference_low"] > 0) & (rows["difference"] >= least) & (rows["questions"] >= ENOUGH)
    )


def _whole(summary: pd.DataFrame, measure: str) -> pd.DataFrame:
    return summary[(summary["k"] == 0) & (summary["measure"] == measure)]


def _percent(row, *names: str) -> str:
    return _span(row, *(names or ("mean", "low", "high")), 100, "%") + " %"


def _nats(row) -> str:
    return (
        f"{_span(row, 'mean', 'low', 'high', 1)} nats, control"
        f" {_span(row, 'control', 'control_low', 'control_high', 1)}"
    )


def _span(row, mean: str, low: str, high: str, scale: float, kind: str = "") -> str:
    digits = 0 if kind == "%" else 3
    value, below, above = (scale * row[name] for name in (mean, low, high))
    return f"{value:.{digits}f} [{below:.{digits}f}, {above:.{digits}f}]"

"""What the tables say, in words that follow from the numbers by stated rules.

An effect counts as *shown* only if `RULE` says so. The words for any other effect are "not shown",
never "absent". "Most" means more than half.
"""

from __future__ import annotations

import pandas as pd

from alar.inspector.plots.effects import ENOUGH, KIND_NAMES
from alar.inspector.plots.spaces import TARGET_NAMES

LEAST_KL = 0.01  # nats: nobody would notice a smaller difference in an action
RULE = (
    "A difference counts as shown when its 95 % interval (bootstrap over questions) excludes 0 and"
    f" it rests on at least {ENOUGH} questions; a difference in KL must also be at least {LEAST_KL}"
    " nats per token."
)


def say_interventions(summary: pd.DataFrame) -> list[str]:
    """Sentences about interventions on whole blocks: use, identity, content, order, cost.

    `summary` comes from `alar.inspector.effects.mean_effects`.
    """
    found = [_use(summary), _which(summary), _content(summary), _order(summary), _cost(summary)]
    return [sentence for sentence in found if sentence]  # "": that kind was not measured


def say_causal_map(table: pd.DataFrame) -> str:
    """Which single steps matter. `table` comes from `alar.inspector.effects.step_effects`."""
    shown = table[_above(table, LEAST_KL)]
    if shown.empty:
        return "No single latent step changes the action more than its random control does."
    best = shown.loc[shown["difference"].idxmax()]
    return (
        f"Single steps matter in {len(shown)} of {len(table)} places (turn × k); most at turn"
        f" {int(best['turn'])}, k = {int(best['k'])}: {_nats(best, 'difference')} nats above the"
        " control."
    )


def say_kinds(summary: pd.DataFrame) -> list[str]:
    """Whether the kind of the action (search, call, answer) follows z.

    `summary` is of patches whose donors acted differently.
    """
    rows = _whole(summary, "to_donor_kind")
    if rows.empty:
        return []
    row = rows.iloc[0]  # patches are the only intervention of such a summary
    moved = (
        "With the z of a turn that searched or called where this one answers, or the reverse, the"
        f" policy does as the donor did in {_percent(row)} of the turns"
        f" (random control {_percent(row, 'control')})"
    )
    if _above(rows)[row.name]:
        return [f"{moved}: z carries what kind of action comes next."]
    return [f"{moved}: that z carries the kind of the next action is not shown."]


def say_probes(table: pd.DataFrame) -> list[str]:
    """What z holds beyond the words of the question: one sentence per target.

    `table` comes from `alar.inspector.probes.probe_table`.
    """
    said = []
    for target, rows in table.groupby("target", sort=False):
        best = rows.loc[rows["difference"].idxmax()]  # the turn and k where z beats the words most
        scores = (
            f"{_percent(best, 'accuracy')} from z at its best place, turn {int(best['turn'])},"
            f" k = {int(best['k'])}; {100 * best['embedding']:.0f} % from the question's words,"
            f" {100 * best['shuffled']:.0f} % with shuffled labels"
        )
        found = "that z holds more of it than the words of the question is not shown"
        # Words of the question are one rival, chance is the other; z must beat both.
        if _above(rows)[best.name] and best["accuracy_low"] > best["shuffled_high"]:
            found = "a linear probe reads it in z better than in the words of the question"
        said.append(f"{TARGET_NAMES.get(target, target)}: {found} ({scores}).")
    return said


def _use(summary: pd.DataFrame) -> str:
    rows = _whole(summary, "kl")
    rows = rows[rows["intervention"] != "shuffle"]  # it keeps every z: `_order` speaks of it
    if rows.empty:
        return ""
    shown = rows[_above(rows, LEAST_KL)]
    if shown.empty:
        return (
            "No replacement of z changes the distribution of the action more than an equally long"
            " random step does: that the action uses what z says is not shown."
        )
    names = ", ".join(shown["intervention"].map(KIND_NAMES))
    best = shown.loc[shown["difference"].idxmax(), "intervention"]
    changed = _whole(summary, "changed", best).iloc[0]
    return (
        f"The action depends on z: {len(shown)} of {len(rows)} replacements change its distribution"
        f" beyond their random control ({names}), most of all {KIND_NAMES[best]}, which changes the"
        f" action itself in {_percent(changed)} of the turns"
        f" (control {_percent(changed, 'control')})."
    )


def _which(summary: pd.DataFrame) -> str:
    """Whether it matters which thought it is, or only that there is a thought."""
    patched, rows = _whole(summary, "kl", "patch"), _whole(summary, "kl")
    if patched.empty:
        return ""
    values = _beside_control(patched.iloc[0])
    if _above(patched, LEAST_KL).any():
        return (
            "It matters which thought it is: another question's z changes the distribution of the"
            f" action ({values})."
        )
    # The others leave no thought of any question in the block: zeros, a mean, noise, nothing.
    others = rows[~rows["intervention"].isin(("patch", "shuffle"))]
    if _above(others, LEAST_KL).any():
        return (
            "In these turns it matters that there is a thought; that it matters which one is not"
            f" shown: another question's z leaves the action as it is ({values})."
        )
    return ""


def _content(summary: pd.DataFrame) -> str:
    rows = _whole(summary, "to_donor", "patch")
    if rows.empty:
        return ""
    row = rows.iloc[0]
    moved = (
        f"With another question's z the policy writes that question's action in {_percent(row)} of"
        f" the turns (random control {_percent(row, 'control')})"
    )
    if not _above(rows).any():
        return f"{moved}: that z carries the content of the action is not shown."
    share = "most" if row["mean"] > 0.5 else "a part"
    return f"{moved}: z carries {share} of what the next action is about."


def _order(summary: pd.DataFrame) -> str:
    rows = _whole(summary, "kl", "shuffle")
    if rows.empty:
        return ""
    values = _beside_control(rows.iloc[0])
    if _above(rows, LEAST_KL).any():
        return (
            "The order of the steps matters: reordering them changes the action beyond its control"
            f" ({values})."
        )
    return f"That the order of the steps matters is not shown ({values})."


def _cost(summary: pd.DataFrame) -> str:
    rows = _whole(summary, "correct")
    if rows.empty:
        return ""
    # `_above` turned round: here the harm is a difference below 0.
    shown = rows[(rows["difference_high"] < 0) & (rows["questions"] >= ENOUGH)]
    if shown.empty:
        return "No replacement lowers the share of correct answers below its random control's."
    worst = shown.loc[shown["difference"].idxmin()]
    return (
        f"{KIND_NAMES[worst['intervention']].capitalize()} costs most: {_percent(worst)} of the"
        f" answers are correct then, {_percent(worst, 'control')} under its control."
    )


def _above(rows: pd.DataFrame, least: float = 0.0) -> pd.Series:
    """Which rows have a difference that counts as shown, by `RULE`."""
    clear = (rows["difference_low"] > 0) & (rows["difference"] >= least)
    return clear & (rows["questions"] >= ENOUGH)


def _whole(summary: pd.DataFrame, measure: str, kind: str = "") -> pd.DataFrame:
    """The rows of one measure where the whole block was replaced, by `kind` if one is named."""
    rows = summary[(summary["k"] == 0) & (summary["measure"] == measure)]  # k = 0: whole block
    return rows[rows["intervention"] == kind] if kind else rows


def _interval(row: pd.Series, name: str) -> list[float]:
    # The interval of "mean" stands in plain `low` and `high` (see `mean_effects`).
    ends = ("low", "high") if name == "mean" else (f"{name}_low", f"{name}_high")
    return [row[column] for column in (name, *ends)]


def _percent(row: pd.Series, name: str = "mean") -> str:
    value, low, high = (100 * number for number in _interval(row, name))  # share → percent
    return f"{value:.0f} [{low:.0f}, {high:.0f}] %"


def _nats(row: pd.Series, name: str) -> str:
    value, low, high = _interval(row, name)
    return f"{value:.3f} [{low:.3f}, {high:.3f}]"


def _beside_control(row: pd.Series) -> str:
    return f"{_nats(row, 'mean')} nats, control {_nats(row, 'control')}"

"""What was published, in one table, and the tables that show it beside what is measured here.

`values` has every number that we know, with where it is from. `note` says how well it is known:

- "published": read where its authors wrote it;
- "published, second-hand": from somebody's account of the paper. The means of the results agree
  with the released figure to 0.1 points;
- "digitised": read off that figure.

What we could not find is left out, or has no value. All of it is of other models than ours, so it
is no target for them: tables name the model in every row. Published accuracies of the tool domain
come from the released, more lenient check (`alar.domains.tool.published_check`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pandas as pd

from alar.evaluate import tables
from alar.evaluate.statistics import summarise_sets
from alar.evaluate.tables import MACRO

COLUMNS = ("domain", "model", "system", "condition", "set", "metric", "value", "note", "source")
FIRST_HAND, SECOND_HAND, DIGITISED = "published", "published, second-hand", "digitised"
OURS = "this run"
ABSENT = "–"

_SEARCH_7B, _SEARCH_3B = "Search-R1 7B", "Search-R1 3B"
_THINKING_4B = "Qwen3-4B"  # Qwen3-4B-Thinking-2507
TOKENSKIP_MODEL = "Qwen3-4B on MATH"
_PAPER = "arXiv 2606.02871"
_FIGURE = "figure in the README of the released ALAR code"
_README = "README of the released ALAR code"
_LATENT_REASONING = "README of LatentReasoning"

_MEANS = [
    # domain, model, system, accuracy %, generated tokens (None: not known), note
    ("search", _SEARCH_7B, "base", 42.7, 236, SECOND_HAND),
    ("search", _SEARCH_7B, "ThinkPrune", 42.0, 220, SECOND_HAND),
    ("search", _SEARCH_7B, "stage1", 40.5, 112, SECOND_HAND),
    ("search", _SEARCH_7B, "alar", 41.7, 133, SECOND_HAND),
    ("search", _SEARCH_3B, "base", 38.2, 154, SECOND_HAND),
    ("search", _SEARCH_3B, "ThinkPrune", 37.8, 147, SECOND_HAND),
    ("search", _SEARCH_3B, "ShorterBetter", 37.6, None, DIGITISED),
    ("search", _SEARCH_3B, "O1-Pruner", 23.5, None, DIGITISED),
    ("search", _SEARCH_3B, "stage1", 37.3, 94, SECOND_HAND),
    ("search", _SEARCH_3B, "alar", 38.4, 120, SECOND_HAND),
    ("tool", _THINKING_4B, "base", 86.1, 760, SECOND_HAND),
    ("tool", _THINKING_4B, "ShorterBetter", 85.1, 162, SECOND_HAND),
    ("tool", _THINKING_4B, "ThinkPrune", 88.4, 251, SECOND_HAND),
    ("tool", _THINKING_4B, "O1-Pruner", 86.2, 156, SECOND_HAND),
    ("tool", _THINKING_4B, "stage1", 88.8, 87, SECOND_HAND),
    ("tool", _THINKING_4B, "alar", 89.2, 117, SECOND_HAND),
]
_REDUCTIONS = [
    # domain, model, system, fewer tokens than the base in %, note, source
    ("search", _SEARCH_7B, "alar", 43.6, FIRST_HAND, _README),
    ("search", _SEARCH_3B, "alar", 22, SECOND_HAND, _PAPER),
    ("search", _SEARCH_3B, "ShorterBetter", 4.6, DIGITISED, _FIGURE),
    ("search", _SEARCH_3B, "O1-Pruner", -1.3, DIGITISED, _FIGURE),
    ("tool", _THINKING_4B, "alar", 84.6, FIRST_HAND, _README),
]
# ALAR 7B: set → latent share of turns, %
_LATENT_SHARES = {"nq": 89, "triviaqa": 91, "2wikimultihopqa": 75, "bamboogle": 59}
# Of the paper's comparison of K we know its values and this sentence, no number, no domain.
THOUGHTS = (1, 2, 4, 8)
ON_THOUGHTS = "four thoughts capture most of the benefit"
_TOKENSKIP = [
    # vocabulary, ratio, accuracy %, think tokens, tokens of right answers; MATH, LLMLingua-2
    ("standard", 1.0, 42.8, 1530, 1092),
    ("standard", 0.7, 52.6, 1330, 991),
    ("standard", 0.5, 51.6, 1231, 827),
    ("standard", 0.3, 44.0, 1331, 762),
    ("dual", 1.0, 43.2, 1536, 1121),
    ("dual", 0.7, 50.4, 1291, 889),
    ("dual", 0.5, 53.6, 1261, 894),
    ("dual", 0.3, 51.2, 1266, 862),
]


def _rows() -> Iterator[tuple]:
    """The rows of `values`, in the order of `COLUMNS`."""
    for domain, model, system, accuracy, tokens, note in _MEANS:
        about = (domain, model, system, "", MACRO)
        source = _FIGURE if note == DIGITISED else _PAPER
        yield *about, "accuracy", accuracy, note, source
        if tokens is not None:
            yield *about, "tokens", tokens, note, source
    for domain, model, system, reduction, note, source in _REDUCTIONS:
        yield domain, model, system, "", MACRO, "token_reduction", reduction, note, source
    for name, share in _LATENT_SHARES.items():
        about = ("search", _SEARCH_7B, "alar", "", name)
        yield *about, "latent_share", share, SECOND_HAND, _PAPER
    for thoughts in THOUGHTS:
        yield "", "", "", f"K = {thoughts}", "", "benefit", None, SECOND_HAND, _PAPER
    for vocabulary, ratio, *known in _TOKENSKIP:
        about = ("math", _THINKING_4B, "TokenSkip", f"{vocabulary}, ratio {ratio}", "math")
        for metric, value in zip(("accuracy", "think_tokens", "correct_tokens"), known):
            yield *about, metric, value, FIRST_HAND, _LATENT_REASONING


def values(domain: str = "") -> pd.DataFrame:
    """Every published number, one a row, of one domain ("search", "tool", "math") or of all.

    `condition` is TokenSkip's vocabulary and ratio, or K. Accuracies, reductions (against the same
    model's base) and shares are in percent, as published. `value` is NaN where something was
    reported without a number.
    """
    table = pd.DataFrame(_rows(), columns=list(COLUMNS)).astype({"value": float})
    return table[table["domain"] == domain].reset_index(drop=True) if domain else table


def means(domain: str = "") -> pd.DataFrame:
    """One row per published mean over the sets of a domain, or of both.

    Columns: domain, model, system, note, and in percent or tokens, NaN where unknown, accuracy,
    tokens and token_reduction. The note is the accuracy's.
    """
    table = values(domain)
    table = table[(table["set"] == MACRO) & (table["condition"] == "")]
    keys = ["domain", "model", "system"]
    notes = table[table["metric"] == "accuracy"].set_index(keys)["note"]
    wide = table.pivot(index=keys, columns="metric", values="value")  # sorted, unlike `notes`
    return wide.reindex(notes.index).rename_axis(columns=None).assign(note=notes).reset_index()


def points() -> pd.DataFrame:
    """`means` as changes from the base of the same model, for the figure of both domains.

    Columns: setting, system, accuracy, tokens, accuracy_difference, token_reduction, digitised.
    Accuracies and reductions are fractions.
    """
    table = means()
    tools = table["domain"] == "tool"
    table["setting"] = table["model"].where(~tools, table["model"] + ", tools")
    base = table[table["system"] == "base"].set_index("setting")  # setting → its base
    accuracy, tokens = table["setting"].map(base["accuracy"]), table["setting"].map(base["tokens"])
    table["accuracy_difference"] = table["accuracy"] / 100 - accuracy / 100
    table["accuracy"] /= 100
    # From the counts where they are known: they say more than a rounded percentage.
    computed = 1 - table["tokens"] / tokens
    table["token_reduction"] = computed.fillna(table["token_reduction"] / 100)
    table["digitised"] = table["note"] == DIGITISED
    columns = "setting system accuracy tokens accuracy_difference token_reduction digitised"
    return table[columns.split()]


def beside_published(
    summary: pd.DataFrame,
    domain: str,
    *,
    released_check: pd.DataFrame | None = None,
    measured: str = "measured",
) -> pd.DataFrame:
    """The results as people read them, and below each system the paper's on other models.

    `summary` is `tables.SUMMARY`. Its rows "macro" are shown if there are any, because published
    numbers are such means, else its rows "all". `released_check` is the same table by the check
    that published numbers of tools come from. `measured` says in the last column what ours are.
    A cell is "–" where nothing is known.
    """
    over = MACRO if MACRO in set(summary["question_type"]) else "all"
    ours = summary[summary["question_type"] == over].reset_index(drop=True)
    found = {"accuracy %": ours}
    # Published accuracies stand in the column of the check that made them.
    judged = "accuracy %"
    if domain == "tool":
        judged = "accuracy %, published protocol"
        found[judged] = released_check
    rows = pd.DataFrame({"system": ours["system"], "model": OURS})
    rows["over"] = "mean of sets" if over == MACRO else "all questions"
    for name, table in found.items():
        shown = {}
        if table is not None:
            table = table[table["question_type"] == over]
            shown = dict(zip(table["system"], tables.with_intervals(table, "em", 100)))
        rows[name] = [shown.get(system, ABSENT) for system in rows["system"]]
    rows["tokens"] = tables.with_intervals(ours, "tokens")
    rows["fewer tokens %"] = tables.with_intervals(ours, "token_reduction", 100)
    rows["numbers are"] = measured
    theirs = means(domain)
    known = pd.DataFrame({"system": theirs["system"], "model": theirs["model"]})
    known["over"] = "mean of sets"
    known["accuracy %"] = ABSENT
    known[judged] = _shown(theirs["accuracy"], ".1f")
    known["tokens"] = _shown(theirs["tokens"], ".0f")
    known["fewer tokens %"] = _shown(theirs["token_reduction"], ".1f")
    known["numbers are"] = theirs["note"]
    together = pd.concat([rows, known], ignore_index=True)
    # A stable sort keeps ours first and the published models in their order.
    order = tables.in_order(together["system"], tables.SYSTEMS)
    together = together.sort_values(
        "system", key=lambda names: names.map(order.index), kind="stable"
    )
    return together.set_index(["system", "model"])


def by_released_check(
    questions: pd.DataFrame, set_of: Mapping[str, str], **options
) -> pd.DataFrame | None:
    """`summarise_sets` of the verdicts in the column `published_protocol`, None where are none.

    A mean is given only if the released check knows all of the sets. `options` are those of
    `summarise_sets`.
    """
    if "published_protocol" not in questions or questions["published_protocol"].isna().all():
        return None
    known = questions.dropna(subset="published_protocol")
    verdicts = known["published_protocol"].astype(bool)
    table = summarise_sets(known.assign(correct=verdicts), set_of, **options)
    if len(known) < len(questions):
        table = table[~table["question_type"].isin(("all", MACRO))]
    return table.reset_index(drop=True)


def latent_shares(domain: str = "search") -> pd.DataFrame:
    """The published latent share of turns by set. Columns: model, system, set, value (%), note."""
    table = values(domain)
    shares = table[table["metric"] == "latent_share"]
    return shares[["model", "system", "set", "value", "note"]].reset_index(drop=True)


def latent_shares_beside(
    summary: pd.DataFrame, systems: Sequence[str], domain: str
) -> pd.DataFrame:
    """Latent share of turns in % by set, of our `systems` and of the paper's ALAR.

    `summary` is `tables.SUMMARY` with sets as question types. One row per set, those that only the
    paper has asked last.
    """
    ours = summary[~summary["question_type"].isin(("all", MACRO))]
    columns = {}
    for system in systems:
        rows = ours[ours["system"] == system].set_index("question_type")
        columns[system] = pd.Series(tables.with_intervals(rows, "latent_share", 100), rows.index)
    theirs = latent_shares(domain).set_index("set")
    for (model, note), rows in theirs.groupby(["model", "note"]):  # none in the tool domain
        columns[f"{model}, {note}"] = pd.Series(_shown(rows["value"], ".0f"), rows.index)
    sets = list(dict.fromkeys([*ours["question_type"], *theirs.index]))
    return pd.DataFrame(columns).reindex(sets).fillna(ABSENT).rename_axis("set")


def tokenskip_ratios() -> pd.DataFrame:
    """TokenSkip as published on MATH. One row per model ("standard", "dual") and ratio.

    Columns: model, ratio, accuracy (%), think_tokens, correct_tokens.
    """
    names = ["model", "ratio", "accuracy", "think_tokens", "correct_tokens"]
    return pd.DataFrame(_TOKENSKIP, columns=names)


def _shown(numbers: pd.Series, form: str) -> list[str]:
    return [ABSENT if pd.isna(number) else f"{number:{form}}" for number in numbers]

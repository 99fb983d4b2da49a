"""What single choices of the method are worth: variants of one parameter file beside a reference.

    reference = read_variant(*files_of("runs/ablations/reference/search"))
    alpha = read_variant(*files_of("runs/ablations/alpha-0/search"))
    table = ablation_table([reference, alpha])               # `tables.ABLATIONS`
    figure, numbers = figures.ablations_figure(table)
    each_run([reference, alpha])                             # each against its own base

A row is a setting. It is named after the parameters in which it differs from the first variant,
whatever its folder is called. Variants that differ only in the seed are one row. Correctness and
tokens are averaged over the seeds, question by question, before questions are resampled. So
intervals say how far the questions could move a number; the range over seeds stands beside them.
Differences are paired by question and use the seeds that the row has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from alar.evaluate import published, statistics, tables

# (stage, file) below a variant's run folder
FILES = (
    ("", "provenance.json"),
    ("06_benchmark_eval", "questions.parquet"),
    ("06_benchmark_eval", "turns.parquet"),
)
COMPARED = ("stage1", "alar")  # systems of notebook 06 that make rows
REFERENCE = "as the reference"  # the label of the reference's own row
# These sections decide what is asked and shown, not what is trained: they make no setting.
_ASIDE = {"run", "eval", "figures", "inspector", "ablations"}


@dataclass(frozen=True)
class MeasuredVariant:
    """One trained and evaluated variant, with the tables of notebook 06."""

    name: str
    seed: int
    parameters: Mapping[str, Any]  # "section.key" → value
    questions: pd.DataFrame  # `tables.QUESTIONS` of all systems
    turns: pd.DataFrame  # `tables.TURNS` of all systems


def files_of(run_dir: str | Path) -> list[Path]:
    """The files of a run folder that `read_variant` reads."""
    return [Path(run_dir, stage, file) for stage, file in FILES]


def read_variant(
    provenance: str | Path, questions: str | Path, turns: str | Path
) -> MeasuredVariant:
    """The variant whose files a run left in runs/<study>/<name of the variant>/<domain>."""
    path = Path(provenance).resolve()
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        sections, seed = found["parameters"], found["seeds"]["run"]
    except (json.JSONDecodeError, KeyError) as error:
        raise tables.TableError(
            f"{path}: no whole account of a run ({error}); run that variant again"
        ) from error
    parameters = {}  # "section.key" → value
    for section, values in sections.items():
        if section not in _ASIDE:
            parameters |= {f"{section}.{key}": value for key, value in values.items()}
    return MeasuredVariant(
        path.parents[1].name,  # the folder of the variant, above that of the domain
        seed,
        parameters,
        tables.read(questions, tables.QUESTIONS),
        tables.read(turns, tables.TURNS),
    )


def changed_parameters(variant: MeasuredVariant, reference: MeasuredVariant) -> dict[str, Any]:
    """The parameters in which a variant differs from the reference → its own values."""
    changed = {}
    for name in sorted(variant.parameters.keys() | reference.parameters.keys()):
        value = variant.parameters.get(name)  # None if only the reference has it
        if value != reference.parameters.get(name):
            changed[name] = value
    return changed


def ablation_table(
    variants: Sequence[MeasuredVariant],
    *,
    systems: Sequence[str] = COMPARED,
    resamples: int = 10_000,
    seed: int = 0,
) -> pd.DataFrame:
    """`tables.ABLATIONS`: one row per setting and system, the first variant's own rows first.

    Raises TableError if two variants are the same setting with the same seed, if the reference
    lacks a seed of a row, or if they answered different questions.
    """
    if not variants:
        raise tables.TableError(
            "no variant has been evaluated yet; run python run_all.py --params"
            " params/ablations.yaml"
        )
    settings = _settings(variants)
    reference = next(iter(settings.values()))  # seed → variant
    options = {"resamples": resamples, "seed": seed}
    rows = []
    for system in systems:
        for setting, found in settings.items():
            ours = {s: variant for s, variant in found.items() if _has(variant, system)}
            if not ours:
                continue
            # Seeds are compared with themselves only, so the reference needs every one of them.
            for own, variant in ours.items():
                if own not in reference or not _has(reference[own], system):
                    raise tables.TableError(
                        f"{variant.name}: the reference was not evaluated as '{system}' with seed"
                        f" {variant.seed}; run its variant with that seed too"
                    )
            about = {"setting": setting, "system": system}
            rows.append(about | _row(ours, reference, system, options))
    return tables.read(pd.DataFrame(rows)[list(tables.ABLATIONS.columns)], tables.ABLATIONS)


def by_type(variants: Sequence[MeasuredVariant], systems: Sequence[str] = COMPARED) -> pd.DataFrame:
    """Accuracy by question type, averaged over seeds.

    One row per setting and system, one column per type.
    """
    rows = []
    for setting, found in _settings(variants).items():
        # Seeds answer the same questions, so the mean of the pool is the mean over seeds.
        pooled = pd.concat([variant.questions for variant in found.values()])
        pooled = pooled[pooled["system"].isin(systems)]
        means = pooled.groupby(["system", "question_type"])["correct"].mean()
        rows.append(means.unstack().assign(setting=setting))
    table = pd.concat(rows).reset_index().set_index(["system", "setting"])
    types = tables.in_order(table.columns, tables.QUESTION_TYPES)
    return _by_system(table, systems)[types]


def each_run(
    variants: Sequence[MeasuredVariant],
    systems: Sequence[str] = COMPARED,
    *,
    resamples: int = 10_000,
    seed: int = 0,
) -> pd.DataFrame:
    """Every variant against its *own* base, as people read it, so that seeds can be compared.

    The table has one row per system and variant.
    """
    options, rows = {"resamples": resamples, "seed": seed}, []
    for variant in variants:
        summary = statistics.readable_summary(statistics.summarise(variant.questions, **options))
        shown = [system for system in systems if system in summary.index]
        chosen = summary.loc[shown].drop(columns=["n", "turns"])
        modes = statistics.adaptivity(variant.turns, **options).set_index("system").loc[shown]
        chosen["hard − easy, points"] = tables.with_intervals(
            modes, "explicit_share_difference", 100, ".0f"
        )
        chosen["I(X;M), bit"] = tables.with_intervals(modes, "mutual_information", 1, ".3f")
        rows.append(chosen.reset_index().assign(variant=variant.name, seed=variant.seed))
    return _by_system(pd.concat(rows).set_index(["system", "variant", "seed"]), systems)


def thoughts_beside(table: pd.DataFrame, reference: MeasuredVariant) -> pd.DataFrame:
    """Accuracy by the number of thoughts K, beside what was published of K. One row per K.

    `table` is `tables.ABLATIONS`. Its rows of the reference and those that differ from it in K
    alone have a column per system. The paper compared K of 1, 2, 4 and 8; its numbers are not
    known, so its column is "–" but for the one sentence that is.
    """
    names = {REFERENCE: reference.parameters.get("model.num_latent")}
    for setting in table["setting"]:
        name, _, value = setting.rpartition(" ")
        if name == "model.num_latent" and value.isdigit():  # and no further change
            names[setting] = int(value)
    measured = table.assign(K=table["setting"].map(names)).dropna(subset="K")
    columns = {}
    for system, rows in measured.groupby("system", sort=False):
        accuracies = tables.with_intervals(rows, "accuracy", 100)
        columns[f"{system}, accuracy %"] = pd.Series(accuracies, rows["K"].astype(int))
    theirs = pd.Series(published.ABSENT, published.THOUGHTS)
    theirs[4] = published.ON_THOUGHTS
    columns[f"the paper, {published.SECOND_HAND}"] = theirs
    shown = pd.DataFrame(columns).fillna(published.ABSENT)
    return shown.sort_index().rename_axis("K")


def readable_ablations(table: pd.DataFrame) -> pd.DataFrame:
    """`tables.ABLATIONS` as people read it: percent, points and tokens, each with its interval."""
    table = tables.read(table, tables.ABLATIONS)
    spread = []  # lowest and highest difference of a single seed, in points
    for row in table.itertuples():
        low, high = 100 * row.difference_lowest, 100 * row.difference_highest
        spread.append(f"{low:+.1f} … {high:+.1f}" if row.seeds > 1 else "")
    return pd.DataFrame(
        {
            "system": table["system"],
            "setting": table["setting"],
            "seeds": table["seeds"],
            "accuracy %": tables.with_intervals(table, "accuracy", 100, ".1f"),
            "− reference, points": tables.with_intervals(table, "accuracy_difference", 100, "+.1f"),
            "over seeds": spread,
            "tokens": tables.with_intervals(table, "tokens", 1, ".1f"),
            "fewer than base %": tables.with_intervals(table, "token_reduction", 100, ".1f"),
            "latent share %": (100 * table["latent_share"]).round(1),
            "hard − easy, points": (100 * table["explicit_difference"]).round(),
            "I(X;M), bit": table["mutual_information"].round(3),
        }
    ).set_index(["system", "setting"])


def _has(variant: MeasuredVariant, system: str) -> bool:
    return system in set(variant.questions["system"])


def _by_system(table: pd.DataFrame, systems: Sequence[str]) -> pd.DataFrame:
    """Rows in blocks by system, in the order of `systems`; a block keeps the order of its rows."""
    return table.sort_index(
        level="system",
        sort_remaining=False,
        key=lambda names: names.map(systems.index),
        kind="stable",
    )


def _settings(variants: Sequence[MeasuredVariant]) -> dict[str, dict[int, MeasuredVariant]]:
    """Setting as people read it → seed → variant, in the order given, the reference first."""
    settings: dict[str, dict[int, MeasuredVariant]] = {}
    for variant in variants:
        changed = changed_parameters(variant, variants[0])
        label = ", ".join(f"{name} {value}" for name, value in changed.items()) or REFERENCE
        found = settings.setdefault(label, {})
        if variant.seed in found:
            raise tables.TableError(
                f"variants {found[variant.seed].name} and {variant.name} are the same setting"
                f" ({label}) with the same seed {variant.seed}; remove one of them from"
                " ablations.compared"
            )
        found[variant.seed] = variant
    return settings


def _row(
    ours: Mapping[int, MeasuredVariant],
    reference: Mapping[int, MeasuredVariant],
    system: str,
    options: dict,
) -> dict[str, Any]:
    """One setting (seed → variant) as one system, against the reference with the same seeds."""
    answers = [_answers(variant, system) for variant in ours.values()]
    theirs = [_answers(reference[seed], system) for seed in ours]
    bases = [_answers(variant, "base") for variant in ours.values()]
    asked = answers[0].index
    if not all(found.index.equals(asked) for found in (*answers, *theirs, *bases)):
        raise tables.TableError(
            f"{', '.join(variant.name for variant in ours.values())} and the reference answered"
            " different questions; use the same eval.questions and eval.sets for all variants"
        )
    correct = _mean(answers, "correct")  # (questions,)
    tokens = _mean(answers, "generated_tokens")  # (questions,)
    accuracy = statistics.bootstrap_mean(correct, **options)
    difference = statistics.paired_bootstrap(correct, _mean(theirs, "correct"), **options)
    reduction = statistics.token_reduction(_mean(bases, "generated_tokens"), tokens, **options)
    # One difference per seed, as fractions.
    each = [a["correct"].mean() - b["correct"].mean() for a, b in zip(answers, theirs)]

    own = [ours[seed].turns for seed in sorted(ours)]
    own = [turns[turns["system"] == system] for turns in own]
    # Point values only, so a single resample will do.
    modes = pd.concat([statistics.adaptivity(turns, resamples=1) for turns in own])
    turns = pd.concat(own)
    moded = turns[turns["mode"] != "none"]  # turns with a reasoning block
    return {
        "seeds": len(ours),
        "n": len(asked),
        **accuracy.columns("accuracy"),
        **difference.columns("accuracy_difference"),
        "difference_lowest": min(each),
        "difference_highest": max(each),
        **statistics.bootstrap_mean(tokens, **options).columns("tokens"),
        **reduction.columns("token_reduction"),
        "latent_share": float((moded["mode"] == "latent").mean()),
        "explicit_difference": float(np.mean(modes["explicit_share_difference"].tolist())),
        "mutual_information": float(np.mean(modes["mutual_information"].tolist())),
    }


def _answers(variant: MeasuredVariant, system: str) -> pd.DataFrame:
    rows = variant.questions[variant.questions["system"] == system]
    if rows.empty:
        raise tables.TableError(f"{variant.name}: '{system}' was not evaluated; see eval.systems")
    return rows.set_index("question_id").sort_index()  # one order for all, so rows are pairs


def _mean(answers: Sequence[pd.DataFrame], column: str) -> np.ndarray:
    """The mean over the seeds, question by question: (questions,)."""
    return np.mean([found[column].to_numpy(float) for found in answers], axis=0)

"""What single choices of the method are worth: variants of one parameter file beside a reference.

    reference = read_variant(*files_of("runs/ablations/reference/search"))
    alpha = read_variant(*files_of("runs/ablations/alpha-0/search"))
    table = compare([reference, alpha])                      # `tables.ABLATIONS`
    figure, numbers = figures.ablations(table)
    each_run([reference, alpha])                             # each against its own base

A row is a setting, named by the parameters in which it differs from the first variant, whatever its
folder is called. Variants that differ in nothing but the seed are one row: correctness and tokens
are averaged over the seeds question by question before questions are resampled, so intervals say
how far the questions could move a number, and the range over seeds stands beside them. Differences
are paired by question, and taken over the seeds that the row has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from alar.evaluate import statistics, tables

# (stage, file) below a variant's run folder
FILES = (
    ("", "provenance.json"),
    ("06_benchmark_eval", "questions.parquet"),
    ("06_benchmark_eval", "turns.parquet"),
)
COMPARED = ("stage1", "alar")  # systems of notebook 06 that make rows
REFERENCE = "as the reference"
# Sections that decide what is asked and shown, but not what is trained.
_ASIDE = {"run", "eval", "figures", "inspector", "ablations"}


@dataclass(frozen=True)
class Variant:
    """One trained and evaluated variant: its parameters as "section.key" → value, and the tables of
    notebook 06."""

    name: str
    seed: int
    parameters: Mapping[str, Any]
    questions: pd.DataFrame
    turns: pd.DataFrame


def files_of(run_dir: str | Path) -> list[Path]:
    """What `read_variant` reads of a run folder."""
    return [Path(run_dir, stage, file) for stage, file in FILES]


def read_variant(provenance: str | Path, questions: str | Path, turns: str | Path) -> Variant:
    """From the files that a run leaves; the name is that of the variant's folder,
    runs/<experiment>/<name>/<domain>."""
    path = Path(provenance).resolve()
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        sections, seed = record["parameters"], record["seeds"]["run"]
    except (json.JSONDecodeError, KeyError) as error:
        raise tables.TableError(
            f"{path}: no whole record of a run ({error}); run that variant again"
        ) from error
    parameters = {
        f"{section}.{key}": value
        for section, values in sections.items()
        if section not in _ASIDE
        for key, value in values.items()
    }
    return Variant(
        path.parents[1].name,
        seed,
        parameters,
        tables.read(questions, tables.QUESTIONS),
        tables.read(turns, tables.TURNS),
    )


def differences(variant: Variant, reference: Variant) -> dict[str, Any]:
    """The parameters in which a variant differs from the reference, with its values."""
    names = variant.parameters.keys() | reference.parameters.keys()
    return {
        name: variant.parameters.get(name)
        for name in sorted(names)
        if variant.parameters.get(name) != reference.parameters.get(name)
    }


def compare(
    variants: Sequence[Variant],
    *,
    systems: Sequence[str] = COMPARED,
    resamples: int = 10_000,
    seed: int = 0,
) -> pd.DataFrame:
    """`tables.ABLATIONS`: one row per setting and system, the first variant's own rows first.

    Raises TableError where two variants are the same setting with the same seed, where the
    reference lacks a seed of a row, and where they answered different questions.
    """
    if not variants:
        raise tables.TableError(
            "no variant has been evaluated yet; run python run_all.py --params"
            " params/ablations.yaml"
        )
    settings = _settings(variants)
    reference = next(iter(settings.values()))
    options = {"resamples": resamples, "seed": seed}
    rows = []
    for system in systems:
        for changed, found in settings.items():
            ours = {s: v for s, v in found.items() if system in set(v.questions["system"])}
            if not ours:
                continue
            missing = [
                v
                for s, v in ours.items()
                if s not in reference or system not in set(reference[s].questions["system"])
            ]
            if missing:
                raise tables.TableError(
                    f"{missing[0].name}: the reference was not evaluated as '{system}' with seed"
                    f" {missing[0].seed}; run its variant with that seed too"
                )
            rows.append(
                {"setting": changed, "system": system} | _row(ours, reference, system, options)
            )
    return tables.read(pd.DataFrame(rows)[list(tables.ABLATIONS.columns)], tables.ABLATIONS)


def by_type(variants: Sequence[Variant], systems: Sequence[str] = COMPARED) -> pd.DataFrame:
    """Accuracy per question type, averaged over seeds: one row per setting and system, one column
    per type."""
    rows = []
    for changed, found in _settings(variants).items():
        pooled = pd.concat([v.questions for v in found.values()])
        pooled = pooled[pooled["system"].isin(systems)]
        rows.append(
            pooled.groupby(["system", "question_type"])["correct"]
            .mean()
            .unstack()
            .assign(setting=changed)
        )
    table = pd.concat(rows).reset_index().set_index(["system", "setting"])
    return table.sort_index(
        level="system",
        sort_remaining=False,
        key=lambda names: names.map(systems.index),
        kind="stable",
    )[tables.in_order(table.columns, tables.QUESTION_TYPES)]


def each_run(
    variants: Sequence[Variant],
    systems: Sequence[str] = COMPARED,
    *,
    resamples: int = 10_000,
    seed: int = 0,
) -> pd.DataFrame:
    """Every variant against its *own* base, as people read it: one row per system and variant, so
    that seeds can be compared."""
    options, rows = {"resamples": resamples, "seed": seed}, []
    for variant in variants:
        summary = statistics.readable(statistics.summarise(variant.questions, **options))
        modes = statistics.adaptivity(variant.turns, **options).set_index("system")
        chosen = summary.loc[[system for system in systems if system in summary.index]].drop(
            columns=["n", "turns"]
        )
        chosen["hard − easy, points"] = tables.with_intervals(
            modes.loc[chosen.index], "explicit_share_difference", 100, ".0f"
        )
        chosen["I(X;M), bit"] = tables.with_intervals(
            modes.loc[chosen.index], "mutual_information", 1, ".3f"
        )
        rows.append(chosen.reset_index().assign(variant=variant.name, seed=variant.seed))
    table = pd.concat(rows).set_index(["system", "variant", "seed"])
    return table.sort_index(
        level="system",
        sort_remaining=False,
        key=lambda names: names.map(systems.index),
        kind="stable",
    )


def readable(table: pd.DataFrame) -> pd.DataFrame:
    """`tables.ABLATIONS` as people read it: percent, points and tokens, each with its interval."""
    table = tables.read(table, tables.ABLATIONS)
    several = table["seeds"] > 1
    spread = [
        f"{100 * low:+.1f} … {100 * high:+.1f}" if many else ""
        for low, high, many in zip(
            table["difference_lowest"], table["difference_highest"], several, strict=True
        )
    ]
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


def _settings(variants: Sequence[Variant]) -> dict[str, dict[int, Variant]]:
    """Setting as people read it → seed → variant, in the order given; the first is the reference."""
    settings: dict[str, dict[int, Variant]] = {}
    for variant in variants:
        changed = differences(variant, variants[0])
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
    ours: Mapping[int, Variant], reference: Mapping[int, Variant], system: str, options: dict
) -> dict[str, Any]:
    answers = {seed: _answers(variant, system) for seed, variant in ours.items()}
    theirs = {seed: _answers(reference[seed], system) for seed in ours}
    bases = {seed: _answers(variant, "base") for seed, variant in ours.items()}
    asked = next(iter(answers.values())).index
    for found in (*answers.values(), *theirs.values(), *bases.values()):
        if not found.index.equals(asked):
            raise tables.TableError(
                f"{', '.join(v.name for v in ours.values())} and the reference answered different"
                " questions; use the same eval.questions and eval.sets for all variants"
            )

    def mean(found: Mapping[int, pd.DataFrame], column: str) -> np.ndarray:
        return np.mean([frame[column].to_numpy(float) for frame in found.values()], axis=0)

    each = [answers[s]["correct"].mean() - theirs[s]["correct"].mean() for s in ours]
    turns = pd.concat(
        [v.turns[v.turns["system"] == system].assign(seed=s) for s, v in ours.items()]
    )
    modes = [statistics.adaptivity(part, resamples=1).iloc[0] for _, part in turns.groupby("seed")]
    moded = turns[turns["mode"] != "none"]
    return {
        "seeds": len(ours),
        "n": len(asked),
        **_interval("accuracy", statistics.bootstrap_mean(mean(answers, "correct"), **options)),
        **_interval(
            "accuracy_difference",
            statistics.paired_bootstrap(
                mean(answers, "correct"), mean(theirs, "correct"), **options
            ),
        ),
        "difference_lowest": min(each),
        "difference_highest": max(each),
        **_interval(
            "tokens", statistics.bootstrap_mean(mean(answers, "generated_tokens"), **options)
        ),
        **_interval(
            "token_reduction",
            statistics.token_reduction(
                mean(bases, "generated_tokens"), mean(answers, "generated_tokens"), **options
            ),
        ),
        "latent_share": float((moded["mode"] == "latent").mean()),
        "explicit_difference": float(np.mean([row["explicit_share_difference"] for row in modes])),
        "mutual_information": float(np.mean([row["mutual_information"] for row in modes])),
    }


def _answers(variant: Variant, system: str) -> pd.DataFrame:
    rows = variant.questions[variant.questions["system"] == system]
    if rows.empty:
        raise tables.TableError(f"{variant.name}: '{system}' was not evaluated; see eval.systems")
    return rows.set_index("question_id").sort_index()


def _interval(name: str, found: statistics.Estimate) -> dict[str, float]:
    return {name: found.mean, f"{name}_low": found.low, f"{name}_high": found.high}

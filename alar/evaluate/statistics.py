"""What the evaluation tables say, and how far chance could move it.

Every system and every metric of a comparison uses the same draws of questions, so differences are
paired. Results depend only on the seed and the data. The order of rows and the other systems in the
table do not matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import pandas as pd

from alar.evaluate import tables
from alar.evaluate.intervals import (
    Estimate,
    bootstrap_mean,
    estimate,
    paired_bootstrap,
    ratio,
    resampled_sums,
    running_mean,
    token_reduction,
    wilson,
)
from alar.rl.objective import binary_entropy

__all__ = [
    "Estimate",
    "adaptivity",
    "aes",
    "bootstrap_mean",
    "compare_systems",
    "efficiency",
    "mode_share",
    "paired_bootstrap",
    "readable_sets",
    "readable_summary",
    "running_mean",
    "summarise",
    "summarise_sets",
    "token_reduction",
    "wilson",
]


def aes(accuracy, base_accuracy, tokens, base_tokens):
    """Accuracy-efficiency score (O1-Pruner, arXiv 2501.12570): changes relative to the base.

    Saved tokens count once, gained accuracy three times, lost accuracy five times. Takes numbers or
    arrays. It is NaN where the base has accuracy 0 or no tokens.
    """
    saved = 1 - ratio(tokens, base_tokens)  # a fraction; negative where tokens were added
    gained = ratio(np.subtract(accuracy, base_accuracy), base_accuracy)  # a fraction of the base's
    # `[()]` turns an array without dimensions into a plain number.
    return saved + np.where(gained >= 0, 3 * gained, 5 * gained)[()]


def summarise(
    questions: pd.DataFrame,
    base: str = "base",
    *,
    resamples: int = 10_000,
    seed: int = 0,
    table: tables.Table = tables.QUESTIONS,
) -> pd.DataFrame:
    """One row per system and question type (and "all"): the columns of `tables.SUMMARY`.

    `em` and `tokens` are means over questions. `latent_share` is latent turns over turns that hold
    a reasoning block. Differences are paired with `base`; they are NaN if the table has no such
    system. Raises TableError if a system lacks questions that another one answered.
    """
    questions = _aligned(tables.read(questions, table), table)
    rows = []
    for question_type, part in _by_type(questions):
        systems = tables.in_order(part["system"], tables.SYSTEMS)
        # One frame per system, with the questions in the same order in all of them.
        columns = {name: _per_question(part[part["system"] == name]) for name in systems}
        draws = _draw_together(columns, resamples, seed)  # system → frame of sums
        n = len(next(iter(columns.values())))  # questions, as many for every system
        for system in systems:
            row = {"system": system, "question_type": question_type, "n": n}
            row |= _levels(columns[system].sum(), draws[system], n)
            row |= _differences(columns, draws, system, base, n)
            rows.append(row)
    summary = pd.DataFrame(rows)[list(tables.SUMMARY.columns)]
    order = tables.in_order(questions["system"], tables.SYSTEMS)
    return summary.sort_values(
        "system", key=lambda names: names.map(order.index), kind="stable", ignore_index=True
    )


def summarise_sets(
    questions: pd.DataFrame,
    set_of: Mapping[str, str],
    base: str = "base",
    *,
    resamples: int = 10_000,
    seed: int = 0,
) -> pd.DataFrame:
    """`summarise` with sets in place of question types, and where there are several, their mean.

    `set_of` maps a question's id to its set. The rows "macro" are unweighted means over the sets,
    as the paper's numbers are, and compare with the base's; their `n` counts all questions. Their
    intervals resample questions within each set. Raises TableError for a question without a set.
    """
    named = questions["question_id"].map(set_of)
    if named.isna().any():
        lost = questions.loc[named.isna(), "question_id"].iloc[0]
        raise tables.TableError(
            f"table 'questions': question '{lost}' is of no set; {tables.QUESTIONS.origin}: give"
            " the set of every question that was asked"
        )
    questions = questions.assign(question_type=named)
    summary = summarise(questions, base, resamples=resamples, seed=seed)
    if named.nunique() == 1:
        return summary
    macro = _macro(_aligned(questions, tables.QUESTIONS), base, resamples, seed)
    return pd.concat([summary, macro], ignore_index=True)


def compare_systems(
    questions: pd.DataFrame,
    a: str,
    b: str,
    *,
    resamples: int = 10_000,
    seed: int = 0,
    table: tables.Table = tables.QUESTIONS,
) -> pd.DataFrame:
    """System `a` against system `b` on the same questions, one row per question type and "all".

    `em_difference` is a − b. `token_ratio` is the mean tokens of a over those of b: 1.25 means 25 %
    more than b.
    """
    questions = tables.read(questions, table)
    for system in (a, b):
        if system not in set(questions["system"]):
            known = ", ".join(tables.in_order(questions["system"], tables.SYSTEMS))
            raise tables.TableError(
                f"table '{table.name}' has no system '{system}'; it has {known}; {table.origin}"
            )
    # Without the other systems, which may lack questions.
    pair = questions[questions["system"].isin([a, b])]
    summary = summarise(pair, b, resamples=resamples, seed=seed, table=table)
    ours = summary[summary["system"] == a].set_index("question_type")
    theirs = summary[summary["system"] == b].set_index("question_type")
    reduction = Estimate.read(ours, "token_reduction")
    # The ratio is 1 − reduction, so the ends of the interval change places.
    ratios = Estimate(1 - reduction.value, 1 - reduction.high, 1 - reduction.low)
    columns = {
        "system": a,
        "reference": b,
        "n": ours["n"],
        "em": ours["em"],
        "em_reference": theirs["em"],
        **Estimate.read(ours, "em_difference").columns("em_difference"),
        "tokens": ours["tokens"],
        "tokens_reference": theirs["tokens"],
        **ratios.columns("token_ratio"),
    }
    return pd.DataFrame(columns).reset_index()


def efficiency(
    questions: pd.DataFrame,
    base: str = "base",
    *,
    resamples: int = 10_000,
    seed: int = 0,
    table: tables.Table = tables.QUESTIONS,
) -> pd.DataFrame:
    """`aes` of every system over all questions, with its interval; one row per system."""
    questions = _aligned(tables.read(questions, table), table)
    systems = tables.in_order(questions["system"], tables.SYSTEMS)
    columns = {name: _per_question(questions[questions["system"] == name]) for name in systems}
    draws = _draw_together(columns, resamples, seed)

    totals = {name: frame.sum() for name, frame in columns.items()}  # system → sums

    # Sums are enough: the number of questions cancels out in every ratio.
    def score(sums, system: str):
        return aes(
            sums[system]["correct"],
            sums[base]["correct"],
            sums[system]["tokens"],
            sums[base]["tokens"],
        )

    rows = []
    for system in systems:
        found = estimate(score(totals, system), score(draws, system))
        rows.append({"system": system} | found.columns("aes"))
    return pd.DataFrame(rows)


def adaptivity(turns: pd.DataFrame, *, resamples: int = 10_000, seed: int = 0) -> pd.DataFrame:
    """`tables.ADAPTIVITY`: does the mode follow the difficulty of the turn? One row per system.

    The explicit share is think turns over turns that hold a reasoning block. H(M), H(M|X) and
    I(X;M) = H(M) − H(M|X) are in bits and come from the exact p(latent | state) of each scored
    turn: H(M) is the entropy of the mean probability, H(M|X) the mean entropy. Intervals resample
    whole questions. A value is NaN if the system has no such turns.
    """
    turns = tables.read(turns, tables.TURNS)
    rows = []
    for system in tables.in_order(turns["system"], tables.SYSTEMS):
        part = turns[turns["system"] == system]
        sums = _per_question_modes(part)  # one row per question
        draws = resampled_sums(sums.to_numpy(float), resamples, seed)  # (resamples, columns)
        point = _mode_statistics(sums.sum())  # name → value
        spread = _mode_statistics(pd.DataFrame(draws, columns=sums.columns))  # name → (resamples,)
        row = {
            "system": system,
            "n": len(sums),
            "turns": len(part),
            "hard_turns": int(part["hard"].sum()),
        }
        for name, value in point.items():
            row |= estimate(value, spread[name]).columns(name)
        rows.append(row)
    return pd.DataFrame(rows)[list(tables.ADAPTIVITY.columns)]


def mode_share(turns: pd.DataFrame) -> pd.DataFrame:
    """`tables.MODE_SHARE`: latent share by system, question type, turn number and hardness.

    Intervals are Wilson's. A question has one turn of each number, so the turns of one row are
    independent. Turns without a reasoning block are left out.
    """
    turns = tables.read(turns, tables.TURNS)
    moded = turns[turns["mode"] != "none"]  # a turn without a block chose no mode
    rows = []
    for system in tables.in_order(moded["system"], tables.SYSTEMS):
        for question_type in tables.in_order(moded["question_type"], tables.QUESTION_TYPES):
            part = moded[(moded["system"] == system) & (moded["question_type"] == question_type)]
            for (turn, hard), group in part.groupby(["turn", "hard"], sort=True):
                share = wilson((group["mode"] == "latent").sum(), len(group))
                about = {
                    "system": system,
                    "question_type": question_type,
                    "turn": int(turn),
                    "n": len(group),
                    "hard": bool(hard),
                }
                rows.append(about | share.columns("latent_share"))
    return pd.DataFrame(rows, columns=list(tables.MODE_SHARE.columns))


def readable_summary(summary: pd.DataFrame, question_type: str = "all") -> pd.DataFrame:
    """The summary as people read it: percent and tokens, each followed by its interval."""
    summary = tables.read(summary, tables.SUMMARY)
    rows = summary[summary["question_type"] == question_type].set_index("system")
    return pd.DataFrame(
        {
            "n": rows["n"],
            "accuracy %": tables.with_intervals(rows, "em", 100),
            "accuracy − base, points": tables.with_intervals(rows, "em_difference", 100, "+.1f"),
            "tokens": tables.with_intervals(rows, "tokens"),
            "fewer tokens %": tables.with_intervals(rows, "token_reduction", 100),
            "turns": rows["turns"].round(2),
            "latent share %": tables.with_intervals(rows, "latent_share", 100),
        }
    )


def readable_sets(summary: pd.DataFrame, released_check: pd.DataFrame | None = None):
    """What `summarise_sets` returns as people read it: one row per set and system, then the mean.

    `released_check` is the same table by the check that published numbers of tools come from.
    """
    rows = summary[summary["question_type"] != "all"].set_index(["question_type", "system"])
    shown = pd.DataFrame({"n": rows["n"], "accuracy %": tables.with_intervals(rows, "em", 100)})
    if released_check is not None:
        judged = released_check.set_index(["question_type", "system"])
        accuracies = pd.Series(tables.with_intervals(judged, "em", 100), judged.index)
        # A set that the released check does not know has no verdict of it.
        shown["accuracy %, published protocol"] = accuracies.reindex(shown.index).fillna("–")
    shown["tokens"] = tables.with_intervals(rows, "tokens")
    shown["fewer tokens %"] = tables.with_intervals(rows, "token_reduction", 100)
    shown["latent share %"] = tables.with_intervals(rows, "latent_share", 100)
    sets = list(dict.fromkeys(rows.index.get_level_values("question_type")))
    return shown.loc[sets].rename_axis(["set", "system"])


def _aligned(questions: pd.DataFrame, table: tables.Table) -> pd.DataFrame:
    """The table sorted by question.

    Raises TableError unless every system answered every question exactly once.
    """
    twice = questions.duplicated(["system", "question_id"])
    if twice.any():
        row = questions[twice].iloc[0]
        raise tables.TableError(
            f"table '{table.name}': system '{row['system']}' has question '{row['question_id']}'"
            f" twice; {table.origin}"
        )
    types = questions.groupby("question_id")["question_type"].nunique()  # types of each question
    if (types > 1).any():
        raise tables.TableError(
            f"table '{table.name}': question '{types.idxmax()}' has several values of"
            f" question_type; {table.origin}"
        )
    everything = set(questions["question_id"])  # what any system answered
    for system, ids in questions.groupby("system")["question_id"]:
        missing = sorted(everything - set(ids))
        if missing:
            shown = ", ".join(missing[:5])
            if len(missing) > 5:
                shown += f" and {len(missing) - 5} more"
            raise tables.TableError(
                f"table '{table.name}': system '{system}' lacks {len(missing)} of {len(everything)}"
                f" questions ({shown}), so systems cannot be paired; {table.origin}: run it again"
                " for all systems"
            )
    # One order for all systems pairs them, and makes results independent of the rows' order.
    return questions.sort_values("question_id", kind="stable")


def _by_type(questions: pd.DataFrame) -> Iterable[tuple[str, pd.DataFrame]]:
    # (question type, its rows), with the pool of all types first.
    yield "all", questions
    for question_type in tables.in_order(questions["question_type"], tables.QUESTION_TYPES):
        yield question_type, questions[questions["question_type"] == question_type]


def _per_question(part: pd.DataFrame) -> pd.DataFrame:
    # One system's rows as floats (questions, 5). Every metric is a mean or a ratio of their sums.
    return pd.DataFrame(
        {
            "correct": part["correct"].astype(float),
            "tokens": part["generated_tokens"].astype(float),
            "turns": part["turns"].astype(float),
            "latent": part["latent_turns"].astype(float),
            "reasoned": (part["latent_turns"] + part["think_turns"]).astype(float),
        }
    )


def _draw_together(
    columns: dict[str, pd.DataFrame], resamples: int, seed: int
) -> dict[str, pd.DataFrame]:
    """Resampled sums per system, from the same draws of questions for all of them."""
    # (questions, systems · columns)
    stacked = np.concatenate([frame.to_numpy() for frame in columns.values()], axis=1)
    sums = resampled_sums(stacked, resamples, seed)  # (resamples, systems · columns)
    parts = np.split(sums, len(columns), axis=1)  # systems × (resamples, columns)
    return {
        name: pd.DataFrame(part, columns=columns[name].columns)
        for name, part in zip(columns, parts, strict=True)
    }


def _levels(total: pd.Series, draws: pd.DataFrame, n: int) -> dict[str, float]:
    em = estimate(total["correct"] / n, draws["correct"].to_numpy() / n)
    tokens = estimate(total["tokens"] / n, draws["tokens"].to_numpy() / n)
    # Over turns, not over questions: a question with many turns counts more.
    share = ratio(total["latent"], total["reasoned"])
    shares = ratio(draws["latent"], draws["reasoned"])  # (resamples,)
    return {
        **em.columns("em"),
        **tokens.columns("tokens"),
        "turns": total["turns"] / n,
        **estimate(share, shares).columns("latent_share"),
    }


def _differences(columns, draws, system: str, base: str, n: int) -> dict[str, float]:
    if base not in columns:
        unknown = Estimate(np.nan, np.nan, np.nan)
        return unknown.columns("em_difference") | unknown.columns("token_reduction")
    total, reference = columns[system].sum(), columns[base].sum()
    gain = (total["correct"] - reference["correct"]) / n
    # Draw i holds the same questions for both systems, so these differences are paired.
    gains = (draws[system]["correct"] - draws[base]["correct"]).to_numpy() / n
    reduction = 1 - ratio(total["tokens"], reference["tokens"])
    reductions = 1 - ratio(draws[system]["tokens"], draws[base]["tokens"])
    return {
        **estimate(gain, gains).columns("em_difference"),
        **estimate(reduction, reductions).columns("token_reduction"),
    }


def _macro(questions: pd.DataFrame, base: str, resamples: int, seed: int) -> pd.DataFrame:
    """`tables.SUMMARY` of the mean over the sets, one row per system; `questions` are aligned."""
    systems = tables.in_order(questions["system"], tables.SYSTEMS)
    points: dict[str, list] = {system: [] for system in systems}  # one frame (1, 5) per set
    spreads: dict[str, list] = {system: [] for system in systems}  # one (resamples, 5) per set
    for number, (_, part) in enumerate(questions.groupby("question_type", sort=False)):
        columns = {name: _per_question(part[part["system"] == name]) for name in systems}
        # Another seed for each set, so that their draws are independent.
        draws = _draw_together(columns, resamples, seed + number)
        n = len(columns[systems[0]])
        for system in systems:
            points[system].append(_set_means(columns[system].sum().to_frame().T, n))
            spreads[system].append(_set_means(draws[system], n))
    mean = {system: sum(found) / len(found) for system, found in points.items()}
    means = {system: sum(found) / len(found) for system, found in spreads.items()}
    rows = []
    for system in systems:
        count = int((questions["system"] == system).sum())
        row = {"system": system, "question_type": tables.MACRO, "n": count}
        # These are means already: one "question" each.
        row |= _levels(mean[system].sum(), means[system], 1)
        row |= _differences(mean, means, system, base, 1)
        rows.append(row)
    return pd.DataFrame(rows)[list(tables.SUMMARY.columns)]


def _set_means(sums: pd.DataFrame, n: int) -> pd.DataFrame:
    """Means of one set from sums over its n questions: (rows, 5) → (rows, 5).

    The latent share stands as `latent` over a `reasoned` of 1, so that sets weigh the same.
    """
    return (sums / n).assign(latent=ratio(sums["latent"], sums["reasoned"]), reasoned=1.0)


def _per_question_modes(part: pd.DataFrame) -> pd.DataFrame:
    """Per question: numbers of turns by mode and difficulty, and sums over the scored turns."""
    moded = part["mode"] != "none"
    explicit = part["mode"] == "think"
    scored = part["p_latent"].notna()  # a base without latent blocks has no p
    p = part["p_latent"].fillna(0.0)  # adds nothing to the sums: `scored` does not count it
    counts = {
        "hard": moded & part["hard"],
        "hard_explicit": explicit & part["hard"],
        "easy": moded & ~part["hard"],
        "easy_explicit": explicit & ~part["hard"],
        "scored": scored,
        "p": p,
        "entropy": scored * binary_entropy(p),
    }
    return pd.DataFrame(counts).astype(float).groupby(part["question_id"], sort=True).sum()


def _mode_statistics(sums) -> dict[str, np.ndarray]:
    """Statistics from sums over turns: of one total (a series) or of resamples (a frame)."""
    hard = ratio(sums["hard_explicit"], sums["hard"])
    easy = ratio(sums["easy_explicit"], sums["easy"])
    # H(M) in bits. Rounding may carry the mean of probabilities just past 1.
    marginal = binary_entropy(np.clip(ratio(sums["p"], sums["scored"]), 0, 1))
    given_state = ratio(sums["entropy"], sums["scored"])
    return {
        "explicit_share_hard": hard,
        "explicit_share_easy": easy,
        "explicit_share_difference": hard - easy,
        "mode_entropy": marginal,
        "mode_entropy_given_state": given_state,
        "mutual_information": marginal - given_state,
    }

"""What z encodes, as far as a linear probe can read it.

| target | kind | where |
|---|---|---|
| type | class | question type |
| hard | class | whether this turn needs a computation |
| query_entity | name | what the next search asks about, of turns that search |
| function | name | what the next call calls first, of turns that call |
| provider | class | by which provider's name it calls it: to be read from the request, not known by
heart | | bridge_entity | name | the territory between the two hops, of bridge questions | | number
| class | a numeric answer, above or below the median of its question type |

A class is read by logistic regression with an L2 penalty. Names are too many for classes: a ridge
regression maps z to the mean token embedding of the name, and the nearest of all names in the data
counts. Features are standardised; folds keep each question's turns together. Every turn number is
probed by itself, or the turn number would answer for the state.

Two controls say what a score is worth: the same probe on *shuffled labels*, and on the *mean token
embedding of the question* instead of z, which knows the words but not the state. A probe shows what
can be read, not what is used: for that, see `alar.inspector.interventions`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import GroupKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from alar.domains.search.world import world
from alar.domains.tool.functions import own_name
from alar.domains.tool.protocol import parse_calls
from alar.evaluate.statistics import bootstrap_mean, paired_bootstrap
from alar.inspector.blocks import Site
from alar.inspector.lens import token_embeddings
from alar.rollout.codec import Codec

TARGETS = {
    "type": "class",
    "hard": "class",
    "query_entity": "name",
    "function": "name",
    "provider": "class",
    "bridge_entity": "name",
    "number": "class",
}
_QUERY_SUFFIXES = (" currency", " languages")


def labels(sites: Sequence[Site]) -> pd.DataFrame:
    """One row per site: question, turn (from 1) and every target, missing where it does not apply."""
    table = pd.DataFrame([_labels(site) for site in sites])
    middle = table.groupby("type")["number"].transform("median")
    above = np.where(
        table["number"].isna(),
        None,
        (table["number"] > middle).map({True: "above", False: "below"}),
    )
    return table.assign(number=above)


def _labels(site: Site) -> dict:
    question, number = site.trajectory.question, site.block.turn
    turn, answer = site.trajectory.turns[number], question.answers[0] if question.answers else ""
    function, provider = own_name(_called(turn.argument) if turn.action == "call" else "")
    return {
        "question_id": question.id,
        "turn": number + 1,
        "type": question.type or None,
        "hard": "hard" if number in question.hard_turns else "easy",
        "query_entity": _entity(turn.argument) if turn.action == "search" else None,
        "function": function or None,
        "provider": provider or None,
        "bridge_entity": (
            _bridge(question) if question.type == "bridge" and question.world else None
        ),
        "number": float(answer) if answer.isdigit() else float("nan"),
    }


def _entity(query: str) -> str | None:
    for suffix in _QUERY_SUFFIXES:
        query = query.removesuffix(suffix)
    return query or None


def _called(text: str) -> str:
    calls, _ = parse_calls(text)
    return calls[0]["name"] if calls else ""


def _bridge(question) -> str | None:
    """The territory of the city that the question names (the longest one, if names contain each
    other)."""
    cities = world(question.world).cities
    named = [city for city in cities if city in question.text]
    return cities[max(named, key=len)] if named else None


def question_embeddings(sites: Sequence[Site], model, codec: Codec) -> np.ndarray:
    """(sites, H): mean token embedding of each question's text."""
    return _text_embeddings([site.trajectory.question.text for site in sites], model, codec)


def _text_embeddings(texts: Sequence[str], model, codec: Codec) -> np.ndarray:
    table = token_embeddings(model)
    return np.stack([table[codec.untrusted(text)].mean(0).cpu().numpy() for text in texts]).astype(
        np.float64
    )


def class_hits(
    features: np.ndarray, classes: np.ndarray, groups: np.ndarray, *, folds: int = 5
) -> np.ndarray:
    """Whether each row's class is predicted by a logistic probe that never saw its group."""
    hits = np.zeros(len(classes), dtype=bool)
    for train, test in GroupKFold(folds).split(features, classes, groups):
        if len(set(classes[train])) < 2:
            hits[test] = classes[test] == classes[train][0]
            continue
        probe = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=300))
        hits[test] = (
            probe.fit(features[train], classes[train]).predict(features[test]) == classes[test]
        )
    return hits


def name_hits(
    features: np.ndarray,
    names: np.ndarray,
    embeddings: dict[str, np.ndarray],
    groups: np.ndarray,
    *,
    folds: int = 5,
):
    """Whether the name nearest to each row's prediction is its own, for a ridge probe that never
    saw its group."""
    candidates = sorted(set(names))
    table = np.stack([embeddings[name] for name in candidates])  # (names, H)
    centre = table.mean(0)
    table = table - centre
    unit = table / np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1e-12)
    row_of = {name: row for row, name in enumerate(candidates)}
    own = np.array([row_of[name] for name in names])
    hits = np.zeros(len(names), dtype=bool)
    for train, test in GroupKFold(folds).split(features, own, groups):
        probe = make_pipeline(StandardScaler(), Ridge(alpha=10.0)).fit(
            features[train], table[own[train]]
        )
        hits[test] = (probe.predict(features[test]) @ unit.T).argmax(1) == own[test]
    return hits


def probe_table(
    sites: Sequence[Site],
    model,
    codec: Codec,
    *,
    targets: Sequence[str] = tuple(TARGETS),
    folds: int = 5,
    least: int = 10,
    resamples: int = 10_000,
    seed: int = 0,
) -> pd.DataFrame:
    """One row per target, turn and step k: accuracy, the two controls, and accuracy − embedding,
    with 95 % intervals.

    Classes with fewer than `least` turns are left out; a target is skipped at a turn where fewer
    than two classes, or fewer than `least` turns in all, remain. `common` is the share of the most
    frequent label: what guessing it would score. Intervals resample questions. Blocks must be
    equally long (ValueError).
    """
    if len({site.block.stop - site.block.start for site in sites}) > 1:
        raise ValueError("the blocks of these turns have different lengths: probe one K at a time")
    about, rows = labels(sites), []
    z = np.stack([site.z for site in sites]).astype(np.float64)  # (sites, K, H)
    words = question_embeddings(sites, model, codec)
    rng = np.random.default_rng(seed)
    options = {"resamples": resamples, "seed": seed}
    for target in targets:
        for turn in sorted(about["turn"].unique()):
            chosen = _usable(about, target, turn, least)
            groups = about["question_id"].to_numpy()[chosen]
            if len(set(groups)) < max(folds, least):
                continue
            own = about[target].to_numpy()[chosen]
            score = _scorer(target, own, model, codec, groups, folds)
            shuffled = own[rng.permutation(len(own))]
            by_words = _by_question(score(words[chosen], own), groups)
            for step in range(z.shape[1]):
                hits = _by_question(score(z[chosen, step], own), groups)
                chance = _by_question(score(z[chosen, step], shuffled), groups)
                row = {
                    "target": target,
                    "turn": turn,
                    "k": step + 1,
                    "turns": len(own),
                    "questions": len(hits),
                }
                row |= {
                    "labels": len(set(own)),
                    "common": pd.Series(own).value_counts(normalize=True).iloc[0],
                }
                for name, values in (
                    ("accuracy", hits),
                    ("shuffled", chance),
                    ("embedding", by_words),
                ):
                    row |= dict(
                        zip(
                            (name, f"{name}_low", f"{name}_high"), bootstrap_mean(values, **options)
                        )
                    )
                names = ("difference", "difference_low", "difference_high")
                rows.append(row | dict(zip(names, paired_bootstrap(hits, by_words, **options))))
    return pd.DataFrame(rows)


def _usable(about: pd.DataFrame, target: str, turn: int, least: int) -> np.ndarray:
    """Row numbers of one turn number that have a label; of a class target, those of classes that
    are frequent enough."""
    part = about[(about["turn"] == turn) & about[target].notna()]
    if TARGETS[target] == "class":
        counts = part[target].value_counts()
        part = part[part[target].isin(counts[counts >= least].index)]
    return part.index.to_numpy() if part[target].nunique() > 1 else np.zeros(0, dtype=int)


def _scorer(target: str, names: np.ndarray, model, codec: Codec, groups: np.ndarray, folds: int):
    if TARGETS[target] == "class":
        return lambda features, own: class_hits(features, own, groups, folds=folds)
    texts = sorted(set(names))
    embeddings = dict(zip(texts, _text_embeddings(texts, model, codec)))
    return lambda features, own: name_hits(features, own, embeddings, groups, folds=folds)


def _by_question(hits: np.ndarray, groups: np.ndarray) -> np.ndarray:
    return pd.Series(hits.astype(float)).groupby(groups, sort=False).mean().to_numpy()

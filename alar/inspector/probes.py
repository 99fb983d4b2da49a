"""What z encodes, as far as a linear probe can read it.

| target        | kind  | what                                                                |
|---------------|-------|---------------------------------------------------------------------|
| type          | class | question type                                                       |
| hard          | class | whether this turn needs a computation                               |
| query_entity  | name  | what the next search asks about; turns that search only             |
| function      | name  | the function that the next call names first; turns that call only   |
| provider      | class | the provider in that name, which stands in the request              |
| bridge_entity | name  | the territory between the two hops; bridge questions only           |
| number        | class | a numeric answer, above or below the median of its question type    |

Logistic regression with an L2 penalty reads a class. Names are too many for classes: a ridge
regression maps z to the mean token embedding of the name, and the guess is the nearest of all names
in the data. Features are standardised; folds keep each question's turns together. Every turn number
has probes of its own, because otherwise a probe could read the turn number instead of the state.

Two controls say what a score is worth: the same probe on *shuffled labels*, and the same probe on
the *mean token embedding of the question* instead of z, which knows the words but not the state. A
probe shows what can be read, not what is used; `alar.inspector.interventions` shows use.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float
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

TARGETS = {  # target → kind
    "type": "class",
    "hard": "class",
    "query_entity": "name",
    "function": "name",
    "provider": "class",
    "bridge_entity": "name",
    "number": "class",
}


def labels(sites: Sequence[Site]) -> pd.DataFrame:
    """One row per site: question, turn (from 1), and every target, None where it does not apply."""
    table = pd.DataFrame([_labels(site) for site in sites])
    middle = table.groupby("type")["number"].transform("median")
    # NaN > median is False, so a missing number is "below" here; the last line takes that away.
    side = np.where(table["number"] > middle, "above", "below")
    return table.assign(number=np.where(table["number"].isna(), None, side))


def _labels(site: Site) -> dict:
    question, number = site.trajectory.question, site.block.turn
    turn, answer = site.trajectory.turns[number], question.answers[0] if question.answers else ""
    found = {
        "question_id": question.id,
        "turn": number + 1,
        "type": question.type or None,
        "hard": "hard" if number in question.hard_turns else "easy",
        "query_entity": None,
        "function": None,
        "provider": None,
        "bridge_entity": None,
        "number": float(answer) if answer.isdigit() else float("nan"),
    }
    if turn.action == "search":
        # A query is the entity, alone or with one of these words (`alar.domains.search.questions`).
        found["query_entity"] = (
            turn.argument.removesuffix(" currency").removesuffix(" languages") or None
        )
    if turn.action == "call":
        calls, _ = parse_calls(turn.argument)
        function, provider = own_name(calls[0]["name"] if calls else "")
        found |= {"function": function or None, "provider": provider or None}
    if question.type == "bridge" and question.world:
        found["bridge_entity"] = _bridge(question)
    return found


def _bridge(question) -> str | None:
    """The territory of the city that the question names.

    The longest name counts, since the name of one city may contain that of another.
    """
    cities = world(question.world).cities  # city → territory
    named = [city for city in cities if city in question.text]
    return cities[max(named, key=len)] if named else None


def _text_embeddings(texts: Sequence[str], model, codec: Codec) -> Float[np.ndarray, "texts H"]:
    """Mean token embedding of each text."""
    table = token_embeddings(model)  # (V, H)
    means = [table[codec.untrusted(text)].mean(0).cpu().numpy() for text in texts]
    return np.stack(means).astype(np.float64)


def class_hits(
    features: Float[np.ndarray, "N F"], classes: np.ndarray, groups: np.ndarray, *, folds: int = 5
) -> Bool[np.ndarray, " N"]:
    """Whether a logistic probe that never saw a row's group predicts its class, for each row."""
    hits = np.zeros(len(classes), dtype=bool)
    for train, test in GroupKFold(folds).split(features, classes, groups):
        predicted = classes[train][0]  # if the fold has one class only, which cannot be fitted
        if len(set(classes[train])) > 1:
            probe = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=300))
            predicted = probe.fit(features[train], classes[train]).predict(features[test])
        hits[test] = classes[test] == predicted
    return hits


def name_hits(
    features: Float[np.ndarray, "N F"],
    names: np.ndarray,
    embeddings: dict[str, np.ndarray],
    groups: np.ndarray,
    *,
    folds: int = 5,
) -> Bool[np.ndarray, " N"]:
    """Whether the name nearest to a row's prediction is its own, for each row.

    The prediction comes from a ridge probe that never saw the row's group.
    """
    candidates, own = np.unique(names, return_inverse=True)  # own: (N,), rows of the table
    table = np.stack([embeddings[name] for name in candidates])  # (names, H)
    table = table - table.mean(0)  # what all names share would make them near to each other
    unit = table / np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1e-12)
    hits = np.zeros(len(names), dtype=bool)  # (N,)
    for train, test in GroupKFold(folds).split(features, own, groups):
        probe = make_pipeline(StandardScaler(), Ridge(alpha=10.0))
        probe.fit(features[train], table[own[train]])
        scores = probe.predict(features[test]) @ unit.T  # (test rows, names)
        hits[test] = scores.argmax(1) == own[test]
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
    with 95 % intervals that resample questions.

    Classes with fewer than `least` turns are left out. A target is skipped at a turn where fewer
    than two classes remain, or fewer questions than `least` or `folds`. `common` is the share of
    the most frequent label: what guessing it would score. ValueError if the blocks are of different
    lengths.
    """
    if len({len(site.block) for site in sites}) > 1:
        raise ValueError("the blocks of these turns have different lengths: probe one K at a time")
    about, rows = labels(sites), []
    z = np.stack([site.z for site in sites]).astype(np.float64)  # (sites, K, H)
    # The control, (sites, H): it is the same at every step.
    words = _text_embeddings([site.trajectory.question.text for site in sites], model, codec)
    rng = np.random.default_rng(seed)
    options = {"resamples": resamples, "seed": seed}
    for target in targets:
        for turn in sorted(about["turn"].unique()):
            chosen = _usable(about, target, turn, least)  # row numbers of `sites`
            groups = about["question_id"].to_numpy()[chosen]
            if len(set(groups)) < max(folds, least):
                continue
            own = about[target].to_numpy()[chosen]
            score = _scorer(target, own, model, codec, groups, folds)
            # One shuffle for all steps. Groups keep their rows: only the label loses its meaning.
            shuffled = own[rng.permutation(len(own))]
            by_words = score(words[chosen], own)  # (questions,), as all scores
            for step in range(z.shape[1]):
                hits = score(z[chosen, step], own)
                row = {
                    "target": target,
                    "turn": turn,
                    "k": step + 1,
                    "turns": len(own),
                    "questions": len(hits),
                    "labels": len(set(own)),
                    "common": pd.Series(own).value_counts(normalize=True).iloc[0],
                }
                chance = score(z[chosen, step], shuffled)
                for name, found in (
                    ("accuracy", bootstrap_mean(hits, **options)),
                    ("shuffled", bootstrap_mean(chance, **options)),
                    ("embedding", bootstrap_mean(by_words, **options)),
                    ("difference", paired_bootstrap(hits, by_words, **options)),
                ):
                    row |= found.columns(name)
                rows.append(row)
    return pd.DataFrame(rows)


def _usable(about: pd.DataFrame, target: str, turn: int, least: int) -> np.ndarray:
    """Numbers of the rows of one turn that have a label; for a class target, of a frequent class.

    Empty if they have fewer than two labels.
    """
    part = about[(about["turn"] == turn) & about[target].notna()]
    if TARGETS[target] == "class":
        counts = part[target].value_counts()
        part = part[part[target].isin(counts[counts >= least].index)]
    return part.index.to_numpy() if part[target].nunique() > 1 else np.zeros(0, dtype=int)


def _scorer(target: str, names: np.ndarray, model, codec: Codec, groups: np.ndarray, folds: int):
    """A function score(features, labels) → share of hits of every question.

    `names` are the true labels, `groups` the questions, both (N,).
    """
    texts = sorted(set(names)) if TARGETS[target] == "name" else []
    embeddings = dict(zip(texts, _text_embeddings(texts, model, codec))) if texts else {}

    def score(features: np.ndarray, own: np.ndarray) -> Float[np.ndarray, " questions"]:
        if embeddings:
            hits = name_hits(features, own, embeddings, groups, folds=folds)
        else:
            hits = class_hits(features, own, groups, folds=folds)
        # A question counts once, however many turns it has. Its place depends on `groups` only, so
        # all scores of these rows are paired by question.
        return pd.Series(hits.astype(float)).groupby(groups, sort=False).mean().to_numpy()

    return score

"""Published numbers are those of the papers, marked as known, and stand beside ours without being
mixed with them."""

import numpy as np
import pandas as pd
import pytest

from alar import figures
from alar.evaluate import published, statistics, tables
from alar.evaluate.accuracy import accuracy_table
from alar.evaluate.intervals import Estimate
from alar.methods.comparison import methods_beside
from alar.methods.tokenskip.measure import readable_ratios
from alar.study.bfcl import both_accuracies

# The papers' tables: (accuracy %, tokens); None where a cell could not be found.
MEANS = {
    "Search-R1 7B": {
        "base": (42.7, 236),
        "ThinkPrune": (42.0, 220),
        "stage1": (40.5, 112),
        "alar": (41.7, 133),
    },
    "Search-R1 3B": {
        "base": (38.2, 154),
        "ThinkPrune": (37.8, 147),
        "ShorterBetter": (37.6, None),
        "O1-Pruner": (23.5, None),
        "stage1": (37.3, 94),
        "alar": (38.4, 120),
    },
    "Qwen3-4B": {
        "base": (86.1, 760),
        "ShorterBetter": (85.1, 162),
        "ThinkPrune": (88.4, 251),
        "O1-Pruner": (86.2, 156),
        "stage1": (88.8, 87),
        "alar": (89.2, 117),
    },
}
REDUCTIONS = {
    ("Search-R1 7B", "alar"): 43.6,
    ("Search-R1 3B", "alar"): 22.0,
    ("Search-R1 3B", "ShorterBetter"): 4.6,
    ("Search-R1 3B", "O1-Pruner"): -1.3,
    ("Qwen3-4B", "alar"): 84.6,
}
SHARES = {"nq": 89, "triviaqa": 91, "2wikimultihopqa": 75, "bamboogle": 59}
RATIOS = {
    "standard": {1.0: 42.8, 0.7: 52.6, 0.5: 51.6, 0.3: 44.0},
    "dual": {1.0: 43.2, 0.7: 50.4, 0.5: 53.6, 0.3: 51.2},
}
SYSTEMS = ("base", "stage1", "alar")
OPTIONS = {"resamples": 200, "seed": 0}


def questions(sizes: dict[str, int], systems=SYSTEMS) -> tuple[pd.DataFrame, dict[str, str]]:
    """`tables.QUESTIONS` with so many questions of each set, and the set of every question."""
    rng = np.random.default_rng(0)
    set_of = {f"{name}/{i:03d}": name for name, size in sizes.items() for i in range(size)}
    rows = []
    for system in systems:
        for question, name in set_of.items():
            latent = 0 if system == "base" else int(rng.integers(0, 3))
            tokens = int(rng.integers(20, 200))
            right = bool(rng.random() < (0.9 if name == "nq" else 0.4))
            rows.append((system, question, "bridge", right, tokens, 9, 3, latent, 3 - latent, True))
    return pd.DataFrame(rows, columns=list(tables.QUESTIONS.columns)), set_of


@pytest.fixture(scope="module")
def two_sets():
    return questions({"nq": 60, "hotpotqa": 20})


@pytest.fixture(scope="module")
def by_set(two_sets):
    return statistics.summarise_sets(*two_sets, **OPTIONS)


def test_published_values_are_those_of_the_papers():
    found = published.values()
    means = found[(found["set"] == "macro")].set_index(["model", "system", "metric"])["value"]
    expected = {}
    for model, systems in MEANS.items():
        for system, (accuracy, tokens) in systems.items():
            expected[model, system, "accuracy"] = accuracy
            if tokens is not None:
                expected[model, system, "tokens"] = tokens
    expected |= {(*about, "token_reduction"): value for about, value in REDUCTIONS.items()}
    assert means.to_dict() == expected
    shares = found[found["metric"] == "latent_share"]
    assert shares.set_index("set")["value"].to_dict() == SHARES
    assert set(shares["model"]) == {"Search-R1 7B"} and set(shares["system"]) == {"alar"}
    ratios = published.tokenskip_ratios()
    for model, accuracies in RATIOS.items():
        rows = ratios[ratios["model"] == model]
        assert dict(zip(rows["ratio"], rows["accuracy"])) == accuracies
    thoughts = found[found["condition"].str.startswith("K")]
    assert list(thoughts["condition"]) == [f"K = {k}" for k in (1, 2, 4, 8)]
    assert thoughts["value"].isna().all() and not found["value"].drop(thoughts.index).isna().any()


def test_every_published_value_says_how_it_is_known():
    found = published.values()
    assert set(found["note"]) == {"published", "published, second-hand", "digitised"}
    assert (found["source"] != "").all()
    digitised = found[found["note"] == "digitised"]
    assert set(zip(digitised["model"], digitised["system"])) == {
        ("Search-R1 3B", "ShorterBetter"),
        ("Search-R1 3B", "O1-Pruner"),
    }
    second = found[found["note"] == "published, second-hand"]
    assert {"accuracy", "tokens", "latent_share", "benefit"} <= set(second["metric"])
    assert set(found.loc[found["domain"] == "math", "note"]) == {"published"}


def test_the_mean_of_sets_weighs_sets_and_not_questions(two_sets, by_set):
    table, set_of = two_sets
    macro = by_set[by_set["question_type"] == "macro"].set_index("system")
    table = table.assign(set=table["question_id"].map(set_of), share=table["latent_turns"] / 3)
    means = table.groupby(["system", "set"])[["correct", "generated_tokens", "share"]].mean()
    means = means.groupby("system").mean()
    assert np.allclose(macro["em"], means.loc[macro.index, "correct"])
    assert np.allclose(macro["tokens"], means.loc[macro.index, "generated_tokens"])
    assert np.allclose(macro["latent_share"], means.loc[macro.index, "share"])
    reduction = 1 - means["generated_tokens"] / means.loc["base", "generated_tokens"]
    assert np.allclose(macro["token_reduction"], reduction[macro.index])
    assert np.allclose(macro["em_difference"], macro["em"] - macro.loc["base", "em"])
    pooled = by_set[by_set["question_type"] == "all"].set_index("system")
    assert (macro["em"] - pooled["em"]).abs().min() > 0.01 and set(macro["n"]) == {80}
    # BFCL's table computes the same mean and interval on its own.
    one = table[table["system"] == "alar"].sort_values("question_id")
    other = accuracy_table(one.rename(columns={"set": "category"}), **OPTIONS)
    other = other.set_index("category").loc["macro"]
    for ours, theirs in zip(Estimate.names("em"), Estimate.names("accuracy")):
        assert macro.loc["alar", ours] == pytest.approx(other[theirs])


def test_one_set_has_no_mean_and_its_rows_are_those_of_the_summary():
    table, set_of = questions({"real": 30})
    found = statistics.summarise_sets(table, set_of, **OPTIONS)
    assert set(found["question_type"]) == {"all", "real"}
    summary = statistics.summarise(table, **OPTIONS)
    alone, all_rows = (
        t[t["question_type"] == "all"].reset_index(drop=True) for t in (found, summary)
    )
    pd.testing.assert_frame_equal(alone, all_rows)


def test_a_question_without_a_set_is_named(two_sets):
    table, set_of = two_sets
    with pytest.raises(tables.TableError, match="'nq/007' is of no set"):
        statistics.summarise_sets(table, {k: v for k, v in set_of.items() if k != "nq/007"})


def test_published_results_stand_below_ours_with_their_model(by_set):
    shown = published.beside_published(by_set, "search", measured="measured, 1.2 M parameters")
    assert list(shown.loc["alar"].index) == ["this run", "Search-R1 7B", "Search-R1 3B"]
    ours = by_set[(by_set["system"] == "alar") & (by_set["question_type"] == "macro")].iloc[0]
    assert shown.loc[("alar", "this run"), "accuracy %"].startswith(f"{100 * ours['em']:.1f} [")
    assert shown.loc[("alar", "this run"), "numbers are"] == "measured, 1.2 M parameters"
    row = shown.loc[("alar", "Search-R1 7B")]
    assert list(row) == ["mean of sets", "41.7", "133", "43.6", "published, second-hand"]
    row = shown.loc[("ShorterBetter", "Search-R1 3B")]
    assert list(row) == ["mean of sets", "37.6", "–", "4.6", "digitised"]
    for model, systems in MEANS.items():
        for system, (accuracy, _) in systems.items():
            if model != "Qwen3-4B":
                assert shown.loc[(system, model), "accuracy %"] == f"{accuracy:.1f}"
    summary = by_set[by_set["question_type"] != "macro"]
    shown = published.beside_published(summary, "search")
    assert shown.loc[("base", "this run"), "over"] == "all questions"


def test_published_accuracies_of_tools_stand_in_the_column_of_their_own_check(by_set):
    official, lenient = "accuracy %", "accuracy %, published protocol"
    shown = published.beside_published(by_set, "tool")
    assert (shown.xs("this run", level="model")[lenient] == "–").all()
    assert (shown.xs("Qwen3-4B", level="model")[official] == "–").all()
    assert shown.loc[("alar", "Qwen3-4B"), lenient] == "89.2"
    other = by_set.assign(em=by_set["em"] / 2)
    shown = published.beside_published(by_set, "tool", released_check=other)
    ours = shown.loc[("alar", "this run")]
    assert float(ours[lenient].split()[0]) == pytest.approx(
        float(ours[official].split()[0]) / 2, abs=0.1
    )


def test_the_released_checks_verdict_is_a_table_of_its_own(two_sets):
    table, set_of = two_sets
    assert published.by_released_check(table, set_of, **OPTIONS) is None
    unknown = table.assign(published_protocol=None)
    assert published.by_released_check(unknown, set_of, **OPTIONS) is None
    judged = table.assign(published_protocol=~table["correct"])
    found = published.by_released_check(judged, set_of, **OPTIONS)
    official = statistics.summarise_sets(table, set_of, **OPTIONS)
    assert np.allclose(found["em"], 1 - official["em"])
    assert "macro" in set(found["question_type"])
    # A set that it does not know: no mean over the others may pass for the mean.
    known = table["question_id"].map(set_of) == "nq"
    partly = judged.assign(published_protocol=judged["published_protocol"].where(known))
    found = published.by_released_check(partly, set_of, **OPTIONS)
    assert set(found["question_type"]) == {"nq"}
    shown = statistics.readable_sets(official, found)["accuracy %, published protocol"]
    assert (shown.loc["hotpotqa"] == "–").all() and (shown.loc["macro"] == "–").all()
    assert "[" in shown.loc[("nq", "alar")]


def test_latent_shares_stand_beside_the_sets_they_were_published_of(by_set):
    shown = published.latent_shares_beside(by_set, ["alar"], "search")
    theirs = "Search-R1 7B, published, second-hand"
    assert shown[theirs].to_dict() == {k: str(v) for k, v in SHARES.items()} | {"hotpotqa": "–"}
    assert "[" in shown.loc["nq", "alar"] and shown.loc["bamboogle", "alar"] == "–"
    assert list(published.latent_shares_beside(by_set, ["alar"], "tool").columns) == ["alar"]


def test_published_latent_shares_are_hollow_beside_alars_own_sets():
    rows = []
    for system in ("warmup", "alar"):
        for name in ("nq", "hotpotqa"):
            for turn, hard in ((1, False), (2, False), (2, True)):
                share = Estimate(0.5 if hard else 0.8, 0.4, 0.9).columns("latent_share")
                about = {"system": system, "question_type": name, "turn": turn}
                rows.append(about | {"n": 20, "hard": hard} | share)
    figure, table = figures.latent_share(pd.DataFrame(rows))
    hollow = [
        [line for line in axes.lines if line.get_markerfacecolor() == "none"]
        for axes in figure.axes
    ]
    assert not hollow[0] and [line.get_ydata()[0] for line in hollow[1]] == [0.89]
    whole = table[(table["turn"] == "all") & (table["source"] == "measured")]
    assert list(whole["question_type"]) == ["nq", "nq"]
    assert np.allclose(whole["latent_share"], (0.8 + 0.8 + 0.5) / 3)
    words = figure._supxlabel.get_text()
    assert "hollow: Search-R1 7B, published, second-hand" in words
    figure.draw_without_rendering()
    box = figure.get_tightbbox()
    assert 0 <= box.x0 < box.x1 <= figure.get_size_inches()[0]


def test_published_means_are_hollow_in_the_figure_of_the_stages(by_set):
    figure, table = figures.stages(by_set, domain="search")
    assert set(table.loc[table["source"] == "measured", "question_type"]) == {"macro"}
    theirs = table[table["source"] == "Search-R1 3B"].set_index("system")
    assert theirs["em"].to_dict() == pytest.approx({"base": 0.382, "stage1": 0.373, "alar": 0.384})
    for axes, name in zip(figure.axes, ("em", "tokens")):
        drawn = [line.get_xdata()[0] for line in axes.lines if line.get_markerfacecolor() == "none"]
        known = table.loc[table["source"] != "measured", name]
        assert sorted(drawn) == pytest.approx(sorted(known))
        low, high = axes.get_xlim()
        assert all(low < x < high for x in drawn)
    assert "published, second-hand" in figure._supxlabel.get_text()
    plain, rows = figures.stages(by_set)
    assert len(rows) == len(SYSTEMS) and "hollow" not in plain._supxlabel.get_text()


def ratios() -> pd.DataFrame:
    rows = []
    for ratio in (1.0, 0.5, 0.1):
        row = {"model": "standard", "scorer": "surprisal", "ratio": ratio, "n": 40}
        for name, value in (("accuracy", 0.5), ("think_tokens", 50.0), ("correct_tokens", 40.0)):
            row |= Estimate(value, value - 0.05, value + 0.05).columns(name)
        rows.append(row | {"generated_tokens": 90.0})
    return pd.DataFrame(rows)[list(tables.RATIOS.columns)]


def test_tokenskips_ratios_stand_beside_the_published_ones():
    shown = readable_ratios(ratios())
    name = "accuracy %, published"
    assert shown.loc[("standard", "surprisal", 1.0), name] == "42.8"
    assert shown.loc[("standard", "surprisal", 0.1), name] == "–"
    assert shown.loc[("dual", "llmlingua2", 0.5), name] == "53.6"
    assert shown.loc[("dual", "llmlingua2", 0.5), "accuracy %"] == "–"
    everything = shown[shown[name] != "–"][name].astype(float)
    assert sorted(everything) == sorted(v for row in RATIOS.values() for v in row.values())
    figure, table = figures.ratios(ratios())
    hollow = [line for line in figure.axes[0].lines if line.get_markerfacecolor() == "none"]
    drawn = [y for line in hollow for y in line.get_ydata()]
    assert sorted(drawn) == pytest.approx(sorted(everything / 100))
    assert (table["source"] == "measured").sum() == 3


def test_compared_methods_stand_beside_the_papers_own_comparison():
    rows = []
    for method, accuracy in (("base", 0.9), ("stage 1", 0.5), ("ThinkPrune", 0.8), ("direct", 0.1)):
        row = {"domain": "tool", "method": method, "settings": "", "n": 10, "scale": "measured"}
        for name in ("accuracy", "accuracy_difference", "tokens", "token_reduction", "aes"):
            row |= Estimate(accuracy, accuracy, accuracy).columns(name)
        rows.append(row | {"training_seconds": 1.0, "training_tokens": 1.0})
    shown = methods_beside(pd.DataFrame(rows), "tool")
    assert shown.loc[("stage1", "this run"), "accuracy %"] == "50.0 [50.0, 50.0]"
    assert shown.loc[("ThinkPrune", "Qwen3-4B"), "tokens"] == "251"
    assert "direct" not in shown.index


def test_bfcls_categories_get_both_accuracies():
    results = pd.DataFrame(
        {
            "category": ["simple_python"] * 4 + ["multiple"] * 2,
            "correct": [True, True, True, False, True, False],
            "published_protocol": [True, False, False, False, True, True],
        }
    )
    found = both_accuracies(results).set_index("category")
    assert found["accuracy"].to_dict() == {"simple_python": 0.75, "multiple": 0.5, "macro": 0.625}
    lenient = found["published_protocol"].to_dict()
    assert lenient == {"simple_python": 0.25, "multiple": 1.0, "macro": 0.625}
    other = pd.DataFrame(
        {"category": "irrelevance", "correct": [True], "published_protocol": [None]}
    )
    found = both_accuracies(pd.concat([results, other])).set_index("category")
    assert found["published_protocol"].isna()[["irrelevance", "macro"]].all()
    assert found.loc["multiple", "published_protocol"] == 1.0

"""Intervals and summaries against scipy, slow loops and closed forms."""

import json

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from alar.evaluate import intervals, statistics, tables
from alar.evaluate.intervals import Estimate
from alar.rl.objective import binary_entropy

RESAMPLES = 500


def question_table(
    correct: dict[str, list[bool]], tokens: dict[str, list[int]], types=None
) -> pd.DataFrame:
    rows = []
    for system, answers in correct.items():
        for i, (right, count) in enumerate(zip(answers, tokens[system], strict=True)):
            rows.append(
                {
                    "system": system,
                    "question_id": f"q{i:03d}",
                    "question_type": types[i] if types else "single",
                    "correct": bool(right),
                    "generated_tokens": count,
                    "think_tokens": count // 2,
                    "turns": 2 + i % 2,
                    "latent_turns": i % 3,
                    "think_turns": (i + 1) % 2,
                    "well_formed": True,
                }
            )
    return pd.DataFrame(rows)


@pytest.fixture
def questions() -> pd.DataFrame:
    rng = np.random.default_rng(3)
    n = 60
    correct = {
        name: list(rng.random(n) < share)
        for name, share in {"base": 0.9, "stage1": 0.6, "alar": 0.85}.items()
    }
    tokens = {name: list(rng.integers(20, 150, n)) for name in correct}
    return question_table(correct, tokens, ["bridge", "single", "arithmetic"] * (n // 3))


def turn_table(modes, hard, p_latent, question=None, system="alar") -> pd.DataFrame:
    question = question if question is not None else range(len(modes))
    return pd.DataFrame(
        {
            "system": system,
            "question_id": [f"q{i}" for i in question],
            "question_type": "single",
            "turn": pd.Series(question).groupby(list(question)).cumcount() + 1,
            "hard": hard,
            "mode": modes,
            "tokens": 10,
            "p_latent": np.asarray(p_latent, dtype=float),
        }
    )


def test_bootstrap_interval_equals_scipys_for_the_same_seed():
    values = np.random.default_rng(1).normal(size=37)
    ours = statistics.bootstrap_mean(values, resamples=RESAMPLES, seed=5)
    theirs = stats.bootstrap(
        (values,), np.mean, n_resamples=RESAMPLES, method="percentile", rng=np.random.default_rng(5)
    ).confidence_interval
    assert ours == pytest.approx((values.mean(), theirs.low, theirs.high), abs=1e-12)


def test_an_estimate_survives_the_way_through_a_table():
    found = Estimate(0.5, 0.4, 0.7)
    table = pd.DataFrame([{"system": "alar"} | found.columns("em")])
    assert list(table) == ["system", "em", "em_low", "em_high"]
    assert Estimate.read(table.iloc[0], "em") == found
    assert tables.with_intervals(table, "em", 100) == ["50.0 [40.0, 70.0]"]


def test_intervals_do_not_depend_on_how_the_work_is_cut(monkeypatch):
    values = np.arange(23) % 7
    whole = statistics.bootstrap_mean(values, resamples=RESAMPLES)
    monkeypatch.setattr(intervals, "_CHUNK_CELLS", 100)
    assert statistics.bootstrap_mean(values, resamples=RESAMPLES) == whole


def test_same_seed_same_interval_and_another_seed_another():
    values = np.random.default_rng(1).normal(size=30)
    first, second, third = (
        statistics.bootstrap_mean(values, resamples=RESAMPLES, seed=seed) for seed in (0, 0, 1)
    )
    assert first == second and first != third


def test_paired_bootstrap_resamples_pairs():
    rng = np.random.default_rng(2)
    a, b = rng.random(25), rng.random(25)
    draws, picks = [], np.random.default_rng(7)
    for _ in range(RESAMPLES):
        chosen = [int(i) for i in picks.integers(0, 25, 25)]
        draws.append(sum(a[i] - b[i] for i in chosen) / 25)
    expected = (np.mean(a) - np.mean(b), *np.percentile(draws, [2.5, 97.5]))
    assert statistics.paired_bootstrap(a, b, resamples=RESAMPLES, seed=7) == pytest.approx(expected)


def test_token_reduction_equals_a_slow_loop():
    rng = np.random.default_rng(4)
    base, ours = rng.integers(50, 200, 40), rng.integers(20, 150, 40)
    draws, picks = [], np.random.default_rng(0)
    for _ in range(RESAMPLES):
        chosen = picks.integers(0, 40, 40)
        draws.append(1 - sum(ours[i] for i in chosen) / sum(base[i] for i in chosen))
    expected = (1 - ours.mean() / base.mean(), *np.percentile(draws, [2.5, 97.5]))
    assert statistics.token_reduction(base, ours, resamples=RESAMPLES) == pytest.approx(expected)


def test_a_constant_difference_has_an_interval_without_width():
    tokens = np.array([30, 50, 90])
    assert statistics.paired_bootstrap(tokens + 5, tokens, resamples=RESAMPLES) == (5, 5, 5)
    assert statistics.token_reduction(2 * tokens, tokens, resamples=RESAMPLES) == (0.5, 0.5, 0.5)


def test_intervals_cover_the_true_mean_about_as_often_as_they_say():
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(300):
        low, high = statistics.bootstrap_mean(rng.random(80) < 0.7, resamples=400, seed=trial)[1:]
        covered += low <= 0.7 <= high
    assert 0.90 <= covered / 300 <= 0.98


@pytest.mark.parametrize(
    "values, complaint", [([], "at least one"), ([1.0, np.nan], "1 of 2 are NaN")]
)
def test_values_without_a_mean_are_refused(values, complaint):
    with pytest.raises(ValueError, match=complaint):
        statistics.bootstrap_mean(values)


def test_pairs_of_unequal_length_are_refused():
    with pytest.raises(ValueError, match="3 .* 2"):
        statistics.paired_bootstrap([1, 2, 3], [1, 2])


@pytest.mark.parametrize("successes, n", [(0, 12), (12, 12), (7, 30)])
def test_wilson_interval_equals_scipys(successes, n):
    expected = stats.binomtest(successes, n).proportion_ci(method="wilson")
    assert statistics.wilson(successes, n)[1:] == pytest.approx(
        (expected.low, expected.high), abs=1e-12
    )


def test_running_mean_equals_a_slow_loop_and_skips_gaps():
    values = [1.0, 4.0, np.nan, 2.0, 7.0]
    expected = [np.nanmean(values[max(0, i - 1) : i + 2]) for i in range(5)]
    assert list(statistics.running_mean(values, 3).value) == pytest.approx(expected)


def test_aes_rewards_gains_three_times_and_punishes_losses_five_times():
    assert statistics.aes(0.8, 0.8, 50, 100) == pytest.approx(0.5)
    assert statistics.aes(0.88, 0.8, 50, 100) == pytest.approx(0.5 + 3 * 0.1)
    assert statistics.aes(0.72, 0.8, 50, 100) == pytest.approx(0.5 - 5 * 0.1)


def test_summary_has_the_columns_that_figures_read(questions):
    summary = statistics.summarise(questions, resamples=RESAMPLES)
    assert list(summary.columns) == list(tables.SUMMARY.columns)
    assert list(summary["system"].unique()) == ["base", "stage1", "alar"]
    assert list(summary["question_type"].unique()) == ["all", "single", "bridge", "arithmetic"]
    assert (summary.groupby("system")["n"].sum() == 2 * 60).all()


def test_summary_agrees_with_the_plain_estimates(questions):
    summary = statistics.summarise(questions, resamples=RESAMPLES, seed=9)
    row = summary.query("system == 'alar' and question_type == 'bridge'").iloc[0]
    part = questions[questions["question_type"] == "bridge"].sort_values("question_id")
    alar, base = (part[part["system"] == name] for name in ("alar", "base"))
    options = {"resamples": RESAMPLES, "seed": 9}
    for name, expected in {
        "em": statistics.bootstrap_mean(alar["correct"], **options),
        "tokens": statistics.bootstrap_mean(alar["generated_tokens"], **options),
        "em_difference": statistics.paired_bootstrap(alar["correct"], base["correct"], **options),
        "token_reduction": statistics.token_reduction(
            base["generated_tokens"], alar["generated_tokens"], **options
        ),
    }.items():
        assert Estimate.read(row, name) == pytest.approx(expected, abs=1e-12)
    assert (
        row["latent_share"]
        == alar["latent_turns"].sum() / (alar["latent_turns"] + alar["think_turns"]).sum()
    )


def test_summary_does_not_depend_on_the_order_of_rows_or_on_other_systems(questions):
    whole = statistics.summarise(questions, resamples=RESAMPLES)
    shuffled = statistics.summarise(questions.sample(frac=1, random_state=1), resamples=RESAMPLES)
    pd.testing.assert_frame_equal(whole, shuffled)
    pair = statistics.summarise(questions[questions["system"] != "stage1"], resamples=RESAMPLES)
    pd.testing.assert_frame_equal(whole[whole["system"] != "stage1"].reset_index(drop=True), pair)


def test_base_differs_from_itself_by_exactly_nothing(questions):
    base = statistics.summarise(questions, resamples=RESAMPLES).query("system == 'base'")
    columns = [name for name in base if name.startswith(("em_difference", "token_reduction"))]
    assert (base[columns] == 0).all(axis=None)


def test_differences_are_nan_without_the_base(questions):
    summary = statistics.summarise(questions[questions["system"] != "base"], resamples=RESAMPLES)
    assert summary[["em_difference", "token_reduction_low"]].isna().all(axis=None)
    assert summary["em"].notna().all()


def test_missing_questions_are_named(questions):
    holed = questions.drop(
        questions.query("system == 'alar' and question_id in ['q004', 'q017']").index
    )
    with pytest.raises(tables.TableError, match="alar.* 2 of 60 .*q004, q017"):
        statistics.summarise(holed, resamples=RESAMPLES)


def test_repeated_questions_are_named(questions):
    with pytest.raises(tables.TableError, match="base.*q000"):
        statistics.summarise(pd.concat([questions, questions.head(1)]), resamples=RESAMPLES)


def test_a_question_of_two_types_is_named(questions):
    questions.loc[
        (questions["system"] == "alar") & (questions["question_id"] == "q003"), "question_type"
    ] = "single"
    with pytest.raises(tables.TableError, match="q003.*question_type"):
        statistics.summarise(questions, resamples=RESAMPLES)


def test_compare_reports_the_token_ratio_and_the_em_difference(questions):
    row = statistics.compare_systems(questions, "alar", "stage1", resamples=RESAMPLES).iloc[0]
    part = questions.groupby("system")[["correct", "generated_tokens"]].mean()
    expected = part.loc["alar", "generated_tokens"] / part.loc["stage1", "generated_tokens"]
    assert row["token_ratio"] == pytest.approx(expected)
    assert row["token_ratio_low"] < row["token_ratio"] < row["token_ratio_high"]
    assert row["em_difference"] == pytest.approx(
        part.loc["alar", "correct"] - part.loc["stage1", "correct"]
    )


def test_compare_names_an_unknown_system(questions):
    with pytest.raises(tables.TableError, match="oracle.*base, stage1, alar"):
        statistics.compare_systems(questions, "alar", "oracle", resamples=RESAMPLES)


def test_explicit_share_counts_hard_and_easy_turns_apart():
    turns = turn_table(
        ["think", "latent", "latent", "think", "none", "latent"],
        [True, True, False, False, True, False],
        [0.5] * 6,
    )
    row = statistics.adaptivity(turns, resamples=RESAMPLES).iloc[0]
    assert list(row.index) == list(tables.ADAPTIVITY.columns)
    assert (row["explicit_share_hard"], row["explicit_share_easy"]) == (1 / 2, 1 / 3)
    assert row["explicit_share_difference"] == pytest.approx(1 / 6)
    assert (row["n"], row["turns"], row["hard_turns"]) == (6, 6, 3)


@pytest.mark.parametrize(
    "p_latent, marginal, given_state",
    [
        ([0.0, 1.0] * 20, 1.0, 0.0),  # the state decides
        ([0.5] * 40, 1.0, 1.0),  # a fair coin in every state
        ([1.0] * 40, 0.0, 0.0),  # one mode only
        ([0.25, 0.75] * 20, 1.0, 2 - 0.75 * np.log2(3)),
    ],
)
def test_mode_information_has_its_closed_form(p_latent, marginal, given_state):
    turns = turn_table(["latent"] * 40, [False] * 40, p_latent)
    row = statistics.adaptivity(turns, resamples=RESAMPLES).iloc[0]
    assert row["mode_entropy"] == pytest.approx(marginal)
    assert row["mode_entropy_given_state"] == pytest.approx(given_state)
    assert row["mutual_information"] == pytest.approx(marginal - given_state)
    assert row["mutual_information_low"] <= row["mutual_information_high"] + 1e-12


def test_entropy_equals_scipys():
    p = np.linspace(0, 1, 11)
    assert binary_entropy(p) == pytest.approx([stats.entropy([x, 1 - x], base=2) for x in p])


def test_turns_without_a_score_do_not_enter_the_information():
    scored = turn_table(["latent"] * 10, [False] * 10, [0.2, 0.8] * 5)
    padded = pd.concat(
        [scored, scored.assign(question_id=scored["question_id"] + "x", p_latent=np.nan)]
    )
    with_gaps, without = (
        statistics.adaptivity(turns, resamples=RESAMPLES).iloc[0] for turns in (padded, scored)
    )
    assert with_gaps["mutual_information"] == pytest.approx(without["mutual_information"])
    unscored = statistics.adaptivity(scored.assign(p_latent=np.nan), resamples=RESAMPLES).iloc[0]
    assert unscored[["mode_entropy", "mutual_information_low"]].isna().all()


def test_intervals_are_clustered_by_question():
    """Writing every turn down five times is no new evidence: the interval must not shrink."""
    rng = np.random.default_rng(0)
    modes, hard = rng.choice(["think", "latent"], 60), rng.random(60) < 0.5
    once = turn_table(modes, hard, rng.random(60), question=[i // 2 for i in range(60)])
    again = pd.concat([once] * 5)
    first, second = (statistics.adaptivity(turns, resamples=RESAMPLES) for turns in (once, again))
    columns = [name for name in first if name not in ("system", "turns", "hard_turns")]
    pd.testing.assert_frame_equal(first[columns], second[columns])


def test_mode_share_gives_the_share_of_every_turn_position_hard_turns_apart():
    turns = turn_table(
        ["latent", "think", "latent", "latent", "none"],
        [False, True, False, False, False],
        [0.5] * 5,
        question=[0, 0, 1, 1, 2],
    )
    share = statistics.mode_share(turns)
    assert list(share.columns) == list(tables.MODE_SHARE.columns)
    assert share[["turn", "n", "hard", "latent_share"]].values.tolist() == [
        [1, 2, False, 1],
        [2, 1, False, 1],
        [2, 1, True, 0],
    ]
    assert share["latent_share_low"].iloc[0] == pytest.approx(statistics.wilson(2, 2).low)


def test_readable_summary_shows_percent_with_intervals(questions):
    text = statistics.readable_summary(statistics.summarise(questions, resamples=RESAMPLES))
    assert list(text.index) == ["base", "stage1", "alar"]
    assert text.loc["base", "accuracy − base, points"] == "+0.0 [+0.0, +0.0]"
    without = statistics.summarise(questions[questions["system"] == "alar"], resamples=RESAMPLES)
    assert statistics.readable_summary(without).loc["alar", "fewer tokens %"] == "–"


def test_tables_name_the_missing_column_and_the_stage(questions):
    with pytest.raises(tables.TableError, match="questions.*'generated_tokens'.*06_benchmark_eval"):
        statistics.summarise(questions.drop(columns="generated_tokens"))


def test_tables_name_an_unknown_mode():
    with pytest.raises(tables.TableError, match="mode.*'thinking'"):
        statistics.mode_share(turn_table(["thinking"], [False], [0.5]))


def test_tables_say_which_stage_to_run_for_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="metrics.jsonl.*05_ar_grpo"):
        tables.read(tmp_path / "metrics.jsonl", tables.METRICS)


def test_tables_name_the_damaged_line_of_a_cut_off_file(tmp_path):
    row = json.dumps(dict.fromkeys(tables.LOSS.columns, 1.0))
    (tmp_path / "loss.jsonl").write_text(f"{row}\n{row[:9]}")
    with pytest.raises(tables.TableError, match="loss.jsonl, line 2"):
        tables.read(tmp_path / "loss.jsonl", tables.LOSS)


def test_tables_say_that_a_parquet_file_is_damaged(tmp_path, questions):
    questions.to_parquet(tmp_path / "questions.parquet")
    whole = (tmp_path / "questions.parquet").read_bytes()
    (tmp_path / "questions.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(tables.TableError, match="questions.parquet is damaged"):
        tables.read(tmp_path / "questions.parquet", tables.QUESTIONS)


def test_tables_refuse_to_be_empty(questions):
    with pytest.raises(tables.TableError, match="no rows.*06_benchmark_eval"):
        tables.read(questions.head(0), tables.QUESTIONS)


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_tables_survive_the_way_through_a_file(tmp_path, questions, suffix):
    path = tmp_path / f"questions.{suffix}"
    questions.to_parquet(path) if suffix == "parquet" else questions.to_csv(path, index=False)
    pd.testing.assert_frame_equal(tables.read(path, tables.QUESTIONS), questions, check_dtype=False)

"""Figures from small made-up tables: complete, legible, repeatable, and honest about what they
show."""

import filecmp
import itertools
import warnings
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from matplotlib.text import Text

from alar import figures
from alar.evaluate import published, statistics, tables
from alar.evaluate.intervals import Estimate
from alar.figures import training

SYSTEMS = ("base", "stage1", "warmup", "alar", "alar-think", "alar-latent")
TURNS = {"single": 2, "bridge": 3, "comparison": 3, "arithmetic": 3}


def evaluation(systems=SYSTEMS, n=80, seed=0) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Questions and turns of systems that lose hard questions when they do not think."""
    rng = np.random.default_rng(seed)
    p_latent = {"stage1": 1.0, "alar-latent": 1.0, "base": 0.0, "alar-think": 0.0}
    questions, turns = [], []
    for system, i in itertools.product(systems, range(n)):
        kind = list(TURNS)[i % len(TURNS)]
        modes = []
        for turn in range(1, TURNS[kind] + 1):
            hard = kind in ("comparison", "arithmetic") and turn == TURNS[kind]
            p = p_latent.get(system, 0.5 if system == "warmup" else 0.06 if hard else 0.93)
            modes.append("latent" if rng.random() < p else "think")
            tokens = 22 if modes[-1] == "latent" else int(rng.integers(40, 70))
            turns.append((system, f"q{i}", kind, turn, hard, modes[-1], tokens, p))
        lost = kind in ("comparison", "arithmetic") and modes[-1] == "latent"
        tokens = sum(turn[6] for turn in turns[-len(modes) :])
        correct = bool(rng.random() < (0.2 if lost else 0.95))
        latent = modes.count("latent")
        questions.append(
            (
                system,
                f"q{i}",
                kind,
                correct,
                tokens,
                0,
                len(modes),
                latent,
                len(modes) - latent,
                True,
            )
        )
    return (
        pd.DataFrame(questions, columns=list(tables.QUESTIONS.columns)),
        pd.DataFrame(turns, columns=list(tables.TURNS.columns)),
    )


def summary(systems=SYSTEMS, base="base", n=80) -> pd.DataFrame:
    return statistics.summarise(evaluation(systems, n)[0], base=base, resamples=200)


def metrics(steps=40) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    x = np.linspace(0, 1, steps)
    table = pd.DataFrame({name: x + rng.normal(0, 0.03, steps) for name in tables.METRICS.columns})
    table["step"] = np.arange(1, steps + 1)
    table["validation_accuracy"] = np.where(table["step"] % 10 == 0, 0.8 + 0.1 * x, np.nan)
    return table


def example() -> pd.DataFrame:
    rows = []
    for system, turn in itertools.product(("base", "alar"), (1, 2, 3)):
        mode = "latent" if system == "alar" and turn < 3 else "think"
        block = (
            "<latent>••••</latent>"
            if mode == "latent"
            else f"<think>{'A rather long chain. ' * 12}</think>"
        )
        action = (
            "<search>the currency of Estonia</search>" if turn < 3 else "<answer>$12 & 3_4</answer>"
        )
        text = f"{block}\n\n{action}"
        rows.append(
            (system, "How many years after Slovakia?", turn, mode, 20 + turn, text, turn == 3)
        )
    return pd.DataFrame(rows, columns=list(tables.EXAMPLE_TURNS.columns))


def losses() -> dict[str, pd.DataFrame]:
    steps = np.arange(1, 101)
    return {
        name: pd.DataFrame({"step": steps, "loss": low + np.exp(-steps / 20)})
        for name, low in {"AASD": 0.2, "mode warm-up": 0.4}.items()
    }


def rewards() -> pd.DataFrame:
    rows = [
        (variant, case, share, slope * share)
        for variant, (case, slope), share in itertools.product(
            ("published", "repaired"), {"correct": 0.3, "wrong": -0.3}.items(), (0.0, 0.5, 1.0)
        )
    ]
    return pd.DataFrame(
        [*rows, ("repaired", "unclosed", 1.0, -1.0)], columns=list(tables.REWARD_SHAPES.columns)
    )


def speed_ratios() -> pd.DataFrame:
    nan = float("nan")
    rows = [
        (
            "training step",
            "hidden 256, 6 layers, batch 8, padded",
            "ours",
            "plain SFT",
            1.25,
            1.3,
            nan,
        ),
        (
            "training step",
            "hidden 256, 6 layers, batch 8, padded",
            "per sample",
            "ours",
            1.9,
            nan,
            1.7,
        ),
        ("log-prob pass", "laptop, batch 16, AASD", "cached z", "plain forward", 1.01, 1.05, nan),
        ("rollouts", "laptop, 64 at once", "generate, batch 1", "ours", 11.0, nan, 8.0),
    ]
    return pd.DataFrame(
        [
            (part, case, above, below, clock, ratio, 0.9 * ratio, 1.2 * ratio, at_most, at_least)
            for part, case, above, below, ratio, at_most, at_least in rows
            for clock in ("wall", "cpu")
        ],
        columns=list(tables.BENCH_RATIOS.columns),
    )


def throughput() -> pd.DataFrame:
    rows = [
        (route, at_once, 128, 5000, 5000 / (speed * at_once**0.7), speed * at_once**0.7)
        for route, speed in {"server": 90.0, "hf": 300.0, "vllm": 120.0}.items()
        for at_once in (1, 8, 64)
    ]
    return pd.DataFrame(rows, columns=list(tables.THROUGHPUT.columns))


def compared() -> pd.DataFrame:
    rows = []
    for domain, shift in (("search", 0), ("tool", 40)):
        cases = [
            ("base", ""),
            ("ALAR", ""),
            ("TokenSkip", "ratio 0.5"),
            ("TokenSkip", "ratio 1.0"),
            ("O1-Pruner", "λ 2"),
        ]
        for place, (method, settings) in enumerate(cases):
            row = {
                "domain": domain,
                "method": method,
                "settings": settings,
                "n": 1600,
                "training_seconds": 90.0 * place,
            }
            for name, value, reach in (
                ("accuracy", 0.9 - 0.02 * place, 0.015),
                ("accuracy_difference", -0.02 * place, 0.01),
                ("tokens", 130 + shift - 20 * place, 4.0),
                ("token_reduction", 0.1 * place, 0.01),
                ("aes", 0.1, 0.1),
            ):
                row |= Estimate(value, value - reach, value + reach).columns(name)
            rows.append(row | {"training_tokens": 1e6 * place, "scale": "measured at laptop scale"})
    return pd.DataFrame(rows)[list(tables.METHODS.columns)]


def skipped() -> pd.DataFrame:
    rows = []
    for model in ("standard", "dual"):
        for ratio in (0.5, 0.7, 1.0):
            row = {
                "model": model,
                "scorer": "surprisal",
                "ratio": ratio,
                "n": 40,
                "generated_tokens": 40 + 60 * ratio,
            }
            for name, value in (
                ("accuracy", 0.8),
                ("think_tokens", 50 * ratio),
                ("correct_tokens", 40.0),
            ):
                row |= Estimate(value, value - 0.05, value + 0.05).columns(name)
            rows.append(row)
    return pd.DataFrame(rows)[list(tables.RATIOS.columns)]


def ablated() -> pd.DataFrame:
    rows = []
    for system, changed in {"stage1": "model.num_latent 0", "alar": "rl.alpha 0.3"}.items():
        for place, setting in enumerate(("as the reference", changed)):
            row = dict.fromkeys(tables.ABLATIONS.columns, 0.1)
            row |= {"setting": setting, "system": system, "n": 400, "seeds": 1 + 2 * place}
            for name, value, reach in (
                ("accuracy", 0.6 - 0.2 * place, 0.03),
                ("tokens", 90.0 - 20 * place, 3.0),
            ):
                row |= Estimate(value, value - reach, value + reach).columns(name)
            rows.append(row)
    return pd.DataFrame(rows)[list(tables.ABLATIONS.columns)]


DRAWINGS = {
    "ablations_figure": lambda: figures.ablations_figure(ablated()),
    "accuracy_against_tokens": lambda: figures.accuracy_against_tokens(summary()),
    "stages": lambda: figures.stages(summary(), domain="search"),
    "question_types": lambda: figures.question_types(summary()),
    "controls_figure": lambda: figures.controls_figure(
        summary(("intact", "zeroed", "text"), base="intact")
    ),
    "oracle_figure": lambda: figures.oracle_figure(
        summary(("oracle", "alar", "alar-think"), base="oracle")
    ),
    "method": lambda: figures.method(),
    "methods_figure": lambda: figures.methods_figure(compared()),
    "dynamics": lambda: figures.dynamics(metrics(), validation_questions=64, total_steps=60),
    "lengths": lambda: figures.lengths(
        {"ShorterBetter": metrics(), "O1-Pruner": metrics(20)}, validation_questions=64
    ),
    "losses": lambda: figures.losses(losses()),
    "ratios": lambda: figures.ratios(skipped()),
    "reward_shapes": lambda: figures.reward_shapes(rewards()),
    "latent_share": lambda: figures.latent_share(statistics.mode_share(evaluation()[1])),
    "trajectory_figure": lambda: figures.trajectory_figure(example()),
    "speed": lambda: figures.speed(speed_ratios()),
    "throughput": lambda: figures.throughput(throughput()),
}


def words(figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text) if text.get_visible()]


@pytest.fixture(scope="module", params=DRAWINGS, ids=str)
def drawing(request):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return DRAWINGS[request.param]()


def test_every_exported_drawing_is_tested():
    assert set(DRAWINGS) == set(figures.__all__) - {"save_figure", "LiveDynamics"}


def test_no_text_is_cut_off_and_every_figure_fits_its_column(drawing):
    figure, _ = drawing
    width, height = figure.get_size_inches()
    assert width in (3.4, 7.0)
    drawn = figure.get_tightbbox()
    assert 0 <= drawn.x0 < drawn.x1 <= width and 0 <= drawn.y0 < drawn.y1 <= height


def test_titles_and_small_print_do_not_overlap(drawing):
    figure, _ = drawing
    boxes = [
        (title.get_text(), title.get_window_extent())
        for axes in figure.axes
        for title in (axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label)
        if title.get_visible() and title.get_text().strip()
    ]
    boxes.append(("small print", figure._supxlabel.get_window_extent()))
    for (first, box), (second, other) in itertools.combinations(boxes, 2):
        assert not box.overlaps(other), (first, second)


def test_every_figure_says_where_its_numbers_come_from(drawing):
    figure, _ = drawing
    small_print = figure._supxlabel.get_text()
    assert any(
        word in small_print for word in ("measured", "published", "not a measurement", "formulas")
    )


def test_a_figure_is_saved_with_the_numbers_in_it_and_twice_the_same(drawing, tmp_path):
    figure, table = drawing
    first = figures.save_figure(figure, table, tmp_path / "first", "name")
    second = figures.save_figure(figure, table, tmp_path / "second", "name")
    assert [path.name for path in first] == ["name.csv", "name.png", "name.svg"]
    assert len(pd.read_csv(first[0])) == len(table) > 0
    for one, other in zip(first, second, strict=True):
        assert filecmp.cmp(one, other, shallow=False), one.name


def test_drawing_again_gives_the_same_bytes(tmp_path):
    for folder in ("first", "second"):
        figures.save_figure(*figures.stages(summary()), tmp_path / folder, "stages")
    for name in ("stages.csv", "stages.png", "stages.svg"):
        assert filecmp.cmp(tmp_path / "first" / name, tmp_path / "second" / name, shallow=False), (
            name
        )


def test_formats_can_be_chosen(tmp_path):
    paths = figures.save_figure(*figures.method(), tmp_path, "method", formats=["pdf"])
    assert [path.suffix for path in paths] == [".csv", ".pdf"]


def test_figures_are_drawn_from_files_too(tmp_path):
    summary().to_csv(tmp_path / "summary.csv", index=False)
    _, table = figures.stages(tmp_path / "summary.csv")
    assert list(table["system"]) == list(SYSTEMS)


def test_figures_show_themselves_in_a_notebook_without_pyplot():
    assert figures.method()[0]._repr_png_().startswith(b"\x89PNG")


def test_the_scale_and_the_number_of_questions_are_in_the_small_print():
    figure, _ = figures.stages(summary(), scale="measured on one GPU")
    assert "measured on one GPU · n = 80 questions" in figure._supxlabel.get_text()


def test_published_reductions_are_the_papers():
    results = published.points().set_index(["setting", "system"])
    assert results.loc[("Search-R1 7B", "alar"), "token_reduction"] == pytest.approx(
        0.436, abs=5e-4
    )
    assert results.loc[("Qwen3-4B, tools", "alar"), "token_reduction"] == pytest.approx(
        0.846, abs=5e-4
    )
    assert results.loc[("Search-R1 3B", "alar"), "token_reduction"] == pytest.approx(0.22, abs=5e-3)
    assert results.loc[("Search-R1 3B", "alar"), "accuracy_difference"] == pytest.approx(0.002)
    assert list(results.index[results["digitised"]].get_level_values("system")) == [
        "ShorterBetter",
        "O1-Pruner",
    ]


def test_published_points_are_hollow_and_ours_filled():
    figure, table = figures.accuracy_against_tokens(summary())
    faces = [
        line.get_markerfacecolor() for line in figure.axes[0].lines if len(line.get_xdata()) == 1
    ]
    assert faces.count("none") >= len(published.points()) - 3
    assert (table["source"] == "measured").sum() == len(SYSTEMS) - 1


def test_every_point_is_drawn_once_in_full():
    figure, table = figures.accuracy_against_tokens(summary(n=4))
    assert len(figure.axes) == 2
    points = [
        line.get_xydata()[0]
        for axes in figure.axes
        for line in axes.lines
        if line.get_zorder() == 4
    ]
    expected = table[["token_reduction", "accuracy_difference"]].to_numpy()
    assert np.array(sorted(map(tuple, points))) == pytest.approx(
        np.array(sorted(map(tuple, expected)))
    )
    for axes in figure.axes:
        low, high = axes.get_ylim()
        assert all(
            low <= line.get_ydata()[0] <= high for line in axes.lines if line.get_zorder() == 4
        )


def test_one_axis_is_enough_when_no_point_lies_far_off(monkeypatch):
    results = published.points()
    monkeypatch.setattr(published, "points", lambda: results[results["accuracy_difference"] > -0.1])
    close = summary(("base", "alar"), n=400)
    close[["em_difference", "em_difference_low", "em_difference_high"]] = [-0.01, -0.02, 0.0]
    assert len(figures.accuracy_against_tokens(close)[0].axes) == 1


def test_small_tables_still_give_figures():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figures.stages(summary(("alar",), n=4))
        figures.question_types(summary(("base", "alar"), n=4))
        figures.accuracy_against_tokens(summary(n=4))
        figures.dynamics(metrics(2))
        figures.latent_share(statistics.mode_share(evaluation(("alar",), 4)[1]), systems=("alar",))
        figures.losses({"AASD": losses()["AASD"].head(1)})


def test_a_missing_column_is_named_with_its_stage():
    with pytest.raises(tables.TableError, match="summary.*'em_low'.*06_benchmark_eval"):
        figures.stages(summary().drop(columns="em_low"))
    with pytest.raises(tables.TableError, match="metrics.*'reward'.*05_ar_grpo"):
        figures.dynamics(metrics().drop(columns="reward"))


def test_a_missing_reference_is_named():
    with pytest.raises(tables.TableError, match="'intact'.*zeroed, text"):
        figures.controls_figure(summary(("zeroed", "text")))
    with pytest.raises(tables.TableError, match="'base'"):
        figures.accuracy_against_tokens(summary(("alar", "stage1")))


def test_an_absent_system_is_named():
    with pytest.raises(tables.TableError, match="'warmup'.*alar"):
        figures.latent_share(statistics.mode_share(evaluation(("alar",))[1]))


def test_hard_turns_are_marked_as_such():
    _, table = figures.latent_share(statistics.mode_share(evaluation()[1]))
    hard = table[(table["question_type"] == "arithmetic") & (table["turn"] == 3)]
    assert hard["hard"].all()


def test_the_trajectory_shows_every_action():
    figure, _ = figures.trajectory_figure(example())
    shown = "\n".join(words(figure))
    assert shown.count("<search>the currency of Estonia</search>") == 4
    assert "<answer>$12 & 3_4</answer>" in shown


class FakeDisplay:
    """Stands for IPython's display: counts what is shown, and how often it is replaced."""

    def __init__(self):
        self.shown = self.updates = 0

    def __call__(self, figure, display_id):
        self.shown += 1
        return self

    def update(self, figure):
        self.updates += 1


@pytest.fixture
def notebook(monkeypatch):
    """An IPython session in which time stands still and drawing costs nothing."""
    display, clock = FakeDisplay(), SimpleNamespace(now=100.0)
    monkeypatch.setattr(training, "_in_notebook", lambda: True)
    monkeypatch.setattr("IPython.display.display", display)
    monkeypatch.setattr(training, "dynamics", lambda table, **_: (table, table))
    monkeypatch.setattr(training, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return SimpleNamespace(display=display, clock=clock)


def test_the_live_figure_is_one_output_and_is_redrawn_seldom(notebook):
    live = figures.LiveDynamics(total_steps=40, every_seconds=5)
    for row in metrics().to_dict("records"):
        live.add(row)
        notebook.clock.now += 1.0
    live.finish()
    assert notebook.display.shown == 1
    assert notebook.display.updates == 40 // 5
    assert len(live.rows) == 40


def test_the_live_figure_needs_no_notebook(monkeypatch):
    live = figures.LiveDynamics()
    for row in metrics(3).to_dict("records"):
        live.add(row)
    live.finish()
    assert "c   Latent share of turns (%)" in words(live.figure())


def markers(axes):
    """The marker lines of a panel with intervals, and the points that they mark."""
    lines = [bars.lines[0] for bars in axes.containers]
    return lines, [(x, y) for line in lines for x, y in zip(line.get_xdata(), line.get_ydata())]


def test_every_method_has_a_marker_with_both_intervals_in_its_own_colour():
    table = compared().query("domain == 'search'")
    figure, numbers = figures.methods_figure(table)
    points, drawn = markers(figure.axes[0])
    assert set(drawn) == set(zip(table["tokens"], table["accuracy"]))
    assert len(drawn) == 2 * len(table)  # once along each axis
    looks = {(line.get_color(), line.get_marker()) for line in points}
    assert len(looks) == table["method"].nunique()
    assert "n = 1600 questions" in figure._supxlabel.get_text() and numbers.equals(
        table.reset_index(drop=True)
    )


def test_methods_near_the_base_are_drawn_larger_in_a_panel_of_their_own(tmp_path):
    table = compared().query("domain == 'search'").reset_index(drop=True)
    far = table.index[-1]
    table.loc[far, ["accuracy", "accuracy_low", "accuracy_high"]] = 0.1, 0.05, 0.15
    table.to_csv(tmp_path / "methods.csv", index=False)
    figure, _ = figures.methods_figure(tmp_path / "methods.csv")
    near = table.drop(far)
    assert set(markers(figure.axes[1])[1]) == set(zip(near["tokens"], near["accuracy"]))
    assert not any("nan" in line.get_text() for line in figure.legends[0].get_texts())

"""The live views without a browser: every control changes its view, every view has a picture, a
click computes little."""

import base64

import nbformat
import numpy as np
import pytest

from alar.inspector import inspect, plots, widgets
from alar.inspector.interventions import KINDS, Intervention, InterventionLab
from alar.records import Origin, Question, Trajectory, TurnRecord
from alar.rollout.hf import HFEngine
from alar.study.publish import to_html

ROOM = 4 + 3 + 1  # z, the closing tag, and the last token of the prefix
TEXTS = ("Where is <b>Oslo</b>?", "When did $x$ begin?", "Who wrote it?")


@pytest.fixture(scope="module")
def engine(random_model):
    return HFEngine(*random_model())


@pytest.fixture(scope="module")
def trajectories(engine):
    """Three questions with one, two and three latent turns of random z; the second one's last turn
    answers."""
    codec, drawn, found = engine.codec, np.random.default_rng(0), []
    for number, text in enumerate(TEXTS):
        ids, turns = codec.prompt(text), []
        origins = [Origin.PROMPT] * len(ids)
        for turn in range(number + 1):
            written, marks = codec.latent_turn("search", f"{text} {turn}", first=turn == 0)
            turns.append(
                TurnRecord(
                    len(ids), len(ids) + len(written), "latent", "search", f"{text} {turn}", True
                )
            )
            ids, origins = ids + written, origins + marks
        z = drawn.normal(size=(4 * len(turns), engine.model.config.hidden_size)).astype(np.float32)
        found.append(
            Trajectory(
                Question(f"q{number}", text, ("x",)),
                ids,
                [int(o) for o in origins],
                [float("nan")] * len(ids),
                z,
                turns,
                text,
                number == 1,
                "answer",
            )
        )
    return found


@pytest.fixture(scope="module")
def readings(engine, trajectories):
    return [inspect(t, engine.model, engine.codec) for t in trajectories]


@pytest.fixture(scope="module")
def lab(engine, trajectories):
    mean = np.mean([t.latents[:4] for t in trajectories], axis=0)
    return InterventionLab(engine, mean=mean, max_new_tokens=24)


@pytest.fixture(scope="module")
def twins(engine, trajectories, readings, lab):
    sites = lab.sites(trajectories)
    return {
        "browser": plots.draw_trajectory(trajectories[0], engine.codec)[0],
        "lens": plots.draw_lens(readings[0], 0)[0],
        "panel": plots.draw_panel(lab.effects([(sites[0], Intervention("patch"), sites[-1])]))[0],
        "compare": plots.draw_comparison({"alar": trajectories[0], "stage1": trajectories[2]})[0],
    }


@pytest.fixture
def views(engine, trajectories, readings, lab, twins):
    """Every view with its twin, as the notebook makes them."""
    codec = engine.codec
    chances = [[0.1 * (turn + 1) for turn in range(len(t.turns))] for t in trajectories]
    systems = {"alar": trajectories, "stage1": trajectories[::-1]}
    made = [
        widgets.trajectory_browser(trajectories, codec, chances, twins["browser"]),
        widgets.lens_explorer(readings, twins["lens"]),
        widgets.intervention_panel(lab, lab.sites(trajectories), twins["panel"]),
        widgets.checkpoint_comparison(
            systems, dict.fromkeys(systems, codec), None, twins["compare"]
        ),
    ]
    return {view.name: view for view in made}


def positions(control):
    """Every value that a person can choose."""
    if hasattr(control, "options"):
        return [option[1] if isinstance(option, tuple) else option for option in control.options]
    return range(control.min, control.max + 1)


def test_every_control_of_every_view_changes_what_is_shown(views):
    for name, view in views.items():
        if name == "panel":
            view.controls["kind"].value = "patch"  # the only one with a donor
        for label, control in view.controls.items():
            seen = set()
            for value in positions(control):
                control.value = value
                seen.add(view.output.value)
            assert len(seen) > 1, f"{name}: {label}"
            assert all('no">step' not in text for text in seen)


def test_what_is_shown_is_what_the_values_say(views, readings):
    lens = views["lens"]
    lens.controls["question"].value = 2
    lens.controls["step"].value = 12
    lens.controls["layer"].value = 0
    assert "turn 3, k = 4, input z" in lens.output.value
    token, probability = readings[2].lens(11, 0)[0]
    assert f"{probability:.3f}" in lens.output.value
    lens.controls["question"].value = 0
    assert lens.controls["step"].max == 4 and "turn 1, k = 4" in lens.output.value
    browser = views["browser"]
    browser.controls["question"].value = 1
    browser.controls["turn"].value = 1
    assert "<b>Oslo" not in browser.output.value and browser.output.value.count("<i>•</i>") == 4


def test_text_from_outside_stays_text(views):
    for view in views.values():
        assert "<b>Oslo</b>" not in view.output.value


def test_every_view_has_a_picture_for_where_no_kernel_is(views):
    for name, view in views.items():
        bundle = view._repr_mimebundle_()
        assert base64.b64decode(bundle["image/png"]).startswith(b"\x89PNG"), name
        assert "application/vnd.jupyter.widget-view+json" in bundle


def test_published_pages_show_the_picture_and_no_widget(views, tmp_path):
    outputs = [
        nbformat.v4.new_output("execute_result", view._repr_mimebundle_())
        for view in views.values()
    ]
    bare = dict(views["lens"].box._repr_mimebundle_())
    notebook = nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_code_cell(
                "views", outputs=[*outputs, nbformat.v4.new_output("display_data", bare)]
            )
        ]
    )
    notebook.metadata["widgets"] = {
        "application/vnd.jupyter.widget-state+json": {"state": {"secret": {}}}
    }
    nbformat.write(notebook, tmp_path / "n.ipynb")
    page = to_html(tmp_path / "n.ipynb", tmp_path)
    assert page.count("data:image/png;base64") == len(views)
    assert (
        "widget-view" not in page
        and "widget-state" not in page
        and "secret" not in page
        and "VBox(" not in page
    )


def test_a_click_computes_the_block_and_the_action_only(
    views, lab, engine, trajectories, monkeypatch
):
    """The tokens before the block come from the cache: at most 24 new tokens a row, plus z and the
    closing tag."""
    panel, fed = views["panel"], []
    forward = engine.model.model.forward

    def counted(*args, **kwargs):
        embeddings = kwargs["inputs_embeds"]
        fed.append(embeddings.shape[0] * embeddings.shape[1])
        return forward(*args, **kwargs)

    monkeypatch.setattr(engine.model.model, "forward", counted)
    longest = max(len(site.action_ids) for site in lab.sites(trajectories))
    for kind in KINDS:
        panel.controls["kind"].value = kind
        fed.clear()
        panel.update()
        scored = (
            (2 if kind == "patch" else 1) * 3 * (ROOM + longest)
        )  # intact, control, intervention; own and donor's action
        assert 0 < sum(fed) <= 2 * (ROOM + 24) + scored, kind


def test_pictures_come_with_the_numbers_in_them(readings):
    reading = readings[1]
    table = plots.draw_lens(reading, 1)[1]
    row = table[(table["k"] == 3) & (table["layer"] == 2) & (table["rank"] == 1)].iloc[0]
    place = reading.rows(1)[2]
    assert (row["token"], row["probability"]) == reading.lens(place, 2)[0]
    assert row["entropy"] == pytest.approx(reading.lens_entropy[place, 2])
    weights = plots.draw_attention(readings)[1]
    looks = weights[weights["from"] == "latent step"].groupby("k")["weight"].sum()
    assert np.allclose(looks, 1, atol=1e-5)
    cosines = plots.draw_vectors(readings)[1]
    mean = np.mean([r.block_cosines(turn)[0, 3] for r in readings for turn in r.latent_turns])
    assert cosines[(cosines["k"] == 1) & (cosines["other_k"] == 4)]["cosine"].iloc[
        0
    ] == pytest.approx(mean)

"""Trajectories as HTML: what the report shows, that text stays text, that nothing is fetched, and
how large it gets."""

import dataclasses
import re
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest

from alar.inspector import conclusions, fragments, inspect
from alar.inspector.report import LIMIT, write_report
from alar.inspector.tokens import pieces, stretches
from alar.records import Origin, Question, Trajectory, TurnRecord
from alar.rollout.codec import Codec

HOSTILE = (
    '<script>alert(1)</script> & "quotes" </details> <img src=x onerror=alert(2)>'
    " http://example.org/a.js 日本 é$x$"
)


@pytest.fixture(scope="module")
def latent_model(random_model):
    return random_model()


@pytest.fixture(scope="module")
def codec(latent_model):
    return Codec.of(*latent_model)


@pytest.fixture(scope="module")
def make(latent_model, codec):
    """make(text) → a trajectory of a latent turn with a search, an observation and a think turn,
    all about `text`."""

    def write(text: str, observation: str = "", seed: int = 0) -> Trajectory:
        ids, origins, turns = codec.prompt(text), [], []
        origins = [Origin.PROMPT] * len(ids)
        steps = [
            (codec.latent_turn("search", text, first=True), "latent", "search"),
            (codec.think_turn(text, "answer", text, first=False), "think", "answer"),
        ]
        for (written, marks), mode, action in steps:
            turns.append(
                TurnRecord(
                    len(ids), len(ids) + len(written), mode, action, text, True, titles=[text]
                )
            )
            ids, origins = ids + written, origins + marks
            if action == "search":
                seen = codec.observation(
                    f"\n\n<information>{observation or text}</information>\n\n"
                )
                ids, origins = ids + seen, origins + [Origin.OBSERVATION] * len(seen)
        z = (
            np.random.default_rng(seed)
            .normal(size=(4, latent_model[0].config.hidden_size))
            .astype(np.float32)
        )
        question = Question("q", text, (text,), "bridge")
        found = Trajectory(
            question,
            ids,
            [int(o) for o in origins],
            [float("nan")] * len(ids),
            z,
            turns,
            text,
            False,
            "answer",
        )
        found.check()
        return found

    return write


@pytest.fixture(scope="module")
def hostile(make):
    return make(HOSTILE)


class Reader(HTMLParser):
    """What a browser would make of a page: elements, attributes, text."""

    def __init__(self, page: str):
        super().__init__()
        self.elements, self.attributes, self.shown = set(), [], []
        self.feed(page)
        self.text = "".join(self.shown)

    def handle_starttag(self, tag, attributes):
        self.elements.add(tag)
        self.attributes += [(tag, *attribute) for attribute in attributes]

    def handle_data(self, data):
        self.shown.append(data)


def test_pieces_cover_every_token_once_and_keep_characters_whole(hostile, codec):
    found = pieces(hostile, codec)
    assert [i for piece in found for i in range(piece.start, piece.end)] == list(
        range(len(hostile.ids))
    )
    assert all(set(hostile.origins[p.start : p.end]) == {p.origin} for p in found)
    assert not any("�" in piece.text for piece in found), "日本 takes several tokens a character"
    assert "".join(p.text for p in found if p.text != "<|im_end|>") == codec.text(hostile.ids), (
        "which leaves the ends out"
    )
    assert sum(piece.text == "•" for piece in found) == 4


def test_the_time_line_has_no_gaps(hostile):
    found = stretches(hostile)
    assert [stretch.kind for stretch in found] == ["prompt", "latent", "observation", "think"]
    assert [stretch.start for stretch in found[1:]] == [stretch.end for stretch in found[:-1]]
    assert (found[0].start, found[-1].end) == (0, len(hostile.ids))
    assert fragments.timeline_html(hostile).count("flex:") == 4


@pytest.fixture(scope="module")
def page(hostile, latent_model, codec, tmp_path_factory):
    readings = inspect(hostile, latent_model[0], codec)
    readings = dataclasses.replace(readings, pieces={token: HOSTILE for token in readings.pieces})
    path = write_report(
        tmp_path_factory.mktemp("report") / "r.html",
        [hostile],
        codec,
        readings={0: readings},
        p_latent=[[0.25, 0.75]],
        title=HOSTILE,
        facts={HOSTILE: HOSTILE},
    )
    return path.read_text(encoding="utf-8")


def test_text_from_outside_is_shown_as_text(page):
    reader = Reader(page)
    assert not reader.elements & {
        "script",
        "img",
        "iframe",
        "object",
        "embed",
        "form",
        "base",
        "video",
        "audio",
        "svg",
    }
    assert not [a for a in reader.attributes if a[1].startswith("on")]
    assert (
        "<script>alert(1)</script>" in reader.text and "<img src=x onerror=alert(2)>" in reader.text
    )


def test_the_page_refers_to_nothing_outside_itself(page):
    reader = Reader(page)
    links = [
        value
        for _, name, value in reader.attributes
        if name in ("src", "href", "action", "data", "poster", "srcset")
    ]
    assert links == ["data:,"]
    assert "default-src 'none'" in page and "@import" not in page and "url(" not in page


def test_the_page_shows_what_a_trajectory_holds(page, hostile):
    text = Reader(page).text
    for word in (
        "1 · latent",
        "2 · think",
        "0.25",
        "0.75",
        "bridge",
        "gold:",
        "••••",
        "layer 2",
        "input z",
        "nearest embeddings",
    ):
        assert word in text, word
    marks = {int(origin) for origin in re.findall(r'class="o(\d)"><i>', page)}
    assert marks == set(hostile.origins)


def test_fifty_trajectories_of_a_large_model_stay_below_five_megabytes(
    make, latent_model, codec, tmp_path
):
    """28 layers and 600 tokens each; the laptop's model has 4 layers and 250 tokens."""
    long = [
        make(f"What is the capital of place {i}?", "A passage of some length. " * 40, seed=i)
        for i in range(50)
    ]
    assert min(len(t.ids) for t in long) > 250
    readings = inspect(long[0], latent_model[0], codec)
    deep = {
        name: np.repeat(getattr(readings, name)[:, :1], 29, axis=1)
        for name in ("lens_ids", "lens_probabilities", "lens_entropy")
    }
    readings = dataclasses.replace(
        readings, **deep, action_attention=np.repeat(readings.action_attention[:, :1], 28, axis=1)
    )
    path = write_report(
        tmp_path / "r.html", long, codec, readings=dict.fromkeys(range(50), readings)
    )
    assert path.stat().st_size < LIMIT
    assert path.read_text().count('<details class="one">') == 50


def test_no_trajectories_is_an_error(codec, tmp_path):
    with pytest.raises(ValueError, match="no trajectories to report on"):
        write_report(tmp_path / "r.html", [], codec)


def test_the_command_names_what_is_missing(tmp_path, capsys):
    from alar.inspector.__main__ import main

    assert main([]) == 1 and "name a run folder" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 1 and "run notebook 08" in capsys.readouterr().err


def test_the_command_writes_the_report_of_a_run(latent_model, make, tmp_path, capsys):
    from alar.inspector.__main__ import main
    from alar.model import save
    from alar.records import write_trajectories

    save(*latent_model, tmp_path / "03_aasd" / "checkpoint")
    (tmp_path / "08_latent_inspector").mkdir()
    write_trajectories(
        tmp_path / "08_latent_inspector" / "trajectories.jsonl",
        [make("Where?"), make("When?", seed=1)],
    )
    assert main([str(tmp_path), "-o", str(tmp_path / "r.html"), "--count", "1"]) == 0, (
        capsys.readouterr().err
    )
    text = Reader((tmp_path / "r.html").read_text()).text
    assert "Where?" in text and "When?" not in text and "03_aasd" in text

    (tmp_path / "executed").mkdir()
    asked = tmp_path / "executed" / "08_latent_inspector.params.yaml"
    (tmp_path / "03_aasd" / "checkpoint").rename(tmp_path / "elsewhere")
    asked.write_text(f"checkpoint: {tmp_path / 'elsewhere'}\n")
    assert main([str(tmp_path), "-o", str(tmp_path / "r.html")]) == 0, capsys.readouterr().err
    assert "elsewhere" in Reader((tmp_path / "r.html").read_text()).text
    asked.write_text("checkpoint: ''\n")
    assert (
        main([str(tmp_path), "-o", str(tmp_path / "r.html")]) == 1
        and "no checkpoint at" in capsys.readouterr().err
    )


def effect_rows(*rows: dict) -> pd.DataFrame:
    """A summary of interventions: what is not named is zero with an interval of no width."""
    names = ("mean", "control", "difference")
    zero = {f"{name}{end}": 0.0 for name in names for end in ("_low", "_high")} | dict.fromkeys(
        (*names, "low", "high"), 0.0
    )
    return pd.DataFrame([{"k": 0, "questions": 20, "turns": 20} | zero | row for row in rows])


def test_words_follow_from_the_numbers_by_the_stated_rule():
    def said(measure, kind, **row):
        changed = {"measure": "changed", "intervention": kind, "mean": 0.4}
        table = effect_rows(changed, {"measure": measure, "intervention": kind} | row)
        return " ".join(conclusions.say_interventions(table))

    clear = {"mean": 0.7, "difference": 0.6, "difference_low": 0.5, "difference_high": 0.7}
    assert "z carries most of what the next action is about" in said("to_donor", "patch", **clear)
    assert "z carries a part" in said("to_donor", "patch", **clear | {"mean": 0.3})
    for weak in ({"difference_low": 0.0}, {"questions": conclusions.ENOUGH - 1}):
        assert "content of the action is not shown" in said("to_donor", "patch", **clear | weak)
    assert "The action depends on z: 1 of 1" in said("kl", "zero", **clear)
    assert "40 [0, 0] % of the turns" in said("kl", "zero", **clear)
    for weak in (
        {"difference_low": -0.1},
        {"difference": 0.5 * conclusions.LEAST_KL, "difference_low": 0.001},
    ):
        assert "that the action uses what z says is not shown" in said("kl", "zero", **clear | weak)
    assert "The order of the steps matters" in said("kl", "shuffle", **clear)
    assert "That the order of the steps matters is not shown" in said("kl", "shuffle")
    assert "costs most" in said("correct", "drop", difference=-0.5, difference_high=-0.1)
    assert "No replacement lowers" in said("correct", "drop", difference=-0.5, difference_high=0.1)


def test_the_kind_of_the_action_follows_z_only_if_the_numbers_say_so():
    row = {
        "measure": "to_donor_kind",
        "intervention": "patch",
        "mean": 0.9,
        "difference": 0.8,
        "difference_low": 0.6,
    }
    assert "z carries what kind" in conclusions.say_kinds(effect_rows(row))[0]
    assert "is not shown" in conclusions.say_kinds(effect_rows(row | {"difference_low": 0.0}))[0]
    assert conclusions.say_kinds(effect_rows(row | {"measure": "kl"})) == []


def test_a_probe_counts_only_beyond_both_controls():
    row = {
        "target": "hard",
        "turn": 2,
        "k": 1,
        "questions": 40,
        "accuracy": 0.9,
        "accuracy_low": 0.8,
        "accuracy_high": 1.0,
        "embedding": 0.5,
        "shuffled": 0.5,
        "shuffled_high": 0.6,
        "difference": 0.4,
        "difference_low": 0.3,
    }
    assert "better than in the words" in conclusions.say_probes(pd.DataFrame([row]))[0]
    for weak in ({"difference_low": 0.0}, {"shuffled_high": 0.85}):
        assert "not shown" in conclusions.say_probes(pd.DataFrame([row | weak]))[0]


def test_a_causal_map_names_its_strongest_place():
    places = [
        {"turn": 1, "k": k, "difference": 0.1 * k, "difference_low": 0.05 * k} for k in (1, 2)
    ]
    assert "in 2 of 2 places (turn × k); most at turn 1, k = 2" in conclusions.say_causal_map(
        effect_rows(*places)
    )
    assert "No single latent step" in conclusions.say_causal_map(
        effect_rows(*({**p, "questions": 3} for p in places))
    )

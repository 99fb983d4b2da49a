"""Live views: controls that drive a pure function, each with a static twin.

A `View` is shown as widgets where a kernel is at work and as its twin, a picture, everywhere else:
both are alternatives of one output, so a headless run needs no click and a published page no widget
state. Every control has the CSS class `alar-<view>-<control>` and every view `alar-<view>`, by
which tests find them.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ipywidgets
from matplotlib.figure import Figure

from alar.inspector import fragments
from alar.inspector.fragments import boxed, escaped
from alar.inspector.interventions import KINDS, Bench, Effect, Intervention, Site
from alar.inspector.record import LatentRecord
from alar.inspector.tokens import shortened, visible
from alar.records import Trajectory
from alar.rollout.codec import Codec

LABEL = 90  # characters of a question in a list


class View:
    """`draw(**values)` turns the values of the controls into HTML; `twin` is the figure that stands
    in for it."""

    def __init__(
        self,
        name: str,
        controls: Mapping[str, ipywidgets.Widget],
        draw: Callable[..., str],
        twin: Figure | None = None,
    ):
        self.name, self.controls, self.draw, self.twin = name, dict(controls), draw, twin
        self.output = ipywidgets.HTML()
        self.output.add_class(f"alar-{name}")
        for label, control in self.controls.items():
            control.add_class(f"alar-{name}-{label}")
            control.observe(self.update, "value")
        row = ipywidgets.HBox(list(self.controls.values()), layout={"flex_flow": "row wrap"})
        self.box = ipywidgets.VBox([row, self.output])
        self.update()

    @property
    def values(self) -> dict[str, Any]:
        return {label: control.value for label, control in self.controls.items()}

    def update(self, change: object = None) -> None:
        self.output.value = self.draw(**self.values)

    def _repr_mimebundle_(self, **options) -> dict[str, Any]:
        bundle = dict(self.box._repr_mimebundle_(**options) or {})
        bundle["text/plain"] = f"{self.name} ({', '.join(self.controls)})"
        if self.twin is not None:
            bundle["image/png"] = base64.b64encode(self.twin._repr_png_()).decode()
        return bundle


def trajectory_browser(
    trajectories: Sequence[Trajectory],
    codec: Codec,
    p_latent: Sequence[Sequence[float]] | None = None,
    twin: Figure | None = None,
) -> View:
    """One trajectory at a time: time line, turns, tokens coloured by origin; all of it or one turn."""
    question = _questions(trajectories)
    turn = ipywidgets.Dropdown(description="tokens of", options=_turn_options(trajectories[0]))
    question.observe(
        lambda change: setattr(turn, "options", _turn_options(trajectories[change["new"]])), "value"
    )

    def draw(question: int, turn: int) -> str:
        shown = trajectories[question]
        span = (
            None
            if turn < 0 or turn >= len(shown.turns)
            else (shown.turns[turn].start, shown.turns[turn].end)
        )
        scores = p_latent[question] if p_latent is not None else None
        return boxed(
            f"<p>{fragments.headline(shown)}</p>",
            fragments.timeline(shown),
            fragments.turns(shown, scores),
            fragments.legend(),
            fragments.tokens(shown, codec, span),
        )

    return View("browser", {"question": question, "turn": turn}, draw, twin)


def lens_explorer(records: Sequence[LatentRecord], twin: Figure | None = None) -> View:
    """What the lens reads in one latent step at one layer; layer 0 is z itself, the last one the
    model's output."""
    question = _choice(
        "question", [shortened(record.about["question"], LABEL) for record in records]
    )
    step = ipywidgets.IntSlider(description="step", min=1, max=len(records[0]))
    layer = ipywidgets.IntSlider(
        description="layer", min=0, max=records[0].num_layers, value=records[0].num_layers
    )
    question.observe(lambda change: setattr(step, "max", len(records[change["new"]])), "value")

    def draw(question: int, step: int, layer: int) -> str:
        return boxed(lens_reading(records[question], min(step, len(records[question])) - 1, layer))

    return View("lens", {"question": question, "step": step, "layer": layer}, draw, twin)


def lens_reading(record: LatentRecord, row: int, layer: int) -> str:
    """One latent step in words: place, norm, the lens's candidates with bars, the nearest
    embeddings."""
    where = f"turn {record.turn[row] + 1}, k = {record.step[row] + 1}, " + (
        f"layer {layer}" if layer else "input z"
    )
    facts = (
        f"‖z‖ is {record.norm_ratio[row]:.2f} of the median embedding norm, longer than"
        f" {100 * record.norm_quantile[row]:.0f} % of the embeddings; entropy"
        f" {record.lens_entropy[row, layer]:.2f} nats"
    )
    rows = "".join(
        f"<tr><td>{escaped(visible(token))}</td><td>{probability:.3f}</td>"
        '<td><span class="bar"'
        f' style="width:{max(1, round(160 * probability))}px"></span></td></tr>'
        for token, probability in record.lens(row, layer)
    )
    near = ", ".join(f"{visible(token)} ({cosine:.2f})" for token, cosine in record.nearest(row))
    return (
        f"<p><b>{escaped(where)}</b>: {escaped(facts)}</p><table><tr><th>the lens"
        f" reads</th><th>p</th><th></th></tr>{rows}</table><p>nearest embeddings:"
        f" {escaped(near)}</p>"
    )


def checkpoint_comparison(
    systems: Mapping[str, Sequence[Trajectory]],
    codecs: Mapping[str, Codec],
    p_latent: Mapping[str, Sequence[Sequence[float]]] | None = None,
    twin: Figure | None = None,
) -> View:
    """The same question under two checkpoints, one above the other."""
    names = list(systems)
    question = _questions(systems[names[0]])
    one = ipywidgets.Dropdown(description="above", options=names, value=names[0])
    other = ipywidgets.Dropdown(description="below", options=names, value=names[-1])

    def draw(question: int, one: str, other: str) -> str:
        parts = []
        for name in (one, other):
            shown = systems[name][question]
            first, last = shown.turns[0].start if shown.turns else 0, len(shown.ids)
            scores = p_latent[name][question] if p_latent else None
            parts += [
                f"<h4>{escaped(name)}</h4><p>{fragments.headline(shown)}</p>",
                fragments.timeline(shown),
                fragments.turns(shown, scores),
                fragments.tokens(shown, codecs[name], (first, last)),
            ]
        return boxed(*parts)

    return View("compare", {"question": question, "one": one, "other": other}, draw, twin)


def intervention_panel(bench: Bench, sites: Sequence[Site], twin: Figure | None = None) -> View:
    """Replace z in one latent turn and read the action that the policy then writes, beside the
    random control.

    The tokens before the block are kept from click to click; only z, `</latent>` and the action are
    computed.
    """
    labels = [site_label(site) for site in sites]
    turn = _choice("turn", labels)
    kind = ipywidgets.Dropdown(description="replace by", options=KINDS)
    step = ipywidgets.Dropdown(description="step", options=_step_options(sites[0]))
    donor = _choice("donor", labels)
    donor.value = len(labels) - 1
    turn.observe(
        lambda change: setattr(step, "options", _step_options(sites[change["new"]])), "value"
    )

    def draw(turn: int, kind: str, step: int, donor: int) -> str:
        source = sites[donor] if kind == "patch" else None
        began = time.perf_counter()
        try:
            cases = [
                (sites[turn], Intervention(kind, None if step < 0 else step, control), source)
                for control in (False, True)
            ]
            effects = bench.effects(cases)
        except ValueError as problem:  # such as a donor with another K
            return boxed(f'<p class="no">{escaped(problem)}</p>')
        took = 1000 * (time.perf_counter() - began)
        return boxed(
            effect_reading(effects), f"<p><small>written anew in {took:.0f} ms</small></p>"
        )

    return View("panel", {"turn": turn, "kind": kind, "step": step, "donor": donor}, draw, twin)


def effect_reading(effects: Sequence[Effect]) -> str:
    """Intact action, action under the intervention, action under its control, as a table."""
    rows: list[Sequence[object]] = [("intact", effects[0].reference, "", "", "")]
    for effect in effects:
        name = "random control" if effect.intervention.control else effect.intervention.kind
        verdict = (
            "the donor's action" if effect.to_donor else "changed" if effect.changed else "the same"
        )
        rows.append((name, effect.action, verdict, f"{effect.kl:.4f}", f"{effect.distance:.2f}"))
    if effects[0].donor_action:
        rows.append(("donor", effects[0].donor_action, "", "", ""))
    return fragments.table(("z", "action", "", "KL (nats)", "moved by"), rows)


def site_label(site: Site) -> str:
    """Question, turn and recorded action of a latent turn, on one line."""
    turn = site.trajectory.turns[site.block.turn]
    action = f"{turn.action}: {turn.argument}" if turn.action else "no action"
    return f"{shortened(site.trajectory.question.text, 60)} · turn {site.block.turn + 1} · {action}"


def _step_options(site: Site) -> list[tuple[str, int]]:
    return [("all steps", -1), *((f"k = {step + 1}", step) for step in range(len(site.z)))]


def _questions(trajectories: Sequence[Trajectory]) -> ipywidgets.Dropdown:
    return _choice(
        "question",
        [f"{'✓' if t.correct else '✗'} {shortened(t.question.text, LABEL)}" for t in trajectories],
    )


def _choice(description: str, labels: Sequence[str]) -> ipywidgets.Dropdown:
    """A list whose values are positions; equal labels stay apart by their number."""
    options = [(f"{number + 1}. {label}", number) for number, label in enumerate(labels)]
    return ipywidgets.Dropdown(description=description, options=options, layout={"width": "46em"})


def _turn_options(trajectory: Trajectory) -> list[tuple[str, int]]:
    return [
        ("everything", -1),
        *((f"turn {number + 1}", number) for number in range(len(trajectory.turns))),
    ]

"""Live views: controls that drive a pure function, each with a static twin.

Where a kernel is at work, a `View` is shown as widgets; everywhere else its twin, a picture, is
shown. Both are alternatives of one output, so a headless run needs no click and a published page
needs no widget state. Every control has the CSS class `alar-<view>-<control>` and every view has
`alar-<view>`, so that tests can find them.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ipywidgets
from matplotlib.figure import Figure

from alar.inspector.fragments import (
    boxed,
    escaped,
    headline_html,
    legend_html,
    table_html,
    timeline_html,
    tokens_html,
    turns_html,
)
from alar.inspector.interventions import KINDS, Effect, Intervention, InterventionLab, Site
from alar.inspector.readings import LatentReadings
from alar.inspector.tokens import one_line, turn_action, visible
from alar.records import Trajectory
from alar.rollout.codec import Codec

LABEL = 90  # characters of a question in a list
ALL = -1  # the value of the choice "all turns" or "all steps"; others count from 0


class View:
    """Controls, and below them the HTML that `draw` makes of their values.

    `draw` takes one keyword argument per control, named as in `controls`. `twin` is the figure that
    is shown where widgets cannot be.
    """

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
        self.update()  # the first picture needs no click

    def update(self, change: object = None) -> None:
        values = {label: control.value for label, control in self.controls.items()}
        self.output.value = self.draw(**values)

    def _repr_mimebundle_(self, **options) -> dict[str, Any]:
        # A frontend shows the richest type it knows: the widget, else the picture, else the text.
        bundle = dict(self.box._repr_mimebundle_(**options) or {})  # MIME type → content
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
    """One trajectory at a time: time line, turns, tokens coloured by origin (all or one turn).

    `p_latent` has one list per trajectory with p(latent | state) of every turn.
    """

    def turns_of(question: int) -> list[tuple[str, int]]:
        numbers = range(len(trajectories[question].turns))
        return [("everything", ALL), *((f"turn {number + 1}", number) for number in numbers)]

    def draw(question: int, turn: int) -> str:
        shown = trajectories[question]
        span = None  # all tokens
        if 0 <= turn < len(shown.turns):
            span = shown.turns[turn].start, shown.turns[turn].end
        scores = None if p_latent is None else p_latent[question]
        return boxed(_summary(shown, scores), legend_html(), tokens_html(shown, codec, span))

    question = _questions(trajectories)
    turn = ipywidgets.Dropdown(description="tokens of", options=turns_of(0))
    _follows(turn, "options", question, turns_of)
    return View("browser", {"question": question, "turn": turn}, draw, twin)


def lens_explorer(readings: Sequence[LatentReadings], twin: Figure | None = None) -> View:
    """What the lens reads in one latent step at one layer.

    Layer 0 is z itself, the last layer the model's output. Steps count from 1 through all blocks of
    a trajectory.
    """

    def draw(question: int, step: int, layer: int) -> str:
        return boxed(
            lens_reading(readings[question], min(step, len(readings[question])) - 1, layer)
        )

    # All readings come from one model, so the first tells the number of layers.
    labels = [one_line(each.about["question"], LABEL) for each in readings]
    question, layers = _choice("question", labels), readings[0].num_layers
    step = ipywidgets.IntSlider(description="step", min=1, max=len(readings[0]))
    layer = ipywidgets.IntSlider(description="layer", min=0, max=layers, value=layers)
    _follows(step, "max", question, lambda chosen: len(readings[chosen]))
    return View("lens", {"question": question, "step": step, "layer": layer}, draw, twin)


def lens_reading(readings: LatentReadings, row: int, layer: int) -> str:
    """One latent step as HTML: place, norm, the lens's candidates with bars, nearest embeddings.

    `row` is a row of the readings (from 0), `layer` from 0, the input.
    """
    where = f"turn {readings.turn[row] + 1}, k = {readings.step[row] + 1}, "
    where += f"layer {layer}" if layer else "input z"
    facts = (
        f"‖z‖ is {readings.norm_ratio[row]:.2f} of the median embedding norm, longer than"
        f" {100 * readings.norm_quantile[row]:.0f} % of the embeddings; entropy"
        f" {readings.lens_entropy[row, layer]:.2f} nats"
    )
    rows = ["<tr><th>the lens reads</th><th>p</th><th></th></tr>"]
    for token, probability in readings.lens(row, layer):
        width = max(1, round(160 * probability))  # pixels; at least one, so that it can be seen
        bar = f'<span class="bar" style="width:{width}px"></span>'
        cells = (escaped(visible(token)), f"{probability:.3f}", bar)
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    near = ", ".join(f"{visible(token)} ({cosine:.2f})" for token, cosine in readings.nearest(row))
    return (
        f"<p><b>{where}</b>: {facts}</p><table>{''.join(rows)}</table>"
        f"<p>nearest embeddings: {escaped(near)}</p>"
    )


def checkpoint_comparison(
    systems: Mapping[str, Sequence[Trajectory]],
    codecs: Mapping[str, Codec],
    p_latent: Mapping[str, Sequence[Sequence[float]]] | None = None,
    twin: Figure | None = None,
) -> View:
    """The same question under two checkpoints, one above the other.

    `systems`, `codecs` and `p_latent` map a checkpoint's name to its trajectories, its codec and
    its p(latent | state). All checkpoints have the same questions in the same order.
    """

    def draw(question: int, one: str, other: str) -> str:
        parts = []
        for name in (one, other):
            shown = systems[name][question]
            # The prompt is left out: the question stands in the headline already.
            first = shown.turns[0].start if shown.turns else 0
            scores = None if p_latent is None else p_latent[name][question]
            parts += [f"<h4>{escaped(name)}</h4>", _summary(shown, scores)]
            parts.append(tokens_html(shown, codecs[name], (first, len(shown.ids))))
        return boxed(*parts)

    names = list(systems)
    question = _questions(systems[names[0]])
    one = ipywidgets.Dropdown(description="above", options=names, value=names[0])
    other = ipywidgets.Dropdown(description="below", options=names, value=names[-1])
    return View("compare", {"question": question, "one": one, "other": other}, draw, twin)


def intervention_panel(
    lab: InterventionLab, sites: Sequence[Site], twin: Figure | None = None
) -> View:
    """Replace z in one latent turn, and read the action that the policy then writes, beside the
    random control.

    Keys and values of the tokens before the block stay from click to click, so a click computes
    only z, `</latent>` and the action.
    """

    def steps_of(turn: int) -> list[tuple[str, int]]:
        numbers = range(len(sites[turn].block))
        return [("all steps", ALL), *((f"k = {number + 1}", number) for number in numbers)]

    def draw(turn: int, kind: str, step: int, donor: int) -> str:
        change = Intervention(kind, None if step == ALL else step)
        control = Intervention(kind, change.step, control=True)
        source = sites[donor] if kind == "patch" else None  # a donor would cost a forward pass
        began = time.perf_counter()
        try:
            effects = lab.effects([(sites[turn], each, source) for each in (change, control)])
        except ValueError as problem:  # such as a donor with another K
            return boxed(f'<p class="no">{escaped(problem)}</p>')
        took = 1000 * (time.perf_counter() - began)  # milliseconds
        note = f"<p><small>written anew in {took:.0f} ms</small></p>"
        return boxed(effect_reading(effects), note)

    labels = [_site_label(site) for site in sites]
    turn, donor = _choice("turn", labels), _choice("donor", labels)
    donor.value = len(labels) - 1  # not the turn that is shown first
    kind = ipywidgets.Dropdown(description="replace by", options=KINDS)
    step = ipywidgets.Dropdown(description="step", options=steps_of(0))
    _follows(step, "options", turn, steps_of)
    return View("panel", {"turn": turn, "kind": kind, "step": step, "donor": donor}, draw, twin)


def effect_reading(effects: Sequence[Effect]) -> str:
    """A table of the intact action and the action of every effect, as HTML.

    All effects are of one site and one donor.
    """
    rows: list[Sequence[object]] = [("intact", effects[0].reference, "", "", "")]
    for effect in effects:
        name = "random control" if effect.intervention.control else effect.intervention.kind
        verdict = "changed" if effect.changed else "the same"
        if effect.to_donor:
            verdict = "the donor's action"
        rows.append((name, effect.action, verdict, f"{effect.kl:.4f}", f"{effect.distance:.2f}"))
    if effects[0].donor_action:
        rows.append(("donor", effects[0].donor_action, "", "", ""))
    return table_html(("z", "action", "", "KL (nats)", "moved by"), rows)


def _summary(shown: Trajectory, scores: Sequence[float] | None) -> str:
    head = f"<p>{headline_html(shown)}</p>"
    return head + timeline_html(shown) + turns_html(shown, scores)


def _site_label(site: Site) -> str:
    """Question, turn and recorded action of a latent turn, on one line."""
    trajectory, number = site.trajectory, site.block.turn
    action = turn_action(trajectory.turns[number])
    return f"{one_line(trajectory.question.text, 60)} · turn {number + 1} · {action}"


def _questions(trajectories: Sequence[Trajectory]) -> ipywidgets.Dropdown:
    marks = ["✓" if trajectory.correct else "✗" for trajectory in trajectories]
    texts = [one_line(trajectory.question.text, LABEL) for trajectory in trajectories]
    return _choice("question", [f"{mark} {text}" for mark, text in zip(marks, texts)])


def _choice(description: str, labels: Sequence[str]) -> ipywidgets.Dropdown:
    """A list to choose from; its values are positions (from 0).

    Numbers before the labels keep equal labels apart.
    """
    options = [(f"{number + 1}. {label}", number) for number, label in enumerate(labels)]
    return ipywidgets.Dropdown(description=description, options=options, layout={"width": "46em"})


def _follows(control, attribute: str, leader, value_of: Callable[[int], Any]) -> None:
    """Give the control's attribute a new value whenever another choice is made in `leader`.

    `value_of` maps the choice to that value.
    """
    leader.observe(lambda change: setattr(control, attribute, value_of(change["new"])), "value")

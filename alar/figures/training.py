"""How training went: AR-GRPO live and afterwards, loss curves, and the shape of the reward."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from alar.evaluate import tables
from alar.evaluate.intervals import Estimate, running_mean, wilson
from alar.figures.style import (
    BLACK,
    BLUE,
    COLUMN,
    GREEN,
    GREY,
    MEASURED,
    ORANGE,
    PAGE,
    PURPLE,
    SKY,
    VERMILLION,
    TableOrFile,
    footnote,
    new_figure,
    panel_letter,
    percent_axis,
    styled,
)

# Panel title → its series: column of metrics.jsonl, label, colour.
_PANELS = {
    "Reward": [("reward", "rollouts", BLACK)],
    "Accuracy (%)": [
        ("accuracy", "rollouts", GREEN),
        ("validation_accuracy", "validation, greedy", BLACK),
    ],
    "Latent share of turns (%)": [
        ("latent_share", "all turns", BLACK),
        ("latent_share_easy", "easy turns", BLUE),
        ("latent_share_hard", "hard turns", VERMILLION),
    ],
    "Generated tokens": [
        ("generated_tokens", "rollouts", PURPLE),
        ("validation_tokens", "validation, greedy", BLACK),
    ],
    "Entropy of the mode (bits)": [
        ("mode_entropy", "H(M)", BLACK),
        ("mode_entropy_given_state", "H(M|X)", ORANGE),
    ],
    "State–mode information (bits)": [("mutual_information", "I(X;M)", BLUE)],
}


# Colour and line of each kind of outcome in `reward_shapes`: eight distinct pairs.
_CASE_COLOURS = (GREEN, VERMILLION, BLACK, BLUE, ORANGE, PURPLE, SKY, GREY)
_CASE_DASHES = ("-", "--", ":", "-.", (0, (5, 1)), (0, (1, 1)), (0, (3, 1, 1, 1)), "-")


@styled
def dynamics(
    metrics: TableOrFile,
    *,
    validation_questions: int = 0,
    total_steps: int = 0,
    scale: str = MEASURED,
) -> tuple[Figure, pd.DataFrame]:
    """Reward, accuracy, latent share, tokens and mode entropies over the steps of AR-GRPO.

    Thin lines are single steps, thick lines are running means with a 95 % band. If
    `validation_questions`, the number of validation questions, is given, validation points have
    Wilson intervals. The horizontal axis reaches at least to `total_steps`.
    """
    metrics = tables.read(metrics, tables.METRICS)
    # a mean covers a tenth of the steps
    steps, window = metrics["step"], max(3, len(metrics) // 10)
    figure = new_figure(PAGE, 3.6)
    grid = figure.subplots(2, 3, sharex=True).ravel()  # (6,), one per entry of `_PANELS`
    drawn = [pd.DataFrame({"step": steps})]  # the parts of the table, column by column
    for index, (axes, title) in enumerate(zip(grid, _PANELS, strict=True)):
        for column, label, colour in _PANELS[title]:
            if column not in metrics or metrics[column].isna().all():
                continue  # never measured, for example because validation is off
            if column.startswith("validation_"):
                points = _draw_validation(
                    axes, metrics, column, label, colour, validation_questions
                )
                drawn.append(points)
            else:
                drawn.append(_draw_smoothed(axes, metrics, column, label, colour, window))
        axes.set_title(f"{panel_letter(index)}   {title}")
        if title.endswith("(%)"):
            percent_axis(axes.yaxis)
        if len(axes.get_legend_handles_labels()[1]) > 1:  # a single line is named by the title
            box = {"frameon": True, "framealpha": 0.8, "edgecolor": "none"}
            axes.legend(loc="best", handlelength=1.2, labelspacing=0.25, **box)
    _within_shares(grid[1])
    # A share lies in [0, 1], and so does the entropy of two modes in bits.
    for axes in (grid[2], *grid[-2:]):
        axes.set_ylim(-0.03, 1.03)
    for axes in grid[3:]:
        axes.set_xlabel("AR-GRPO step")
    # a live figure keeps its axis while it grows
    grid[0].set_xlim(0, max(steps.max(), total_steps, 1))
    grid[0].xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    lines = f"thick: running mean of {window} steps, band: its 95 % interval"
    if validation_questions:
        lines += f", points: validation, n = {validation_questions}, with 95 % intervals"
    footnote(figure, scale, lines)
    return figure, pd.concat(drawn, axis=1)


@styled
def losses(
    curves: Mapping[str, TableOrFile], *, scale: str = MEASURED
) -> tuple[Figure, pd.DataFrame]:
    """Cross-entropy over the optimiser steps of supervised stages, at most five of them.

    `curves` is name → table, such as {"AASD": path, "mode warm-up": path}.
    """
    figure = new_figure(COLUMN, 2.3)
    axes = figure.subplots()
    drawn = []
    for (name, source), colour in zip(curves.items(), (BLUE, ORANGE, GREEN, PURPLE, SKY)):
        rows = tables.read(source, tables.LOSS).dropna(subset=["loss"])  # only steps with a loss
        window = max(3, len(rows) // 20)
        smooth = _draw_smoothed(axes, rows, "loss", name, colour, window)
        about = pd.DataFrame({"stage": name, "step": rows["step"]})  # which curve a row belongs to
        drawn.append(pd.concat([about, smooth], axis=1))
    axes.set_xlabel("Optimiser step")
    axes.set_ylabel("Cross-entropy (nats per token)")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.legend(loc="upper right")
    footnote(figure, scale, "line: running mean, band: its 95 % interval")
    return figure, pd.concat(drawn, ignore_index=True)


@styled
def lengths(
    curves: Mapping[str, TableOrFile], *, validation_questions: int = 0, scale: str = MEASURED
) -> tuple[Figure, pd.DataFrame]:
    """Generated tokens and accuracy over the steps of RL under up to five length rewards.

    `curves` is name → table, such as {"ShorterBetter": path}. Lines are running means over the
    rollouts, points are greedy validation. If `validation_questions`, the number of validation
    questions, is given, the points of the accuracy have Wilson intervals.
    """
    figure = new_figure(PAGE, 2.5)
    grid = figure.subplots(1, 2, sharex=True)
    drawn = []
    panels = {"generated_tokens": "Generated tokens", "accuracy": "Accuracy (%)"}  # column → title
    validation = {"generated_tokens": "validation_tokens", "accuracy": "validation_accuracy"}
    for (name, source), colour in zip(curves.items(), (BLUE, VERMILLION, PURPLE, ORANGE, SKY)):
        rows = tables.read(source, tables.LENGTHS)
        window = max(3, len(rows) // 10)
        parts = [pd.DataFrame({"method": name, "step": rows["step"]})]
        for axes, column in zip(grid, panels, strict=True):
            parts.append(_draw_smoothed(axes, rows, column, name, colour, window))
            if validation[column] in rows:
                # "_": not in the legend
                wanted = (validation[column], "_", colour, validation_questions)
                parts.append(_draw_validation(axes, rows, *wanted))
        drawn.append(pd.concat(parts, axis=1))
    for index, (axes, title) in enumerate(zip(grid, panels.values(), strict=True)):
        axes.set_title(f"{panel_letter(index)}   {title}")
        axes.set_xlabel("Step")
    _within_shares(grid[1])
    percent_axis(grid[1].yaxis)
    grid[0].xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside right upper", labelspacing=0.6)
    lines = "thick: running mean of the rollouts and its 95 % interval, points: greedy validation"
    if validation_questions:
        lines += f", n = {validation_questions}, with 95 % intervals"
    footnote(figure, scale, lines)
    return figure, pd.concat(drawn, ignore_index=True)


@styled
def reward_shapes(
    rewards: TableOrFile, *, scale: str = "computed from the formulas"
) -> tuple[Figure, pd.DataFrame]:
    """Reward against the latent share of a trajectory.

    One panel per variant of the formula, one line per kind of outcome.
    """
    rewards = tables.read(rewards, tables.REWARD_SHAPES)
    variants = tables.in_order(rewards["variant"], ("published", "repaired"))  # one panel each
    cases = list(dict.fromkeys(rewards["case"]))
    looks = dict(zip(cases, zip(_CASE_COLOURS, _CASE_DASHES)))  # case → (colour, dashes)
    figure = new_figure(PAGE, 2.5)
    grid = figure.subplots(1, len(variants), sharey=True, sharex=True, squeeze=False)[0]
    for index, (axes, variant) in enumerate(zip(grid, variants, strict=True)):
        axes.axhline(0, color=GREY, linewidth=0.7)
        for case in cases:
            line = rewards[(rewards["variant"] == variant) & (rewards["case"] == case)]
            line = line.sort_values("latent_share")
            colour, dashes = looks[case]
            look = {"color": colour, "linestyle": dashes, "label": case}
            if len(line) == 1:
                look["marker"] = "o"  # a line of one point would not show
            axes.plot(line["latent_share"], line["reward"], **look)
        axes.set_title(f"{panel_letter(index)}   {variant}")
        axes.set_xlabel("Latent share of the trajectory's turns (%)")
        axes.set_xlim(-0.02, 1.02)
        percent_axis(axes.xaxis)
    grid[0].set_ylabel("Reward")
    handles, labels = grid[0].get_legend_handles_labels()
    place = {"loc": "outside right upper", "labelspacing": 0.6, "handlelength": 2.6}
    figure.legend(handles, labels, **place)
    footnote(figure, scale)
    return figure, rewards


class LiveDynamics:
    """The figure of `dynamics`, redrawn in the notebook while AR-GRPO trains.

        live = LiveDynamics(total_steps=rl_steps)
        for row in train(...):
            live.add(row)
        live.finish()

    It redraws at most every `every_seconds`, and drawing never takes more than about 5 % of the
    time. Outside IPython nothing is shown. The output cell holds one figure, the last one drawn.
    """

    def __init__(
        self,
        *,
        total_steps: int = 0,
        validation_questions: int = 0,
        every_seconds: float = 5.0,
        scale: str = MEASURED,
    ):
        self.rows: list[dict] = []
        self._options = {
            "total_steps": total_steps,
            "validation_questions": validation_questions,
            "scale": scale,
        }
        self._every = every_seconds
        self._due = 0.0  # when to redraw, by time.monotonic(); 0: at the first row
        self._handle = None  # of the output in the notebook, once there is one

    def add(self, row: Mapping) -> None:
        """Takes one row of metrics, and redraws if it is time."""
        self.rows.append(dict(row))
        if time.monotonic() >= self._due:
            self._show()

    def finish(self) -> None:
        """Draws the last state."""
        if self.rows:
            self._show()

    def figure(self) -> Figure:
        """The figure of all rows so far."""
        return dynamics(pd.DataFrame(self.rows), **self._options)[0]

    def _show(self) -> None:
        if not _in_notebook():
            return
        from IPython.display import display

        started = time.monotonic()
        figure = self.figure()
        if self._handle is None:
            self._handle = display(figure, display_id=True)
        else:
            self._handle.update(figure)  # in place of the last figure, not below it
        # Wait 20 times as long as this figure took: drawing takes 1/21 of the time, 5 %.
        spent = time.monotonic() - started
        self._due = time.monotonic() + max(self._every, 20 * spent)


def _in_notebook() -> bool:
    try:
        from IPython import get_ipython
    except ImportError:  # nobody needs IPython to save a figure
        return False
    return get_ipython() is not None


def _within_shares(axes) -> None:
    """Leave no room below 0 % and above 100 %, where a band may reach but no share can lie."""
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, -0.03), min(high, 1.03))


def _draw_smoothed(
    axes, metrics: pd.DataFrame, column: str, label: str, colour: str, window: int
) -> pd.DataFrame:
    steps, values = metrics["step"].to_numpy(), metrics[column].to_numpy(dtype=float)
    smooth = running_mean(values, window)  # three series: mean, lower end, upper end
    axes.plot(steps, values, color=colour, linewidth=0.5, alpha=0.35)
    axes.fill_between(steps, smooth.low, smooth.high, color=colour, alpha=0.15, linewidth=0)
    axes.plot(steps, smooth.value, color=colour, label=label)
    drawn = {
        column: values,
        f"{column}_mean": smooth.value,
        f"{column}_low": smooth.low,
        f"{column}_high": smooth.high,
    }
    # The index of `metrics` lets the caller join the columns row by row.
    return pd.DataFrame(drawn).set_index(metrics.index)


def _draw_validation(
    axes, metrics, column: str, label: str, colour: str, questions: int
) -> pd.DataFrame:
    values = metrics[column].to_numpy(dtype=float)
    there = np.isfinite(values)  # only some steps are validated
    steps = metrics["step"][there]
    look = {"color": colour, "zorder": 4}
    axes.plot(steps, values[there], "o", markersize=3.5, label=label, **look)
    table = pd.DataFrame({column: values})  # NaN at steps without validation
    if questions and column == "validation_accuracy":
        # (points, 2): accuracy × questions is the number of right answers.
        ends = np.array([wilson(value * questions, questions)[1:] for value in values[there]])
        axes.vlines(steps, ends[:, 0], ends[:, 1], linewidth=0.9, **look)
        table.loc[there, list(Estimate.names(column)[1:])] = ends
    return table

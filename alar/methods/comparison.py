"""The comparison of methods: one row each, with the same questions, engine, loop and statistics.

    comparison = MethodComparison(run_dir, environment, questions, max_new_tokens=128, max_turns=6,
                                  batch_size=256)
    comparison.measure(Method("base", base_folder))
    comparison.measure(Method("ThinkPrune", folder, settings={"limit": 90},
                              training_seconds=210.0, training_tokens=4e6))
    table = comparison.table()  # `tables.METHODS`, every method measured in this run so far
    figure, numbers = figures.methods_figure(table)

`measure` leaves two files in `run_dir/methods`. One holds the answers, one row per question
(`tables.QUESTIONS`), as a result in a store (`alar.store`). The other is a note of what was
measured. A method is not measured again while its checkpoint's content, its settings, the
questions, the limits, the environment and the code that evaluates are the same.

All differences to the base are paired by question, with one draw of questions for all methods. They
are computed when the table is asked for, so rows that different notebooks measured can be compared.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from alar.engines.choice import opened_engine
from alar.evaluate import published, statistics, tables
from alar.evaluate.systems import evaluate, question_table
from alar.files import write_json
from alar.records import Environment, Question, Trajectory
from alar.rollout.engine import Engine
from alar.store import Store, closure, content, digest, key

BASE = "base"
FOLDER = "methods"
# The study's own methods: name → (stage of the checkpoint, mode, stages that its making took).
STAGES = ("02_teacher_traces", "03_aasd", "04_mode_warmup", "05_ar_grpo")
TRAINED = {"stage 1": ("03_aasd", "latent", STAGES[:2]), "ALAR": ("05_ar_grpo", "free", STAGES)}


@dataclass(frozen=True)
class Method:
    """A checkpoint to measure, and what it cost.

    `mode`: "off" for models that reason in text only, "free" where the policy chooses between text
    and latent blocks, "latent" and "think" force one. `settings` tell rows of one method apart and
    are shown with its name. `training_seconds` is wall time and includes making the method's own
    data. `training_tokens` counts every token of the sequences that were trained on, prompts and
    observations included, each time a sequence was seen. NaN: not known.
    """

    name: str
    checkpoint: str | Path
    mode: str = "off"
    settings: Mapping[str, Any] = field(default_factory=dict)
    training_seconds: float = 0.0  # the base costs nothing
    training_tokens: float = 0.0

    @property
    def label(self) -> str:
        """Name and settings, as tables and legends show them."""
        return f"{self.name}, {_shown(self.settings)}" if self.settings else self.name


def study_methods(stage) -> list[Method]:
    """The explicit base, stage 1 and ALAR of a run, as far as they exist, for any notebook's table.

    stage: the notebook's `alar.study.stage.Stage`. The seconds are those that `run_all.py` noted
    for the notebooks that make the traces and train. It does not note tokens.
    """
    methods = [Method(BASE, stage.input("01_latent_model", "base"))]
    for name, (trained, mode, stages) in TRAINED.items():
        checkpoint = stage.input(trained, "checkpoint", required=False)
        if checkpoint is not None:  # a study may stop before RL
            seconds = stage.seconds(*stages)
            costs = {"training_seconds": seconds, "training_tokens": math.nan}
            methods.append(Method(name, checkpoint, mode, **costs))
    return methods


def open_comparison(
    stage,
    base: str | Path,
    environment: Environment,
    questions: Sequence[Question],
    *,
    dataset: str = "",
    domain: str = "search",
    **limits: Any,
) -> tuple[MethodComparison, list[Method]]:
    """A notebook's comparison, and the methods that its own are compared with.

    With the study's base and test questions, a notebook shares the run's table and is compared with
    the study's models. On an answer `dataset`, or from another base, it has a table of its own and
    is compared with that base alone. `limits` are those of `MethodComparison`.
    """
    # None where the run has no such stage.
    studys = stage.input("01_latent_model", "base", required=False)
    if not dataset and Path(base) == studys:
        comparison = MethodComparison(
            stage.run_dir, environment, questions, domain=domain, scale=stage.scale, **limits
        )
        return comparison, study_methods(stage)
    name = Path(dataset).stem or domain
    scale = f"measured on {name}" if dataset else "measured"
    comparison = MethodComparison(
        stage.folder, environment, questions, domain=name, scale=scale, **limits
    )
    return comparison, [Method(BASE, base)]


class MethodComparison:
    """The study's test questions in one domain, and the methods measured on them.

    run_dir: the folder in which `methods/` is made. `scale` says in tables and figures how
    large the model is (`Stage.scale`).
    """

    def __init__(
        self,
        run_dir: str | Path,
        environment: Environment,
        questions: Sequence[Question],
        *,
        max_new_tokens: int,
        max_turns: int,
        batch_size: int,
        engine: str = "hf",
        domain: str = "search",
        scale: str = "measured",
    ):
        self.folder = Path(run_dir) / FOLDER
        self.environment, self.questions = environment, list(questions)
        self.limits = {"max_new_tokens": max_new_tokens, "max_turns": max_turns}
        self.batch_size, self.engine = batch_size, engine
        self.domain, self.scale = domain, scale

    def measure(
        self,
        method: Method,
        *,
        engine: Engine | None = None,
        environment: Environment | None = None,
        columns: Callable[[Sequence[Trajectory], Engine], Mapping[str, Sequence]] | None = None,
        progress: Callable[[Iterable], Iterable] = iter,
    ) -> Path:
        """Roll `method` out greedily on all questions, unless it was done before.

        Returns the file of the answers.

        `engine`: a ready one, for checkpoints that need more than `opened_engine`; `environment`:
        the domain's with another form of prompt. Both must follow from the checkpoint and the
        settings, which decide whether a row is measured again. `columns`: further columns of the
        answers, one value per question.
        """
        if not Path(method.checkpoint).is_dir():
            raise FileNotFoundError(
                f"{method.label}: no checkpoint folder {method.checkpoint}; run the notebook that"
                " trains it"
            )
        environment = environment or self.environment
        # Two measurements with equal values here are one.
        decisive = {
            "name": method.name,
            "mode": method.mode,
            "settings": dict(method.settings),
            "content": content(method.checkpoint),
            "protocol": self.protocol,
            # One prompt shows the form: few-shot examples or a ratio change it.
            "prompt": digest(list(environment.form.prompt(self.questions[0]))),
            "engine": self.engine,
        }
        # Readable part of the file names.
        slug = re.sub(r"[^A-Za-z0-9.]+", "-", method.label).strip("-").lower()
        answers = key(f"{slug}.parquet", decisive)

        def roll_out(path: Path) -> None:
            # The caller closes an engine of its own.
            ready = nullcontext(engine) if engine else opened_engine(method.checkpoint, self.engine)
            with ready as opened:
                trajectories = evaluate(
                    opened,
                    environment,
                    self.questions,
                    mode=method.mode,
                    batch_size=self.batch_size,
                    progress=progress,
                    **self.limits,
                )
                # Column → one value per question.
                extra = columns(trajectories, opened) if columns else {}
            question_table(trajectories, method.label).assign(**extra).to_parquet(path)

        # The file of an equal measurement, or a new one.
        path = Store(self.folder).once(answers, roll_out)
        note = (
            asdict(method)
            | decisive
            | {
                "checkpoint": str(method.checkpoint),
                "label": method.label,
                "domain": self.domain,
                "scale": self.scale,
                "answers": answers,
            }
        )
        # Costs and words may change without measuring again, so the note is always rewritten.
        write_json(self.folder / key(f"{slug}.json", method.label), note)
        return path

    def measured(self) -> list[dict]:
        """The notes of the methods that this protocol measured, the base first, then by name."""
        notes = [
            json.loads(path.read_text(encoding="utf-8")) for path in self.folder.glob("*.json")
        ]

        def place(note: dict) -> tuple:
            # False sorts first.
            return note["name"] != BASE, note["name"], _numbers_in(note["label"])

        return sorted((note for note in notes if note["protocol"] == self.protocol), key=place)

    def answers(self) -> pd.DataFrame:
        """`tables.QUESTIONS` of all methods; the column `system` holds their labels."""
        found = [pd.read_parquet(self.folder / note["answers"]) for note in self.measured()]
        if not found:
            raise FileNotFoundError(
                f"{self.folder}: no method is measured here by this protocol; call `measure` first"
            )
        return pd.concat(found, ignore_index=True)

    def table(self, *, resamples: int = 10_000, seed: int = 0) -> pd.DataFrame:
        """`tables.METHODS`: one row per method. Raises TableError if the base is not measured."""
        notes, answers = self.measured(), self.answers()  # one note and n answers per method
        if BASE not in set(answers["system"]):
            raise tables.TableError(
                f"{self.folder}: '{BASE}' is not measured here, so nothing can be compared with it:"
                " measure it first, as the notebooks do with study_methods"
            )
        options = {"resamples": resamples, "seed": seed}  # equal draws of questions for both
        summary = statistics.summarise(answers, BASE, **options)
        # Not by question type.
        summary = summary.query("question_type == 'all'").set_index("system")
        efficiency = statistics.efficiency(answers, BASE, **options).set_index("system")
        rows = []
        for note in notes:
            found = summary.loc[note["label"]]  # one row: values with their intervals
            rows.append(
                {
                    "domain": note["domain"],
                    "method": note["name"],
                    "settings": _shown(note["settings"]),
                    "n": found["n"],
                    **_interval("accuracy", found, "em"),
                    **_interval("accuracy_difference", found, "em_difference"),
                    **_interval("tokens", found, "tokens"),
                    **_interval("token_reduction", found, "token_reduction"),
                    **_interval("aes", efficiency.loc[note["label"]], "aes"),
                    "training_seconds": note["training_seconds"],
                    "training_tokens": note["training_tokens"],
                    "scale": note["scale"],
                }
            )
        return tables.read(pd.DataFrame(rows), tables.METHODS)

    @cached_property
    def protocol(self) -> str:
        """A hash of what decides an answer apart from the method."""
        # Only plain values can be hashed; an object such as a retriever is left out.
        settings = {}
        for name, value in vars(self.environment).items():
            if isinstance(value, int | float | str | bool):
                settings[name] = value
        environment = type(self.environment)
        # And all that these modules import.
        code = {"alar.evaluate.systems", "alar.engines.choice", environment.__module__}
        return digest(
            {
                "questions": [asdict(question) for question in self.questions],
                "limits": self.limits,
                "environment": [environment.__name__, settings],
                "code": closure(code),
            }
        )


def _shown(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in settings.items())


def readable_methods(table: pd.DataFrame) -> pd.DataFrame:
    """`tables.METHODS` as people read it: percent and tokens, each with its interval."""
    table = tables.read(table, tables.METHODS)
    return pd.DataFrame(
        {
            "method": table["method"],
            "settings": table["settings"],
            "n": table["n"],
            "accuracy %": tables.with_intervals(table, "accuracy", 100, ".1f"),
            "− base, points": tables.with_intervals(table, "accuracy_difference", 100, "+.1f"),
            "tokens": tables.with_intervals(table, "tokens", 1, ".1f"),
            "fewer tokens %": tables.with_intervals(table, "token_reduction", 100, ".1f"),
            "AES": tables.with_intervals(table, "aes", 1, "+.2f"),
            "training, s": table["training_seconds"].round(),
            "training, M tokens": (table["training_tokens"] / 1e6).round(2),
        }
    ).set_index(["method", "settings"])


def methods_beside(table: pd.DataFrame, domain: str) -> pd.DataFrame:
    """The methods of `tables.METHODS` that the paper has too, beside its own numbers of them.

    What the rows and columns are: `alar.evaluate.published.beside_published`.
    """
    table = tables.read(table, tables.METHODS)
    # That function reads a summary: "em" for accuracy, names of systems for the study's own.
    names = dict(zip(statistics.Estimate.names("accuracy"), statistics.Estimate.names("em")))
    systems = table["method"].replace({"stage 1": "stage1", "ALAR": "alar"})
    rows = table.rename(columns=names).assign(system=systems, question_type="all")
    rows = rows[systems.isin(published.means(domain)["system"])]
    return published.beside_published(rows, domain, measured=", ".join(set(table["scale"])))


def _interval(name: str, row: pd.Series, source: str) -> dict[str, float]:
    return statistics.Estimate.read(row, source).columns(name)


def _numbers_in(label: str) -> list:
    """Sorts "ratio 0.3" before "ratio 0.5" and 8 before 16."""
    pieces = []
    for piece in re.findall(r"\d+(?:\.\d+)?|\D+", label):
        is_number = piece[0].isdigit()
        # Numbers sort before words and by value.
        pieces.append((0, float(piece), "") if is_number else (1, 0.0, piece))
    return pieces

"""One row per compared method: the same test questions, engine, agent loop and statistics for all
of them.

    comparison = Comparison(run_dir, environment, questions, max_new_tokens=128, max_turns=6,
    batch_size=256) comparison.measure(Method("base", base_folder))
    comparison.measure(Method("ThinkPrune", folder, settings={"limit": 90}, training_seconds=210.0,
    training_tokens=4e6)) table = comparison.table()                       # `tables.METHODS`, every
    method measured in this run so far figure, numbers = figures.methods_figure(table)

`measure` leaves two files in `run_dir/methods`: the answers, one row per question
(`tables.QUESTIONS`), and a record of what was measured. A method is not measured again while its
checkpoint's content, its settings, the questions, the limits, the environment and the code that
evaluates are the same. All differences to the base are paired by question, with one draw of
questions for all methods, and made when the table is asked for: so rows measured by different
notebooks compare.
"""

from __future__ import annotations

import hashlib
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

import alar
from alar.engines.choice import opened_engine
from alar.evaluate import statistics, tables
from alar.evaluate.systems import evaluate, question_table
from alar.files import write_json
from alar.records import Environment, Question, Trajectory
from alar.rollout.engine import Engine
from alar.study import cache
from alar.study.stage import FINISHED, Stage, resolve, scale_of

BASE = "base"
FOLDER = "methods"


@dataclass(frozen=True)
class Method:
    """A checkpoint to measure, and what it cost.

    `mode`: "off" for models that reason in text only, "free" where the policy chooses between text
    and latent blocks, "latent" and "think" force one. `settings` tell rows of one method apart and
    are shown with its name. `training_seconds` is wall time, the making of the method's own data
    included; `training_tokens` are those of the sequences that its optimiser steps were over,
    prompts and observations included, each time they were seen. NaN: not known.
    """

    name: str
    checkpoint: str | Path
    mode: str = "off"
    settings: Mapping[str, Any] = field(default_factory=dict)
    training_seconds: float = 0.0
    training_tokens: float = 0.0

    @property
    def label(self) -> str:
        """Name and settings, as tables and legends show them."""
        return f"{self.name}, {shown(self.settings)}" if self.settings else self.name


def study_methods(stage: Stage) -> list[Method]:
    """The explicit base, stage 1 and ALAR of a run, as far as they are there, for any notebook's
    table.

    Seconds are those of the notebooks that make the traces and train, as `run_all.py` noted them;
    tokens are not noted there.
    """
    trained = {"stage 1": ("03_aasd", "latent", 2), "ALAR": ("05_ar_grpo", "free", 4)}
    methods = [Method(BASE, stage.input("01_latent_model", "base"))]
    stems = ("02_teacher_traces", "03_aasd", "04_mode_warmup", "05_ar_grpo")
    for name, (stem, mode, notebooks) in trained.items():
        checkpoint = stage.input(stem, "checkpoint", required=False)
        if checkpoint is not None:
            notes = [
                cache.read_record(stage.run_dir / other / FINISHED) for other in stems[:notebooks]
            ]
            seconds = sum(note["seconds"] for note in notes) if all(notes) else math.nan
            methods.append(
                Method(name, checkpoint, mode, training_seconds=seconds, training_tokens=math.nan)
            )
    return methods


def opened(
    stage: Stage,
    base: str | Path,
    environment: Environment,
    questions: Sequence[Question],
    *,
    dataset: str = "",
    domain: str = "search",
    **limits: Any,
) -> tuple[Comparison, list[Method]]:
    """A notebook's comparison, and the methods that its own are set beside; `limits` as in
    `Comparison`.

    Beside the study's models, in the run's table, where `base` is the study's and the questions are
    the study's test; on an answer `dataset`, or from another base, beside that base alone, in a
    table of the notebook's own.
    """
    beside_study = not dataset and Path(base) == stage.input(
        "01_latent_model", "base", required=False
    )
    if beside_study:
        return Comparison(
            stage.run_dir, environment, questions, domain=domain, **limits
        ), study_methods(stage)
    name = Path(dataset).stem or domain
    scale = f"measured on {name}" if dataset else ""
    comparison = Comparison(
        stage.folder, environment, questions, domain=name, scale=scale, **limits
    )
    return comparison, [Method(BASE, base)]


class Comparison:
    """The study's test questions in one domain, and the methods measured on them. `scale` says in
    tables and figures where: by default the size of the run's own model."""

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
        scale: str = "",
    ):
        run_dir = resolve(run_dir)
        self.folder = run_dir / FOLDER
        self.environment, self.questions = environment, list(questions)
        self.limits = {"max_new_tokens": max_new_tokens, "max_turns": max_turns}
        self.batch_size, self.engine, self.domain = batch_size, engine, domain
        self.scale = scale or scale_of(run_dir)

    def measure(
        self,
        method: Method,
        *,
        engine: Engine | None = None,
        environment: Environment | None = None,
        columns: Callable[[Sequence[Trajectory], Engine], Mapping[str, Sequence]] | None = None,
        progress: Callable[[Iterable], Iterable] = iter,
    ) -> Path:
        """Greedy rollouts of `method` on all questions, unless they are there already; returns the
        record's file.

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
        record = asdict(method) | {
            "checkpoint": str(method.checkpoint),
            "settings": dict(method.settings),
            "label": method.label,
            "domain": self.domain,
            "scale": self.scale,
            "content": cache.content(Path(method.checkpoint)),
            "protocol": self.protocol,
            "prompt": _hash(list(environment.form.prompt(self.questions[0]))),
            "engine": self.engine,
        }
        path = self.folder / f"{_slug(method.label)}.json"
        if not _same(cache.read_record(path), record) or not path.with_suffix(".parquet").exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(
                missing_ok=True
            )  # the record is written last: without it the answers do not count
            opened = (
                opened_engine(method.checkpoint, self.engine)
                if engine is None
                else nullcontext(engine)
            )
            with opened as ready:
                trajectories = evaluate(
                    ready, environment, self.questions,
                    mode=method.mode, batch_size=self.batch_size, progress=progress, **self.limits,
                )  # fmt: skip
                extra = columns(trajectories, ready) if columns else {}
            question_table(trajectories, method.label).assign(**extra).to_parquet(
                path.with_suffix(".parquet")
            )
        write_json(path, record)
        return path

    def records(self) -> list[dict]:
        """Of the methods measured by this protocol, in the order of their names, the base first."""
        found = [
            cache.read_record(path) | {"file": path.stem}
            for path in sorted(self.folder.glob("*.json"))
        ]
        mine = [record for record in found if record["protocol"] == self.protocol]
        return sorted(
            mine,
            key=lambda record: (
                record["name"] != BASE,
                record["name"],
                _numbers_in(record["label"]),
            ),
        )

    def answers(self) -> pd.DataFrame:
        """`tables.QUESTIONS` of all methods; the column `system` holds their labels."""
        found = [
            pd.read_parquet(self.folder / f"{record['file']}.parquet") for record in self.records()
        ]
        if not found:
            raise FileNotFoundError(
                f"{self.folder}: no method is measured here by this protocol; call `measure` first"
            )
        return pd.concat(found, ignore_index=True)

    def table(self, *, resamples: int = 10_000, seed: int = 0) -> pd.DataFrame:
        """`tables.METHODS`: one row per method. Raises TableError where the base is not measured."""
        records, answers = self.records(), self.answers()
        if BASE not in set(answers["system"]):
            raise tables.TableError(
                f"{self.folder}: '{BASE}' is not measured here, so nothing can be compared with it:"
                " measure it first, as the notebooks do with study_methods"
            )
        options = {"resamples": resamples, "seed": seed}
        summary = (
            statistics.summarise(answers, BASE, **options)
            .query("question_type == 'all'")
            .set_index("system")
        )
        efficiency = statistics.efficiency(answers, BASE, **options).set_index("system")
        rows = []
        for record in records:
            found = summary.loc[record["label"]]
            rows.append(
                {
                    "domain": record["domain"],
                    "method": record["name"],
                    "settings": shown(record["settings"]),
                    "n": found["n"],
                    **_interval("accuracy", found, "em"),
                    **_interval("accuracy_difference", found, "em_difference"),
                    **_interval("tokens", found, "tokens"),
                    **_interval("token_reduction", found, "token_reduction"),
                    **_interval("aes", efficiency.loc[record["label"]], "aes"),
                    "training_seconds": record["training_seconds"],
                    "training_tokens": record["training_tokens"],
                    "scale": record["scale"],
                }
            )
        return tables.read(pd.DataFrame(rows), tables.METHODS)

    @cached_property
    def protocol(self) -> str:
        """A hash of all that decides what an answer is, but for the method: questions, limits,
        environment, code."""
        code = {"alar.evaluate.systems", "alar.engines.choice", type(self.environment).__module__}
        simple = {
            k: v
            for k, v in vars(self.environment).items()
            if isinstance(v, int | float | str | bool)
        }
        return _hash(
            {
                "questions": [asdict(question) for question in self.questions],
                "limits": self.limits,
                "environment": [type(self.environment).__name__, simple],
                "code": cache.closure(code, Path(alar.__file__).parent),
            }
        )


def shown(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in settings.items())


def readable(table: pd.DataFrame) -> pd.DataFrame:
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


def _interval(name: str, row: pd.Series, source: str) -> dict[str, float]:
    return statistics.Estimate.read(row, source).columns(name)


def _same(before: dict | None, now: dict) -> bool:
    """Whether what was measured is what would be measured; costs and words may differ."""
    told = ("name", "mode", "settings", "content", "protocol", "prompt", "engine")
    return before is not None and all(
        before.get(key) == json.loads(json.dumps(now[key])) for key in told
    )


def _slug(label: str) -> str:
    """A file name that people can read and no other label has."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", label).strip("-").lower() + "-" + _hash(label)[:6]


def _numbers_in(label: str) -> list:
    """Sorts "ratio 0.3" before "ratio 0.5" and 8 before 16."""
    return [
        (0, float(part), "") if part[0].isdigit() else (1, 0.0, part)
        for part in re.findall(r"\d+(?:\.\d+)?|\D+", label)
    ]


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()

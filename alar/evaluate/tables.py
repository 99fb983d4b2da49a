"""The tables that stages hand to the statistics and the figures: their columns, and a reader that
checks them.

A stage writes a small table once; everything downstream only reads it. So each table is described
here, in one place: its file, the stage that writes it and its columns. `read` accepts a data frame,
a `.parquet`, `.csv` or `.jsonl` file and refuses whatever does not fit, naming the table, the
column and the stage to run.

`em` is the share of correct answers: exact match in search, the verdict of BFCL's checker in the
tool domain. Units: tokens are counts, shares and accuracies are fractions in 0..1, entropies are
bits.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from pandas.api import types as dtypes

# Orders in which rows and panels appear; names that are not listed follow in alphabetical order.
SYSTEMS = ("base", "stage1", "warmup", "alar", "alar-think", "alar-latent", "oracle")
QUESTION_TYPES = (
    "all",
    "single",
    "bridge",
    "comparison",
    "arithmetic",
    "simple",
    "multiple",
    "parallel",
    "parallel_multiple",
    "multi_turn",
    "irrelevance",
)
CONTROLS = ("intact", "zeroed", "shuffled", "noise", "mean", "text")
MODES = ("latent", "think", "none")


class TableError(ValueError):
    """A table that is missing, damaged or of the wrong shape."""


@dataclass(frozen=True)
class Table:
    """What a table must look like. `columns` maps a name to "text", "number" or "flag"; others may
    be present."""

    name: str
    file: str
    stage: str
    columns: dict[str, str]

    @property
    def origin(self) -> str:
        return f"{self.stage} writes it ({self.file})"


def _numbers(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "number")


def _interval(name: str) -> dict[str, str]:
    return _numbers(name, f"{name}_low", f"{name}_high")


_EVALUATION = "06_benchmark_eval"
_QUESTION_COLUMNS = {
    "system": "text",
    "question_id": "text",
    "question_type": "text",
    "correct": "flag",
    **_numbers("generated_tokens", "think_tokens", "turns", "latent_turns", "think_turns"),
    "well_formed": "flag",
}

QUESTIONS = Table("questions", "questions.parquet", _EVALUATION, _QUESTION_COLUMNS)
CONTROL_QUESTIONS = Table("controls", "controls.parquet", _EVALUATION, _QUESTION_COLUMNS)
ORACLE_QUESTIONS = Table("oracle", "oracle.parquet", _EVALUATION, _QUESTION_COLUMNS)
TURNS = Table(
    "turns",
    "turns.parquet",
    _EVALUATION,
    {
        "system": "text",
        "question_id": "text",
        "question_type": "text",
        "turn": "number",
        "hard": "flag",
        "mode": "text",
        "tokens": "number",
        "p_latent": "number",
    },
)
SUMMARY = Table(
    "summary",
    "summary.csv",
    _EVALUATION,
    {
        "system": "text",
        "question_type": "text",
        "n": "number",
        **_interval("em"),
        **_interval("tokens"),
        "turns": "number",
        **_interval("latent_share"),
        **_interval("em_difference"),
        **_interval("token_reduction"),
    },
)
ADAPTIVITY = Table(
    "adaptivity",
    "adaptivity.csv",
    _EVALUATION,
    {
        "system": "text",
        **_numbers("n", "turns", "hard_turns"),
        **_interval("explicit_share_hard"),
        **_interval("explicit_share_easy"),
        **_interval("explicit_share_difference"),
        **_interval("mode_entropy"),
        **_interval("mode_entropy_given_state"),
        **_interval("mutual_information"),
    },
)
MODE_SHARE = Table(
    "mode share",
    "mode_share.csv",
    "07_figures (alar.evaluate.statistics.mode_share)",
    {
        "system": "text",
        "question_type": "text",
        **_numbers("turn", "n"),
        "hard": "flag",
        **_interval("latent_share"),
    },
)
EXAMPLE_TURNS = Table(
    "example turns",
    "example_turns.csv",
    _EVALUATION,
    {
        "system": "text",
        "question": "text",
        "turn": "number",
        "mode": "text",
        "tokens": "number",
        "text": "text",
        "hard": "flag",
    },
)
METRICS = Table(
    "metrics",
    "metrics.jsonl",
    "05_ar_grpo",
    _numbers(
        "step",
        "reward",
        "accuracy",
        "latent_share",
        "generated_tokens",
        "mode_entropy",
        "mode_entropy_given_state",
        "mutual_information",
    ),
)
LENGTHS = Table(
    "lengths",
    "<method>.jsonl",
    "11_length_rewards",
    _numbers("step", "reward", "accuracy", "generated_tokens"),
)
LOSS = Table("loss", "loss.jsonl", "03_aasd and 04_mode_warmup", _numbers("step", "loss"))
REWARD_SHAPES = Table(
    "reward shapes",
    "rewards.csv",
    "07_figures (alar.rl.reward.shaped_rewards)",
    {"variant": "text", "case": "text", "latent_share": "number", "reward": "number"},
)
BENCH_RATIOS = Table(
    "speed ratios",
    "ratios.csv",
    "09_benchmarks",
    {
        **dict.fromkeys(("part", "case", "numerator", "denominator", "clock"), "text"),
        **_interval("ratio"),
        **_numbers("at_most", "at_least"),
    },
)
THROUGHPUT = Table(
    "throughput",
    "throughput.csv",
    "10_serving",
    {"route": "text", **_numbers("concurrent", "turns", "tokens", "seconds", "tokens_per_second")},
)
METHODS = Table(
    "methods",
    "methods.csv",
    "11_length_rewards and the notebooks after it (alar.methods.comparison)",
    {
        **dict.fromkeys(("domain", "method", "settings"), "text"),
        "n": "number",
        **_interval("accuracy"),
        **_interval("accuracy_difference"),
        **_interval("tokens"),
        **_interval("token_reduction"),
        **_interval("aes"),
        **_numbers("training_seconds", "training_tokens"),
        "scale": "text",
    },
)

RATIOS = Table(
    "ratios",
    "ratios.csv",
    "12_tokenskip",
    {
        **dict.fromkeys(("model", "scorer"), "text"),
        **_numbers("ratio", "n", "generated_tokens"),
        **_interval("accuracy"),
        **_interval("think_tokens"),
        **_interval("correct_tokens"),
    },
)

ABLATIONS = Table(
    "ablations",
    "ablations.csv",
    "17_ablations (alar.evaluate.ablations.compare)",
    {
        **dict.fromkeys(("setting", "system"), "text"),
        **_numbers("seeds", "n"),
        **_interval("accuracy"),
        **_interval("accuracy_difference"),
        **_numbers("difference_lowest", "difference_highest"),  # of the single seeds
        **_interval("tokens"),
        **_interval("token_reduction"),
        **_numbers("latent_share", "explicit_difference", "mutual_information"),
    },
)

_KINDS = {
    "text": lambda column: (
        dtypes.is_string_dtype(column) or isinstance(column.dtype, pd.CategoricalDtype)
    ),
    "number": lambda column: dtypes.is_numeric_dtype(column) and not dtypes.is_bool_dtype(column),
    "flag": dtypes.is_bool_dtype,
}


def read(source: pd.DataFrame | str | Path, table: Table) -> pd.DataFrame:
    """The table with a fresh index, checked against its description.

    Raises FileNotFoundError for a missing file and TableError for a damaged or unfit one.
    """
    frame, where = (
        (source, "") if isinstance(source, pd.DataFrame) else _from_file(Path(source), table)
    )
    label = f"table '{table.name}'{where}"
    if frame.empty:
        raise TableError(f"{label} has no rows; {table.origin}: run that stage again")
    missing = [name for name in table.columns if name not in frame.columns]
    if missing:
        present = ", ".join(map(str, frame.columns))
        raise TableError(
            f"{label}: no column {', '.join(map(repr, missing))}; {table.origin}; the columns here"
            f" are {present}"
        )
    for name, kind in table.columns.items():
        if not _KINDS[kind](frame[name]):
            raise TableError(
                f"{label}: column '{name}' should hold a {kind}, but its type is"
                f" {frame[name].dtype}; {table.origin}"
            )
    if "mode" in table.columns:
        unknown = sorted(set(frame["mode"]) - set(MODES))
        if unknown:
            raise TableError(
                f"{label}: column 'mode' holds {unknown[0]!r}; known modes are {', '.join(MODES)};"
                f" {table.origin}"
            )
    return frame.reset_index(drop=True)


def with_intervals(
    table: pd.DataFrame, name: str, scale: float = 1.0, form: str = ".1f"
) -> list[str]:
    """Column `name` as people read it: every value with its interval, "–" where there is none."""
    rows = (table[[name, f"{name}_low", f"{name}_high"]] * scale).itertuples(index=False)
    return [
        "–" if pd.isna(value) else f"{value:{form}} [{low:{form}}, {high:{form}}]"
        for value, low, high in rows
    ]


def in_order(names, known: tuple[str, ...]) -> list[str]:
    """The distinct names, those in `known` first and in its order, then the others alphabetically."""
    distinct = set(names)
    return [name for name in known if name in distinct] + sorted(distinct - set(known))


def _from_file(path: Path, table: Table) -> tuple[pd.DataFrame, str]:
    if not path.is_file():
        raise FileNotFoundError(
            f"table '{table.name}': {path} does not exist; {table.origin}: run that stage first"
        )
    where = f" ({path})"
    if path.suffix == ".jsonl":
        return pd.DataFrame(_json_lines(path, table)), where
    reader = {".parquet": pd.read_parquet, ".csv": pd.read_csv}.get(path.suffix)
    if reader is None:
        raise TableError(
            f"table '{table.name}': {path}: cannot read '{path.suffix}'; use .parquet, .csv or"
            " .jsonl"
        )
    try:
        return reader(path), where
    except (
        ValueError,
        OSError,
    ) as error:  # a truncated file: pyarrow and pandas raise subclasses of these
        raise TableError(
            f"table '{table.name}': {path} is damaged ({error}); {table.origin}: run it again"
        ) from error


def _json_lines(path: Path, table: Table) -> list[dict]:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise TableError(
                f"table '{table.name}': {path}, line {number} is not valid JSON ({error.msg}),"
                f" probably cut off; {table.origin}: run it again"
            ) from error
    return rows

"""The tables that stages hand to the statistics and the figures: their columns, and one reader.

A stage writes a small table once, and everything after it only reads the table. This module
describes each table: its file, the stage that writes it and its columns. `read` accepts a data
frame or a `.parquet`, `.csv` or `.jsonl` file. Its errors name the table, the missing column and
the stage to run.

`em` is the share of correct answers: exact match in search, the verdict of BFCL's checker in the
tool domain. Tokens are counts, shares and accuracies are fractions in 0..1, entropies are in bits.
An estimate (`~` below) has three columns: `name`, `name_low`, `name_high`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from alar.evaluate.intervals import Estimate
from alar.files import read_jsonl

# Rows and panels appear in these orders; names that are not listed follow in alphabetical order.
SYSTEMS = ("base", "stage1", "warmup", "alar", "alar-think", "alar-latent", "oracle")
QUESTION_TYPES = (
    # Search on the first line, tools on the second.
    *("all", "single", "bridge", "comparison", "arithmetic"),
    *("simple", "multiple", "parallel", "parallel_multiple", "multi_turn", "irrelevance"),
)
MACRO = "macro"  # in place of a question type: the unweighted mean over the sets asked
CONTROLS = ("intact", "zeroed", "shuffled", "noise", "mean", "text")
MODES = ("latent", "think", "none")  # of a turn; "none" has no reasoning block


class TableError(ValueError):
    """A table is damaged, has no rows, or lacks a column."""


@dataclass(frozen=True)
class Table:
    """What a table must have. Other columns may be present."""

    file: str  # its name in the stage's folder
    stage: str  # the one that writes it
    listed: str  # columns in their order, `~` before an estimate

    @property
    def name(self) -> str:
        return self.file.partition(".")[0]

    @property
    def origin(self) -> str:
        return f"{self.stage} writes it ({self.file})"

    @property
    def columns(self) -> tuple[str, ...]:
        found: list[str] = []
        for column in self.listed.split():
            found += Estimate.names(column[1:]) if column.startswith("~") else [column]
        return tuple(found)


_EVALUATION = "06_benchmark_eval"
# The same columns for the systems, the controls and the oracle, so that one reader serves all.
_ANSWERS = (
    "system question_id question_type correct generated_tokens think_tokens turns latent_turns"
    " think_turns well_formed"
)
QUESTIONS = Table("questions.parquet", _EVALUATION, _ANSWERS)
CONTROL_QUESTIONS = Table("controls.parquet", _EVALUATION, _ANSWERS)
ORACLE_QUESTIONS = Table("oracle.parquet", _EVALUATION, _ANSWERS)
TURNS = Table(
    "turns.parquet", _EVALUATION, "system question_id question_type turn hard mode tokens p_latent"
)
SUMMARY = Table(
    "summary.csv",
    _EVALUATION,
    "system question_type n ~em ~tokens turns ~latent_share ~em_difference ~token_reduction",
)
ADAPTIVITY = Table(
    "adaptivity.csv",
    _EVALUATION,
    "system n turns hard_turns ~explicit_share_hard ~explicit_share_easy"
    " ~explicit_share_difference ~mode_entropy ~mode_entropy_given_state ~mutual_information",
)
MODE_SHARE = Table(
    "mode_share.csv",
    "07_figures (alar.evaluate.statistics.mode_share)",
    "system question_type turn n hard ~latent_share",
)
EXAMPLE_TURNS = Table(
    "example_turns.csv", _EVALUATION, "system question turn mode tokens text hard"
)
# One row per step of RL.
METRICS = Table(
    "metrics.jsonl",
    "05_ar_grpo",
    "step reward accuracy latent_share generated_tokens mode_entropy mode_entropy_given_state"
    " mutual_information",
)
LENGTHS = Table("<method>.jsonl", "11_length_rewards", "step reward accuracy generated_tokens")
LOSS = Table("loss.jsonl", "03_aasd and 04_mode_warmup", "step loss")
REWARD_SHAPES = Table(
    "rewards.csv", "07_figures (alar.rl.reward.shaped_rewards)", "variant case latent_share reward"
)
# numerator / denominator, with the bounds that the ratio has to keep.
BENCH_RATIOS = Table(
    "ratios.csv", "09_benchmarks", "part case numerator denominator clock ~ratio at_most at_least"
)
THROUGHPUT = Table(
    "throughput.csv", "10_serving", "route concurrent turns tokens seconds tokens_per_second"
)
METHODS = Table(
    "methods.csv",
    "11_length_rewards and the notebooks after it (alar.methods.comparison)",
    "domain method settings n ~accuracy ~accuracy_difference ~tokens ~token_reduction ~aes"
    " training_seconds training_tokens scale",
)
RATIOS = Table(
    "ratios.csv",
    "12_tokenskip",
    "model scorer ratio n generated_tokens ~accuracy ~think_tokens ~correct_tokens",
)
ABLATIONS = Table(
    "ablations.csv",
    "17_ablations (alar.evaluate.ablations.ablation_table)",
    "setting system seeds n ~accuracy ~accuracy_difference difference_lowest difference_highest"
    " ~tokens ~token_reduction latent_share explicit_difference mutual_information",
)

_READERS = {
    ".parquet": pd.read_parquet,
    ".csv": pd.read_csv,
    ".jsonl": lambda path: pd.DataFrame(read_jsonl(path)),
}


def read(source: pd.DataFrame | str | Path, table: Table) -> pd.DataFrame:
    """Check the table and return it with a fresh index.

    Raises FileNotFoundError for a missing file and TableError for a damaged or unfit one.
    """
    frame, label = source, f"table '{table.name}'"
    if not isinstance(source, pd.DataFrame):
        frame, label = _from_file(Path(source), table), f"{label} ({source})"
    if frame.empty:
        raise TableError(f"{label} has no rows; {table.origin}: run that stage again")
    missing = [name for name in table.columns if name not in frame.columns]
    if missing:
        raise TableError(
            f"{label}: no column {', '.join(map(repr, missing))}; {table.origin}; the columns here"
            f" are {', '.join(map(str, frame.columns))}"
        )
    # A mode of another name would silently count as "not latent".
    unknown = sorted(set(frame["mode"]) - set(MODES)) if "mode" in table.columns else []
    if unknown:
        raise TableError(
            f"{label}: column 'mode' holds {unknown[0]!r}; known modes are {', '.join(MODES)};"
            f" {table.origin}"
        )
    return frame.reset_index(drop=True)


def with_intervals(
    table: pd.DataFrame, name: str, scale: float = 1.0, form: str = ".1f"
) -> list[str]:
    """Estimates as people read them: every value with its interval, "–" for NaN.

    Values are multiplied by `scale` (100 for percent) and written in the format `form`.
    """
    shown = []
    for value, low, high in zip(*(column * scale for column in Estimate.read(table, name))):
        defined = not pd.isna(value)
        shown.append(f"{value:{form}} [{low:{form}}, {high:{form}}]" if defined else "–")
    return shown


def in_order(names, known: tuple[str, ...]) -> list[str]:
    """The distinct names: those in `known` first and in its order, then the others by alphabet."""
    distinct = set(names)
    return [name for name in known if name in distinct] + sorted(distinct - set(known))


def _from_file(path: Path, table: Table) -> pd.DataFrame:
    if not path.is_file():
        raise FileNotFoundError(
            f"table '{table.name}': {path} does not exist; {table.origin}: run that stage first"
        )
    if path.suffix not in _READERS:
        raise TableError(f"table '{table.name}': {path} is none of {', '.join(_READERS)}")
    try:
        return _READERS[path.suffix](path)
    except (ValueError, OSError) as error:  # what each reader raises for a truncated file
        raise TableError(
            f"table '{table.name}': {path} is damaged ({error}); {table.origin}: run it again"
        ) from error

"""Timing side by side: contestants run in turn (A B C A B C …), so that whatever slows the machine
slows them all.

A ratio is taken within each round and reported as the median over the rounds with its range. Wall
time is what a user waits; the process's CPU time does not see other programs and is the steadier
clock on a busy machine with one thread (on a GPU it only says how busy the host is). Peak memory
comes from an untimed first run, which also warms up.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch

from alar.evaluate.intervals import Estimate
from alar.evaluate.tables import BENCH_RATIOS
from alar.study.bench.memory import peak_memory

CLOCKS = ("wall", "cpu")


@dataclass(frozen=True)
class Contestant:
    """`run()` does the work once and returns how many real tokens it processed or generated.
    `probe` is a shorter run with the same kind of peak, where `run` is too long to be watched."""

    name: str
    run: Callable[[], int]
    probe: Callable[[], int] | None = None


@dataclass(frozen=True)
class Comparison:
    """Time of `numerator` over time of `denominator`, per token, and what is claimed of it."""

    numerator: str
    denominator: str
    at_most: float | None = None
    at_least: float | None = None


@dataclass(frozen=True)
class Case:
    """Contestants that do the same work. `part` and `name` label it; `padded_over_real` is 1
    without padding."""

    part: str
    name: str
    contestants: tuple[Contestant, ...]
    comparisons: tuple[Comparison, ...] = ()
    padded_over_real: float = 1.0

    def __post_init__(self):
        names = [contestant.name for contestant in self.contestants]
        if not names or len(set(names)) < len(names):
            raise ValueError(
                f"case {self.part}, {self.name}: contestants {names} need distinct names, at"
                " least one"
            )
        for comparison in self.comparisons:
            for name in (comparison.numerator, comparison.denominator):
                if name not in names:
                    raise ValueError(
                        f"case {self.part}, {self.name}: no contestant {name!r} to compare among"
                        f" {names}"
                    )


@dataclass(frozen=True)
class Results:
    """rounds: one row per run. summary: one row per contestant, medians and ranges. ratios: one row
    per comparison and clock."""

    rounds: pd.DataFrame
    summary: pd.DataFrame
    ratios: pd.DataFrame

    def save(self, folder: str | Path) -> None:
        for name in ("rounds", "summary", "ratios"):
            getattr(self, name).to_csv(Path(folder) / f"{name}.csv", index=False)


def run(
    cases: Sequence[Case],
    *,
    rounds: int = 5,
    device: str | torch.device = "cpu",
    threads: int = 1,
    progress: Callable[[Iterable], Iterable] = iter,
) -> Results:
    """Time all cases. `threads` of PyTorch are used meanwhile (0: as it is); `progress` wraps the
    iteration over cases."""
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}: expected at least 1")
    if not cases:
        raise ValueError("no case to time")
    device = resolve_device(device)
    timed, peaks = [], {}
    with num_threads(threads), _quick_collections():
        for case in progress(cases):
            for contestant in case.contestants:
                peak = peak_memory(contestant.probe or contestant.run, device)
                peaks[case.part, case.name, contestant.name] = peak
            for row in interleaved(case.contestants, rounds, device):
                timed.append({"part": case.part, "case": case.name} | row)
    table = pd.DataFrame(timed)
    return Results(table, _summary(cases, table, peaks), _ratios(cases, table))


def interleaved(
    contestants: Sequence[Contestant], rounds: int, device: torch.device
) -> Iterable[dict]:
    """One row for every run, in the order A B C A B C …: contestant, round, tokens, wall_s, cpu_s."""
    for number in range(1, rounds + 1):
        for contestant in contestants:
            gc.collect()  # nobody pays for what the one before left behind
            _synchronise(device)
            wall, cpu = time.perf_counter(), time.process_time()
            tokens = contestant.run()
            _synchronise(device)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            yield {
                "contestant": contestant.name,
                "round": number,
                "tokens": tokens,
                "wall_s": wall,
                "cpu_s": cpu,
            }


def resolve_device(device: str | torch.device) -> torch.device:
    """ "auto" is the GPU where there is one. Raises ValueError for a GPU that is not there."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if str(device).split(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"device {str(device)!r}: expected 'auto', 'cpu' or 'cuda'")
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda': PyTorch sees no GPU here; use bench.device: cpu")
    return device


@contextmanager
def num_threads(count: int):
    """PyTorch's threads inside the block; 0 leaves them as they are."""
    if count < 0:
        raise ValueError(f"threads is {count}: expected 0 (as PyTorch decides) or more")
    before = torch.get_num_threads()
    if count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _quick_collections():
    """Set aside what is alive already, the loaded libraries above all, so that a collection before
    every run is cheap."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _summary(cases: Sequence[Case], table: pd.DataFrame, peaks: dict) -> pd.DataFrame:
    rows = []
    for case, contestant, runs in _by_contestant(cases, table):
        row = {
            "part": case.part,
            "case": case.name,
            "contestant": contestant.name,
            "rounds": len(runs),
        }
        row |= {"tokens": runs["tokens"].median(), "padded_over_real": case.padded_over_real}
        for clock in CLOCKS:
            row |= _range(f"{clock}_s", runs[f"{clock}_s"])
        row["tokens_per_s"] = (runs["tokens"] / runs["wall_s"]).median()
        row["peak_mib"] = peaks[case.part, case.name, contestant.name]
        rows.append(row)
    return pd.DataFrame(rows)


def _ratios(cases: Sequence[Case], table: pd.DataFrame) -> pd.DataFrame:
    runs = {
        (case.part, case.name, contestant.name): found
        for case, contestant, found in _by_contestant(cases, table)
    }
    rows = []
    for case in cases:
        for comparison in case.comparisons:
            above, below = (
                runs[case.part, case.name, name].set_index("round")
                for name in (comparison.numerator, comparison.denominator)
            )
            for clock in CLOCKS:
                ratio = (above[f"{clock}_s"] / above["tokens"]) / (
                    below[f"{clock}_s"] / below["tokens"]
                )
                names = {
                    "numerator": comparison.numerator,
                    "denominator": comparison.denominator,
                    "clock": clock,
                }
                bar = {"at_most": comparison.at_most, "at_least": comparison.at_least}
                rows.append(
                    {"part": case.part, "case": case.name} | names | _range("ratio", ratio) | bar
                )
    return pd.DataFrame(rows, columns=list(BENCH_RATIOS.columns)).astype(
        {"at_most": float, "at_least": float}
    )


def _by_contestant(cases: Sequence[Case], table: pd.DataFrame):
    groups = dict(list(table.groupby(["part", "case", "contestant"])))
    for case in cases:
        for contestant in case.contestants:
            yield case, contestant, groups[case.part, case.name, contestant.name]


def _range(name: str, values: pd.Series) -> dict[str, float]:
    return Estimate(values.median(), values.min(), values.max()).columns(name)

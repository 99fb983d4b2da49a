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
from collections.abc import Callable, Iterable, Iterator, Sequence
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
class Claim:
    """Time of `numerator` over time of `denominator`, per token, and the bar it is held to."""

    numerator: str
    denominator: str
    at_most: float | None = None
    at_least: float | None = None


@dataclass(frozen=True)
class Contest:
    """Contestants that do the same work. `part` and `name` label it; `padded_over_real` is 1
    without padding."""

    part: str
    name: str
    contestants: tuple[Contestant, ...]
    claims: tuple[Claim, ...] = ()
    padded_over_real: float = 1.0

    def __post_init__(self):
        names = [contestant.name for contestant in self.contestants]
        where = f"contest {self.part}, {self.name}"
        if not names or len(set(names)) < len(names):
            raise ValueError(f"{where}: expected at least one contestant, distinct names: {names}")
        for claim in self.claims:
            missing = {claim.numerator, claim.denominator} - set(names)
            if missing:
                raise ValueError(f"{where}: no contestant {missing.pop()!r} among {names}")


@dataclass(frozen=True)
class Results:
    """rounds: one row per run. summary: one row per contestant, medians and ranges. ratios: one row
    per claim and clock."""

    rounds: pd.DataFrame
    summary: pd.DataFrame
    ratios: pd.DataFrame

    def save(self, folder: str | Path) -> None:
        for name, table in vars(self).items():
            table.to_csv(Path(folder) / f"{name}.csv", index=False)


def time_contests(
    contests: Sequence[Contest],
    *,
    rounds: int = 5,
    device: str | torch.device = "cpu",
    threads: int = 1,
    progress: Callable[[Iterable], Iterable] = iter,
) -> Results:
    """Time all contests with so many `threads` of PyTorch (0: as it is); `progress` wraps the
    iteration over contests."""
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}: expected at least 1")
    if not contests:
        raise ValueError("no contest to time")
    device = resolve_device(device)
    timed, summary, ratios = [], [], []
    with num_threads(threads), _quick_collections():
        for contest in progress(contests):
            peaks = {  # MiB
                contestant.name: peak_memory(contestant.probe or contestant.run, device)
                for contestant in contest.contestants
            }
            label = {"part": contest.part, "case": contest.name}
            runs = pd.DataFrame(interleaved(contest.contestants, rounds, device))
            timed.append(runs.assign(**label)[[*label, *runs]])
            summary += [label | row for row in _summary(contest, runs, peaks)]
            ratios += [label | row for row in _ratios(contest, runs)]
    bars = {"at_most": float, "at_least": float}  # None becomes NaN
    return Results(
        pd.concat(timed, ignore_index=True),
        pd.DataFrame(summary),
        pd.DataFrame(ratios, columns=list(BENCH_RATIOS.columns)).astype(bars),
    )


def interleaved(
    contestants: Sequence[Contestant], rounds: int, device: torch.device
) -> Iterator[dict]:
    """One row for every run, in the order A B C A B C …"""
    for number in range(1, rounds + 1):
        for contestant in contestants:
            gc.collect()  # nobody pays for what the one before left behind
            _synchronise(device)
            wall, cpu = time.perf_counter(), time.process_time()
            tokens = contestant.run()
            _synchronise(device)
            yield {
                "contestant": contestant.name,
                "round": number,
                "tokens": tokens,
                "wall_s": time.perf_counter() - wall,
                "cpu_s": time.process_time() - cpu,
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
    torch.set_num_threads(count or before)
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


def _summary(contest: Contest, runs: pd.DataFrame, peaks: dict[str, float]) -> Iterator[dict]:
    for name, peak in peaks.items():
        own = runs[runs["contestant"] == name]
        row = {"contestant": name, "rounds": len(own), "tokens": own["tokens"].median()}
        row["padded_over_real"] = contest.padded_over_real
        for clock in CLOCKS:
            row |= _range(f"{clock}_s", own[f"{clock}_s"])
        row["tokens_per_s"] = (own["tokens"] / own["wall_s"]).median()
        row["peak_mib"] = peak
        yield row


def _ratios(contest: Contest, runs: pd.DataFrame) -> Iterator[dict]:
    runs = runs.set_index("round")
    for claim in contest.claims:
        above = runs[runs["contestant"] == claim.numerator]
        below = runs[runs["contestant"] == claim.denominator]
        for clock in CLOCKS:
            seconds = f"{clock}_s"
            ratio = (above[seconds] / above["tokens"]) / (below[seconds] / below["tokens"])
            yield vars(claim) | {"clock": clock} | _range("ratio", ratio)


def _range(name: str, values: pd.Series) -> dict[str, float]:
    return Estimate(values.median(), values.min(), values.max()).columns(name)

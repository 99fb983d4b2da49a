"""Timing side by side: contestants run in turn (A B C A B C …), so whatever slows the machine slows
them all.

A ratio is taken within each round; we report its median over the rounds and its range. Wall time is
what a user waits. The process's CPU time does not include other programs, so it is the steadier
clock on a busy machine with one thread (with a GPU it only says how busy the host is). Peak memory
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

CLOCKS = ("wall", "cpu")  # columns wall_s and cpu_s, in seconds


@dataclass(frozen=True)
class Contestant:
    """`run()` does the work once and returns how many real tokens it processed or generated.

    `probe` is a shorter run with the same kind of memory peak, for a `run` that takes too long to
    be watched.
    """

    name: str
    run: Callable[[], int]
    probe: Callable[[], int] | None = None


@dataclass(frozen=True)
class Claim:
    """The ratio of two contestants' times per token, and the limit that it must keep (None: no
    limit)."""

    numerator: str
    denominator: str
    at_most: float | None = None
    at_least: float | None = None


@dataclass(frozen=True)
class Contest:
    """Contestants that do the same work. `part` and `name` label it. `padded_over_real` is the
    number of all positions over that of real tokens: 1 without padding."""

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
    """Three tables. rounds: one row per run. summary: one row per contestant, with medians and
    ranges. ratios: one row per claim and clock."""

    rounds: pd.DataFrame
    summary: pd.DataFrame
    ratios: pd.DataFrame

    def save(self, folder: str | Path) -> None:
        for name, table in vars(self).items():
            # The files are rounds.csv, summary.csv and ratios.csv.
            table.to_csv(Path(folder) / f"{name}.csv", index=False)


def time_contests(
    contests: Sequence[Contest],
    *,
    rounds: int = 5,
    device: str | torch.device = "cpu",
    threads: int = 1,
    progress: Callable[[Iterable], Iterable] = iter,
) -> Results:
    """Time all contests with `threads` threads of PyTorch (0: leave as is). `progress` wraps the
    iteration over contests. Raises ValueError for no rounds or no contests."""
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}: expected at least 1")
    if not contests:
        raise ValueError("no contest to time")
    device = resolve_device(device)
    timed, summary, ratios = [], [], []  # timed: one table per contest
    with num_threads(threads), _quick_collections():
        for contest in progress(contests):
            peaks = {  # MiB
                # This run is not timed, and it warms up.
                contestant.name: peak_memory(contestant.probe or contestant.run, device)
                for contestant in contest.contestants
            }
            label = {"part": contest.part, "case": contest.name}
            runs = pd.DataFrame(interleaved(contest.contestants, rounds, device))
            timed.append(runs.assign(**label)[[*label, *runs]])  # label columns first
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
    """One row per run, in the order A B C A B C …: tokens, and wall and CPU time in seconds."""
    for number in range(1, rounds + 1):
        for contestant in contestants:
            gc.collect()  # nobody pays for the garbage of the contestant before
            _synchronise(device)
            # CPU time is that of all threads of this process.
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
    torch.set_num_threads(count or before)  # 0: unchanged
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _quick_collections():
    """Exclude all objects that exist now from garbage collection, mostly those of loaded libraries,
    so the collection before every run is cheap."""
    gc.collect()
    gc.freeze()  # later collections skip what is alive now
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
        row["padded_over_real"] = contest.padded_over_real  # how much padding a batch has
        for clock in CLOCKS:
            row |= _range(f"{clock}_s", own[f"{clock}_s"])
        row["tokens_per_s"] = (own["tokens"] / own["wall_s"]).median()
        row["peak_mib"] = peak
        yield row


def _ratios(contest: Contest, runs: pd.DataFrame) -> Iterator[dict]:
    runs = runs.set_index("round")  # division then pairs the runs of a round
    for claim in contest.claims:
        above = runs[runs["contestant"] == claim.numerator]
        below = runs[runs["contestant"] == claim.denominator]
        for clock in CLOCKS:
            seconds = f"{clock}_s"
            # One ratio per round, in a series.
            ratio = (above[seconds] / above["tokens"]) / (below[seconds] / below["tokens"])
            yield vars(claim) | {"clock": clock} | _range("ratio", ratio)


def _range(name: str, values: pd.Series) -> dict[str, float]:
    # The columns are `name`, `name_low` and `name_high`.
    return Estimate(values.median(), values.min(), values.max()).columns(name)

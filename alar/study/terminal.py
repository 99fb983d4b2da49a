"""What a run shows: stage k of n, the running cell, bars with the time left, and a summary at the
end.

In a terminal the current state is redrawn in place. In a log file a line appears when something
begins or ends, and at most every 30 seconds in between.
"""

import csv
import time
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from alar.study.receipts import outdated

LOG_EVERY = 30.0  # seconds between two lines in a log file
SUMMARY = "summary.txt"
BAR_WIDTH = 28  # characters


class Terminal:
    """Shows the stages of one run, one after the other."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console(highlight=False, soft_wrap=True)
        # Times in seconds since 1970.
        self._label, self._cell, self._began, self._logged = "", "", 0.0, 0.0
        self._bars: dict[str, dict[str, Any]] = {}  # description → the last row of that bar
        self._live: Live | None = None  # only in a terminal, while a stage runs

    def say(self, text: str) -> None:
        # As Text, because rich would read [name] in a message as markup.
        self.console.print(Text(text), soft_wrap=True)

    def stage_starts(self, k: int, n: int, stem: str, reason: str) -> None:
        self._label, self._cell, self._bars = f"[{k}/{n}] {stem}", "starting", {}
        self._began = self._logged = time.time()
        if self.console.is_terminal:
            self._live = Live(console=self.console, auto_refresh=False, transient=True)
            self._live.start()
        else:
            self.say(f"{self._label}  ({reason})")

    def stage_skipped(
        self, k: int, n: int, stem: str, seconds: float, source: Path | None = None
    ) -> None:
        where = "nothing it depends on has changed"
        if source:
            where = f"in {source}, from the same code, parameters and inputs"
        self.say(f"[{k}/{n}] {stem}  finished earlier ({duration(seconds)}), {where}")

    def cell(self, k: int, n: int) -> None:
        self._cell = f"cell {k}/{n}"

    def bar(self, row: dict[str, Any]) -> None:
        if row["closed"]:
            self._bars.pop(row["bar"], None)  # None: it may have closed before its first report
        else:
            self._bars[row["bar"]] = row

    def tick(self) -> None:
        now = time.time()
        if self._live is not None:
            lines = [Text(f"{self._label}  {self._cell}  {duration(now - self._began)}")]
            lines += [Text("    " + bar_line(row, now)) for row in self._bars.values()]
            self._live.update(Group(*lines), refresh=True)
        elif now - self._logged >= LOG_EVERY:  # a log file, which cannot be redrawn
            self._logged = now
            self.say(self.state(now))

    def state(self, now: float) -> str:
        """What the run is doing now, in one line."""
        bars = "".join(f", {bar_line(row, now, width=0)}" for row in self._bars.values())
        return f"{self._label}  {self._cell}, {duration(now - self._began)} so far{bars}"

    def stage_ends(self, outcome: str = "done") -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        self.say(f"{self._label}  {outcome} in {duration(time.time() - self._began)}")

    def summary(self, run_dir: Path, seconds: dict[str, tuple[float, bool]]) -> None:
        """The results of stage 06, if there are any, the time per stage, and where the figures are.

        seconds: stage → (wall time in seconds, whether it was reused). The same text is written to
        `run_dir/summary.txt`.
        """
        for block in self.write_summary(run_dir, seconds):
            self.console.print(block)

    def write_summary(
        self, run_dir: Path, seconds: dict[str, tuple[float, bool]]
    ) -> list[Table | Text]:
        """Write `run_dir/summary.txt`; returns its blocks."""
        blocks: list[Table | Text] = []
        results = run_dir / "06_benchmark_eval" / "summary.csv"
        if results.exists():
            blocks.append(results_table(results, outdated(results.parent)))
        blocks.append(times_table(seconds))
        drawn = run_dir / "07_figures"  # searched with its subfolders
        figures = [path for path in drawn.rglob("*") if path.suffix in (".png", ".svg", ".pdf")]
        blocks.append(Text(f"{len(figures)} figures in {drawn}" if figures else "no figures drawn"))
        with (run_dir / SUMMARY).open("w", encoding="utf-8") as stream:
            console = Console(file=stream, width=120)  # columns; a file has no width of its own
            for block in blocks:
                console.print(block)
        return blocks


def bar_line(row: dict[str, Any], now: float, width: int = BAR_WIDTH) -> str:
    """One bar as text: name, bar of `width` characters (0 = none), done/total, time left, note.

    row: as `alar.study.stage.progress` reports it. now: seconds since 1970.
    """
    done, total, elapsed = row["done"], row["total"], now - row["started"]
    parts = [row["bar"]]
    if total:
        if width:
            full = round(width * min(done / total, 1))  # more may be done than was announced
            parts.append("█" * full + "░" * (width - full))
        parts.append(f"{done}/{total}")
        # The time left, at the mean pace so far.
        left = f"{duration(elapsed / done * (total - done))} left" if done else "time left unknown"
        parts.append(left)
    else:
        parts.append(str(done))
    if row["note"]:
        parts.append(row["note"])
    return "  ".join(parts)


def results_table(path: Path, change: str = "") -> Table:
    """`summary.csv` with 95 % intervals, only the rows over all question types.

    `change` says which input has changed since, so that the table is that of an earlier run.
    """
    title = "Test questions, greedy decoding, 95 % intervals"
    if change:
        title += f"; of an earlier run: {change}"
    table = Table(title=title, title_justify="left")
    for name in ("system", "accuracy %", "tokens", "token reduction %", "latent share %"):
        table.add_column(name, justify="left" if name == "system" else "right")
    with path.open(newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            if row.get("question_type", "all") == "all":  # the rows per type are for the figures
                table.add_row(
                    row["system"],
                    interval(row, "em", 100),  # a fraction, shown in percent
                    interval(row, "tokens", 1),  # generated tokens per question
                    interval(row, "token_reduction", 100),
                    interval(row, "latent_share", 100),
                )
    return table


def times_table(seconds: dict[str, tuple[float, bool]]) -> Table:
    table = Table(title="Time per stage", title_justify="left")
    table.add_column("stage")
    table.add_column("wall time", justify="right")
    table.add_column("")
    for stage, (wall, reused) in seconds.items():
        table.add_row(stage, duration(wall), "reused" if reused else "")
    # What was reused took no time in this run.
    spent = sum(wall for wall, reused in seconds.values() if not reused)
    table.add_row("this run", duration(spent), "")
    return table


def interval(row: dict[str, str], name: str, scale: float) -> str:
    """ "42.7 [41.0, 44.1]", "42.7" without an interval, "" without a value."""

    def number(key):
        try:
            value = float(row.get(key) or "nan") * scale
        except ValueError:
            return ""
        return "" if value != value else f"{value:.1f}"  # NaN is the only value unlike itself

    value, low, high = number(name), number(f"{name}_low"), number(f"{name}_high")
    return f"{value} [{low}, {high}]" if value and low and high else value


def duration(seconds: float) -> str:
    """ "4 s", "2:05", "1:02:05"."""
    whole = int(round(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"

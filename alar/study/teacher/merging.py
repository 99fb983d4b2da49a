"""Shards of teacher rollouts made one: checked against each other, counted, and written as traces."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, median

from alar.domains.tool.toolmind import SUCCESS
from alar.files import read_jsonl, write_json
from alar.records import Trajectory, write_trajectories
from alar.study.parts import differences
from alar.study.teacher import Shard


def merge(folders: Sequence[str | Path], output: str | Path) -> dict:
    """The kept trajectories of all shards as one file, and a summary beside it, `teacher.json`,
    which is returned.

    `folders` are those given to `sample`, or shards themselves, which other machines may have
    written. Raises ValueError for shards that are missing, unfinished, there twice, or sampled with
    different settings, and if nothing is kept.
    """
    shards = _shards(folders)
    settings = json.loads((shards[0] / "settings.json").read_text(encoding="utf-8"))
    tally = _Tally()
    write_trajectories(output, tally.kept(shards))
    summary = {
        "questions": len(tally.seen),
        "kept": len(tally.lengths),
        "accuracy": tally.right / len(tally.seen),
        "generated_tokens": mean(tally.tokens),
        "median_think_length": float(median(tally.lengths)),
        "dropped": dict(tally.dropped.most_common()),
        "skipped": json.loads((shards[0] / "done.json").read_text(encoding="utf-8"))["skipped"],
        "settings": {key: value for key, value in settings.items() if key != "shard"},
    }
    write_json(Path(output).with_name("teacher.json"), summary)
    return summary


class _Tally:
    """What is counted while the parts are read, one record at a time."""

    def __init__(self):
        self.seen: dict[str, Path] = {}
        self.dropped: Counter = Counter()  # reason, less its details → requests
        self.tokens: list[int] = []
        self.lengths: list[int] = []  # think lengths of what is kept
        self.right = 0

    def kept(self, shards: Sequence[Path]) -> Iterator[Trajectory]:
        for place in shards:
            before = len(self.seen)
            for path in sorted(place.glob("part-*.jsonl")):
                for record in read_jsonl(path):
                    if record["id"] in self.seen:
                        raise ValueError(
                            f"{path}: request {record['id']} is in {self.seen[record['id']]} too;"
                            " remove one of them"
                        )
                    self.seen[record["id"]] = path
                    if (trajectory := self._count(record)) is not None:
                        yield trajectory
            wanted = json.loads((place / "done.json").read_text(encoding="utf-8"))["requests"]
            if len(self.seen) - before != wanted:
                raise ValueError(
                    f"{place}: has {len(self.seen) - before} requests of {wanted}; parts are"
                    " missing: sample it again"
                )
        if not self.lengths:
            raise ValueError(
                f"the teacher solved none of {len(self.seen)} requests:"
                f" {dict(self.dropped.most_common(5))}"
            )

    def _count(self, record: dict) -> Trajectory | None:
        self.right += record["score"] is not None and record["score"] >= SUCCESS
        self.tokens.append(record["generated_tokens"])
        if record["reason"]:
            self.dropped[record["reason"].partition(" (")[0]] += 1
            return None
        trajectory = Trajectory.from_json(record["trajectory"])
        self.lengths.append(trajectory.think_length)
        return trajectory


def _shards(folders: Sequence[str | Path]) -> list[Path]:
    """All shards, in order, after comparing what they say of themselves."""
    found: dict[Shard, Path] = {}
    first: dict = {}
    for folder in map(Path, folders):
        for place in (
            [folder] if (folder / "settings.json").exists() else sorted(folder.glob("shard-*"))
        ):
            path = place / "settings.json"
            if not path.exists():
                raise ValueError(
                    f"{place}: has no settings.json; it is no shard, or sampling it never began"
                )
            settings = json.loads(path.read_text(encoding="utf-8"))
            shard = Shard.of(settings.pop("shard"))
            settings["shards"] = shard.count
            first = first or settings
            if different := differences(first, settings):
                raise ValueError(
                    f"{place}: sampled with other settings than {next(iter(found.values()))}:"
                    f" {different}"
                )
            if shard in found:
                raise ValueError(
                    f"shard {shard} is there twice: {found[shard]} and {place}; give one of them"
                )
            if not (place / "done.json").exists():
                raise ValueError(
                    f"{place}: shard {shard} is not finished; sample it again with the same"
                    " settings, and it goes on"
                )
            found[shard] = place
    if not found:
        raise ValueError(f"{', '.join(map(str, folders))}: no shards here; `sample` writes them")
    missing = [
        str(shard)
        for n in range(first["shards"])
        if (shard := Shard(n + 1, first["shards"])) not in found
    ]
    if missing:
        raise ValueError(f"shards are missing: {', '.join(missing)}; sample them with --shard")
    return [found[shard] for shard in sorted(found, key=lambda shard: shard.index)]

"""Merges the shards of teacher rollouts into one file of traces, after checking that they belong
together."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, median

from alar.domains.tool.toolmind import SUCCESS
from alar.files import read_jsonl, write_json
from alar.records import Trajectory, write_trajectories
from alar.study.teacher import SHARD_RECEIPT, Shard


def merge_shards(folders: Sequence[str | Path], output: str | Path) -> dict:
    """Write the kept trajectories of all shards as one file, and beside it a summary,
    `teacher.json`, which is returned.

    `folders` are those given to `sample`, or folders of single shards, perhaps from other machines.
    Raises ValueError if a shard is missing, unfinished, there twice, or sampled with different
    settings, and if nothing is kept.
    """
    shards = _shards(folders)
    first = next(iter(shards.values()))  # the settings of all shards are equal
    tally = _Tally()
    # One line at a time: traces may not fit in memory.
    write_trajectories(output, tally.kept(shards))
    settings = {name: value for name, value in first["settings"].items() if name != "shard"}
    summary = {
        "questions": len(tally.seen),
        "kept": len(tally.lengths),
        "accuracy": tally.right / len(tally.seen),  # of all requests, also those that are too long
        "generated_tokens": mean(tally.tokens),  # per request
        "median_think_length": float(median(tally.lengths)),  # characters
        "dropped": dict(tally.dropped.most_common()),
        "skipped": first["skipped"],
        "settings": settings,
    }
    write_json(Path(output).with_name("teacher.json"), summary)
    return summary


class _Tally:
    """Counts while the chunks are read, one line at a time."""

    def __init__(self):
        self.seen: dict[str, Path] = {}  # request id → the chunk that holds it
        self.dropped: Counter = Counter()  # reason without its details → requests
        self.tokens: list[int] = []  # generated tokens of every request
        self.lengths: list[int] = []  # think lengths of kept trajectories, in characters
        self.right = 0

    def kept(self, shards: dict[Path, dict]) -> Iterator[Trajectory]:
        for place, receipt in shards.items():
            before = len(self.seen)
            for path in (place / chunk for chunk in receipt["chunks"]):
                if not path.exists():
                    raise ValueError(f"{path}: this chunk is missing; sample its shard again")
                for line in read_jsonl(path):
                    if line["id"] in self.seen:
                        raise ValueError(
                            f"{path}: request {line['id']} is in {self.seen[line['id']]} too;"
                            " remove one of them"
                        )
                    self.seen[line["id"]] = path
                    trajectory = self._count(line)
                    if trajectory is not None:
                        yield trajectory
            found = len(self.seen) - before
            if found != receipt["requests"]:
                raise ValueError(
                    f"{place}: has {found} requests of {receipt['requests']}; sample it again"
                )
        if not self.lengths:
            raise ValueError(
                f"the teacher solved none of {len(self.seen)} requests:"
                f" {dict(self.dropped.most_common(5))}"
            )

    def _count(self, line: dict) -> Trajectory | None:
        self.right += line["score"] is not None and line["score"] >= SUCCESS
        self.tokens.append(line["generated_tokens"])
        if line["reason"]:
            # The part in brackets differs per request.
            self.dropped[line["reason"].partition(" (")[0]] += 1
            return None
        trajectory = Trajectory.from_json(line["trajectory"])
        self.lengths.append(trajectory.think_length)
        return trajectory


def _shards(folders: Sequence[str | Path]) -> dict[Path, dict]:
    """Folder → receipt of all shards, in order. Raises ValueError if they do not fit together."""
    found: dict[Shard, tuple[Path, dict]] = {}
    first: dict = {}
    for place in _places(folders):
        path = place / SHARD_RECEIPT
        if not path.exists():
            raise ValueError(
                f"{place}: has no {SHARD_RECEIPT}, so this shard is not finished; sample it again"
                " with the same settings, and it goes on"
            )
        receipt = json.loads(path.read_text(encoding="utf-8"))
        shard = Shard.of(receipt["settings"]["shard"])
        # Shards may differ in their index, so it is left out.
        settings = receipt["settings"] | {"shard": "", "shards": shard.count}
        first = first or settings
        different = [name for name in settings if settings[name] != first.get(name)]
        if different:
            known = next(iter(found.values()))[0]
            raise ValueError(
                f"{place}: sampled with other settings than {known}: {', '.join(different)}"
            )
        if shard in found:
            raise ValueError(
                f"shard {shard} is there twice: {found[shard][0]} and {place}; give one of them"
            )
        found[shard] = place, receipt
    if not found:
        raise ValueError(f"{', '.join(map(str, folders))}: no shards here; `sample` writes them")
    every = [Shard(index, first["shards"]) for index in range(1, first["shards"] + 1)]
    missing = [str(shard) for shard in every if shard not in found]  # such as "3/8"
    if missing:
        raise ValueError(f"shards are missing: {', '.join(missing)}; sample them with --shard")
    return dict(found[shard] for shard in every)


def _places(folders: Sequence[str | Path]) -> list[Path]:
    """The folders of shards: the given ones if they are shards, else all shards directly below."""
    places = []
    for folder in map(Path, folders):
        is_shard = folder.name.startswith("shard-") or (folder / SHARD_RECEIPT).exists()
        # An unfinished shard too, so that it is named.
        places += [folder] if is_shard else sorted(folder.glob("shard-*"))
    return places

"""ToolMind's rows, read from a JSON Lines file, a folder of such files, or the hub."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from alar.domains.tool.toolmind import load_rows, split_of_row
from alar.records import Question

HUB = "Nanbeige/ToolMind"
HUB_FILES = "graph_syn_datasets/*"  # the part that the paper's teacher answers
FETCH = f'hf download {HUB} --repo-type dataset --include "{HUB_FILES}" --local-dir data/toolmind'


def toolmind_files(source: str | Path) -> list[Path]:
    """The files of a source. If it is the name of a data set on the hub, they are downloaded first.

    Raises FileNotFoundError with the command that helps.
    """
    path = Path(source)
    # owner/name looks like a folder, too; a folder that exists comes first.
    on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", str(source)) and path.suffix != ".jsonl"
    if on_hub and not path.exists():
        path = _downloaded(str(source))
    # sorted: the same order on every machine
    files = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise FileNotFoundError(
            f"{source}: no JSON Lines file, and no folder with some. To fetch ToolMind: {FETCH}"
        )
    return files


def read_records(files: list[Path]) -> Iterator[dict]:
    """All rows. Raises ValueError with file and line for a bad row, as a cut-off file has one."""
    for file in files:
        # bytes: json.loads finds the encoding, and bad UTF-8 is a ValueError
        with file.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise ValueError(
                        f"{file}, line {number}: is not JSON ({error}); fetch the file again"
                    ) from None
                if not isinstance(record, dict):
                    kind = type(record).__name__
                    raise ValueError(
                        f"{file}, line {number}: is {kind}, not an object with conversations and"
                        " tools"
                    )
                yield record


def load_questions(source: str | Path, split: str = "train") -> list[Question]:
    """The requests of a source's "train", "validation" or "test" split.

    Raises ValueError if there are none.
    """
    loaded = load_rows(read_records(toolmind_files(source)))
    rows = [row for row in loaded.rows if split_of_row(row) == split]
    if not rows:
        skipped = loaded.skipped.most_common(3)  # (reason, rows) pairs
        reasons = ", ".join(f"{reason}: {count}" for reason, count in skipped)
        raise ValueError(
            f"{source}: no request of the {split} split; {len(loaded.rows)} rows could be read"
            f" ({reasons or 'none was skipped'})"
        )
    # the score asks for the world
    return [row.request.question(row.id, world="toolmind") for row in rows]


def _downloaded(name: str) -> Path:
    # Imported here, so that local files need no client of the hub.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        return Path(snapshot_download(name, repo_type="dataset", allow_patterns=[HUB_FILES]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        raise FileNotFoundError(
            f"{name}: cannot be fetched from the hub ({type(error).__name__}: {error}). On a"
            f" machine with a network: {FETCH}; then give that folder"
        ) from error

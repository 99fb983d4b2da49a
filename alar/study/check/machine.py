"""What this machine has: GPUs, memory, disk, a retrieval server, installed packages."""

from __future__ import annotations

import importlib.metadata
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import torch

from alar.domains.search.client import HTTPRetriever
from alar.domains.search.corpus import RetrievalError
from alar.study import provenance

CONNECT_SECONDS = 3.0


@dataclass(frozen=True)
class GPU:
    name: str
    memory: int  # bytes


def gpus() -> tuple[list[GPU], str]:
    """(the GPUs that torch can use, a remark on why there are none or "")."""
    if torch.cuda.is_available():
        found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        return [GPU(each.name, each.total_memory) for each in found], ""
    seen = provenance.nvidia_gpus()  # by the driver, without torch
    if not seen:
        return [], "none found"
    return [], f"torch {torch.__version__} cannot use the {len(seen)} × {seen[0][0]} of the driver"


def described(text: str) -> list[GPU]:
    """The GPUs that `--gpus 8x80` means: eight, each with 80 GiB. ValueError for another form."""
    parts = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if parts is None:
        raise ValueError(f"--gpus {text}: expected COUNTxGIB, such as 8x80")
    count, memory = map(int, parts.groups())
    return [GPU(f"GPU of {memory} GiB", memory * 2**30)] * count


def host_memory() -> int:
    """Bytes of memory of this machine."""
    return psutil.virtual_memory().total


def existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())  # "/" always exists


def free_disk(path: Path) -> tuple[int, int]:
    """(device number, free bytes) of the file system that `path` is or will be on."""
    place = existing(path)
    return place.stat().st_dev, psutil.disk_usage(str(place)).free  # equal numbers: the same disk


def installed_version(package: str) -> str:
    """A package's version without a local part such as +cpu; "" if it is not installed."""
    try:
        return importlib.metadata.version(package).split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return ""


def pinned_versions(requirements: Path) -> dict[str, str]:
    """Package → version of every line `name==version` or `===` in the files of this folder."""
    text = "\n".join(
        path.read_text(encoding="utf-8") for path in sorted(requirements.glob("*.txt"))
    )
    # A version ends at a space or at a marker such as `; python_version`.
    return dict(re.findall(r"^([\w.-]+)===?([^\s;]+)", text, re.MULTILINE))


def is_here(host: str) -> bool:
    return host in ("localhost", "127.0.0.1", "::1", "0.0.0.0", socket.gethostname())


def retrieval_server(url: str) -> tuple[str, str]:
    """(state, detail). The state is "answers", or "free" if nothing listens on the port, or "taken"
    if something else does."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((host, port), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        return "free", f"nothing listens on port {port} of {host} ({error.strerror or error})"
    try:
        # One list, because one query was asked.
        (hits,) = HTTPRetriever(url, timeout=60.0, retries=0).search(["capital of France"], 1)
    except RetrievalError as error:
        reason = str(error).splitlines()[0]
        return "taken", f"port {port} of {host} is taken by something else ({reason})"
    if not hits:
        return "taken", "the server found no passage"
    return "answers", f"{hits[0].passage.title!r} for a first query"

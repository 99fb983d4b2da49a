"""Finished work, done once: each result has a key made from everything that decides it.

    store = Store(folder)
    name = key("multiple-00000.jsonl", {"checkpoint": content(checkpoint), "mode": "free"})
    if store.get(name) is None:
        with store.writing(name) as aside:
            write_trajectories(aside, roll_out())

The same ingredients give the same key and find the result. Other ingredients give another key, so
results are never mixed up and nothing has to be declared out of date. A result is written beside
its place and then renamed, so `get` only finds whole results: a kill leaves either nothing or the
finished result. Long work stores its shards one by one; after a kill it continues with the first
one that is missing.

Values (as JSON), files and folders (`content`) and code (`closure`) may decide a result.
"""

import ast
import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent  # of `alar`
# A stage's own notes. They are not part of what it computed, and neither are hidden files.
RECEIPT, RESUME = "stage.json", "resume"


class Store:
    """The results in one folder."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)

    def get(self, key: str) -> Path | None:
        """The finished file or folder, or None."""
        path = self.folder / key  # a file or a folder, as the writer chose
        return path if path.exists() else None

    def writing(self, key: str) -> contextlib.AbstractContextManager[Path]:
        """A path to write a file or folder to; it becomes the result when the block ends well."""
        return whole(self.folder / key)

    def once(self, key: str, make: Callable[[Path], Any]) -> Path:
        """The finished result; `make(path)` writes it if it is not there yet."""
        if self.get(key) is None:
            with self.writing(key) as aside:
                make(aside)
        return self.folder / key


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A path beside `path` for a file or a folder. It replaces `path` when the block ends well.

    A folder cannot be replaced in one step: a kill in between leaves no folder, never half of one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Hidden, so that no listing takes it for a result. In the same folder, so that the rename stays
    # on one file system.
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    remove(aside)  # left by a killed process that had the same process id
    try:
        yield aside
        if path.is_dir():
            remove(path)  # `os.replace` does not replace a folder that holds files
        os.replace(aside, path)
    finally:
        remove(aside)


def remove(path: Path) -> None:
    """Delete a file, a link or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)  # a link is only unlinked: its target is not ours
    else:
        path.unlink(missing_ok=True)


def key(name: str, ingredients: Any) -> str:
    """`name` with a hash of the ingredients (JSON) before its suffix.

    >>> key("answers.jsonl", {"mode": "free"})
    'answers-061c9f0c66b0.jsonl'
    """
    path = Path(name)
    # 12 hexadecimal digits, 48 bits: enough for the results of a study.
    return f"{path.stem}-{digest(ingredients)[:12]}{path.suffix}"


def digest(value: Any) -> str:
    """SHA-256 of a value as JSON, whatever the order of its keys."""
    # Sorted keys: equal dicts give equal text.
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def content(path: str | Path) -> str:
    """Hash of a file, or of a folder's files and their names (those of `file_names`)."""
    path = Path(path)
    if path.is_file():
        return file_hash(path)
    # A renamed file is another content.
    lines = [f"{name} {file_hash(path / name)}\n" for name in file_names(path)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def checkpoint_content(checkpoint: str | Path) -> str:
    """What decides a checkpoint's answers: the content of a folder, or the name of a hub model."""
    return content(checkpoint) if Path(checkpoint).is_dir() else str(checkpoint)


def file_names(folder: Path) -> list[str]:
    """The files of a folder and its subfolders as relative names, without a stage's own notes."""
    names = []
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        hidden = any(part.startswith(".") for part in relative.parts)
        if path.is_file() and not hidden and relative.parts[0] not in (RECEIPT, RESUME):
            names.append(relative.as_posix())
    return names


def file_hash(path: Path) -> str:
    """SHA-256 of a file's bytes. It is read again only if size, time of change or inode differ."""
    stat = path.stat()  # a folder of checkpoints has gigabytes: hash each once in a process
    return _file_hash(path, stat.st_size, stat.st_mtime_ns, stat.st_ino)


@cache
def _file_hash(path: Path, size: int, modified: int, inode: int) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def closure(modules: Iterable[str], package: Path = PACKAGE) -> dict[str, str]:
    """Module or data file of the package → hash, for all that the given modules import, directly
    or not.

    Importing a.b.c runs the __init__ of a and a.b, so these are included. A data file belongs to
    the package whose folder it is in.
    """
    found: dict[str, str] = {}
    waiting = list(modules)  # dotted names whose files are still to be read
    while waiting:
        name = waiting.pop()
        parts = name.split(".")
        folder = package.joinpath(*parts[1:])  # parts[0] is the package itself
        source = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
        if parts[0] != package.name or name in found:
            continue
        waiting += [".".join(parts[:end]) for end in range(1, len(parts))]
        if not source.is_file():
            continue  # `from alar.x import function` names no module
        found[name] = file_hash(source)
        own_package = name if folder.is_dir() else name.rpartition(".")[0]  # for relative imports
        waiting += imports(ast.parse(source.read_bytes()), own_package)
        if folder.is_dir():
            found |= {f"{name}: {file}": file_hash(folder / file) for file in _data_files(folder)}
    return dict(sorted(found.items()))


def imports(tree: ast.AST, package: str) -> set[str]:
    """Dotted names imported anywhere in a module: `from a import b` gives both a and a.b.

    `package` resolves relative imports.
    """
    names: set[str] = set()
    for node in ast.walk(tree):  # imports inside functions too
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                parents = parts[: len(parts) - node.level + 1]  # one dot is the package itself
                base = ".".join([*parents, base]) if base else ".".join(parents)
            names |= {base} | {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # The text in importlib.import_module("alar.x"), and tables of modules imported late.
            if re.fullmatch(r"alar(\.[a-z_]\w*)+", node.value):
                names.add(node.value)
    return names


def _data_files(folder: Path) -> list[str]:
    """Files of a package that are not Python, also in subfolders that are not packages."""
    names = []
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        # [:-1] leaves out `folder` itself.
        packages = [folder / parent / "__init__.py" for parent in relative.parents[:-1]]
        cached = "__pycache__" in relative.parts
        if path.is_dir() or path.suffix in (".py", ".pyc") or cached:
            continue
        if not any(init.exists() for init in packages):
            names.append(relative.as_posix())
    return names

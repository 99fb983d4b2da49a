"""Reads notebooks without running them: their order, parameters, code and imports.

Notebooks are read as JSON, because importing nbformat takes seconds. A `parameters` cell holds only
lines `name = literal`, so headless runs, papermill and a reader see the same plain values.
"""

import ast
import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from alar.store import imports


class NotebookError(ValueError):
    """A notebook that cannot be run headless as it stands."""


def numbered(folder: str | Path) -> list[Path]:
    """The study's notebooks in order: `NN_name.ipynb`."""
    found = sorted(Path(folder).glob("[0-9][0-9]_*.ipynb"))
    # The names are sorted, so equal numbers are neighbours.
    for one, next_one in pairwise(path.name[:2] for path in found):
        if one == next_one:
            raise NotebookError(f"{folder}: two notebooks carry the number {one}; renumber one")
    return found


@dataclass(frozen=True)
class Cell:
    is_code: bool
    is_parameters: bool  # tagged `parameters`, as papermill wants it
    source: str


def cells_of(notebook: str | Path) -> list[Cell]:
    """The cells of a notebook in format 4, in order."""
    try:
        document = json.loads(Path(notebook).read_text(encoding="utf-8"))
        if document["nbformat"] != 4:
            raise NotebookError(
                f"{notebook}: is in notebook format {document['nbformat']}; save it in format 4"
            )
        cells = []
        for cell in document["cells"]:
            is_code = cell["cell_type"] == "code"
            is_parameters = is_code and "parameters" in cell["metadata"].get("tags", [])
            # The source is a list of lines, or one text.
            cells.append(Cell(is_code, is_parameters, "".join(cell["source"])))
        return cells
    except FileNotFoundError:
        raise NotebookError(f"{notebook}: no such notebook") from None
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise NotebookError(
            f"{notebook}: is not a readable notebook: {type(error).__name__}: {error}"
        ) from None


def declared_parameters(notebook: str | Path) -> dict[str, Any]:
    """Name → default, from the cell tagged `parameters`; empty if there is none."""
    cells = [cell for cell in cells_of(notebook) if cell.is_parameters]
    if len(cells) > 1:
        raise NotebookError(f"{notebook}: {len(cells)} cells are tagged parameters; keep one")
    declared: dict[str, Any] = {}
    if not cells:
        return declared
    try:
        statements = ast.parse(cells[0].source).body  # read, never run
    except SyntaxError as error:
        raise NotebookError(
            f"{notebook}: parameters cell, line {error.lineno}: {error.msg}"
        ) from None
    for statement in statements:
        where = f"{notebook}: parameters cell, line {statement.lineno}"
        target = _assigned_name(statement)  # None for anything but `name = value`
        if target is None:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                continue  # a docstring
            raise NotebookError(
                f"{where}: only `name = literal` may stand here; move the rest to the next cell"
            )
        if target in declared:  # Python would take the last one, a reader the first
            raise NotebookError(f"{where}: {target} is given twice; keep one")
        try:
            declared[target] = ast.literal_eval(statement.value)
        except ValueError:  # a call or a name, not a literal
            raise NotebookError(
                f"{where}: {target} is not a plain literal; write the value itself and compute in"
                " the next cell"
            ) from None
    return declared


def code(notebook: str | Path) -> list[str]:
    """The sources of the code cells, without the `parameters` cell."""
    return [cell.source for cell in cells_of(notebook) if cell.is_code and not cell.is_parameters]


def python_source(cell: str) -> str:
    """A cell as plain Python: magics and shell lines become calls that `ast` can parse."""
    from IPython.core.inputtransformer2 import TransformerManager

    return TransformerManager().transform_cell(cell)


def imported_modules(sources: list[str], where: str | Path) -> set[str]:
    """Dotted names that the cells import: `from a import b` gives both a and a.b."""
    names: set[str] = set()
    for source in sources:
        try:
            # A notebook is in no package.
            names |= imports(ast.parse(python_source(source)), package="")
        except SyntaxError as error:
            raise NotebookError(
                f"{where}: a code cell does not parse: {error.msg}: {error.text}"
            ) from None
    return names


def _assigned_name(statement: ast.stmt) -> str | None:
    """`name` of `name = value`, with or without annotation; None for any other statement."""
    if isinstance(statement, ast.Assign):  # `a = b = 1` has two targets
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
        targets = [statement.target]
    else:
        return None
    single = len(targets) == 1 and isinstance(targets[0], ast.Name)
    return targets[0].id if single else None

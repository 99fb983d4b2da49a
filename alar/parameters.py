"""`Section`: a set of parameters, strictly typed, that cannot change once it is made.

Every parameter is declared once, in the section of the room that works with it, for example in
`alar.rl.config`. `alar.study.params` puts the sections together and reads parameter files. A
notebook turns its `parameters` cell into a section in one line: `config = RLConfig.of(globals())`.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field

# A file or folder. `alar.study.params` checks that it exists; a finished stage is known by the
# content of it, not by its name.
Location = Annotated[str, "location"]
# A file or folder if it looks like one ("./x", "/x", "x.jsonl", "a/b" that exists), else a name on
# the hub or a keyword.
LocationOrName = Annotated[str, "location or name"]

# A value that ends so names a file.
DATA_FILES = (".jsonl", ".json", ".parquet")

Share = Annotated[float, Field(ge=0, le=1)]
Rate = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]
CountOrNone = Annotated[int, Field(ge=0)]


class Section(BaseModel):
    """Unknown names, values of another type, NaN and infinity are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )

    @classmethod
    def of(cls, cell: Mapping[str, Any], prefix: str = "", **changed: Any) -> Self:
        """The section that a notebook's `parameters` cell describes.

        `cell` is `globals()`. A field that the cell does not name keeps its default. `prefix`
        stands before the names of another section, as in `rollout_max_turns`. `changed` wins over
        the cell.
        """
        given = {name: cell[prefix + name] for name in cls.model_fields if prefix + name in cell}
        return cls(**given | changed)

    def inconsistencies(self) -> list[tuple[str, str]]:
        """(key, what is wrong) for values that are valid one by one but not together."""
        return []

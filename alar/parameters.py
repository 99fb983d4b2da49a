"""What a section of a parameter file is: a frozen, strictly typed set of parameters, declared once.

A room declares the parameters of its own work as a `Section` (`alar.rl.config`,
`alar.train.config`); `alar.study.params` puts the sections together and reads files. A notebook
turns its `parameters` cell into a section in one line: `config = RLConfig.of(globals())`.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field

# A file or folder. `alar.study.params` checks that it exists and the stage cache follows its
# content, not its name.
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
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )

    @classmethod
    def of(cls, cell: Mapping[str, Any], prefix: str = "", **changed: Any) -> Self:
        """The section as a notebook's `parameters` cell gives it: its fields by their names.

        `cell` is `globals()`; a name that the cell lacks keeps its default. `prefix` is that of
        another notebook's section, "rollout_" for `rollout_max_turns`. `changed` wins over both.
        """
        given = {name: cell[prefix + name] for name in cls.model_fields if prefix + name in cell}
        return cls(**given | changed)

    def inconsistencies(self) -> list[tuple[str, str]]:
        """(key, what is wrong) for values that are valid one by one but not together."""
        return []

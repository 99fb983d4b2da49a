"""The whitelist: every function of the embedded tool world, by name. What is not here cannot be executed."""

from __future__ import annotations

from alar.tool import functions_dates, functions_numbers, functions_text
from alar.tool.schema import Tool, table

TOOLS: dict[str, Tool] = table(
    *functions_numbers.TOOLS.values(), *functions_dates.TOOLS.values(), *functions_text.TOOLS.values()
)

"""The whitelist: every function of the embedded tool world. Nothing else can be executed.

A request offers a function under the name that one of `PROVIDERS` gives it, such as `gcd_oak`. The
provider differs from request to request. A policy therefore has to read the list of functions: it
cannot know a name by heart, just as it cannot know the facts of the search domain's worlds.
"""

from __future__ import annotations

from dataclasses import replace

from alar.domains.tool import functions_dates, functions_numbers, functions_text
from alar.domains.tool.schema import Tool, tools_by_name

TOOLS: dict[str, Tool] = tools_by_name(  # own name → function; 83 of them
    *functions_numbers.TOOLS.values(),
    *functions_dates.TOOLS.values(),
    *functions_text.TOOLS.values(),
)
PROVIDERS = "oak elm ash fir yew pine palm cedar maple hazel birch alder".split()


def own_name(name: str) -> tuple[str, str]:
    """(function, provider) of a name on offer, or (name, "") for a function of another world.

    >>> own_name("days_between_oak")
    ('days_between', 'oak')
    """
    function, _, provider = name.rpartition("_")  # own names have underscores, too
    if function in TOOLS and provider in PROVIDERS:
        return function, provider
    return name, ""


_PROVIDED = [
    replace(tool, name=f"{name}_{provider}")
    for name, tool in TOOLS.items()
    for provider in PROVIDERS
]
# Name in a request → function: every own name, and every own name with every provider.
CALLABLE: dict[str, Tool] = TOOLS | tools_by_name(*_PROVIDED)

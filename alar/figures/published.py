"""Results of the ALAR paper (arXiv 2606.02871) and of the methods it compares with.

The numbers are means over the paper's six search sets (EM, %) and over BFCL's four categories
(accuracy, %), with generated tokens. They are second-hand and agree with the released figure,
digitised to 0.1 points. We know two 3B rows, marked `digitised`, from that figure only. Their token
reduction was read from it, and their token count is not known. Numbers that we could not find are
left out.
"""

from __future__ import annotations

import pandas as pd

_NAN = float("nan")
_SEARCH_7B, _SEARCH_3B, _TOOL_4B = "Search-R1 7B", "Search-R1 3B", "Qwen3-4B, tools"

_ROWS = [
    # setting, system, accuracy %, generated tokens, token reduction (where no count is known)
    (_SEARCH_7B, "base", 42.7, 236, None),
    (_SEARCH_7B, "ThinkPrune", 42.0, 220, None),
    (_SEARCH_7B, "stage1", 40.5, 112, None),
    (_SEARCH_7B, "alar", 41.7, 133, None),
    (_SEARCH_3B, "base", 38.2, 154, None),
    (_SEARCH_3B, "ThinkPrune", 37.8, 147, None),
    (_SEARCH_3B, "ShorterBetter", 37.6, _NAN, 0.046),
    (_SEARCH_3B, "O1-Pruner", 23.5, _NAN, -0.013),
    (_SEARCH_3B, "stage1", 37.3, 94, None),
    (_SEARCH_3B, "alar", 38.4, 120, None),
    (_TOOL_4B, "base", 86.1, 760, None),
    (_TOOL_4B, "ShorterBetter", 85.1, 162, None),
    (_TOOL_4B, "ThinkPrune", 88.4, 251, None),
    (_TOOL_4B, "O1-Pruner", 86.2, 156, None),
    (_TOOL_4B, "stage1", 88.8, 87, None),
    (_TOOL_4B, "alar", 89.2, 117, None),
]


def results() -> pd.DataFrame:
    """One row per published point.

    Columns: setting, system, accuracy, tokens, accuracy_difference, token_reduction, digitised.
    Accuracies and reductions are fractions. Differences and reductions compare with the base of the
    same setting.
    """
    table = pd.DataFrame(
        _ROWS, columns=["setting", "system", "accuracy", "tokens", "token_reduction"]
    )
    base = table[table["system"] == "base"].set_index("setting")  # setting → its base
    table["accuracy"] /= 100
    table["accuracy_difference"] = table["accuracy"] - table["setting"].map(base["accuracy"] / 100)
    table["digitised"] = table["token_reduction"].notna()  # only these rows give it themselves
    # NaN where the count is unknown
    computed = 1 - table["tokens"] / table["setting"].map(base["tokens"])
    table["token_reduction"] = table["token_reduction"].astype(float).fillna(computed)
    return table

"""Answer datasets as an environment: the answer is the only action, and questions name a scorer."""

from __future__ import annotations

from collections.abc import Sequence

from alar import protocol
from alar.domains.static.forms import FORMS
from alar.domains.static.sets import is_correct
from alar.records import Observation, Question, Trajectory


class StaticEnvironment:
    """`form` is "tagged" or "raw" (`alar.domains.static.forms`).

    Give the loop `max_turns=1`. With more turns the policy may try again after a malformed one.
    """

    final = ("answer",)  # the action that ends a trajectory

    def __init__(self, form: str = "tagged"):
        if form not in FORMS:
            raise ValueError(f"form {form!r}: expected one of {', '.join(FORMS)}")
        self.form: protocol.Form = FORMS[form]
        self.stop = FORMS[form].stop

    def observe(self, steps: Sequence[tuple[Question, protocol.Turn]]) -> list[Observation]:
        raise RuntimeError("an answer dataset has no action but the answer")

    def correct(self, trajectory: Trajectory) -> bool:
        return is_correct(trajectory.prediction, trajectory.question)

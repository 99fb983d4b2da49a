"""The tool domain as an environment: calls are executed and answered, and a trajectory is judged by
BFCL's own checker.

One function, `verdict`, serves reward, filter of teacher traces and evaluation, so that what is
trained is what is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from alar import protocol
from alar.domains.tool.bfcl import CheckResult, check_calls, reference_calls
from alar.domains.tool.execution import Executor
from alar.domains.tool.protocol import TOOL, parse_calls, responses_text
from alar.domains.tool.requests import ToolRequest, request_of
from alar.domains.tool.toolmind import SUCCESS, dense_score, expected_calls
from alar.records import Observation, Question, Trajectory

JUDGES = ("official", "toolmind")


class ToolEnvironment:
    """Executes the calls of functions that the request offers and the whitelist holds.

    `judge` is "official", BFCL's checker, or "toolmind", the score that ToolMind's teacher rollouts
    are kept by: it forgives further arguments and JSON-like differences of type, and it is dense:
    trajectories get a grade, which the reward uses. `execute=False` is for requests about functions
    that nobody here can run (BFCL, ToolMind): a trajectory then ends with its first calls, as in
    BFCL's single-turn categories.
    """

    form = TOOL
    stop = ()

    def __init__(
        self, executor: Executor | None = None, *, execute: bool = True, judge: str = "official"
    ):
        if judge not in JUDGES:
            raise ValueError(f"judge {judge!r}: expected one of {', '.join(JUDGES)}")
        self.judge = judge
        self.executor = executor or Executor() if execute else None
        self.final = ("answer",) if execute else ("answer", "call")

    def observe(self, steps: Sequence[tuple[Question, protocol.Turn]]) -> list[Observation]:
        return [Observation(self._respond(request_of(question), turn)) for question, turn in steps]

    def correct(self, trajectory: Trajectory) -> bool:
        return (
            verdict(trajectory).correct
            if self.judge == "official"
            else toolmind_score(trajectory) >= SUCCESS
        )

    def grade(self, trajectory: Trajectory) -> float | None:
        """The dense score as a share of that of a full match; None where only right and wrong
        count."""
        return None if self.judge == "official" else toolmind_score(trajectory) / SUCCESS

    def _respond(self, request: ToolRequest, turn: protocol.Turn) -> str:
        calls, problem = parse_calls(turn.argument)
        if problem:
            return self.form.invalid(problem)
        return responses_text(
            self.executor.run(calls, [function["name"] for function in request.functions])
        )


def verdict(trajectory: Trajectory) -> CheckResult:
    """Whether every turn of calls is right, in order, and the final answer too where the question
    has accepted ones.

    A malformed turn is wrong, with its own problem as the reason; so is a trajectory without a
    final action. A missing reasoning block alone is not wrong: it is what a model answers that does
    not reason, and `Trajectory.well_formed` tells.
    """
    calls, problem = _calls_made(trajectory)
    if problem:
        return CheckResult(False, problem)
    checked = check_turns(calls, request_of(trajectory.question))
    accepted = [_spaced(answer) for answer in trajectory.question.answers]
    if checked.correct and accepted and _spaced(trajectory.prediction) not in accepted:
        return CheckResult(
            False, f"the final answer is {trajectory.prediction[:80]!r}, expected {accepted[0]!r}"
        )
    return checked


def toolmind_score(trajectory: Trajectory) -> float:
    """`dense_score` averaged over the turns of calls that were made or expected; −0.2 for a
    malformed trajectory."""
    calls, problem = _calls_made(trajectory)
    request = request_of(trajectory.question)
    if request.truth is None and not problem:  # the category alone decides
        return SUCCESS if check_turns(calls, request).correct else -0.2
    own = trajectory.question.world == "toolmind"
    expected = [
        expected_calls(turn) if own else reference_calls(map(_without_optional, turn))
        for turn in request.truth or ()
    ]
    if problem or not (calls or expected):
        return -0.2 if problem else SUCCESS
    scores = [
        dense_score(made or [], wanted or []) for made, wanted in zip_longest(calls, expected)
    ]
    return sum(scores) / len(scores)


def check_turns(calls: Sequence[list[dict]], request: ToolRequest) -> CheckResult:
    """BFCL's verdict on the calls of every turn; the number of turns that call must be right too."""
    if request.truth is None:  # the category alone decides
        made = [call for turn in calls for call in turn]
        return check_calls(made, request, None, request.category)
    if len(calls) != len(request.truth):
        return CheckResult(False, f"{len(calls)} turns with calls, expected {len(request.truth)}")
    for number, (made, accepted) in enumerate(zip(calls, request.truth)):
        category = request.category
        if (
            category == "multi_turn"
        ):  # BFCL has no such single-turn category: each turn is judged as what it is
            category = "multiple" if len(accepted) == 1 else "parallel_multiple"
        checked = check_calls(made, request, accepted, category)
        if not checked.correct:
            return (
                checked
                if len(request.truth) == 1
                else CheckResult(False, f"turn {number + 1}: {checked.reason}")
            )
    return CheckResult(True)


def _calls_made(trajectory: Trajectory) -> tuple[list[list[dict]], str]:
    """(calls of every turn that calls, problem of the first turn that is malformed)."""
    if trajectory.prediction is None:
        return [], "no final answer"
    calls = []
    for turn in trajectory.turns:
        if not turn.well_formed and turn.mode != "none":
            return [], turn.problem
        if turn.action == "call":
            parsed, problem = parse_calls(turn.argument)
            if problem:
                return [], problem
            calls.append(parsed)
    return calls, ""


def _without_optional(accepted: dict) -> dict:
    """Ground truth of one call, less the parameters that may be left out: this score asks for
    nothing else of them."""
    ((name, parameters),) = accepted.items()
    return {name: {key: values for key, values in parameters.items() if "" not in values}}


def _spaced(text: str) -> str:
    return " ".join(text.split())

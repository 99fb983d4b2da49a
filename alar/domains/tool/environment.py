"""The tool domain as an environment: it executes calls, and BFCL's own checker judges trajectories.

One function, `verdict`, serves the reward, the filter of teacher traces and the evaluation. So we
train what we measure.
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

JUDGES = ("official", "toolmind", "toolmind-match")
MALFORMED_SCORE = -0.2  # what ToolMind's score takes off when not all calls match


class ToolEnvironment:
    """Executes calls of functions that the request offers and the whitelist holds.

    `judge` is "official", BFCL's checker, or "toolmind", the score that decides which of ToolMind's
    teacher rollouts are kept. The latter forgives further arguments and differences between JSON
    types, and it gives trajectories a grade, which the reward uses. "toolmind-match" is the same
    without the grade: only a full match counts, as in ALAR's released reward. `execute=False` is
    for requests about functions that nobody here can run (BFCL, ToolMind). A trajectory then ends
    with its first calls, as in BFCL's single-turn categories.
    """

    form = TOOL
    stop = ()  # the closing `<|im_end|>` ends a turn; no stop string does

    def __init__(
        self, executor: Executor | None = None, *, execute: bool = True, judge: str = "official"
    ):
        if judge not in JUDGES:
            raise ValueError(f"judge {judge!r}: expected one of {', '.join(JUDGES)}")
        self.judge = judge
        self.executor = (executor or Executor()) if execute else None
        self.final = ("answer",) if execute else ("answer", "call")  # actions that end a trajectory

    def observe(self, steps: Sequence[tuple[Question, protocol.Turn]]) -> list[Observation]:
        return [Observation(self._respond(request_of(question), turn)) for question, turn in steps]

    def correct(self, trajectory: Trajectory) -> bool:
        if self.judge == "official":
            return verdict(trajectory).correct
        return toolmind_score(trajectory) >= SUCCESS

    def grade(self, trajectory: Trajectory) -> float | None:
        """The dense score as a share of a full match's. None if only right and wrong count."""
        return toolmind_score(trajectory) / SUCCESS if self.judge == "toolmind" else None

    def _respond(self, request: ToolRequest, turn: protocol.Turn) -> str:
        calls, problem = parse_calls(turn.argument)
        if problem:
            return self.form.invalid(problem)
        offered = [function["name"] for function in request.functions]
        return responses_text(self.executor.run(calls, offered))


def verdict(trajectory: Trajectory) -> CheckResult:
    """Whether every turn of calls is right, in order, and so is a final answer that is asked for.

    A malformed turn is wrong, with its own problem as the reason. A trajectory without a final
    action is wrong, too. A missing reasoning block alone is not wrong, since some models do not
    reason; `Trajectory.well_formed` counts it.
    """
    calls, problem = _calls_made(trajectory)
    if problem:
        return CheckResult(False, problem)
    checked = check_turns(calls, request_of(trajectory.question))
    # BFCL's questions have no final answers, but the embedded world's have.
    accepted = [_spaced(answer) for answer in trajectory.question.answers]
    if checked.correct and accepted and _spaced(trajectory.prediction) not in accepted:
        said = trajectory.prediction[:80]
        return CheckResult(False, f"the final answer is {said!r}, expected {accepted[0]!r}")
    return checked


def toolmind_score(trajectory: Trajectory) -> float:
    """`dense_score` averaged over the turns of calls that were made or expected.

    A malformed trajectory scores `MALFORMED_SCORE`.
    """
    calls, problem = _calls_made(trajectory)
    if problem:
        return MALFORMED_SCORE
    request = request_of(trajectory.question)
    if request.truth is None:  # the category alone decides
        return SUCCESS if check_turns(calls, request).correct else MALFORMED_SCORE
    if trajectory.question.world == "toolmind":  # its truths are made by `toolmind._truth`
        expected = [expected_calls(turn) for turn in request.truth]
    else:
        expected = [reference_calls(map(_without_optional, turn)) for turn in request.truth]
    if not calls and not expected:
        return SUCCESS
    # A turn too many or too few scores as a turn without a match.
    pairs = zip_longest(calls, expected, fillvalue=[])
    scores = [dense_score(made, wanted) for made, wanted in pairs]
    return sum(scores) / len(scores)


def check_turns(calls: Sequence[list[dict]], request: ToolRequest) -> CheckResult:
    """BFCL's verdict on the calls of every turn. The number of turns with calls counts, too."""
    if request.truth is None:  # the category alone decides
        made = [call for turn in calls for call in turn]
        return check_calls(made, request, None, request.category)
    if len(calls) != len(request.truth):
        return CheckResult(False, f"{len(calls)} turns with calls, expected {len(request.truth)}")
    for number, (made, accepted) in enumerate(zip(calls, request.truth)):
        category = request.category
        if category == "multi_turn":  # the checker has no such category; its turns have one each
            category = "multiple" if len(accepted) == 1 else "parallel_multiple"
        checked = check_calls(made, request, accepted, category)
        if not checked.correct and len(request.truth) > 1:
            return CheckResult(False, f"turn {number + 1}: {checked.reason}")
        if not checked.correct:
            return checked
    return CheckResult(True)


def _calls_made(trajectory: Trajectory) -> tuple[list[list[dict]], str]:
    """(calls of every turn that calls, problem of the first turn that is malformed)."""
    if trajectory.prediction is None:
        return [], "no final answer"
    calls = []  # one list of calls per turn that calls
    for turn in trajectory.turns:
        # A missing block (mode "none") is forgiven; the calls still have to be valid.
        if not turn.well_formed and turn.mode != "none":
            return [], turn.problem
        if turn.action == "call":
            parsed, problem = parse_calls(turn.argument)
            if problem:
                return [], problem
            calls.append(parsed)
    return calls, ""


def _without_optional(accepted: dict) -> dict:
    """The ground truth of one call, without the parameters that may be left out."""
    ((name, parameters),) = accepted.items()
    return {name: {key: values for key, values in parameters.items() if "" not in values}}


def _spaced(text: str) -> str:
    return " ".join(text.split())

"""Surface form of the tool domain: Qwen3's tool template, with a reasoning block in every turn.

    <think>text</think>\\n\\n<tool_call>\\n{"name": "f", "arguments": {}}\\n</tool_call><|im_end|>
    <latent>••••</latent>\\n\\nThe final answer<|im_end|>

A turn holds one or more calls, or the final answer. This module writes the prompts, and not the
checkpoint's own chat template. The two differ in one thing. The template of Qwen3's thinking models
ends the prompt with `<think>\\n`, and a model that finds the block already open can never choose
`<latent>`.

The parser never raises, whatever a policy writes: a malformed turn has a `problem`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from alar import protocol
from alar.domains.tool.requests import openai_tool, request_of
from alar.protocol import Trusted, Turn
from alar.records import Question

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
RESPONSE_OPEN, RESPONSE_CLOSE = "<tool_response>", "</tool_response>"
MAX_CALLS = 16  # in one turn
LONGEST_PROBLEM = 200  # characters; the policy reads it

# The words of Qwen3's template, which its checkpoints know from their training.
_TOOLS_HEAD = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_TOOLS_FOOT = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments"
    ' within <tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments":'
    " <args-json-object>}\n</tool_call>"
)
# Tags that mean something here: none may stand inside a block or around the calls.
_TAG = re.compile(r"</?(?:think|latent|tool_call|tool_response|tools)>")


def tools_text(functions: Sequence[dict]) -> str:
    """The template's block of functions, one JSON object a line."""
    # one JSON object per function
    lines = [json.dumps(openai_tool(function), ensure_ascii=False) for function in functions]
    return _TOOLS_HEAD + "".join(f"\n{line}" for line in lines) + _TOOLS_FOOT


def calls_text(calls: Sequence[dict]) -> str:
    """Calls as the template writes them. Tags inside texts are escaped, so that all read back."""
    written = []
    for call in calls:
        body = f'{{"name": {_json(call["name"])}, "arguments": {_json(call["arguments"])}}}'
        # `\u003c` is "<" to a JSON parser, so the value is the same, but the parser sees no tag.
        body = _TAG.sub(lambda tag: f"\\u003c{tag[0][1:]}", body)
        written.append(f"{CALL_OPEN}\n{body}\n{CALL_CLOSE}")
    return "\n".join(written)


def responses_text(responses: Sequence[str]) -> str:
    """The results of all calls of a turn, in the order of the calls."""
    return "\n".join(f"{RESPONSE_OPEN}\n{response}\n{RESPONSE_CLOSE}" for response in responses)


def parse_calls(text: str) -> tuple[list[dict], str]:
    """(calls, problem) of a text with calls one after another. ([], reason) unless all are valid.

    A call is a JSON object with exactly a `name` (text) and `arguments` (an object). Never raises.
    """
    calls = []  # {"name": str, "arguments": dict} each
    for body in _split_calls(text)[0]:
        call, problem = _parse_call(body)
        if problem:
            return [], problem
        calls.append(call)
    if len(calls) > MAX_CALLS:
        return [], f"{len(calls)} calls in one turn, at most {MAX_CALLS} are allowed"
    return calls, "" if calls else "no call"


def parse_turn(text: str) -> Turn:
    """Parse what the policy wrote between two observations. Never raises.

    The action is "call" (its argument is the text of the calls), "answer", or None.
    """
    mode, reasoning, rest, problem = protocol.leading_block(text, _TAG)
    found, outside = _split_calls(rest)  # bodies of the calls, the text around them
    tagged = _TAG.search(outside)  # a tag that opens or closes nothing, or another block
    action: str | None
    if found:
        action, argument = "call", "\n".join(f"{CALL_OPEN}{body}{CALL_CLOSE}" for body in found)
    elif rest.strip() and not tagged:
        action, argument = "answer", rest.strip()
    else:
        action, argument = None, ""
    problem = problem or _turn_problem(action, argument, outside, tagged[0] if tagged else "")
    # `policy_text` is what counts as think length: the thought, and text outside block and calls.
    # Otherwise a policy could reason outside the block for free.
    thinking = reasoning if mode == "think" else ""
    # a plain answer is an action, not thinking
    extra = outside if action == "call" or tagged else ""
    policy_text = thinking + _TAG.sub("", extra).strip().replace(protocol.BULLET, "")
    return Turn(mode, reasoning, action, argument, not problem, problem, policy_text)


def _turn_problem(action: str | None, argument: str, outside: str, tag: str) -> str:
    """What is wrong after the block. `outside` is the text around the calls, `tag` a tag in it."""
    if "tool_call" in tag:
        return f"{tag} has no partner"
    if tag:
        return "more than one block"
    if action is None:
        return "neither a call nor an answer"
    if action == "answer":
        return ""
    return "text outside the block and the calls" if outside.strip() else parse_calls(argument)[1]


class ToolForm:
    """The template for the agent loop. The policy itself ends its turns, with `<|im_end|>`.

    `instruction` is a system message for every request, before the request's own.
    """

    opening = ""  # no text stands before the first block
    closing = Trusted("<|im_end|>")

    def __init__(self, instruction: str = ""):
        self.instruction = instruction

    def prompt(self, question: Question) -> Sequence[str]:
        request = request_of(question)
        messages = list(request.messages)
        system = [self.instruction] if self.instruction else []
        if messages and messages[0]["role"] == "system":
            system.append(messages.pop(0)["content"])  # the functions follow in the same message
        if request.functions:
            system.append(tools_text(request.functions))
        # Only the template's own pieces are `Trusted`: `<|im_end|>` in a user's text ends nothing.
        pieces = []
        if system:
            pieces += [Trusted("<|im_start|>system\n"), "\n\n".join(system)]
            pieces.append(Trusted("<|im_end|>\n"))
        for message in messages:
            role = "assistant" if message["role"] == "assistant" else "user"
            pieces += [Trusted(f"<|im_start|>{role}\n"), message["content"]]
            pieces.append(Trusted("<|im_end|>\n"))
        return [*pieces, Trusted("<|im_start|>assistant\n")]

    def observation(self, text: str) -> Sequence[str]:
        opening = Trusted("<|im_end|>"), Trusted("\n<|im_start|>user\n")
        return *opening, text, Trusted("<|im_end|>\n<|im_start|>assistant\n")

    def invalid(self, problem: str) -> str:
        # The problem may quote the policy's own text; none of its tags may close the response.
        return responses_text([_json({"error": problem}).replace("<", "\\u003c")])

    def parse(self, text: str) -> Turn:
        return parse_turn(text)

    def action(self, name: str, argument: str) -> str:
        return argument  # the argument of a call has its tags already


TOOL = ToolForm()


def _split_calls(text: str) -> tuple[list[str], str]:
    """(the text between the tags of each call, the text around the calls).

    It takes one pass. A regular expression takes quadratic time for many tags without a partner.
    """
    bodies, around, place = [], [], 0  # `place`: where the unread text begins
    while True:
        start = text.find(CALL_OPEN, place)
        end = text.find(CALL_CLOSE, start)
        if start < 0 or end < 0:
            break
        bodies.append(text[start + len(CALL_OPEN) : end])
        around.append(text[place:start])
        place = end + len(CALL_CLOSE)
    return bodies, "".join(around) + text[place:]


def _parse_call(body: str) -> tuple[dict, str]:
    try:
        call = json.loads(body, parse_constant=_refuse)  # JSON has no NaN, but Python reads it
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        return {}, f"a call is not JSON ({str(error)[:80]})"
    if not isinstance(call, dict):
        return {}, f"a call is {type(call).__name__}, not an object with name and arguments"
    if set(call) != {"name", "arguments"}:
        keys = f"a call has the keys {sorted(map(str, call))[:6]}"[:LONGEST_PROBLEM]
        return {}, f"{keys}, expected name and arguments"
    if not isinstance(call["name"], str):
        return {}, "the name of a call is not text"
    if not isinstance(call["arguments"], dict):
        return {}, f"the arguments of a call are {type(call['arguments']).__name__}, not an object"
    return call, ""


def _refuse(constant: str):
    raise ValueError(f"{constant} is no JSON")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)

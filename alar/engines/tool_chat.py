"""The tool domain as chat messages with tools, for a teacher behind an OpenAI-compatible endpoint.

A context is sent as the messages that its ids were made from: the system's text, the functions as
`tools`, calls as `tool_calls`, responses as `tool` messages, one per call. Earlier turns are sent
without their reasoning, as chat APIs expect. An answer comes back as the text of a turn: first its
reasoning, from `reasoning_content`, `reasoning` or an inline think block, then its calls or its
words. The parser of `alar.domains.tool.protocol` decides whether that text is a well-formed turn.

If the API does not allow a function's name, the function is sent under another name. In the answer
it has its own name again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from alar import protocol
from alar.domains.tool.protocol import (
    CALL_OPEN,
    RESPONSE_CLOSE,
    RESPONSE_OPEN,
    calls_text,
    parse_calls,
    tools_text,
)
from alar.engines.endpoint import Reading, Unrepresentable
from alar.rollout.codec import Codec

# What stands before and after the functions in the template's text.
_HEAD, _, _FOOT = tools_text(()).partition("\n</tools>")
_BLOCK = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # what the API allows as the name of a function


def tool_chat(ids: Sequence[int], codec: Codec) -> tuple[dict, Reading]:
    """(fields of the request, the function that reads its answer) for a context.

    The fields are `messages` and `tools`. Raises Unrepresentable if the context does not end where
    the assistant is to write.
    """
    segments = _segments(ids, codec)  # (role, text) of each message
    if segments[-1:] != [("assistant", "")]:
        raise Unrepresentable("the context does not end where a turn begins")
    system, tools = "", []
    if segments[0][0] == "system":
        system, tools = _system(segments.pop(0)[1])
    # A function's name → the name that is sent.
    sent = _names_sent([tool["function"]["name"] for tool in tools])
    for tool in tools:
        tool["function"]["name"] = sent[tool["function"]["name"]]
    messages: list[dict] = []
    if system:
        messages.append({"role": "system", "content": system})
    unanswered: list[str] = []  # ids of the calls that the next message answers
    for role, text in segments[:-1]:  # the last one is the assistant's opening
        if role == "assistant":
            message = _assistant(text, len(messages), sent)
            messages.append(message)
            unanswered = [call["id"] for call in message.get("tool_calls", ())]
        elif unanswered:  # the template puts responses in a user's message
            messages += _responses(text, unanswered)
            unanswered = []
        else:
            messages.append({"role": "user", "content": text})
    fields: dict[str, Any] = {"messages": messages}
    if tools:
        fields["tools"] = tools
    return fields, partial(answer_text, names={given: name for name, given in sent.items()})


def answer_text(message: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """The text of the turn in a message. `names`: name that was sent → own name.

    Raises Unrepresentable if the message cannot be written as a turn.
    """
    content = _text(message.get("content"))
    reasoning = _text(message.get("reasoning_content")) or _text(message.get("reasoning"))
    if not reasoning:
        if protocol.THINK_CLOSE in content and not content.lstrip().startswith(protocol.THINK_OPEN):
            # The server's template has opened the block at the end of the prompt.
            content = protocol.THINK_OPEN + content
        block = _BLOCK.match(content)
        if block:
            reasoning, content = block[1], content[block.end() :]
    calls = [_call(entry, names) for entry in message.get("tool_calls") or ()]
    try:
        text = "\n".join(filter(None, [content.strip(), calls_text(calls)]))
    except RecursionError:
        raise Unrepresentable("the arguments of a call are nested too deeply") from None
    if reasoning:
        text = f"{protocol.think_block(reasoning)}{protocol.BLOCK_SEPARATOR}{text}"
    try:
        text.encode()  # fails for half of a surrogate pair, which JSON can escape
    except UnicodeEncodeError:
        raise Unrepresentable("the answer holds text that is no Unicode") from None
    return text


def _segments(ids: Sequence[int], codec: Codec) -> list[tuple[str, str]]:
    """(role, text) of every message.

    The border ids are reliable, because text from outside is encoded without special ids.
    """
    opening, closing = codec.trusted("<|im_start|>"), codec.trusted("<|im_end|>")
    if len(opening) != 1 or len(closing) != 1:
        raise ValueError(
            "the student's tokenizer has no <|im_start|> and <|im_end|>: the tool domain needs one"
            " of Qwen's"
        )
    pieces: list[list[int]] = []  # ids of each message, without its opening
    for token in ids:
        if token == opening[0]:
            pieces.append([])
        elif not pieces:
            raise Unrepresentable("the context does not begin with a message")
        else:
            pieces[-1].append(token)
    found = []
    for piece in pieces:
        if closing[0] in piece:
            piece = piece[: piece.index(closing[0])]  # the line break after it belongs to nobody
        role, _, text = codec.text(piece).partition("\n")
        found.append((role, text))
    return found


def _system(text: str) -> tuple[str, list[dict]]:
    """(the system's own text, the functions below it).

    Each function is one line of JSON, so none of them can hold the heading.
    """
    system, heading, listed = text.rpartition(_HEAD)
    if not heading or not listed.endswith(f"\n</tools>{_FOOT}"):
        return text, []  # no functions were offered
    lines = listed.removesuffix(f"\n</tools>{_FOOT}").split("\n")[1:]
    return system.removesuffix("\n\n"), [json.loads(line) for line in lines]


def _assistant(text: str, number: int, sent: Mapping[str, str]) -> dict:
    """The message of an earlier turn. A malformed turn is sent as the text that it is."""
    block = _BLOCK.match(text)
    if block:
        text = text[block.end() :]
    calls, problem = parse_calls(text)
    if problem:
        return {"role": "assistant", "content": text}
    entries = [
        {
            # The number of the message makes it unique in the conversation.
            "id": f"call_{number}_{place}",
            "type": "function",
            "function": {
                "name": sent.get(call["name"], call["name"]),
                "arguments": json.dumps(call["arguments"], ensure_ascii=False),
            },
        }
        for place, call in enumerate(calls)
    ]
    return {
        "role": "assistant",
        "content": text.partition(CALL_OPEN)[0].strip() or None,
        "tool_calls": entries,
    }


def _responses(text: str, calls: Sequence[str]) -> list[dict]:
    # The template gives the responses in the order of the calls, without their ids.
    start, end = f"{RESPONSE_OPEN}\n", f"\n{RESPONSE_CLOSE}"
    bodies = text.removeprefix(start).removesuffix(end).split(f"{end}\n{start}")
    if not (text.startswith(start) and text.endswith(end)) or len(bodies) != len(calls):
        raise Unrepresentable("not as many responses as calls in a turn")
    pairs = zip(calls, bodies)
    return [{"role": "tool", "tool_call_id": call, "content": body} for call, body in pairs]


def _call(entry: Any, names: Mapping[str, str]) -> dict:
    function = entry.get("function") if isinstance(entry, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise Unrepresentable("a call in the answer has no name")
    arguments = function.get("arguments")
    try:
        if isinstance(arguments, str | None):
            arguments = json.loads(arguments or "{}")  # some servers leave out empty arguments
    except (ValueError, RecursionError):
        raise Unrepresentable("the arguments of a call in the answer are not JSON") from None
    if not isinstance(arguments, dict):
        raise Unrepresentable("the arguments of a call in the answer are no object")
    return {"name": names.get(function["name"], function["name"]), "arguments": arguments}


def _text(content: Any) -> str:
    """The text of a message's field, which may be a list of parts. Other values count as empty."""
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, Mapping)]
        return "".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""


def _names_sent(names: Sequence[str]) -> dict[str, str]:
    """Each function's name → a name that the API allows. The names sent are distinct.

    The API allows at most 64 letters, digits, _ and -.
    """
    # Allowed names come first, so that no replacement takes one of them.
    sent = {name: name for name in names if _NAME.fullmatch(name)}
    for name in names:
        if name in sent:
            continue
        # 60 characters leave room for a number.
        plain = re.sub(r"[^A-Za-z0-9_-]", "_", name)[:60] or "function"
        candidate, number = plain, 1
        while candidate in sent.values():
            number += 1
            candidate = f"{plain}_{number}"
        sent[name] = candidate
    return sent

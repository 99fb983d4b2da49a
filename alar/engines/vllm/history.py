"""Chat histories with latent blocks, for the OpenAI-compatible server. A history is rebuilt from
ids, or refused with a reason.

A chat client sends back what it was shown: text, in which a latent block is `<latent></latent>` or
`<latent>••••</latent>`. Feeding that text would put plain bullets where thoughts were. So the
server remembers the ids of every answer that holds a block. The key is the text that the client was
shown. Where a tool parser takes content and calls apart, these are a second key. When the answer
comes back in an assistant message, the chat template renders one special token, `<|latent|>`, in
its place. The remembered ids then replace that token, and the engine recomputes z from the ids.

An assistant message with a block, or a piece of one, that this server did not write is refused. So
is `<|latent|>` in any other text.

`LatentHistory` is an ASGI middleware, which `alar.engines.serve` sets. The rest is plain Python.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from fastapi.responses import JSONResponse

from alar import protocol
from alar.domains.tool.protocol import CALL_OPEN, parse_calls
from alar.engines.vllm.turns import problem_in_context
from alar.rollout.codec import Codec

_SHOWN = f"(?:{protocol.BULLET}|{re.escape(protocol.LATENT_TOKEN)}|\\s)*"  # inside a block
_BLOCK = re.compile(protocol.LATENT_OPEN + _SHOWN + protocol.LATENT_CLOSE)
EMPTY = protocol.LATENT_OPEN + protocol.LATENT_CLOSE  # the one form in which blocks are compared
# What may be left of a block in an answer: a client's stop string can end the text inside a tag.
_PIECE = re.compile(
    f"{protocol.LATENT_OPEN}|{protocol.LATENT_CLOSE[:-1]}|{re.escape(protocol.LATENT_TOKEN)}"
)
UNKNOWN = (
    "an assistant message holds a latent block that this server did not write, or wrote too long"
    " ago, or its text was changed. Thoughts cannot be rebuilt from bullets. Send the message"
    " exactly as it was received, or leave it out, or use /v1/completions with the token ids that"
    " the answer had (return_token_ids)"
)
RESERVED = (
    f"{protocol.LATENT_TOKEN} stands for a thought and cannot be sent as text; remove it, or send"
    " token ids"
)
AS_TEXT = (
    "the prompt holds a latent block as text, which would be fed as plain bullets. Send the prompt"
    " as token ids, with the ids that the answer had (return_token_ids), or use"
    " /v1/chat/completions"
)

# These endpoints keep or render histories in their own ways. They would feed latent blocks as text.
NOT_SERVED = ("/v1/responses", "/v1/messages", "/v1/chat/completions/batch")
ELSEWHERE = (
    "this endpoint cannot rebuild latent blocks of a history; use /v1/chat/completions, or"
    " /v1/completions with token ids"
)


class HistoryRefused(ValueError):
    """A history that cannot be fed as it was written; the message says what to send instead."""


class BlockMemory:
    """The ids of answers, by the text that the client was shown.

    Beyond `capacity` texts, the least recently used are dropped.
    """

    def __init__(self, codec: Codec, capacity: int = 20000):
        self.codec, self.capacity = codec, capacity
        self.answers: OrderedDict[str, list[int]] = OrderedDict()  # `shown` or `called` → ids

    @staticmethod
    def shown(text: str) -> str:
        """One form for all ways of showing a block, and for clients that trim."""
        return _BLOCK.sub(EMPTY, text).strip()

    @classmethod
    def called(cls, content: str, calls: Sequence[dict]) -> str:
        """The key of an answer whose calls stand beside its content.

        A call has a `name` and `arguments`, an object. `sort_keys`: clients may reorder arguments.
        """
        written = [json.dumps([call["name"], call["arguments"]], sort_keys=True) for call in calls]
        return "\n".join([cls.shown(content), *written])

    def remember(self, text: str, ids: Sequence[int]) -> None:
        """Keep an answer's ids, less the token that ended it, if it holds a block."""
        if self.codec.latent_token_id not in ids:
            return
        ids = list(ids)
        if ids[-1] == self.codec.tokenizer.eos_token_id:
            ids.pop()  # the chat template writes the end of a message itself
        keys = [self.shown(text)]
        calls = parse_calls(text)[0]
        if calls:
            keys.append(self.called(text[: text.index(CALL_OPEN)], calls))
        for key in keys:
            self.answers[key] = ids
            self.answers.move_to_end(key)
        while len(self.answers) > self.capacity:
            self.answers.popitem(last=False)

    def placeholders(self, messages: Sequence[dict]) -> tuple[list[dict], list[list[int]]]:
        """Replace every remembered answer by one `<|latent|>`: (messages, ids of each answer).

        Raises HistoryRefused for a block that is not remembered.
        """
        rendered, found = [], []
        for message in messages:
            if not isinstance(message.get("content") or "", str):
                # Pydantic may give an iterator, which can be read only once.
                message = {**message, "content": list(message["content"])}
            text = message_text(message)
            if protocol.LATENT_TOKEN in text and message.get("role") != "assistant":
                raise HistoryRefused(RESERVED)
            if message.get("role") == "assistant" and _PIECE.search(text):
                calls = calls_of(message)
                key = self.called(text, calls) if calls else self.shown(text)
                ids = self.answers.get(key)
                if ids is None:
                    raise HistoryRefused(UNKNOWN)
                self.answers.move_to_end(key)
                found.append(ids)
                # Without its calls and reasoning: they are in the remembered ids already.
                message = {"role": "assistant", "content": protocol.LATENT_TOKEN}
            rendered.append(message)
        return rendered, found

    def splice(self, prompt: Sequence[int], found: Sequence[Sequence[int]]) -> list[int]:
        """The rendered prompt with the ids in place of its placeholders.

        Raises HistoryRefused if the template has left one out or repeated one.
        """
        latent = self.codec.latent_token_id
        if list(prompt).count(latent) != len(found):
            raise HistoryRefused(
                "the chat template leaves out or repeats earlier answers; send the history as"
                " token ids"
            )
        answers, whole = iter(found), []
        for token in prompt:
            whole += next(answers) if token == latent else (token,)
        return whole


def message_text(message: dict) -> str:
    """The text of a chat message: the reasoning that a parser took out of it, and its content.

    Of content in parts, only the text parts count.
    """
    reasoning = message.get("reasoning") or message.get("reasoning_content") or ""
    content = message.get("content") or ""
    if isinstance(content, str):
        return reasoning + content
    parts = [part.get("text", "") if isinstance(part, dict) else str(part) for part in content]
    return reasoning + "".join(parts)


def calls_of(message: dict) -> list[dict]:
    """`name` and `arguments` of a message's tool calls.

    Arguments that are not JSON stay text. No answer is remembered under such a key.
    """
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        arguments = function.get("arguments")
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except ValueError:
            pass  # `placeholders` then finds no answer and refuses the history
        calls.append({"name": function.get("name"), "arguments": arguments})
    return calls


def refuse_text_blocks(prompt) -> None:
    """Raise HistoryRefused if a text prompt, or one of a list, holds a latent block."""
    if isinstance(prompt, str):
        if protocol.LATENT_TOKEN in prompt or _BLOCK.search(prompt):
            raise HistoryRefused(AS_TEXT)
    elif isinstance(prompt, (list, tuple)):
        for part in prompt:
            if not isinstance(part, int):
                refuse_text_blocks(part)


def refuse_broken_blocks(codec: Codec, prompt) -> None:
    """Raise HistoryRefused if a prompt of ids, or one of a list, has latent blocks that are not
    whole."""
    if isinstance(prompt, (list, tuple)):
        if all(isinstance(part, int) for part in prompt):
            if problem := problem_in_context(codec, prompt):
                raise HistoryRefused(problem)
        else:
            for part in prompt:
                refuse_broken_blocks(codec, part)


def refuse_beams(request) -> None:
    """Raise HistoryRefused for beam search. It asks for one token at a time and would never close a
    block."""
    if getattr(request, "use_beam_search", False):
        raise HistoryRefused("beam search does not write latent blocks; leave use_beam_search out")


class LatentHistory:
    """ASGI middleware. It connects a `BlockMemory` with the server's renderer and engine, and adds
    GET /v1/latents/KEY.

    That address gives, once, the record of a request with `vllm_xargs: {"latent_record": KEY}`:

        logprobs    one per token of the answer, null where the policy had no choice
        forced      places of the forced tokens, latent positions included
        positions   places of the latent positions
        latents     their z, (positions, hidden size)
    """

    def __init__(self, app):
        self.app, self.memory = app, None

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] == "http":
            if self.memory is None:  # the engine exists only once the server has started
                self._connect(scope["app"])
            if scope["path"].startswith(NOT_SERVED):
                return await _error(400, ELSEWHERE)(scope, receive, send)
        return await self.app(scope, receive, send)

    def _connect(self, app) -> None:
        from alar.engines.vllm.turns import engine_codec

        app.add_api_route("/v1/latents/{key}", self._latents, methods=["GET"])
        engine, renderer = app.state.engine_client, app.state.online_renderer
        self.engine, self.width = engine, engine.vllm_config.model_config.hf_config.hidden_size
        self.memory = BlockMemory(engine_codec(engine.vllm_config))
        engine.generate = self._remembering(engine.generate)
        # Chat, completions and /tokenize all pass here. vLLM answers a ValueError with status 400.
        renderer.preprocess_chat = self._chat(renderer.preprocess_chat)
        renderer.preprocess_completion = self._completion(renderer.preprocess_completion)

    def _remembering(self, generate):
        async def remembering(*args, **kwargs):
            # A request with n > 1 has several answers; these map the number of each to its parts.
            texts: dict[int, str] = {}
            ids: dict[int, list[int]] = {}
            async for answer in generate(*args, **kwargs):
                for part in answer.outputs:
                    # Streams come in pieces, other answers whole; both are whole in the end.
                    texts[part.index] = texts.get(part.index, "") + part.text
                    ids.setdefault(part.index, []).extend(part.token_ids)
                    if part.finish_reason is not None:
                        self.memory.remember(texts[part.index], ids[part.index])
                yield answer

        return remembering

    def _chat(self, preprocess):
        async def chat(request, messages, *args, **kwargs):
            refuse_beams(request)
            messages, found = self.memory.placeholders(messages)
            conversation, prompts = await preprocess(request, messages, *args, **kwargs)
            for prompt in prompts:
                ids = self.memory.splice(prompt["prompt_token_ids"], found)
                refuse_broken_blocks(self.memory.codec, ids)  # a stop string may have cut one
                prompt["prompt_token_ids"] = ids
            return conversation, prompts

        return chat

    def _completion(self, preprocess):
        async def completion(request, prompt_input, *args, **kwargs):
            refuse_beams(request)
            refuse_text_blocks(prompt_input)
            refuse_broken_blocks(self.memory.codec, prompt_input)
            return await preprocess(request, prompt_input, *args, **kwargs)

        return completion

    async def _latents(self, key: str) -> JSONResponse:
        noted = (await self.engine.collective_rpc("latent_records", args=([key],)))[0][0]
        if noted is None:
            problem = "it was never asked for, or fetched already"
            return _error(404, f"nothing is recorded under {key!r}: {problem}")
        logprobs = noted["logprobs"]
        for place in noted["forced"]:
            logprobs[place] = None
        latents = np.frombuffer(noted["latents"], np.float32).reshape(-1, self.width)  # (N, H)
        return JSONResponse({**noted, "logprobs": logprobs, "latents": latents.tolist()})


def _error(status: int, message: str) -> JSONResponse:
    kind = {400: "BadRequestError", 404: "NotFoundError"}[status]
    return JSONResponse({"error": {"message": message, "type": kind, "code": status}}, status)

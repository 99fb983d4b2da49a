"""A model behind any OpenAI-compatible chat completions endpoint, as an engine for the agent loop:
a teacher to sample from.

Such a server takes messages and gives text; token ids and log-probs are not known. So contexts are
turned back into messages, and the text of an answer is encoded with the student's tokenizer: its
ids are SAMPLED with a log-prob of NaN, which marks them as encoded again. They can be imitated;
they are no rollouts to learn from by policy gradients. How messages look is the affair of a
domain's `Dialect`.

A server that is down, slow or that limits the rate is asked again with growing pauses, or after the
pause that it asks for; while it does, no other request is sent. After that EndpointError names the
server, the cause and what to do. An answer that cannot be written as a turn, or a request that the
server refuses, is a turn without tokens; `problems` says why.
"""

from __future__ import annotations

import asyncio
import email.utils
import ipaddress
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any
from urllib.parse import urlsplit

import httpx
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_attempt,
    wait_exponential,
)

from alar.records import Origin
from alar.rollout.codec import Codec
from alar.rollout.engine import Engine, Sampling, TurnOutput, TurnRequest

REFUSALS = (
    8  # in a row before the first answer: the server refuses what all requests have in common
)
LONGEST_PAUSE = 120.0  # seconds


class EndpointError(RuntimeError):
    """The server cannot be used: it does not answer, or refuses everybody."""


class Unrepresentable(ValueError):
    """A context that cannot be sent as messages, or an answer that is no turn; the text says why."""


class _Passing(Exception):
    """A failure that may pass; `pause` is what the server asks for, in seconds."""

    def __init__(self, cause: str, pause: float = 0.0):
        super().__init__(cause)
        self.pause = pause


Reading = Callable[[Mapping[str, Any]], str]  # an answer's message → the text of the turn
# A context's ids → the fields of a request that say the same, `messages` among them, and how its
# answer is read; one per domain. Both raise Unrepresentable.
Dialect = Callable[[Sequence[int], Codec], tuple[dict, Reading]]


class Endpoint:
    """Client of one server, for one event loop. `url` is that of its API
    ("http://127.0.0.1:8000/v1").

    `extra` fields are added to every request, those that are None taken out of it (`max_tokens` for
    servers that want `max_completion_tokens`). `timeout` is in seconds per attempt; a request is
    attempted 1 + `retries` times.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        key: str = "",
        extra: Mapping[str, Any] | None = None,
        timeout: float = 600.0,
        retries: int = 6,
        backoff: float = 1.0,
    ):
        self.url = url.strip().rstrip("/").removesuffix("/chat/completions").rstrip("/")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise EndpointError(
                f"endpoint {url!r} is not an address such as http://127.0.0.1:8000/v1"
            )
        self.model, self.extra, self.timeout, self.retries = (
            model,
            dict(extra or {}),
            timeout,
            retries,
        )
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(timeout, connect=min(10.0, timeout)),
            limits=httpx.Limits(max_connections=None),
            headers={"Content-Type": "application/json"}
            | ({"Authorization": f"Bearer {key}"} if key else {}),
            trust_env=not _is_loopback(
                parts.hostname
            ),  # a proxy cannot reach this machine's own server
        )
        self._open_again = 0.0  # when the server may be asked again, by the monotonic clock
        self._refused, self._answered = 0, False
        self._growing = wait_exponential(multiplier=backoff, max=60)

    async def close(self) -> None:
        await self._client.aclose()

    async def ask(self, fields: Mapping[str, Any]) -> dict:
        """The first choice of the answer. Raises Unrepresentable if the server refuses this
        request, EndpointError if it cannot be used at all."""
        body = {
            key: value
            for key, value in {"model": self.model, **fields, **self.extra}.items()
            if value is not None
        }
        try:
            content = json.dumps(body, allow_nan=False).encode()
        except ValueError as problem:
            raise Unrepresentable(f"the request cannot be written as JSON ({problem})") from None
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(_Passing),
            stop=stop_after_attempt(1 + self.retries),
            wait=self._pause,
            reraise=True,
        )
        try:
            return await retrying(self._attempt, content)
        except _Passing as error:
            raise self._failure(f"{error} ({1 + self.retries} attempts)") from error

    def _pause(self, state: RetryCallState) -> float:
        return max(self._growing(state), state.outcome.exception().pause)

    async def _attempt(self, content: bytes) -> dict:
        while (pause := self._open_again - time.monotonic()) > 0:
            await asyncio.sleep(pause)
        try:
            response = await self._client.post(f"{self.url}/chat/completions", content=content)
        except httpx.TimeoutException as error:
            raise _Passing(
                f"no answer within {self.timeout:g} s ({type(error).__name__})"
            ) from error
        except httpx.TransportError as error:
            raise _Passing(f"no connection: {type(error).__name__}: {error}") from error
        status, text = response.status_code, response.text[:300]
        if status in (408, 409, 425, 429) or status >= 500:
            pause = _retry_after(response.headers.get("retry-after", ""))
            if status == 429:
                self._open_again = max(self._open_again, time.monotonic() + pause)
            raise _Passing(f"status {status}: {text}", pause)
        if status in (400, 413, 422):
            self._note(answered=False, text=text)
            raise Unrepresentable(f"the server refused the request (status {status}: {text})")
        if status != 200:
            raise self._failure(f"the request was refused with status {status}: {text}")
        try:
            choice, *_ = response.json()["choices"]
            if not isinstance(choice["message"], dict):
                raise TypeError
        except (ValueError, KeyError, TypeError) as error:
            raise _Passing(f"the answer holds no choice with a message: {text!r}") from error
        self._note(answered=True)
        return choice

    def _note(self, *, answered: bool, text: str = "") -> None:
        """Refused requests are dropped one by one, unless nothing but refusals comes."""
        self._answered |= answered
        self._refused += not answered
        if not self._answered and self._refused >= REFUSALS:
            raise self._failure(f"the first {REFUSALS} requests were refused: {text}")

    def _failure(self, cause: str) -> EndpointError:
        return EndpointError(
            f"endpoint {self.url}, model {self.model}: {cause}\nCheck that it runs (curl"
            f" {self.url}/models), the name of the model and the key, or correct the address"
        )


class EndpointEngine(Engine):
    """`Engine` on an endpoint; `codec` is the student's, and at most `concurrent` requests are
    under way.

    `problems` says of a session why its turn has no tokens; later turns of that session have none
    either. Requests run in an event loop of their own, in a thread, which never touches the codec:
    tokenizers are for one thread. Close the engine, or use it as a context manager.
    """

    def __init__(self, endpoint: Endpoint, codec: Codec, dialect: Dialect, *, concurrent: int = 16):
        if concurrent < 1:
            raise ValueError(f"concurrent {concurrent}: expected at least one request at a time")
        self.endpoint, self.codec, self.dialect = endpoint, codec, dialect
        self.problems: dict[int, str] = {}
        self._written: dict[Future, tuple[TurnRequest, Reading]] = {}
        self._unwritten: list[TurnRequest] = []  # that cannot be sent
        self._places = asyncio.Semaphore(concurrent)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="endpoint", daemon=True)
        self._thread.start()

    def __enter__(self) -> EndpointEngine:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def close(self) -> None:
        if self._loop.is_closed():
            return
        self.release([request.session for request, _ in self._written.values()])
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.endpoint.close()

    @property
    def busy(self) -> bool:
        return bool(self._written or self._unwritten)

    def submit(self, requests: Sequence[TurnRequest], sampling: Sampling) -> None:
        under_way = [*self._unwritten, *(request for request, _ in self._written.values())]
        sessions = [request.session for request in [*requests, *under_way]]
        if len(set(sessions)) != len(sessions):
            raise ValueError("two turns of one session are asked for at the same time")
        if any(request.forced or len(request.latents) for request in requests) or sampling.stop:
            raise ValueError(
                "an endpoint writes whole turns of text in a mode of its own: use mode off, without"
                " stop strings"
            )
        for request in requests:
            try:
                fields, read = self._fields(request, sampling)
            except Unrepresentable as problem:
                self.problems.setdefault(request.session, str(problem))
                self._unwritten.append(request)
            else:
                self._written[asyncio.run_coroutine_threadsafe(self._ask(fields), self._loop)] = (
                    request,
                    read,
                )

    def step(self) -> list[tuple[TurnRequest, TurnOutput]]:
        turns = [(request, TurnOutput(finish="eos")) for request in self._unwritten]
        self._unwritten = []
        ended = (
            ()
            if turns or not self._written
            else wait(self._written, return_when=FIRST_COMPLETED)[0]
        )
        for future in ended:
            request, read = self._written.pop(future)
            try:
                turns.append((request, self._output(future.result(), read)))
            except Unrepresentable as problem:
                self.problems[request.session] = str(problem)
                turns.append((request, TurnOutput(finish="eos")))
        return turns

    def release(self, sessions: Sequence[int]) -> None:
        """Forget turns in the making; their connections are closed, which ends most servers' work
        on them."""
        gone = set(sessions)
        self._unwritten = [request for request in self._unwritten if request.session not in gone]
        for future in [
            future for future, (request, _) in self._written.items() if request.session in gone
        ]:
            future.cancel()
            del self._written[future]

    def _fields(self, request: TurnRequest, sampling: Sampling) -> tuple[dict, Reading]:
        if request.session in self.problems:
            raise Unrepresentable(self.problems[request.session])
        fields, read = self.dialect(request.ids, self.codec)
        fields |= {
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_new_tokens,
            "seed": request.seed % 2**31,
        }
        return fields | ({"top_p": sampling.top_p} if sampling.top_p < 1 else {}), read

    async def _ask(self, fields: dict) -> dict:
        async with self._places:
            return await self.endpoint.ask(fields)

    def _output(self, choice: dict, read: Reading) -> TurnOutput:
        finish = choice.get("finish_reason")
        if finish == "content_filter":
            raise Unrepresentable("the server filtered the answer")
        ids = self.codec.untrusted(read(choice["message"])) + self.codec.trusted(
            self.codec.form.closing
        )
        return TurnOutput(
            ids,
            [int(Origin.SAMPLED)] * len(ids),
            [float("nan")] * len(ids),
            [],
            "length" if finish == "length" else "eos",
        )


def _retry_after(value: str) -> float:
    """Seconds that a Retry-After header asks for: a number or a date; 0 without one."""
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError):
            seconds = 0.0
    return min(max(seconds, 0.0), LONGEST_PAUSE) if seconds == seconds else 0.0


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

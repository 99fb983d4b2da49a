"""A model behind any OpenAI-compatible chat completions endpoint, as an engine of the agent loop.

Such a server is a teacher to sample from. It takes messages and returns text, without token ids and
log-probs. So a context is turned back into messages, and the student's tokenizer encodes the text
of an answer. Its ids are SAMPLED with a log-prob of NaN, which marks them as encoded again. A
student can imitate them, but policy gradients cannot learn from them. Each domain says how its
messages look, see `Dialect`.

If a server is down, is slow or limits the rate, the request is sent again after growing pauses, or
after the pause that the server asks for. Until then, a server that limits the rate gets no other
request either. After the last attempt EndpointError names the server, the cause and what to do. If
an answer cannot be written as a turn, or the server refuses a request, the turn has no tokens and
`problems` says why. The `openai` client is not used, for two reasons: it draws its pauses from the
global `random`, which would change the later draws of a run, and it does not hold back other
requests.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import httpx
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_attempt,
    wait_exponential,
)

from alar.domains.search.client import host_of, is_this_machine
from alar.records import Origin
from alar.rollout.codec import Codec
from alar.rollout.engine import Engine, Sampling, TurnOutput, TurnRequest

# After so many refusals and no answer, the server must refuse what all requests have in common.
REFUSALS = 8
LONGEST_PAUSE = 120.0  # seconds; a server that asks for more is asked again after these
TEMPORARY = (408, 409, 425, 429)  # HTTP statuses worth another attempt, as are all from 500 on
REFUSED = (400, 413, 422)  # concern one request; any other status would meet all requests


class EndpointError(RuntimeError):
    """The server cannot be used: it does not answer, or it refuses every request."""


class Unrepresentable(ValueError):
    """A context that cannot be sent as messages, or an answer that is not a turn."""


class _TemporaryFailure(Exception):
    """An attempt failed, and another may succeed. The server asks for `pause` seconds before it."""

    def __init__(self, cause: str, pause: float = 0.0):
        super().__init__(cause)
        self.pause = pause


# message of an answer → text of the turn. Raises Unrepresentable.
Reading = Callable[[Mapping[str, Any]], str]
# (ids of a context, codec) → (fields of the request, `messages` among them, and how to read its
# answer). Every domain has its own. Raises Unrepresentable.
Dialect = Callable[[Sequence[int], Codec], tuple[dict, Reading]]


class Endpoint:
    """Client of one server, for one event loop.

    `url` is that of the API ("http://127.0.0.1:8000/v1"). `extra` fields are added to every
    request. A field that is None there is left out of the request (such as `max_tokens` for servers
    that want `max_completion_tokens`). `timeout` is in seconds per attempt. A request is attempted
    at most 1 + `retries` times. `backoff` is the first pause in seconds; pauses double up to 60.
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
        host = host_of(self.url)
        if not host:
            raise EndpointError(
                f"endpoint {url!r} is not an address such as http://127.0.0.1:8000/v1"
            )
        self.model = model
        self.extra = dict(extra or {})
        self.timeout = timeout
        self.retries = retries
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(timeout, connect=min(10.0, timeout)),
            limits=httpx.Limits(max_connections=None),  # `EndpointEngine` limits the requests
            headers={"Authorization": f"Bearer {key}"} if key else {},
            trust_env=not is_this_machine(host),
        )
        self._open_again = 0.0  # when the server may be asked again, by the monotonic clock
        self._refused = 0  # requests, not attempts
        self._answered = False  # whether the server has answered any request
        self._growing = wait_exponential(multiplier=backoff, max=60)

    async def close(self) -> None:
        await self._client.aclose()

    async def ask(self, fields: Mapping[str, Any]) -> dict:
        """Send one request and return the first choice of its answer.

        Raises Unrepresentable if the server refuses this request, and EndpointError if the server
        cannot be used at all.
        """
        given = {"model": self.model, **fields, **self.extra}
        body = {name: value for name, value in given.items() if value is not None}
        try:
            # NaN and infinities are Python's own; JSON has none, and servers refuse them.
            content = json.dumps(body, allow_nan=False).encode()
        except ValueError as problem:
            raise Unrepresentable(f"the request cannot be written as JSON ({problem})") from None
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(_TemporaryFailure),
            stop=stop_after_attempt(1 + self.retries),
            wait=self._pause,
            reraise=True,
        )
        try:
            return await retrying(self._attempt, content)
        except _TemporaryFailure as error:
            raise self._failure(f"{error} ({1 + self.retries} attempts)") from error

    def _pause(self, state: RetryCallState) -> float:
        return max(self._growing(state), state.outcome.exception().pause)

    async def _attempt(self, content: bytes) -> dict:
        # A loop, because another request may lengthen the pause while this one waits.
        while (pause := self._open_again - time.monotonic()) > 0:
            await asyncio.sleep(pause)
        try:
            response = await self._client.post(
                f"{self.url}/chat/completions",
                content=content,
                headers={"Content-Type": "application/json"},
            )
        except httpx.TimeoutException as error:
            raise _TemporaryFailure(f"no answer within {self.timeout:g} s") from error
        except httpx.TransportError as error:
            raise _TemporaryFailure(f"no connection: {type(error).__name__}: {error}") from error
        except httpx.InvalidURL as error:
            raise self._failure(str(error)) from error
        status, text = response.status_code, response.text[:300]
        if status in TEMPORARY or status >= 500:
            pause = _retry_after(response.headers.get("retry-after", ""))
            if status == 429:
                self._open_again = max(self._open_again, time.monotonic() + pause)
            raise _TemporaryFailure(f"status {status}: {text}", pause)
        if status in REFUSED:
            self._refused += 1
            if not self._answered and self._refused >= REFUSALS:
                raise self._failure(f"the first {REFUSALS} requests were refused: {text}")
            raise Unrepresentable(f"the server refused the request (status {status}: {text})")
        if status != 200:
            raise self._failure(f"the request was refused with status {status}: {text}")
        try:
            choice, *_ = response.json()["choices"]
            if not isinstance(choice["message"], dict):
                raise TypeError
        except (ValueError, KeyError, TypeError) as error:
            raise _TemporaryFailure(f"the answer has no choice with a message: {text!r}") from error
        self._answered = True
        return choice

    def _failure(self, cause: str) -> EndpointError:
        return EndpointError(
            f"endpoint {self.url}, model {self.model}: {cause}\nCheck that it runs (curl"
            f" {self.url}/models), the name of the model and the key, or correct the address"
        )


class EndpointEngine(Engine):
    """`Engine` on an endpoint, with at most `concurrent` requests at a time.

    `codec` is the student's. `problems` says why the turn of a session has no tokens. Later turns
    of that session have none either. Requests run in an event loop of their own, in another thread.
    That thread never touches the codec, because a tokenizer is safe in one thread only. Close the
    engine, or use it as a context manager.
    """

    def __init__(self, endpoint: Endpoint, codec: Codec, dialect: Dialect, *, concurrent: int = 16):
        if concurrent < 1:
            raise ValueError(f"concurrent {concurrent}: expected at least one request at a time")
        self.endpoint = endpoint
        self.codec = codec
        self.dialect = dialect
        self.problems: dict[int, str] = {}  # session → why its turn has no tokens
        self._asked: dict[Future, tuple[TurnRequest, Reading]] = {}
        # Requests that cannot be written as messages. The next step returns empty turns for them.
        self._unsent: list[TurnRequest] = []
        self._places = asyncio.Semaphore(concurrent)  # one for every request under way
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="endpoint", daemon=True)
        self._thread.start()

    @property
    def text_mode(self) -> str:
        return "off"  # the server's own template opens the block

    def __enter__(self) -> EndpointEngine:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def close(self) -> None:
        if self._loop.is_closed():
            return
        self.release([request.session for request, _ in self._asked.values()])
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
        return bool(self._asked or self._unsent)

    def submit(self, requests: Sequence[TurnRequest], sampling: Sampling) -> None:
        under_way = [*requests, *self._unsent, *(request for request, _ in self._asked.values())]
        if len({request.session for request in under_way}) < len(under_way):
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
                self._unsent.append(request)
            else:
                future = asyncio.run_coroutine_threadsafe(self._ask(fields), self._loop)
                self._asked[future] = request, read

    def step(self) -> list[tuple[TurnRequest, TurnOutput]]:
        turns = [(request, TurnOutput(finish="eos")) for request in self._unsent]
        self._unsent = []
        if turns or not self._asked:
            return turns
        for future in wait(self._asked, return_when=FIRST_COMPLETED).done:
            request, read = self._asked.pop(future)
            try:
                output = self._output(future.result(), read)
            except Unrepresentable as problem:
                self.problems[request.session] = str(problem)
                output = TurnOutput(finish="eos")
            turns.append((request, output))
        return turns

    def release(self, sessions: Sequence[int]) -> None:
        """Forget the unfinished turns of these sessions.

        This closes their connections, which makes most servers stop working on them.
        """
        gone = set(sessions)
        self._unsent = [request for request in self._unsent if request.session not in gone]
        for future, (request, _) in list(self._asked.items()):
            if request.session in gone:
                future.cancel()
                del self._asked[future]

    def _fields(self, request: TurnRequest, sampling: Sampling) -> tuple[dict, Reading]:
        if request.session in self.problems:
            raise Unrepresentable(self.problems[request.session])
        fields, read = self.dialect(request.ids, self.codec)
        fields |= {
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_new_tokens,
            "seed": request.seed % 2**31,  # servers take a signed 32-bit number
        }
        if sampling.top_p < 1:
            fields["top_p"] = sampling.top_p
        return fields, read

    async def _ask(self, fields: dict) -> dict:
        async with self._places:
            return await self.endpoint.ask(fields)

    def _output(self, choice: dict, read: Reading) -> TurnOutput:
        finish = choice.get("finish_reason")
        if finish == "content_filter":
            raise Unrepresentable("the server filtered the answer")
        # Untrusted: a special token that the server writes as text must not become a real one.
        ids = self.codec.untrusted(read(choice["message"]))
        ids = ids + self.codec.trusted(self.codec.form.closing)
        origins = [int(Origin.SAMPLED)] * len(ids)
        logprobs = [float("nan")] * len(ids)  # the server's tokens may be others
        return TurnOutput(ids, origins, logprobs, [], "length" if finish == "length" else "eos")


def _retry_after(value: str) -> float:
    """Seconds that a Retry-After header asks for, 0 without one.

    The header is a number of seconds or a date.
    """
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError):
            return 0.0
    if seconds != seconds:  # "nan" is a number to Python
        return 0.0
    return min(max(seconds, 0.0), LONGEST_PAUSE)

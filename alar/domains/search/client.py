"""Client of the retrieval server (`alar.domains.search.server`, or Search-R1's own).

`HTTPRetriever.search` returns what `Retriever.search` returns. If a server is down, slow or broken,
the client asks again after growing pauses. If that does not help, or if an answer is incomplete, a
RetrievalError names the server, the cause and what to do. An error never becomes an empty list of
passages: a policy trained on those would learn that searching is useless.
"""

import ipaddress
from collections.abc import Sequence
from typing import Annotated

import httpx
from pydantic import BaseModel, Field, ValidationError
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from alar.domains.search.corpus import Hit, Passage, RetrievalError


def host_of(url: str) -> str:
    """The host in an http(s) address, "" if the text is no such address."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        return ""
    return parsed.host if parsed.scheme in ("http", "https") else ""


def is_this_machine(host: str) -> bool:
    """Whether a host is the machine's own, which a proxy from the environment cannot reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


class RetrievedDocument(BaseModel):
    id: str | int  # a JSONL corpus may number its passages
    contents: Annotated[str, Field(pattern=r"\S")]  # at least one visible character


class ScoredDocument(BaseModel):
    document: RetrievedDocument
    score: float


class RetrieveAnswer(BaseModel):
    """The answer to `POST /retrieve` with `return_scores`: one list per query, best first."""

    result: list[list[ScoredDocument]]


class _TemporaryFailure(Exception):
    """No connection, a timeout, status 429 or 5xx, or an answer that is not JSON."""


class HTTPRetriever:
    """Search over HTTP.

    `timeout` is in seconds per attempt. A request is attempted at most 1 + `retries` times. The
    first pause between attempts takes `backoff` seconds, each later one twice as long as the one
    before, up to 30 s.
    """

    def __init__(self, url: str, timeout: float = 60.0, retries: int = 4, backoff: float = 0.5):
        # Search-R1's scripts give the address with its path; both spellings are accepted.
        self.url = url.strip().rstrip("/").removesuffix("/retrieve")
        host = host_of(self.url)
        if not host:
            raise RetrievalError(
                f"retrieval.url: {url!r} is not an address such as http://127.0.0.1:8000"
            )
        self.timeout = timeout
        self.retries = retries
        # A server that is down shows within 5 s; only a search may take the whole `timeout`.
        self._client = httpx.Client(
            timeout=httpx.Timeout(timeout, connect=min(5.0, timeout)),
            trust_env=not is_this_machine(host),
        )
        # Without jitter: tenacity draws it from the global `random`, and a retry would change the
        # later draws of a run.
        self._retrying = Retrying(
            retry=retry_if_exception_type(_TemporaryFailure),
            stop=stop_after_attempt(1 + retries),
            wait=wait_exponential(multiplier=backoff, max=30),  # seconds
            reraise=True,  # the last failure itself, not tenacity's RetryError
        )

    def health(self) -> dict:
        """The answer to `GET /health`."""
        return self._request("GET", "/health")

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """The best k passages of each query, best first. Raises RetrievalError."""
        if isinstance(queries, str):
            raise TypeError("queries must be a list of strings, not one string")
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        if not queries:
            return []
        # With scores, since Search-R1's own server breaks without them.
        body = {"queries": list(queries), "topk": k, "return_scores": True}
        try:
            result = RetrieveAnswer.model_validate(self._request("POST", "/retrieve", body)).result
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]  # the first one says enough
            place = ".".join(str(part) for part in problem["loc"])
            raise self._failure(f"the answer is incomplete: {place}: {problem['msg']}") from error
        if len(result) != len(queries):
            raise self._failure(
                f"{len(queries)} queries were sent, {len(result)} results came back"
            )
        return [[_hit(found) for found in documents[:k]] for documents in result]

    def _request(self, method: str, path: str, body: dict | None = None):
        try:
            return self._retrying(self._attempt, method, path, body)
        except _TemporaryFailure as error:
            raise self._failure(f"{error} ({1 + self.retries} attempts)") from error

    def _attempt(self, method: str, path: str, body: dict | None):
        try:
            response = self._client.request(method, self.url + path, json=body)
        except httpx.TimeoutException as error:
            raise _TemporaryFailure(f"no answer within {self.timeout:g} s") from error
        except httpx.TransportError as error:
            raise _TemporaryFailure(f"no connection: {error}") from error
        except httpx.InvalidURL as error:
            raise self._failure(str(error)) from error
        text = response.text[:300]  # for a message: an error page may be long
        if response.status_code >= 500 or response.status_code == 429:
            raise _TemporaryFailure(f"status {response.status_code}: {text}")
        if response.status_code != 200:
            raise self._failure(
                f"the request was refused with status {response.status_code}: {text}"
            )
        try:
            return response.json()
        except ValueError as error:
            raise _TemporaryFailure(f"the answer is not JSON: {text[:80]!r}") from error

    def _failure(self, cause: str) -> RetrievalError:
        return RetrievalError(
            f"retrieval server {self.url}: {cause}\nCheck that it runs (curl {self.url}/health),"
            " start it with python -m alar.domains.search.server --corpus … --index … --port …, or"
            " correct retrieval.url"
        )


def _hit(found: ScoredDocument) -> Hit:
    passage = Passage.from_contents(str(found.document.id), found.document.contents)
    return Hit(passage, found.score)

"""Client of the retrieval server (`alar.search.server`, or Search-R1's own).

`HTTPRetriever.search` gives what `Retriever.search` gives. A server that is down, slow or broken is asked again with
growing pauses; after that, and for any answer that is not whole, RetrievalError names the server, the cause and what to
do. Nothing ever turns into empty documents: a policy trained on those learns that searching is useless.
"""

import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

import requests
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from alar.search.corpus import Hit, Passage, RetrievalError


class _Passing(Exception):
    """A failure that may pass: no connection, a timeout, a 5xx or 429 answer, an answer that is no JSON."""


class HTTPRetriever:
    """Search over HTTP. `timeout` is in seconds per attempt; a request is attempted 1 + `retries` times."""

    def __init__(self, url: str, timeout: float = 60.0, retries: int = 4, backoff: float = 0.5):
        address = url.strip().rstrip("/").removesuffix("/retrieve")
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RetrievalError(f"retrieval.url: {url!r} is not an address such as http://127.0.0.1:8000")
        self.url = address
        self.timeout = timeout
        self.retries = retries
        self._session = requests.Session()
        self._session.trust_env = not _is_loopback(parts.hostname)  # a proxy cannot reach this machine's own server
        # No jitter: tenacity would draw it from the global `random`, and a retry would change the run's later draws.
        self._retrying = Retrying(
            retry=retry_if_exception_type(_Passing),
            stop=stop_after_attempt(1 + retries),
            wait=wait_exponential(multiplier=backoff, max=30),
            reraise=True,
        )

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """The best k passages of each query, best first, as the server found them. Raises RetrievalError."""
        if isinstance(queries, str):
            raise TypeError("queries must be a list of strings, not one string")
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        if not queries:
            return []
        body = {"queries": list(queries), "topk": k, "return_scores": True}
        answer = self._request("POST", "/retrieve", json=body)
        result = answer.get("result") if isinstance(answer, dict) else None
        if not isinstance(result, list):
            raise self._failure('the answer has no list "result"')
        if len(result) != len(queries):
            raise self._failure(f"{len(queries)} queries were sent but {len(result)} results came back")
        return [[self._hit(item, query) for item in items[:k]] for query, items in zip(queries, self._lists(result), strict=True)]

    def health(self) -> dict:
        """What `GET /health` says."""
        return self._request("GET", "/health")

    def _request(self, method: str, path: str, **content):
        try:
            return self._retrying(self._attempt, method, path, **content)
        except _Passing as error:
            raise self._failure(f"{error} ({1 + self.retries} attempts)") from error

    def _attempt(self, method: str, path: str, **content):
        try:
            response = self._session.request(
                method, self.url + path, timeout=(min(5.0, self.timeout), self.timeout), **content
            )
        except requests.Timeout as error:
            raise _Passing(f"no answer within {self.timeout:g} s") from error
        except requests.ConnectionError as error:
            raise _Passing(f"no connection: {error}") from error
        except requests.RequestException as error:
            raise self._failure(f"the request failed: {error}") from error
        if response.status_code >= 500 or response.status_code == 429:
            raise _Passing(f"status {response.status_code}: {response.text[:300]}")
        if response.status_code != 200:
            raise self._failure(f"the request was refused with status {response.status_code}: {response.text[:300]}")
        try:
            return response.json()
        except ValueError as error:
            raise _Passing(f"the answer is no JSON: {response.text[:80]!r}") from error

    def _lists(self, result: list) -> list[list]:
        for row, items in enumerate(result):
            if not isinstance(items, list):
                raise self._failure(f"result {row} is not a list of passages: {str(items)[:80]}")
        return result

    def _hit(self, item: object, query: str) -> Hit:
        document = item.get("document") if isinstance(item, dict) else None
        if not isinstance(document, dict) or not isinstance(document.get("contents"), str) or "id" not in document:
            raise self._failure(f'a passage for {query!r} has no "id" and "contents": {str(item)[:80]}')
        if not document["contents"].strip():
            raise self._failure(f"the passage {document['id']!r} for {query!r} is empty")
        if not isinstance(item.get("score"), (int, float)):
            raise self._failure(f"the passage {document['id']!r} for {query!r} has no score")
        return Hit(Passage.from_contents(document["id"], document["contents"]), float(item["score"]))

    def _failure(self, cause: str) -> RetrievalError:
        return RetrievalError(
            f"retrieval server {self.url}: {cause}\nCheck that it runs (curl {self.url}/health), start it with "
            "python -m alar.search.server --corpus … --index … --port …, or correct retrieval.url"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

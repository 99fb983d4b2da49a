"""The client's half of a JSON service: attempts with growing pauses, and errors that name server,
cause and remedy."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

import requests
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential


class _Passing(Exception):
    """A failure that may pass: no connection, a timeout, a 5xx or 429 answer, an answer that is no
    JSON."""


class JSONClient:
    """Requests to one server. `timeout` is in seconds per attempt; a request is attempted 1 +
    `retries` times.

    A subclass names its service: `error` is what it raises, `service` what it talks to, `parameter`
    what holds the address, `path` what may be left at its end, and `command` what starts a server.
    """

    error: type[Exception]
    service: str
    parameter: str
    path: str
    command: str

    def __init__(self, url: str, timeout: float, retries: int, backoff: float):
        address = url.strip().rstrip("/").removesuffix(self.path)
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise self.error(
                f"{self.parameter}: {url!r} is not an address such as http://127.0.0.1:8000"
            )
        self.url = address
        self.timeout = timeout
        self.retries = retries
        self._session = requests.Session()
        self._session.trust_env = not _is_loopback(
            parts.hostname
        )  # a proxy cannot reach this machine's own server
        # No jitter: tenacity would draw it from the global `random`, and a retry would change the
        # run's later draws.
        self._retrying = Retrying(
            retry=retry_if_exception_type(_Passing),
            stop=stop_after_attempt(1 + retries),
            wait=wait_exponential(multiplier=backoff, max=30),
            reraise=True,
        )

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
            raise self._failure(
                f"the request was refused with status {response.status_code}: {response.text[:300]}"
            )
        try:
            return response.json()
        except ValueError as error:
            raise _Passing(f"the answer is no JSON: {response.text[:80]!r}") from error

    def _failure(self, cause: str) -> Exception:
        return self.error(
            f"{self.service} {self.url}: {cause}\nCheck that it runs (curl {self.url}/health),"
            f" start it with {self.command}, or correct {self.parameter}"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

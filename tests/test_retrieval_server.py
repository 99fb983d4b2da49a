"""The HTTP server and its client: a real uvicorn server on a free port of this machine, and broken
servers."""

import asyncio
import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import requests
import uvicorn

import alar
from alar.domains.search import retriever, server
from alar.domains.search.client import HTTPRetriever
from alar.domains.search.corpus import Hit, Passage, RetrievalError

CITIES = [f"city{i}" for i in range(120)]
PASSAGES = [
    Passage(str(i), city, f"{city} is a city with a river.") for i, city in enumerate(CITIES)
]


class SlowRetriever:
    """Counts calls; each takes 20 ms, as an encoder would."""

    def __init__(self):
        self.inner = retriever.open_retriever(passages=PASSAGES)
        self.passages = PASSAGES
        self.calls: list[int] = []

    def search(self, queries, k):
        self.calls.append(len(queries))
        time.sleep(0.02)
        if "explode" in queries:
            raise RuntimeError("the index is gone")
        return self.inner.search(queries, k)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_open(port: int, process: subprocess.Popen, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while True:
        assert process.poll() is None and time.monotonic() < deadline, "the server did not start"
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.1)


def local() -> requests.Session:
    session = requests.Session()
    session.trust_env = False
    return session


@pytest.fixture(scope="module")
def served():
    """(url, retriever) of a running server."""
    searcher = SlowRetriever()
    config = uvicorn.Config(
        server.create_app(searcher), host="127.0.0.1", port=free_port(), log_level="warning"
    )
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run)
    thread.start()
    deadline = time.monotonic() + 20
    while not running.started:
        assert time.monotonic() < deadline and thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    yield f"http://127.0.0.1:{config.port}", searcher
    running.should_exit = True
    thread.join(timeout=20)
    assert not thread.is_alive()


def test_search_over_http_equals_search_in_process(served):
    url, searcher = served
    queries = ["city5", "city77 river", "", "unknown"]
    expected = searcher.inner.search(queries, 4)
    for address in (url, url + "/", url + "/retrieve"):
        assert HTTPRetriever(address).search(queries, 4) == expected
    assert isinstance(expected[0][0], Hit)
    assert HTTPRetriever(url).search([], 4) == []


def test_the_answer_has_search_r1s_shape(served):
    url, _ = served
    body = {"queries": ["city5 river", "city6 river"], "topk": 2, "return_scores": True}
    result = local().post(url + "/retrieve", json=body, timeout=10).json()["result"]
    assert [len(found) for found in result] == [2, 2]
    assert result[0][0]["document"] == {
        "id": "5",
        "contents": '"city5"\ncity5 is a city with a river.',
    }
    assert result[0][0]["score"] > result[0][1]["score"]


def test_without_scores_the_documents_come_bare(served):
    url, _ = served
    for body in (
        {"queries": ["city5"], "topk": 1, "return_scores": False},
        {"queries": ["city5"], "topk": 1},
    ):
        answer = local().post(url + "/retrieve", json=body, timeout=10)
        assert answer.json() == {
            "result": [[{"id": "5", "contents": '"city5"\ncity5 is a city with a river.'}]]
        }


def test_three_passages_are_the_default(served):
    url, _ = served
    answer = local().post(
        url + "/retrieve", json={"queries": ["city5 river"], "return_scores": True}, timeout=10
    )
    assert len(answer.json()["result"][0]) == 3


def test_health(served):
    url, _ = served
    assert HTTPRetriever(url).health() == {"status": "ok", "passages": 120}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "queries"),
        ({"queries": "city5"}, "queries"),
        ({"queries": [3]}, "queries"),
        ({"queries": ["city5"], "topk": 0}, "topk"),
        ({"queries": ["city5"], "topk": "many"}, "topk"),
        ({"queries": ["city5"], "top_k": 5}, "top_k"),
    ],
)
def test_invalid_requests_get_422_that_names_the_field(served, body, field):
    answer = local().post(served[0] + "/retrieve", json=body, timeout=10)
    assert answer.status_code == 422
    assert field in [str(part) for detail in answer.json()["detail"] for part in detail["loc"]]


def test_concurrent_requests_are_searched_together_and_each_gets_its_own_answer(served):
    url, searcher = served
    expected = searcher.inner.search(CITIES, 5)
    searcher.calls.clear()

    def ask(i: int):
        return HTTPRetriever(url).search([CITIES[i]], 1 + i % 5)

    with ThreadPoolExecutor(40) as pool:
        answers = list(pool.map(ask, range(len(CITIES))))
    assert answers == [[found[: 1 + i % 5]] for i, found in enumerate(expected)]
    assert sum(searcher.calls) == 120
    assert len(searcher.calls) < 60, "120 requests from 40 clients should share calls"


def test_a_batch_closes_when_it_is_full():
    async def scenario() -> list[int]:
        searcher = SlowRetriever()
        batcher = server.SearchBatcher(searcher, max_batch=10, max_wait=5.0)
        worker = asyncio.create_task(batcher.run())
        await asyncio.wait_for(
            asyncio.gather(*(batcher.search(CITIES[i : i + 5], 1) for i in range(0, 40, 5))), 4
        )
        worker.cancel()
        return searcher.calls

    assert asyncio.run(scenario()) == [10, 10, 10, 10]


def test_a_client_that_leaves_does_not_disturb_the_others():
    async def scenario():
        batcher = server.SearchBatcher(SlowRetriever(), max_batch=100, max_wait=0.05)
        worker = asyncio.create_task(batcher.run())
        leaving = asyncio.create_task(batcher.search(["city1"], 1))
        staying = asyncio.create_task(batcher.search(["city2"], 1))
        await asyncio.sleep(0.01)
        leaving.cancel()
        found = await asyncio.wait_for(staying, 5)
        worker.cancel()
        return found

    assert asyncio.run(scenario())[0][0].passage.id == "2"


def test_a_failing_search_is_a_500_with_its_cause_and_the_server_lives_on(served):
    url, _ = served
    answer = local().post(url + "/retrieve", json={"queries": ["explode"]}, timeout=10)
    assert answer.status_code == 500
    assert answer.json() == {"detail": "the search failed: RuntimeError: the index is gone"}
    with pytest.raises(RetrievalError, match="500.*the index is gone.*2 attempts"):
        HTTPRetriever(url, retries=1, backoff=0.01).search(["explode"], 1)
    assert len(HTTPRetriever(url).search(["city5"], 1)[0]) == 1


# Broken servers


class Scripted(ThreadingHTTPServer):
    """Answers POST with the next of `script`, (status, body), and the last one for ever."""

    def __init__(self, script):
        self.script, self.requests = list(script), 0
        super().__init__(("127.0.0.1", 0), _ScriptedHandler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _ScriptedHandler(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        status, body = self.server.script[min(self.server.requests, len(self.server.script) - 1)]
        self.server.requests += 1
        if status == "hang":
            time.sleep(body)
            return
        payload = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def scripted():
    servers = []

    def start(*script) -> Scripted:
        running = Scripted(script)
        threading.Thread(
            target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()
        servers.append(running)
        return running

    yield start
    for running in servers:
        running.shutdown()
        running.server_close()


def item(id="1", contents='"T"\ntext', score=0.5):
    return {"document": {"id": id, "contents": contents}, "score": score}


GOOD = (200, {"result": [[item()]]})


def test_a_server_that_fails_twice_is_asked_a_third_time(scripted):
    broken = scripted((500, "boom"), (200, "<html>starting</html>"), GOOD)
    hits = HTTPRetriever(broken.url, retries=3, backoff=0.01).search(["q"], 1)
    assert hits == [[Hit(Passage("1", "T", "text"), 0.5)]]
    assert broken.requests == 3


def test_a_server_that_keeps_failing_is_named_with_cause_and_remedy(scripted):
    broken = scripted((503, "index still loading"))
    with pytest.raises(RetrievalError) as caught:
        HTTPRetriever(broken.url, retries=2, backoff=0.01).search(["q"], 1)
    assert broken.requests == 3
    for part in (
        broken.url,
        "503",
        "index still loading",
        "3 attempts",
        "/health",
        "alar.domains.search.server",
    ):
        assert part in str(caught.value)


def test_a_dead_server_is_named():
    url = f"http://127.0.0.1:{free_port()}"
    start = time.monotonic()
    with pytest.raises(RetrievalError, match=f"{re.escape(url)}(.|\n)*retrieval.url"):
        HTTPRetriever(url, retries=2, backoff=0.01).search(["q"], 1)
    assert time.monotonic() - start < 5


def test_a_silent_server_runs_into_the_timeout(scripted):
    silent = scripted(("hang", 0.6))
    with pytest.raises(RetrievalError, match=r"0.1 s.*2 attempts"):
        HTTPRetriever(silent.url, timeout=0.1, retries=1, backoff=0.01).search(["q"], 1)


def test_a_refused_request_is_not_repeated(scripted):
    refusing = scripted((422, "topk is wrong"))
    with pytest.raises(RetrievalError, match="422: topk is wrong"):
        HTTPRetriever(refusing.url, backoff=0.01).search(["q"], 1)
    assert refusing.requests == 1


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"result": [[item()]]}, "2 queries"),
        ({"result": []}, "2 queries"),
        ({"results": []}, "result"),
        ([], "incomplete"),
        ({"result": [[item()], None]}, "result.1"),
        ({"result": [[item()], [item(contents="  ")]]}, "result.1.0.document.contents"),
        ({"result": [[item()], [{"id": "1", "contents": "text"}]]}, "result.1.0.document"),
        ({"result": [[item()], [item(contents=None)]]}, "result.1.0.document.contents"),
        ({"result": [[item()], [item(score=None)]]}, "result.1.0.score"),
    ],
)
def test_an_answer_that_is_not_whole_is_an_error_never_empty_documents(scripted, body, place):
    broken = scripted((200, body))
    with pytest.raises(RetrievalError, match=re.escape(place)) as caught:
        HTTPRetriever(broken.url, backoff=0.01).search(["q1", "q2"], 3)
    assert broken.url in str(caught.value)


def test_retries_leave_the_global_random_numbers_alone(scripted):
    broken = scripted((500, ""), (500, ""), GOOD)
    random.seed(3)
    expected = random.random()
    random.seed(3)
    HTTPRetriever(broken.url, backoff=0.01).search(["q"], 1)
    assert random.random() == expected


def test_the_client_refuses_one_string_and_k_below_one(scripted):
    client = HTTPRetriever(scripted(GOOD).url)
    with pytest.raises(TypeError, match="list of strings"):
        client.search("q", 1)
    with pytest.raises(ValueError, match="k must"):
        client.search(["q"], 0)


# The command


def test_the_server_command_serves_a_corpus_file(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(
        "".join(json.dumps({"id": p.id, "contents": p.contents}) + "\n" for p in PASSAGES)
    )
    port = free_port()
    root = str(Path(alar.__file__).parents[1])
    command = [
        sys.executable,
        "-m",
        "alar.domains.search.server",
        "--corpus",
        str(corpus),
        "--backend",
        "tfidf",
    ]
    process = subprocess.Popen(
        [*command, "--port", str(port)], env=os.environ | {"PYTHONPATH": root}
    )
    try:
        wait_until_open(port, process)
        search = HTTPRetriever(f"http://127.0.0.1:{port}").search
        assert [hits[0].passage for hits in search(["city9", "city10"], 2)] == [
            PASSAGES[9],
            PASSAGES[10],
        ]
    finally:
        process.terminate()
        process.wait(timeout=20)


def test_the_server_command_ends_with_the_error_and_code_1(tmp_path, capsys):
    assert server.main(["--corpus", str(tmp_path / "none.jsonl"), "--backend", "tfidf"]) == 1
    assert "none.jsonl: no such corpus" in capsys.readouterr().err

"""What notebook 10 measures: whether two engines agree, and how many tokens a second come out of
one."""

import json
import threading
from copy import deepcopy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import numpy as np
import pytest
import torch

from alar.domains.search.environment import SearchEnvironment
from alar.records import Question
from alar.rollout.engine import Engine, Sampling, TurnOutput
from alar.rollout.hf import HFEngine
from alar.rollout.loop import run
from alar.study.bench import serving

SAMPLING = Sampling(24, stop=())


@pytest.fixture(scope="module")
def answered(random_model):
    """(model, trajectories): one turn each, the second with a latent block."""
    model, tokenizer = random_model("qwen2")
    asked = [Question("a", "What is Lima?", ("Peru",)), Question("b", "Which?", ("x",))]
    modes = ("off", "latent")
    return model, run(
        asked,
        HFEngine(model, tokenizer),
        SearchEnvironment(),
        SAMPLING,
        modes=lambda row, turn: modes[row],
        max_turns=1,
    )


def test_equal_answers_agree(answered):
    model, trajectories = answered
    table = serving.agreement(model, trajectories, trajectories)
    assert table["same"].all() and table["margin"].isna().all()
    assert (table[["logprob_difference", "latent_difference"]] == 0).all(axis=None)
    assert list(table["generated_tokens"]) == [t.generated_tokens for t in trajectories]


def test_a_difference_is_measured_where_it_begins(answered):
    model, (plain, latent) = answered
    last = len(latent.ids) - 1
    changed, longer = deepcopy(latent), deepcopy(plain)
    changed.ids[last] = 7 if latent.ids[last] != 7 else 8
    changed.logprobs[last] += 100  # of another id: says nothing
    changed.logprobs[last - 1] += 0.25
    changed.latents[0, 3] += 0.5
    longer.ids.append(9)
    table = serving.agreement(model, [latent, plain], [changed, longer])
    with torch.no_grad():
        logprobs = model(input_ids=torch.tensor([latent.ids[:last]])).logits[0, -1].log_softmax(-1)
    expected = logprobs[latent.ids[last]] - logprobs[changed.ids[last]]
    assert not table["same"].any()
    assert (
        table["margin"][0] == pytest.approx(expected.item(), abs=1e-4)
        and table["margin"][1] == np.inf
    )
    assert table["logprob_difference"][0] == pytest.approx(0.25, abs=1e-6)
    assert table["latent_difference"][0] == pytest.approx(0.5, abs=1e-6)


class Slow(Engine):
    """Ends the oldest turn in every step; notes how many were under way."""

    codec = None

    def __init__(self):
        self.turns, self.most, self.released = [], 0, []

    def submit(self, requests, sampling):
        self.turns += requests
        self.most = max(self.most, len(self.turns))

    def step(self):
        request = self.turns.pop(0)
        return [(request, TurnOutput(ids=[1] * len(request.ids)))]

    busy = property(lambda self: bool(self.turns))

    def release(self, sessions):
        self.released += sessions


def test_an_engine_is_kept_at_the_load_that_was_asked_for():
    engine = Slow()
    row = serving.engine_throughput(engine, [[1], [1, 2], [1, 2, 3], [1], [1]], SAMPLING, 3)
    assert (engine.most, row["turns"], row["tokens"], row["concurrent"]) == (3, 5, 8, 3)
    assert engine.released == [0, 1, 2, 3, 4]
    assert row["tokens_per_second"] == row["tokens"] / row["seconds"]


@pytest.fixture
def address():
    """A server that answers with as many tokens as the prompt has; it fails for a single one."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert body["vllm_xargs"] == {"latent_stops": []} and body["max_tokens"] == 24
            count = len(body["prompt"])
            self.send_response(200 if count > 1 else 500)
            self.end_headers()
            self.wfile.write(json.dumps({"usage": {"completion_tokens": count}}).encode())

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_server_is_asked_by_many_clients_and_a_failure_is_not_counted_as_speed(address):
    row = serving.server_throughput(address, "alar", [[1, 2], [1, 2, 3], [1, 2]], SAMPLING, 2)
    assert (row["turns"], row["tokens"], row["concurrent"]) == (3, 7, 2)
    with pytest.raises(httpx.HTTPStatusError):
        serving.server_throughput(address, "alar", [[1]], SAMPLING, 1)

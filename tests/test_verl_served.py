"""`ServedEngine`: our agent loop on a server that answers one request at a time, as verl's vLLM
server does.

The server here is the in-process engine behind verl's client interface; contexts reach it as token
ids only.
"""

import asyncio
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from alar.domains.search.environment import SearchEnvironment
from alar.domains.search.questions import training_questions
from alar.engines.verl.vllm import ServedEngine, replay
from alar.records import Origin
from alar.rl.strategy import ExploringSampler
from alar.rollout.engine import Sampling, TurnRequest
from alar.rollout.hf import HFEngine
from alar.rollout.loop import run

SAMPLER = ExploringSampler(2, 4, explore_fraction=0.5)


class Client:
    """`LLMServerClient.generate` on an `HFEngine`; z of the context are recomputed, as in vLLM."""

    def __init__(self, model, tokenizer):
        self.engine, self.model = HFEngine(model, tokenizer), model

    async def generate(self, request_id, *, prompt_ids, sampling_params):
        await asyncio.sleep(
            0.001 * (int(request_id.split(".")[1]) % 3)
        )  # answers come in another order
        extra = sampling_params["extra_args"]
        written = extra.get("latent_written", 0)
        context, forced = (
            prompt_ids[: len(prompt_ids) - written],
            prompt_ids[len(prompt_ids) - written :],
        )
        with torch.no_grad():
            known = self.model.latent_states(torch.tensor([context])).latents.numpy()
        request = TurnRequest(
            0,
            context,
            known,
            forced,
            sampling_params["seed"] or 0,
            extra.get("latent_mode") != "off",
        )
        sampling = Sampling(
            sampling_params["max_tokens"] + written,
            sampling_params["temperature"],
            stop=tuple(extra["latent_stops"]),
        )
        output = self.engine.generate([request], sampling)[0]
        self.engine.release([0])
        return SimpleNamespace(
            token_ids=output.ids[written:],
            log_probs=np.nan_to_num(output.logprobs[written:]).tolist(),
            stop_reason="completed",
            extra_fields={"latents": np.asarray(output.latents)},
        )


@pytest.fixture(scope="module")
def loop():
    events = asyncio.new_event_loop()
    thread = threading.Thread(target=events.run_forever, daemon=True)
    thread.start()
    yield events
    events.call_soon_threadsafe(events.stop)
    thread.join()


def test_trajectories_equal_those_of_the_in_process_engine(random_model, loop):
    model, tokenizer = random_model()
    questions = [
        q for q in training_questions(2, worlds=1, seed=0) for _ in range(SAMPLER.group_size)
    ]
    sampling = Sampling(24, 1.0)
    common = dict(modes=SAMPLER.modes(1), max_turns=3, seed=7, first_row=4)
    local = HFEngine(model, tokenizer)
    expected = run(questions, local, SearchEnvironment(), sampling, **common)
    served = ServedEngine(Client(model, tokenizer), local.codec, loop)
    found = run(questions, served, SearchEnvironment(), sampling, **common)
    assert not served.busy
    for one, other in zip(found, expected, strict=True):
        assert one.ids == other.ids and one.origins == other.origins
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4, nan_ok=True)
        assert one.latents == pytest.approx(other.latents, abs=1e-4)
        one.check()
    assert sum(len(t.latents) for t in found) > 0
    seen = served.latent_probabilities([t for t in found if not t.turns[0].forced_mode])
    assert all(0 <= p <= 1 for row in seen for p in row)


def test_an_answer_that_breaks_a_block_is_an_error(random_model, loop):
    _, tokenizer = random_model()
    codec = HFEngine(*random_model()).codec
    opened = TurnRequest(3, codec.prompt("Who?"), [], codec.separator + codec.latent_open)
    plain = codec.trusted("abc")[0]
    answer = SimpleNamespace(
        token_ids=[plain], log_probs=[0.0], extra_fields={"latents": []}, stop_reason="completed"
    )
    with pytest.raises(
        RuntimeError, match=f"wrote {plain}, the open block asks for {codec.latent_token_id}"
    ):
        replay(codec, opened, Sampling(20), answer)
    known = {"latents": [np.zeros(64)]}
    cut = SimpleNamespace(
        token_ids=[codec.latent_token_id], log_probs=[0.0], extra_fields=known, stop_reason="length"
    )
    with pytest.raises(RuntimeError, match="ended the turn early"):
        replay(codec, opened, Sampling(20), cut)


def test_forced_ids_that_cannot_be_served_are_refused_before_any_request(random_model, loop):
    model, tokenizer = random_model()
    engine = ServedEngine(Client(model, tokenizer), HFEngine(model, tokenizer).codec, loop)
    codec = engine.codec
    fine = TurnRequest(1, codec.prompt("Who?"), [])
    reserved = codec.latent_token_id
    refused = [([wrong], "is no text") for wrong in (-1, reserved, reserved + 1, 10**6)]
    refused.append((codec.latent_open + codec.trusted("abc"), "go on behind <latent>"))
    for forced, problem in refused:
        wrong = TurnRequest(2, codec.prompt("Who?"), [], forced)
        with pytest.raises(ValueError, match=f"session 2: .*{problem}"):
            engine.submit([fine, wrong], Sampling(8))
        assert not engine.busy
        with pytest.raises(ValueError, match=problem):
            replay(codec, wrong, Sampling(8), None)


def test_released_turns_are_forgotten(random_model, loop):
    model, tokenizer = random_model()
    engine = ServedEngine(Client(model, tokenizer), HFEngine(model, tokenizer).codec, loop)
    engine.submit(
        [TurnRequest(session, engine.codec.prompt("Who?"), []) for session in (1, 2)], Sampling(4)
    )
    engine.release([1])
    turns = []
    while engine.busy:
        turns += engine.step()
    assert [request.session for request, _ in turns] == [2]
    assert set(turns[0][1].origins) <= {int(Origin.SAMPLED), int(Origin.LATENT), int(Origin.FORCED)}

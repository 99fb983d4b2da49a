"""The in-process engine against decoding one token at a time, over turns, batches, modes and
hostile text."""

import itertools
import math
import random
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from alar.records import Origin
from alar.rollout.codec import Codec
from alar.rollout.engine import Sampling, TurnRequest, TurnWriter
from alar.rollout.hf import HFEngine, policy_logits
from alar.rollout.sampling import inverse_cdf

SAMPLING = Sampling(max_new_tokens=24, stop=("</search>",))
SCHEDULES = 1000


@torch.no_grad()
def decode_slowly(model, codec, request: TurnRequest, sampling: Sampling, margin: list[float]):
    """(ids, log-probs of sampled tokens, z) of one request: one token at a time, one cache."""
    cache, hidden, seen = DynamicCache(config=model.config), None, 0

    def feed(embedding):
        return model.model(
            inputs_embeds=embedding[None, None], past_key_values=cache, use_cache=True
        ).last_hidden_state[:, 0]

    for token in request.ids:
        if token == codec.latent_token_id:
            hidden, seen = feed(torch.as_tensor(np.asarray(request.latents[seen]))), seen + 1
        else:
            hidden = feed(model.get_input_embeddings()(torch.tensor(token)))
    ids, logprobs, latents, queue = [], [], [], [(token, "forced") for token in request.forced]
    while True:
        logp = torch.log_softmax(policy_logits(model, hidden[0]), -1)
        if queue:
            token, kind = queue.pop(0)
        else:
            top = logp.topk(2)
            token, kind = top.indices[0].item(), "sampled"
            margin.append((top.values[0] - top.values[1]).item())
            logprobs.append(logp[token].item())
        ids.append(token)
        if kind == "latent":
            step = len(latents) % codec.num_latent
            z = model.model.projector(hidden, step)[0]
            latents.append(z)
            hidden = feed(z)
        else:
            text = codec.text(ids)
            if (
                text.endswith("<latent>")
                and text.count("<think>") == text.count("</think>")
                and request.allow_latent
            ):
                queue += [(codec.latent_token_id, "latent")] * codec.num_latent
                queue += [(piece, "forced") for piece in codec.latent_close]
            elif text.endswith("</search>") or (
                kind == "sampled" and token == codec.tokenizer.eos_token_id
            ):
                break
            if len(ids) >= sampling.max_new_tokens and not queue:
                break
            hidden = feed(model.get_input_embeddings()(torch.tensor(token)))
    return ids, logprobs, latents


def compare(model, engine, requests, sampling=SAMPLING) -> int:
    """Assert equality of every row with slow decoding; returns how many rows were skipped as near
    ties."""
    near_ties = 0
    for request, output in zip(requests, engine.generate(requests, sampling)):
        margins: list[float] = []
        ids, logprobs, latents = decode_slowly(model, engine.codec, request, sampling, margins)
        if min(margins, default=1.0) < 1e-4:
            near_ties += 1
            continue
        assert output.ids == ids
        sampled = [
            lp for lp, origin in zip(output.logprobs, output.origins) if origin == Origin.SAMPLED
        ]
        assert np.abs(np.array(sampled) - np.array(logprobs)).max(initial=0) <= 1e-4
        assert all(
            math.isnan(lp) for lp, o in zip(output.logprobs, output.origins) if o != Origin.SAMPLED
        )
        assert len(output.latents) == len(latents)
        for z, expected in zip(output.latents, latents):
            assert np.abs(z - expected.numpy()).max() <= 1e-5
    return near_ties


def tokens_fed(engine) -> list[int]:
    """A list that grows by the number of tokens that each later step of the engine feeds."""
    fed, entries = [], engine._entries

    def counted():
        found = entries()
        fed.append(sum(count for _, count in found))
        return found

    engine._entries = counted
    return fed


def prompts(codec, rng, count):
    words = [
        "Peru",
        "Lima",
        "1991",
        "the currency of",
        "Which",
        "•",
        "<latent>",
        "<think>",
        "<|im_end|>",
    ]
    return [codec.prompt(" ".join(rng.choices(words, k=rng.randint(1, 25)))) for _ in range(count)]


@pytest.mark.parametrize(
    ("family", "num_latent"), [*itertools.product(("qwen2", "qwen3"), (0, 1, 4)), ("llama", 4)]
)
def test_tokens_latents_and_logprobs_equal_slow_decoding(random_model, family, num_latent):
    model, tokenizer = random_model(family, num_latent)
    engine = HFEngine(model, tokenizer)
    codec, rng = engine.codec, random.Random(1)
    forced = [[], codec.separator + codec.latent_open, codec.separator + codec.think_open]
    requests = [
        TurnRequest(
            i, ids, [], rng.choice(forced), allow_latent=num_latent > 0 or rng.random() < 0.5
        )
        for i, ids in enumerate(prompts(codec, rng, 12))
    ]
    assert compare(model, engine, requests) <= 2


def test_a_second_turn_goes_on_from_the_cache_with_the_same_latents(random_model):
    model, tokenizer = random_model()
    engine = HFEngine(model, tokenizer)
    codec, rng = engine.codec, random.Random(2)
    first = [
        TurnRequest(i, ids, [], codec.separator + codec.latent_open)
        for i, ids in enumerate(prompts(codec, rng, 6))
    ]
    second = []
    for request, output in zip(first, engine.generate(first, SAMPLING)):
        observation = codec.observation(
            f"\n\n<information>Doc • <latent> {request.session}</information>\n\n"
        )
        second.append(
            TurnRequest(
                request.session,
                list(request.ids) + output.ids + observation,
                output.latents,
                codec.latent_open,
            )
        )
    rng.shuffle(second)  # sessions move between slots
    fed = tokens_fed(engine)
    assert compare(model, engine, second[:4]) <= 1
    assert fed[0] < 4 * 40  # only what is new was fed, not the history


def test_a_context_that_ends_in_the_open_tag_opens_a_block(random_model):
    model, tokenizer = random_model()
    engine = HFEngine(model, tokenizer)
    request = TurnRequest(0, engine.codec.prompt("x") + engine.codec.latent_open, [])
    output = engine.generate([request], SAMPLING)[0]
    assert output.origins[:7] == [Origin.LATENT] * 4 + [Origin.FORCED] * 3


def test_a_context_without_the_z_of_its_latent_positions_is_refused(random_model):
    model, tokenizer = random_model()
    engine = HFEngine(model, tokenizer)
    ids = engine.codec.prompt("x") + engine.codec.latent_open + [engine.codec.latent_token_id] * 4
    with pytest.raises(ValueError, match="latent vectors"):
        engine.generate([TurnRequest(0, ids + engine.codec.latent_close, [])], SAMPLING)


def test_sampling_does_not_depend_on_the_batch_that_a_request_shares(random_model):
    model, tokenizer = random_model()
    rng = random.Random(3)
    contexts = prompts(HFEngine(model, tokenizer).codec, rng, 8)
    sampling = Sampling(max_new_tokens=20, temperature=1.0, top_p=0.95, stop=("</search>",))

    requests = [TurnRequest(i, contexts[i], [], seed=100 + i) for i in range(8)]

    def written(order):
        chosen = [requests[i] for i in order]
        return dict(zip(order, HFEngine(model, tokenizer).generate(chosen, sampling)))

    alone = {i: written([i])[i] for i in range(8)}
    for outputs in (written(range(8)), written([5, 2, 7, 0, 1, 6, 4, 3])):
        different = [i for i in range(8) if outputs[i].ids != alone[i].ids]
        assert len(different) <= 1 and all(
            near_tie(model, requests[i], alone[i], sampling) for i in different
        )


def test_sampled_tokens_follow_the_policy_distribution(random_model):
    from scipy.stats import chisquare

    model, tokenizer = random_model()
    engine = HFEngine(model, tokenizer)
    context, draws = engine.codec.prompt("Peru"), 4000
    sampling = Sampling(max_new_tokens=1, temperature=1.0, stop=())
    counts = np.zeros(len(tokenizer))
    for start in range(0, draws, 500):
        requests = [TurnRequest(i, context, [], seed=i) for i in range(start, start + 500)]
        for output in engine.generate(requests, sampling):
            counts[output.ids[0]] += 1
        engine.release([request.session for request in requests])
    with torch.no_grad():
        hidden = model.model(input_ids=torch.tensor([context])).last_hidden_state[0, -1]
        expected = draws * torch.softmax(policy_logits(model, hidden).double(), -1).numpy()
    order = np.argsort(-expected)
    head = order[: int((expected[order] >= 8).sum())]
    rest = counts.sum() - counts[head].sum(), expected.sum() - expected[head].sum()
    assert chisquare([*counts[head], rest[0]], [*expected[head], rest[1]]).pvalue > 0.001


def test_the_latent_id_is_never_sampled(random_model):
    model, tokenizer = random_model()
    reserved = model.config.latent_token_id
    with torch.no_grad():
        model.get_input_embeddings().weight[reserved:] *= 100
    engine = HFEngine(model, tokenizer)
    requests = [
        TurnRequest(i, ids, [], seed=i)
        for i, ids in enumerate(prompts(engine.codec, random.Random(4), 8))
    ]
    for output in engine.generate(requests, Sampling(max_new_tokens=30, temperature=2.0, stop=())):
        assert all(i < reserved or o == Origin.LATENT for i, o in zip(output.ids, output.origins))


def schedule_pool(codec, rng) -> list[tuple[TurnRequest, Sampling]]:
    """Requests of one or two turns in every mode, greedy and sampled, several of them with the same
    beginning."""
    pool, contexts = [], prompts(codec, rng, 8)
    forced = [[], codec.latent_open, codec.think_open]
    for number in range(24):
        temperature = rng.choice([0.0, 0.0, 0.7, 1.0])
        sampling = Sampling(
            rng.randint(4, 9), temperature, rng.choice([1.0, 0.9]), stop=("</search>",)
        )
        pool.append(
            (
                TurnRequest(number, rng.choice(contexts), [], rng.choice(forced), seed=number),
                sampling,
            )
        )
    return pool


def near_tie(model, request: TurnRequest, output, sampling: Sampling) -> bool:
    """Whether some token was chosen by a margin within 1e-5: of the two best log-probs, or of the
    draw and a threshold.

    Ten times stricter than what is promised: a flat distribution over 3000 ids has a threshold
    within 1e-4 of most draws, and half of the requests would be exempt.
    """
    ids = torch.tensor([[*request.ids, *output.ids]])
    z = (
        torch.as_tensor(np.stack([*request.latents, *output.latents]))
        if len(request.latents) + len(output.latents)
        else None
    )
    with torch.no_grad():
        hidden = model.latent_states(ids, latents=z).hidden[0, len(request.ids) - 1 : -1]
        logp = torch.log_softmax(policy_logits(model, hidden) / (sampling.temperature or 1.0), -1)
    draws = random.Random(request.seed)
    for row, origin in zip(logp, output.origins):
        if origin != Origin.SAMPLED:
            continue
        if sampling.temperature == 0:
            best, second = row.topk(2).values
            tie = best - second < 1e-5
        else:
            ranked = row.double().exp()
            if sampling.top_p < 1:
                ranked = ranked.sort(descending=True).values
                before = ranked.cumsum(-1) - ranked
                gaps = (ranked[:-1] - ranked[1:])[
                    before[1:] < sampling.top_p
                ]  # equal ids may change places
                if (before - sampling.top_p).abs().min() < 1e-5 or (gaps < 1e-6).any():
                    return True
                ranked = ranked * (before < sampling.top_p)
            bounds = ranked.cumsum(-1)
            tie = (bounds - draws.random() * bounds[-1]).abs().min() < 1e-5
        if tie:
            return True
    return False


@pytest.mark.timeout(900)  # a minute on a quiet machine
def test_a_thousand_random_schedules_write_what_each_request_writes_alone(random_model):
    model, tokenizer = random_model()
    rng = random.Random(5)
    pool = schedule_pool(Codec.of(model, tokenizer), rng)

    def alone(request, sampling):
        return HFEngine(model, tokenizer).generate([request], sampling)[0]

    first = [alone(*entry) for entry in pool]
    for (request, sampling), output in list(zip(pool, first))[
        :12
    ]:  # a second turn that goes on from the first
        seen = rng.choice(["\n\nLima •", "\n\n<information>so</information>"])
        observation = Codec.of(model, tokenizer).observation(seen)
        context = [*request.ids, *output.ids, *observation]
        later = TurnRequest(
            request.session,
            context,
            output.latents,
            rng.choice([[], request.forced]),
            seed=request.seed + 99,
        )
        pool.append((later, sampling))
    expected = first + [alone(*entry) for entry in pool[24:]]
    ties = [
        near_tie(model, request, output, sampling)
        for (request, sampling), output in zip(pool, expected)
    ]
    engine, exceptions, compared = HFEngine(model, tokenizer, step_tokens=64), 0, 0
    for _ in range(SCHEDULES):
        todo = rng.sample(range(24), rng.randint(2, 4))
        place, slots = {}, rng.randint(1, 4)
        while todo or engine.busy:
            while todo and len(place) < slots and rng.random() < 0.7:
                number = todo.pop()
                request, sampling = pool[number]
                place[request.session] = number
                engine.submit([request], sampling)
            for request, output in engine.step():
                number = place.pop(request.session)
                compared += 1
                if output.ids == expected[number].ids:
                    assert len(output.latents) == len(expected[number].latents)
                    for z, other in zip(output.latents, expected[number].latents):
                        assert np.abs(z - other).max() <= 1e-5
                else:
                    assert ties[number], f"request {number} depends on its batch"
                    exceptions += 1
                if number < 12 and rng.random() < 0.3:
                    todo.append(24 + number)
                else:
                    engine.release([request.session])
        if rng.random() < 0.1:
            engine.reset()
        engine.release(range(24))
    print(
        f"{exceptions} exceptions among {compared} turns; {sum(ties)} of {len(ties)} requests have"
        " a near tie"
    )
    assert sum(ties) < len(ties) / 2 and exceptions <= compared / 100


def in_turns(engine, first, observations, sampling) -> list[list]:
    """What each session wrote in its turns. Between them it reads an observation."""
    requests, written = list(first), [[] for _ in first]
    for seen in [*observations, None]:
        outputs = engine.generate(requests, sampling)
        for place, (request, output) in enumerate(zip(requests, outputs)):
            written[place].append(output)
            if seen is not None:
                context = [*request.ids, *output.ids, *seen[request.session]]
                latents = [*request.latents, *output.latents]
                requests[place] = replace(request, ids=context, latents=latents)
    engine.release([request.session for request in first])
    return written


def live_bytes(monkeypatch) -> dict[str, int]:
    """Bytes of the tensors that `Tensor.new_zeros` made, which makes the shelves: now and at most,
    while a shelf is resized too."""
    count, original = {"now": 0, "most": 0}, torch.Tensor.new_zeros

    def freed(size):
        count["now"] -= size

    def counted(self, *shape, **options):
        made = original(self, *shape, **options)
        count["now"] += made.nbytes
        count["most"] = max(count.values())
        weakref.finalize(made, freed, made.nbytes)
        return made

    monkeypatch.setattr(torch.Tensor, "new_zeros", counted)
    return count


@pytest.mark.timeout(600)  # half a minute on a quiet machine
def test_the_keys_of_2000_trajectories_stay_within_the_budget_and_no_result_changes(
    random_model, monkeypatch
):
    model, tokenizer = random_model()
    model.double()  # no near ties: rounding depends on the batch
    codec, rng, budget = Codec.of(model, tokenizer), random.Random(6), 24 * 2**20
    forced = [[], codec.latent_open, codec.think_open]
    sampling = Sampling(16, 1.0, stop=("</search>",))
    bounded = HFEngine(model, tokenizer, cache_bytes=budget)
    free = HFEngine(model, tokenizer, cache_bytes=2**40)
    pauses, pause = [], bounded._pause
    monkeypatch.setattr(bounded, "_pause", lambda turn: pauses.append(turn) or pause(turn))
    work, expected, needed = [], [], 0
    for start in range(0, 2000, 250):
        sessions = range(start, start + 250)
        contexts = prompts(codec, rng, 100)
        first = [
            TurnRequest(one, rng.choice(contexts), [], rng.choice(forced), seed=one)
            for one in sessions
        ]
        seen = {one: rng.choices(range(3, 900), k=rng.randint(1, 150)) for one in sessions}
        work.append((first, [seen], sampling))
        expected += in_turns(free, *work[-1])
        needed = max(needed, free.cache.allocated)
        free.reset()
    live, found = live_bytes(monkeypatch), []
    for entry in work:
        found += in_turns(bounded, *entry)
    assert 0.5 * budget < live["most"] <= budget
    assert needed > 5 * budget and len(pauses) > 10
    for one, other in zip(found, expected, strict=True):
        for ours, theirs in zip(one, other, strict=True):
            assert (ours.ids, ours.origins) == (theirs.ids, theirs.origins)
            assert np.allclose(ours.logprobs, theirs.logprobs, atol=1e-5, equal_nan=True)
            assert np.allclose(ours.latents, theirs.latents, atol=1e-5)


def test_a_context_that_the_budget_cannot_hold_is_refused(random_model):
    model, tokenizer = random_model()
    engine = HFEngine(model, tokenizer, cache_bytes=2**20)
    with pytest.raises(ValueError, match="cache_bytes"):
        engine.generate([TurnRequest(0, engine.codec.prompt("x") * 10, [])], SAMPLING)


def test_a_closed_engine_keeps_neither_keys_nor_model(random_model):
    with HFEngine(*random_model()) as engine:
        engine.generate([TurnRequest(0, engine.codec.prompt("x"), [])], SAMPLING)
        model = weakref.ref(engine.model)
        keys = weakref.ref(next(engine.cache.slots()).shelf.data[0])
    assert keys() is None and model() is None and engine.codec


def test_the_rollouts_of_one_prompt_compute_it_once(random_model):
    model, tokenizer = random_model()
    engine = HFEngine(model, tokenizer)
    fed, ids = tokens_fed(engine), engine.codec.prompt("Which currency has Peru")
    requests = [TurnRequest(i, ids, [], seed=i) for i in range(8)]
    outputs = engine.generate(requests, Sampling(3, 1.0, stop=()))
    assert fed[:2] == [len(ids), 1 + 7]
    for request, output in zip(requests, outputs):
        assert (
            output.ids
            == HFEngine(model, tokenizer).generate([request], Sampling(3, 1.0, stop=()))[0].ids
        )


def test_a_beginning_with_other_latents_is_not_shared(random_model):
    model, tokenizer = random_model()
    engine = HFEngine(model, tokenizer)
    codec, rng = engine.codec, np.random.default_rng(0)
    opened = codec.prompt("Peru") + codec.separator + codec.latent_open
    ids = opened + [codec.latent_token_id] * 4 + codec.latent_close + codec.separator
    one, other = rng.normal(size=(2, 4, model.config.hidden_size)).astype(np.float32)
    mixed = np.concatenate([one[:2], other[2:]])
    engine.generate([TurnRequest(0, ids, one)], SAMPLING)
    for session, latents, known in (
        (1, one, len(ids) - 1),
        (2, other, len(opened)),
        (3, mixed, len(opened) + 2),
    ):
        request = TurnRequest(session, ids, list(latents))
        assert engine._known(session, ids, list(latents))[1] == known
        assert compare(model, engine, [request]) == 0
        engine.release([1, 2, 3])
        engine.reset()
        engine.generate([TurnRequest(0, ids, one)], SAMPLING)


def test_sampling_within_top_p_keeps_the_ids_that_transformers_keeps(random_model):
    from transformers import TopPLogitsWarper

    torch.manual_seed(0)
    logits = 3 * torch.randn(6, 200)
    for top_p in (0.3, 0.9, 0.99):
        kept = torch.softmax(TopPLogitsWarper(top_p)(None, logits), -1)
        draws = (
            torch.arange(4000) + 0.5
        ) / 4000  # evenly spread: frequencies are then the probabilities
        for row in range(len(logits)):
            tokens = inverse_cdf(torch.softmax(logits[row], -1).expand(4000, -1), draws, top_p)
            counts = torch.bincount(tokens, minlength=200) / 4000
            assert (counts - kept[row]).abs().max() <= 1 / 4000 + 1e-5


def write(codec, text: str, sampling=SAMPLING) -> TurnWriter:
    """Push the pieces of a text as if they had been sampled, and forced tokens as they come."""
    writer = TurnWriter(codec, TurnRequest(0, codec.prompt("x"), []), sampling)
    for token in codec.untrusted(text):
        while writer.forced():
            writer.push(writer.forced()[0], 0.0, np.zeros(1))
        if writer.done:
            break
        writer.push(token, -1.0)
    while writer.forced():
        writer.push(writer.forced()[0], 0.0, np.zeros(1))
    return writer


@pytest.mark.parametrize(
    "text, blocks, finish",
    [
        ("\n\n<latent>", 1, ""),
        ("\n\n<think>a <latent> b</think>", 0, ""),
        ("\n\n<think>a</think>\n\n<latent>", 1, ""),
        ("\n\n<search>Peru</search>", 0, "stop"),
        ("\n\n<think><search>Peru</search>", 0, ""),
        ("\n\n<latent>\n", 1, ""),
        ("plain < latent>", 0, ""),
    ],
)
def test_a_block_opens_only_where_the_rule_says(random_model, text, blocks, finish):
    codec = Codec.of(*random_model())
    writer = write(codec, text)
    assert len(writer.output.latents) == blocks * 4 and writer.output.finish == finish


def test_a_block_is_completed_even_at_the_token_limit(random_model):
    model, tokenizer = random_model()
    engine = HFEngine(model, tokenizer)
    codec = engine.codec
    request = TurnRequest(0, codec.prompt("x"), [], codec.separator + codec.latent_open)
    output = engine.generate([request], Sampling(max_new_tokens=5, stop=()))[0]
    assert codec.text(output.ids) == "\n\n<latent>••••</latent>" and output.finish == "length"


def test_a_context_beyond_the_models_positions_is_refused(random_model):
    model, tokenizer = random_model()
    engine = HFEngine(model, tokenizer)
    with pytest.raises(ValueError, match="2048 positions"):
        engine.generate([TurnRequest(0, engine.codec.prompt("x") * 40, [])], SAMPLING)

"""Serving: whether two engines write the same ids, and how many tokens per second an engine or a
server generates."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pandas as pd
import torch

from alar.records import Origin, Trajectory
from alar.rollout.engine import Engine, Sampling, TurnRequest
from alar.rollout.hf import policy_logits

NEAR_TIE = 1e-4  # in log-probability: two ids this close may change places by rounding
# In bfloat16 logits between 16 and 32 are an eighth apart, and two engines may round four of them
# (two ids each) to different sides. Not yet seen on a GPU.
NEAR_TIE_HALF = 0.5


def near_tie(model) -> float:
    """How close two ids are that may change places by the rounding of this model's dtype."""
    return NEAR_TIE if model.dtype == torch.float32 else NEAR_TIE_HALF


def agreement(model, one: Sequence[Trajectory], other: Sequence[Trajectory]) -> pd.DataFrame:
    """One row per question that two engines answered greedily with the weights of the latent
    `model`.

    same, same_answer   whether all ids, or the predictions, are equal
    margin              where the ids first differ: log-probability of the first engine's id minus
                        that of the other's; NaN if they are equal, infinite if one is only longer
    logprob_difference, latent_difference   the largest absolute differences before that place
    """
    return pd.DataFrame([_compared(model, *pair) for pair in zip(one, other, strict=True)])


def _compared(model, one: Trajectory, other: Trajectory) -> dict:
    pairs = list(zip(one.ids, other.ids))
    differing = [place for place, (ours, theirs) in enumerate(pairs) if ours != theirs]
    equal = differing[0] if differing else len(pairs)  # tokens that both wrote
    if differing:
        margin = _margin(model, one.ids[:equal], *pairs[equal])
    else:
        margin = float("nan") if one.ids == other.ids else float("inf")
    thoughts = one.count(Origin.LATENT, span=(0, equal))  # latent positions in the equal part
    # (equal,), NaN where a token was not sampled
    logprobs = np.abs(np.subtract(one.logprobs[:equal], other.logprobs[:equal]))
    latents = np.abs(one.latents[:thoughts] - other.latents[:thoughts])  # (n, H)
    return {
        "question_id": one.question.id,
        "generated_tokens": one.generated_tokens,
        "same": one.ids == other.ids,
        "same_answer": one.prediction == other.prediction,
        "margin": margin,
        "logprob_difference": np.nan_to_num(logprobs).max(initial=0.0),
        "latent_difference": latents.max(initial=0.0),
    }


@torch.no_grad()
def _margin(model, ids: Sequence[int], token: int, other: int) -> float:
    """log p(token) − log p(other) after `ids`."""
    # (H,), at the last id
    hidden = model.latent_states(torch.tensor([ids], device=model.device)).hidden[0, -1]
    logits = policy_logits(model, hidden)  # (V,)
    return (logits[token] - logits[other]).item()


def engine_throughput(
    engine: Engine, prompts: Sequence[Sequence[int]], sampling: Sampling, concurrent: int
) -> dict:
    """Write one turn for each prompt, at most `concurrent` at once. Returns a row of
    `tables.THROUGHPUT` without its route."""
    waiting = deque(TurnRequest(session, ids, []) for session, ids in enumerate(prompts))
    tokens, under_way, began = 0, 0, time.perf_counter()
    while waiting or engine.busy:
        # A new turn enters as soon as one has ended.
        # Fills the free places.
        entering = [waiting.popleft() for _ in range(min(len(waiting), concurrent - under_way))]
        engine.submit(entering, sampling)
        ended = engine.step()
        engine.release([request.session for request, _ in ended])
        tokens += sum(len(output.ids) for _, output in ended)
        under_way += len(entering) - len(ended)
    return _row(concurrent, len(prompts), tokens, time.perf_counter() - began)


def server_throughput(
    address: str, model: str, prompts: Sequence[Sequence[int]], sampling: Sampling, concurrent: int
) -> dict:
    """As `engine_throughput`, over the OpenAI-compatible API with `concurrent` clients. Raises
    httpx.HTTPStatusError for a failed request."""
    body = {
        "model": model,
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_new_tokens,
        "vllm_xargs": {"latent_stops": list(sampling.stop)},
    }
    with httpx.Client(timeout=600, limits=httpx.Limits(max_connections=concurrent)) as client:

        def tokens_of(prompt) -> int:
            answer = client.post(f"{address}/v1/completions", json={**body, "prompt": list(prompt)})
            return answer.raise_for_status().json()["usage"]["completion_tokens"]

        with ThreadPoolExecutor(concurrent) as clients:
            began = time.perf_counter()
            tokens = sum(clients.map(tokens_of, prompts))  # waits for the last answer
            seconds = time.perf_counter() - began  # without starting and stopping the clients
    return _row(concurrent, len(prompts), tokens, seconds)


def _row(concurrent: int, turns: int, tokens: int, seconds: float) -> dict:
    return {
        "concurrent": concurrent,
        "turns": turns,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
    }

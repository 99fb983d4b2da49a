"""Contestants of a training step and of the log-prob pass.

| contestant | what one run does |
|---|---|
| ours | `model(...)` of the latent model, forward and backward |
| plain SFT | transformers' own model on the same ids and labels: latent ids are ordinary tokens |
| per sample | the straightforward algorithm, `per_sample_loss` |

The last is the algorithm of ALAR's released code with its errors corrected, so it differs from ours
only in the work: rows · blocks · (1 + K) + 1 model calls, and every text token is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor
from transformers import DynamicCache

from alar.study.bench.measure import Claim, Contest, Contestant
from alar.study.bench.subjects import ModelPair, TimedBatch

OURS, PLAIN, PER_SAMPLE = "ours", "plain SFT", "per sample"


def training_contests(
    pair: ModelPair,
    batches: Sequence[TimedBatch],
    *,
    checkpointed: bool = False,
    claims: bool = True,
) -> list[Contest]:
    """Forward and backward with the "published" latent gradient, one contest per batch.

    Under gradient checkpointing the per-sample algorithm can only use "projector_only". The limits
    of the claims hold for the default sizes of `model_pair` and `random_batch`; `claims=False`
    leaves them out.
    """
    part, at_most, at_least, gradient = "training step", 1.3, 1.7, "published"
    if checkpointed:
        part, at_most, at_least = "checkpointed training step", 1.6, None
        gradient = "projector_only"
    if not claims:
        at_most = at_least = None
    claimed = (Claim(OURS, PLAIN, at_most=at_most), Claim(PER_SAMPLE, OURS, at_least=at_least))

    def step(model, loss: Callable[..., Tensor], batch: TimedBatch) -> Callable[[], int]:
        def run() -> int:
            model.zero_grad(set_to_none=True)
            with training_mode(model, checkpointed):
                loss(**batch.inputs).backward()  # no optimiser step: it would cost each the same
            model.zero_grad(set_to_none=True)
            return batch.real_tokens

        return run

    def ours(**inputs) -> Tensor:
        return pair.latent(**inputs).loss

    def plain(**inputs) -> Tensor:
        return pair.plain(**inputs, use_cache=False).loss

    def per_sample(**inputs) -> Tensor:
        return per_sample_loss(pair.latent, **inputs, latent_gradient=gradient)[0]

    contests = []
    for batch in batches:
        contestants = (
            Contestant(OURS, step(pair.latent, ours, batch)),
            Contestant(PLAIN, step(pair.plain, plain, batch)),
            Contestant(PER_SAMPLE, step(pair.latent, per_sample, batch)),
        )
        contests.append(_contest(part, pair, batch, contestants, claimed))
    return contests


def logprob_contests(pair: ModelPair, batches: Sequence[TimedBatch]) -> list[Contest]:
    """Log-probs of the labelled tokens without gradient. Our pass gets z with the batch and is
    compared with an ordinary forward."""

    @torch.no_grad()
    def score(model, batch: TimedBatch, **options) -> int:
        inputs = batch.inputs
        logits = model.eval()(inputs["input_ids"], inputs["attention_mask"], **options).logits
        labels = inputs["labels"]
        scored = labels[:, 1:] != -100  # logits are (B, T, V)
        logprobs = torch.log_softmax(logits[:, :-1][scored].float(), -1)  # (n, V)
        logprobs.gather(1, labels[:, 1:][scored][:, None])
        return batch.real_tokens

    contests = []
    for batch in batches:
        ids, mask = batch.inputs["input_ids"], batch.inputs["attention_mask"]
        with torch.no_grad():
            latents = pair.latent.eval().latent_states(ids, mask).latents  # (N, H)
        contestants = (
            Contestant("cached z", partial(score, pair.latent, batch, latents=latents)),
            Contestant("plain forward", partial(score, pair.plain, batch, use_cache=False)),
        )
        claimed = (Claim("cached z", "plain forward", at_most=1.05),)
        contests.append(_contest("log-prob pass", pair, batch, contestants, claimed))
    return contests


def _contest(part: str, pair: ModelPair, batch: TimedBatch, contestants, claims) -> Contest:
    name = f"{pair.name}, {batch.name}"
    return Contest(part, name, contestants, claims, batch.padded_over_real)


def per_sample_loss(
    model,
    input_ids: Tensor,
    attention_mask: Tensor,
    labels: Tensor,
    *,
    latent_gradient: str = "published",
) -> tuple[Tensor, Tensor]:
    """(mean loss, z (N, H) in row-major order) of a latent model, one sample after the other.

    Each sample runs its text segments and latent steps alone, with a KV cache. A second, full
    forward over the embeddings, with z in place, gives the loss. `latent_gradient` is "published"
    (z₁ reaches the text through h₀) or "projector_only", for which the cached passes need no graph.
    Under gradient checkpointing only "projector_only" is possible, because a checkpointed layer
    drops its cache; "published" raises ValueError there.
    """
    if latent_gradient not in ("published", "projector_only"):
        raise ValueError(
            f"latent_gradient {latent_gradient!r}: the baseline has 'published' and"
            " 'projector_only'"
        )
    published = latent_gradient == "published"
    if published and model.is_gradient_checkpointing and model.training:
        raise ValueError(
            "latent_gradient 'published' needs the graph of the cached passes: use 'projector_only'"
            " here"
        )
    num_latent = model.config.num_latent
    embeddings = model.get_input_embeddings()(input_ids)  # (B, T, H)
    latent = (input_ids == model.config.latent_token_id) & attention_mask.bool()  # (B, T)
    found = []
    for row in range(len(input_ids)):
        real = attention_mask[row].bool()
        sample = embeddings[row, real][None]  # (1, L, H)
        # The first position of every block.
        starts = latent[row, real].nonzero()[::num_latent, 0].tolist()
        # For "projector_only" the cached passes need no graph.
        with nullcontext() if published else _plain_inference(model):
            found += _latents_of_sample(model, sample, starts, attached=published)
    if published:
        z = torch.stack([z for _, z in found])  # (N, H)
    else:  # f again, now with a graph
        states = torch.stack([state for state, _ in found]).detach()  # (N, H)
        by_step = [
            model.model.projector(states[step::num_latent], step) for step in range(num_latent)
        ]
        z = torch.stack(by_step, dim=1).flatten(0, 1)  # (N, H)
    output = model.model(
        inputs_embeds=embeddings.index_put(latent.nonzero(as_tuple=True), z),  # (B, T, H)
        attention_mask=attention_mask,
        # (B, T), counted over real tokens
        position_ids=(attention_mask.cumsum(1) - 1).clamp(min=0),
        use_cache=False,
    )
    # (B · (T − 1), V)
    logits = model.lm_head(output.last_hidden_state[:, :-1]).float().flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100)
    return loss, z


def _latents_of_sample(
    model, sample: Tensor, starts: Sequence[int], *, attached: bool
) -> list[tuple[Tensor, Tensor]]:
    """(h, z = f(h)), each (H,), for every latent position of one sample (1, L, H).

    starts: the first latent position of every block. attached: h₀ keeps its graph.
    """
    cache, found, cursor = DynamicCache(config=model.config), [], 0
    for start in starts:
        chunk = sample[:, cursor:start]  # (1, l, H): the text before this block
        for step in range(model.config.num_latent):
            output = model.model(inputs_embeds=chunk, past_key_values=cache, use_cache=True)
            state = output.last_hidden_state[:, -1]  # (1, H)
            if not attached or step > 0:
                state = state.detach()
            z = model.model.projector(state, step)  # (1, H)
            found.append((state[0], z[0]))
            chunk = z[:, None]  # (1, 1, H): z is the next input
        # The model also reads z_K, so that later text sees it in the cache.
        model.model(inputs_embeds=chunk, past_key_values=cache, use_cache=True)
        cursor = start + model.config.num_latent
    return found


@contextmanager
def training_mode(model, checkpointed: bool):
    """Train mode in the block, with or without gradient checkpointing; afterwards eval mode without
    it."""
    model.train()
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    try:
        yield
    finally:
        model.gradient_checkpointing_disable()
        model.eval()


@contextmanager
def _plain_inference(model):
    """No graph and no gradient checkpointing; the latter acts in train mode only."""
    before = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(before)

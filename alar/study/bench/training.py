"""Contestants of a training step and of the log-prob pass.

| contestant | what one run does |
|---|---|
| ours | `model(...)` of the latent model, forward and backward |
| plain SFT | transformers' own model on the same ids and labels: latent ids are ordinary tokens |
| per sample | the straightforward algorithm, `per_sample_loss` |

The last is what the released code of ALAR does, with its errors put right, so that all that
differs from ours is the work: rows · blocks · (1 + K) + 1 model calls and every text token twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import DynamicCache

from alar.study.bench.cases import Batch, ModelPair
from alar.study.bench.measure import Case, Comparison, Contestant

OURS, PLAIN, PER_SAMPLE = "ours", "plain SFT", "per sample"


def training_cases(
    pair: ModelPair, batches: Sequence[Batch], *, checkpointed: bool = False, claims: bool = True
) -> list[Case]:
    """Forward and backward, one case a batch, with the "published" latent gradient. Under gradient
    checkpointing the per-sample algorithm can only have "projector_only". `claims` are made for the
    sizes of `model_pair`'s and `random_batch`'s defaults."""
    gradient = "projector_only" if checkpointed else "published"

    def steps(batch: Batch):
        inputs = batch.inputs
        losses = {
            OURS: (pair.latent, lambda: pair.latent(**inputs).loss),
            PLAIN: (pair.plain, lambda: pair.plain(**inputs, use_cache=False).loss),
            PER_SAMPLE: (
                pair.latent,
                lambda: per_sample_loss(pair.latent, **inputs, latent_gradient=gradient)[0],
            ),
        }

        def step(model, loss):
            def run() -> int:
                model.zero_grad(set_to_none=True)
                with training_mode(model, checkpointed):
                    loss().backward()
                model.zero_grad(set_to_none=True)
                return batch.real_tokens

            return run

        return tuple(Contestant(name, step(*parts)) for name, parts in losses.items())

    comparisons = (
        Comparison(OURS, PLAIN, at_most=(1.6 if checkpointed else 1.3) if claims else None),
        Comparison(PER_SAMPLE, OURS, at_least=1.7 if claims and not checkpointed else None),
    )
    part = "checkpointed training step" if checkpointed else "training step"
    return [
        Case(part, _label(pair, batch), steps(batch), comparisons, batch.padded_over_real)
        for batch in batches
    ]


def logprob_cases(pair: ModelPair, batches: Sequence[Batch]) -> list[Case]:
    """Log-probs of the labelled tokens without gradient: z given with the batch, against an
    ordinary forward."""

    def passes(batch: Batch):
        ids, mask = batch.inputs["input_ids"], batch.inputs["attention_mask"]
        with torch.no_grad():
            latents = pair.latent.eval().latent_states(ids, mask).latents

        def scored(forward):
            @torch.no_grad()
            def run() -> int:
                labelled_logprobs(forward().logits, batch.inputs["labels"])
                return batch.real_tokens

            return run

        return (
            Contestant("cached z", scored(lambda: pair.latent.eval()(ids, mask, latents=latents))),
            Contestant(
                "plain forward", scored(lambda: pair.plain.eval()(ids, mask, use_cache=False))
            ),
        )

    comparisons = (Comparison("cached z", "plain forward", at_most=1.05),)
    return [
        Case(
            "log-prob pass", _label(pair, batch), passes(batch), comparisons, batch.padded_over_real
        )
        for batch in batches
    ]


def labelled_logprobs(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-probs (n,) of the labelled tokens under logits (B, T, V)."""
    scored = labels[:, 1:] != -100
    return torch.log_softmax(logits[:, :-1][scored].float(), -1).gather(
        1, labels[:, 1:][scored][:, None]
    )[:, 0]


def per_sample_loss(
    model,
    input_ids: Tensor,
    attention_mask: Tensor,
    labels: Tensor,
    *,
    latent_gradient: str = "published",
) -> tuple[Tensor, Tensor]:
    """(mean loss, z (N, H) in row-major order) of a latent model, one sample after the other.

    Every sample alone runs each of its text segments and latent steps with a KV cache; a second,
    full forward over the embeddings with z in place gives the loss. `latent_gradient` is
    "published" (z₁ reaches the text through h₀) or "projector_only", where the cached passes need
    no graph. Under gradient checkpointing only the latter is possible: a checkpointed layer drops
    its cache.
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
    embeddings = model.get_input_embeddings()(input_ids)  # (B, T, H)
    latent = (input_ids == model.config.latent_token_id) & attention_mask.bool()
    found = []
    for row in range(len(input_ids)):
        real = attention_mask[row].bool()
        sample = embeddings[row, real][None]  # (1, L, H)
        starts = latent[row, real].nonzero()[:: model.config.num_latent, 0].tolist()
        if published:
            found += _latents_of_sample(model, sample, starts, attached=True)
        else:
            with _plain_inference(model):
                found += _latents_of_sample(model, sample, starts, attached=False)
    states = torch.stack([state for state, _ in found])  # (N, H)
    steps = range(model.config.num_latent)
    if published:
        z = torch.stack([z for _, z in found])
    else:  # f again, now with a graph
        by_step = [
            model.model.projector(states[step :: len(steps)].detach(), step) for step in steps
        ]
        z = torch.stack(by_step, dim=1).flatten(0, 1)
    assembled = embeddings.index_put(latent.nonzero(as_tuple=True), z)
    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
    hidden = model.model(
        inputs_embeds=assembled,
        attention_mask=attention_mask,
        position_ids=positions,
        use_cache=False,
    ).last_hidden_state
    logits = model.lm_head(hidden[:, :-1]).float()
    return (
        torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
        ),
        z,
    )


def _latents_of_sample(
    model, sample: Tensor, starts: Sequence[int], *, attached: bool
) -> list[tuple[Tensor, Tensor]]:
    """(h, z = f(h)), each (H,), for every latent position of one sample (1, L, H); h₀ with its
    graph if `attached`."""
    cache, found, cursor = DynamicCache(config=model.config), [], 0
    for start in starts:
        chunk = sample[:, cursor:start]
        for step in range(model.config.num_latent):
            state = model.model(
                inputs_embeds=chunk, past_key_values=cache, use_cache=True
            ).last_hidden_state[:, -1]
            state = state if attached and step == 0 else state.detach()
            z = model.model.projector(state, step)  # (1, H)
            found.append((state[0], z[0]))
            chunk = z[:, None]
        model.model(
            inputs_embeds=chunk, past_key_values=cache, use_cache=True
        )  # z_K enters the cache
        cursor = start + model.config.num_latent
    return found


@contextmanager
def training_mode(model, checkpointed: bool):
    """Train mode, with or without gradient checkpointing; afterwards eval mode and none."""
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
    """No graph and no checkpointing, which acts in train mode only."""
    before = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(before)


def _label(pair: ModelPair, batch: Batch) -> str:
    return f"{pair.name}, {batch.name}"

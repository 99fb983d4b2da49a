"""Contestants of a rollout: the in-process engine against `transformers.generate`, both in the same
agent loop.

`GenerateEngine` is what a reader would write without an engine. For each turn it pads the whole
context of every trajectory on the left and prefills it again, and the batch decodes until its last
row has stopped. Both run the plain base model greedily in explicit mode, so they write the same
text.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from alar.records import Environment, Origin, Question
from alar.rollout import loop
from alar.rollout.codec import Codec
from alar.rollout.engine import Engine, Sampling, TurnOutput, TurnRequest
from alar.rollout.hf import HFEngine
from alar.study.bench.measure import Claim, Contest, Contestant


class GenerateEngine(Engine):
    """An `Engine` on `transformers.generate`: greedy, explicit mode only. It keeps nothing from
    turn to turn. All submitted turns form one batch, and one step writes the batch to its end."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase):
        self.model, self.tokenizer = model.eval(), tokenizer
        self.codec = Codec.of(model, tokenizer)  # text ↔ ids
        self.waiting: list[TurnRequest] = []  # written by the next `step`
        self.sampling = Sampling()

    @property
    def busy(self) -> bool:
        return bool(self.waiting)

    def submit(self, requests: Sequence[TurnRequest], sampling: Sampling) -> None:
        latent = any(request.forced or len(request.latents) for request in requests)
        if sampling.temperature > 0 or latent:
            raise ValueError(
                "GenerateEngine is greedy and has no forced tags and no latent blocks: use HFEngine"
            )
        self.waiting += requests
        self.sampling = sampling

    def step(self) -> list[tuple[TurnRequest, TurnOutput]]:
        requests, self.waiting = self.waiting, []
        return list(zip(requests, self._write(requests, self.sampling))) if requests else []

    def release(self, sessions: Sequence[int]) -> None:
        """Forget waiting turns of these sessions; nothing else is kept."""
        self.waiting = [request for request in self.waiting if request.session not in set(sessions)]

    @torch.no_grad()
    def _write(self, requests: Sequence[TurnRequest], sampling: Sampling) -> list[TurnOutput]:
        pad, width = self.tokenizer.pad_token_id, max(len(request.ids) for request in requests)
        # (B, T), padded on the left; T = width
        table = [[pad] * (width - len(request.ids)) + list(request.ids) for request in requests]
        # (B, T), 1 at real tokens
        mask = [[0] * (width - len(request.ids)) + [1] * len(request.ids) for request in requests]
        device = self.model.device
        output = self.model.generate(
            input_ids=torch.tensor(table, device=device),
            attention_mask=torch.tensor(mask, device=device),
            max_new_tokens=sampling.max_new_tokens,
            do_sample=False,
            pad_token_id=pad,
            stop_strings=list(sampling.stop),
            tokenizer=self.tokenizer,
        )
        # `output` is (B, T + new tokens).
        return [self._turn(row, sampling) for row in output[:, width:].tolist()]

    def _turn(self, ids: list[int], sampling: Sampling) -> TurnOutput:
        while ids and ids[-1] == self.tokenizer.pad_token_id:
            ids = ids[:-1]  # this row stopped before the last one
        finish = "length"
        if ids and ids[-1] == self.tokenizer.eos_token_id:
            finish = "eos"
        # A stop text has at most 8 tokens, so only the end is read.
        elif any(stop in self.codec.text(ids[-8:]) for stop in sampling.stop):
            finish = "stop"
        # `generate` returns no log-probs here, so they are NaN.
        origins, logprobs = [int(Origin.SAMPLED)] * len(ids), [float("nan")] * len(ids)
        return TurnOutput(ids, origins, logprobs, finish=finish)


def rollout_contest(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    environment: Environment,
    questions: Sequence[Question],
    *,
    batch_size: int = 64,
    single_questions: int = 4,
    max_turns: int = 6,
    max_new_tokens: int = 128,
) -> Contest:
    """Both engines answer all questions, `batch_size` at once. One at a time `generate` answers
    only the first `single_questions`, because times are compared per token."""
    if not 1 <= single_questions <= len(questions):
        raise ValueError(
            f"single_questions is {single_questions}: expected 1 to {len(questions)}, the questions"
            " there are"
        )
    sampling = Sampling(max_new_tokens=max_new_tokens, stop=environment.stop)

    def rollouts(engine, asked: Sequence[Question], at_once: int):
        def run() -> int:  # a new engine every time, so nothing is cached
            options = {"modes": "off", "max_turns": max_turns, "batch_size": at_once}
            found = loop.run(asked, engine(model, tokenizer), environment, sampling, **options)
            return sum(trajectory.generated_tokens for trajectory in found)

        return run

    few, batched = questions[:single_questions], f"generate, batch {batch_size}"  # batched: a name
    # The probe answers one question; its memory peak is of the same kind.
    single, probe = rollouts(GenerateEngine, few, 1), rollouts(GenerateEngine, questions[:1], 1)
    contestants = (
        Contestant("ours", rollouts(HFEngine, questions, batch_size)),
        Contestant(batched, rollouts(GenerateEngine, questions, batch_size)),
        Contestant("generate, batch 1", single, probe),
    )
    claims = (
        Claim(batched, "ours", at_least=1.5),
        Claim("generate, batch 1", "ours", at_least=8.0),
    )
    return Contest("rollouts", f"laptop, {batch_size} at once", contestants, claims)

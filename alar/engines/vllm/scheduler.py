"""Scheduler classes for latent checkpoints: vLLM's own, with three additions.

* A prefill chunk ends before the next known latent position. That position opens the next chunk,
  where the model class can feed its z. Decoding steps have one token, so they need no cut.
* A `TurnWriter`, as in every engine, follows the turn. A block that the token limit would cut is
  completed first, `latent_stops` end the turn, and a token that contradicts a block fails its
  request (status 500 over the API).
* A context whose latent blocks are not whole is refused when its first token is due.
"""

from __future__ import annotations

import secrets

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from alar.engines.vllm.forcing import plain
from alar.engines.vllm.turns import (
    TurnOptions,
    engine_codec,
    open_turn,
    problem_in_context,
    problem_in_turn,
)

logger = init_logger(__name__)


class LatentScheduling:
    """Mixin over a vLLM scheduler. It overrides two private methods that `checks` looks for."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.codec = engine_codec(self.vllm_config)

    def add_request(self, request: Request) -> None:
        params, prompt = request.sampling_params, request.prompt_token_ids
        options = TurnOptions.of(params.extra_args)
        seed = params.seed
        if seed is None and options.record:
            # The forcing notes the log-probs of the tokens that it draws, so it needs a seed.
            seed = secrets.randbits(48)
        if seed is not None and plain(params):  # the forcing draws, in place of vLLM
            extra = {"latent_seed": seed} if params.temperature > 0 else {}
            params = request.sampling_params = params.clone()
            params.seed, params.extra_args = None, {**(params.extra_args or {}), **extra}
        choosable = self.codec.latent_token_id or self.vllm_config.model_config.get_vocab_size()
        problem = problem_in_turn(options, prompt, choosable)
        if problem:  # no option reaches the workers, where a wrong id would be out of range
            options = TurnOptions()
            params = request.sampling_params = params.clone()
            params.extra_args = None
        request.latent_problem = problem or problem_in_context(self.codec, prompt)
        request.latent_writer = open_turn(self.codec, options, prompt)
        super().add_request(request)

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        count = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        latent = self.codec.latent_token_id
        if count > 1 and latent is not None:
            # The chunk's first token is left out. It may be a latent position itself.
            following = request.all_token_ids[num_computed_tokens + 1 : num_computed_tokens + count]
            if latent in following:
                count = 1 + following.index(latent)
        return count

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ):
        problem = request.latent_problem
        for token in new_token_ids:
            problem = problem or self._contradiction(request, token)
        writer = request.latent_writer
        inside = writer is not None and writer.forced() is not None
        if inside:  # raise the limit, so that the block can be closed
            needed = request.num_output_tokens + len(new_token_ids) + len(writer.queue)
            request.max_tokens = max(request.max_tokens, needed)
        new_token_ids, stopped = super()._update_request_with_output(
            request, new_token_ids, is_stale
        )
        if problem:
            logger.error("Request %s failed: %s", request.request_id, problem)
            request.status, request.stop_reason = RequestStatus.FINISHED_ERROR, problem
            request.resumable = False
            return new_token_ids, True
        if stopped and inside:
            by_length = request.status == RequestStatus.FINISHED_LENGTH_CAPPED
            limit = "max_model_len" if by_length else "a stop token"
            request.stop_reason = f"latent block cut by {limit}"
        elif not stopped and writer is not None and writer.output.finish == "stop":
            request.status, request.stop_reason = RequestStatus.FINISHED_STOPPED, "latent_stops"
            stopped = True
        return new_token_ids, stopped

    def _contradiction(self, request: Request, token: int) -> str:
        """What is wrong with this token, in words, or "". A right token goes to the writer."""
        writer = request.latent_writer
        due = None if writer is None else writer.forced()  # (id, origin)
        if due is None:
            wrong = token == self.codec.latent_token_id
        else:
            wrong = token != due[0]
        if wrong:  # this is how `BlockForcer` signals a violated request
            return (
                "integrity violation: a latent position was computed without the hidden state"
                " before it, so its z and everything after it would be wrong"
            )
        if writer is not None:
            writer.push(token, float("nan"))  # the scheduler has no log-probs and needs none
        return ""


class LatentScheduler(LatentScheduling, Scheduler):
    """The scheduler with `async_scheduling=False`."""


class LatentAsyncScheduler(LatentScheduling, AsyncScheduler):
    """The scheduler with `async_scheduling=True`, the default."""

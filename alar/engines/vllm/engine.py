"""`VLLMEngine`: the interface and the results of the in-process engine, written by vLLM.

Ids, log-probs and z come back from vLLM and are replayed through `TurnWriter`, which gives origins
and the end of the turn and would notice a block that is not what it must be. Contexts go in as
token ids; the z of their latent positions are recomputed by the engine's own weights, exactly, so
those of the request are not read.
"""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from alar.engines.vllm.checks import (
    engine_arguments,
    require_entry_point,
    require_vllm,
    stored_dtype,
)
from alar.records import Origin
from alar.rollout.engine import Engine, Sampling, TurnOutput, TurnRequest, TurnWriter

NAN = float("nan")


class IntegrityError(RuntimeError):
    """A request failed because z could not be trusted, or its answer contradicts the rules of a
    block."""


class VLLMEngine(Engine):
    """`Engine` on a checkpoint folder, latent or not.

    `arguments` go to `vllm.LLM` and override the defaults: eager on a CPU, CUDA graphs on a GPU.
    Close the engine, or use it as a context manager: vLLM holds memory and processes. Where a turn
    fails, `step` raises; those that ended beside it come with the next call.
    """

    def __init__(self, folder: str | Path, *, async_scheduling: bool = True, **arguments):
        require_vllm()
        if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "1") != "0":
            require_entry_point()
        from vllm import LLM
        from vllm.platforms import current_platform

        from alar.engines.vllm.plugin import register
        from alar.engines.vllm.turns import engine_codec

        register(imported=current_platform.is_cpu())
        defaults = {
            "enforce_eager": current_platform.is_cpu(),
            "skip_tokenizer_init": True,
            "seed": 0,
            "disable_log_stats": True,
        }
        defaults["dtype"] = stored_dtype(folder)
        self.llm = LLM(
            str(folder),
            **{**defaults, **engine_arguments(async_scheduling=async_scheduling), **arguments},
        )
        self.config = self.llm.llm_engine.vllm_config
        self.codec = engine_codec(self.config)
        self._keys = itertools.count()
        self._written: dict[
            str, tuple[TurnRequest, Sampling]
        ] = {}  # vLLM's request id → the turn being written
        self._ended: list[
            tuple[TurnRequest, TurnOutput]
        ] = []  # beside one that failed, not handed out yet

    def __enter__(self) -> VLLMEngine:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def close(self) -> None:
        """Give back what vLLM holds."""
        if self.llm is None:
            return
        from vllm.distributed import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        self.llm = None
        gc.collect()
        cleanup_dist_env_and_memory()

    def release(self, sessions: Sequence[int]) -> None:
        """Abort turns in the making. Contexts stay: the prefix cache knows them by their ids and
        drops the oldest."""
        gone = set(sessions)
        keys = [key for key, (request, _) in self._written.items() if request.session in gone]
        if keys:
            self.llm.llm_engine.abort_request(keys)
            self._records(keys)
        for key in keys:
            del self._written[key]
        self._ended = [turn for turn in self._ended if turn[0].session not in gone]

    def reset(self) -> None:
        """Forget all contexts, turns in the making included: call after the weights have changed."""
        self.release([request.session for request, _ in [*self._written.values(), *self._ended]])
        if not self.llm.reset_prefix_cache():
            raise RuntimeError(
                "vLLM kept its prefix cache because requests are under way that were not sent"
                " through this engine: end them, then call reset again; until then contexts may be"
                " answered with keys of other weights"
            )

    def load(self, folder: str | Path) -> None:
        """Take the weights of another checkpoint of the same shape, projector included, in place."""
        self.llm.collective_rpc("latent_reload", args=(str(folder),))
        self.reset()

    @property
    def busy(self) -> bool:
        return bool(self._written or self._ended)

    def submit(self, requests: Sequence[TurnRequest], sampling: Sampling) -> None:
        sessions = [request.session for request in requests] + [
            request.session for request, _ in self._written.values()
        ]
        if len(set(sessions)) != len(sessions):
            raise ValueError("two turns of one session are asked for at the same time")
        self._check_lengths(requests, sampling)
        for request in requests:
            key = f"{request.session}.{next(self._keys)}"
            written = len(self._opened(request, sampling).output.ids)
            prompt = {
                "prompt_token_ids": [*map(int, request.ids), *map(int, request.forced[:written])]
            }
            self.llm.llm_engine.add_request(
                key, prompt, self._params(request, key, written, sampling)
            )
            self._written[key] = (request, sampling)

    def step(self) -> list[tuple[TurnRequest, TurnOutput]]:
        ended = [answer for answer in self.llm.llm_engine.step() if answer.finished]
        records = self._records([answer.request_id for answer in ended]) if ended else []
        turns, self._ended, failure = self._ended, [], None
        for answer, record in zip(ended, records):
            request, sampling = self._written.pop(answer.request_id)
            try:
                turns.append((request, self._replay(request, answer, record, sampling)))
            except IntegrityError as error:
                failure = failure or error
        if failure:
            self._ended = turns
            raise failure
        return turns

    def _records(self, keys: list[str]) -> list[dict | None]:
        """What the worker noted of these requests; it forgets them."""
        return self.llm.collective_rpc("latent_records", args=(keys,))[0]

    def _check_lengths(self, requests: Sequence[TurnRequest], sampling: Sampling) -> None:
        limit = self.config.model_config.max_model_len
        longest = (
            max((len(request.ids) for request in requests), default=0)
            + sampling.max_new_tokens
            + self.codec.num_latent
            + 16
        )
        if longest > limit:
            raise ValueError(
                f"a context of {longest} tokens (prompt and new ones) exceeds the engine's {limit}"
                " positions: lower rollout.max_turns or rollout.max_new_tokens, or raise"
                " max_model_len"
            )

    def _opened(self, request: TurnRequest, sampling: Sampling) -> TurnWriter:
        """The turn as far as its prompt can hold it: the forced ids before the first block, which
        vLLM has to write."""
        writer, forced = TurnWriter(self.codec, request, sampling), request.forced
        while (count := len(writer.output.ids)) < len(forced) and writer.forced() == (
            forced[count],
            Origin.FORCED,
        ):
            writer.push(forced[count], NAN)
        return writer

    def _params(self, request: TurnRequest, key: str, written: int, sampling: Sampling):
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        extra = {"latent_record": key, "latent_stops": list(sampling.stop)}
        if not request.allow_latent:
            extra["latent_mode"] = "off"
        if request.forced:
            extra |= {
                "latent_written": written,
                "latent_forced": [*map(int, request.forced[written:])],
            }
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=request.seed if sampling.temperature > 0 else None,
            max_tokens=max(1, sampling.max_new_tokens - written),
            ignore_eos=True,
            stop_token_ids=[self.codec.tokenizer.eos_token_id],
            detokenize=False,
            extra_args=extra,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _replay(
        self, request: TurnRequest, answer, record: dict | None, sampling: Sampling
    ) -> TurnOutput:
        written = answer.outputs[0]
        if written.finish_reason == "error":
            raise IntegrityError(
                f"session {request.session}: {written.stop_reason or 'vLLM failed the request'}"
            )
        if record is None:
            raise IntegrityError(
                f"session {request.session}: its record is gone; send fewer requests at a time"
            )
        width = self.config.model_config.hf_config.hidden_size
        latents = dict(
            zip(
                record["positions"], np.frombuffer(record["latents"], np.float32).reshape(-1, width)
            )
        )
        writer = self._opened(request, sampling)
        for index, token in enumerate(written.token_ids):
            if writer.done:
                break
            due = writer.forced()
            if due is not None and due[0] != token:
                raise IntegrityError(
                    f"session {request.session}: token {index} is {token}, the open block asks for"
                    f" {due[0]}"
                )
            thought = latents.get(index) if due is not None and due[1] is Origin.LATENT else None
            writer.push(token, record["logprobs"][index], thought)
        if not writer.done:
            raise IntegrityError(
                f"session {request.session}: vLLM ended the turn early ({written.finish_reason})"
            )
        return writer.output

"""`VLLMEngine`: the interface and the results of the in-process engine, written by vLLM.

Ids, log-probs and z come back from vLLM and are replayed through `TurnWriter`, which gives origins and the end of the turn
and would notice a block that is not what it must be. Contexts go in as token ids; the z of their latent positions are
recomputed by the engine's own weights, exactly, so those of the request are not read.
"""

from __future__ import annotations

import gc
import itertools
import os
from pathlib import Path
from typing import Sequence

import numpy as np

from alar.records import Origin
from alar.rollout.engine import Sampling, TurnOutput, TurnRequest, TurnWriter
from alar.rollout.vllm.checks import engine_arguments, require_entry_point, require_vllm

NAN = float("nan")


class IntegrityError(RuntimeError):
    """A request failed because z could not be trusted, or its answer contradicts the rules of a block."""


class VLLMEngine:
    """`Engine` on a checkpoint folder, latent or not.

    `arguments` go to `vllm.LLM` and override the defaults, which suit small models on a CPU; on GPUs leave out
    `enforce_eager`. Close the engine, or use it as a context manager: vLLM holds memory and processes.
    """

    def __init__(self, folder: str | Path, *, async_scheduling: bool = True, **arguments):
        require_vllm()
        if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "1") != "0":
            require_entry_point()
        from vllm import LLM
        from vllm.platforms import current_platform

        from alar.rollout.vllm.plugin import register
        from alar.rollout.vllm.turns import codec_of

        register(imported=current_platform.is_cpu())
        defaults = {"enforce_eager": True, "skip_tokenizer_init": True, "seed": 0, "disable_log_stats": True}
        self.llm = LLM(str(folder), **{**defaults, **engine_arguments(async_scheduling=async_scheduling), **arguments})
        self.config = self.llm.llm_engine.vllm_config
        self.codec = codec_of(self.config)
        self._keys = itertools.count()

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
        """Nothing to do: the prefix cache knows contexts by their ids and drops the least recently used."""

    def reset(self) -> None:
        """Forget all cached contexts: call after the weights have changed."""
        self.llm.reset_prefix_cache()

    def load(self, folder: str | Path) -> None:
        """Take the weights of another checkpoint of the same shape, projector included, in place."""
        self.llm.collective_rpc("latent_reload", args=(str(folder),))
        self.reset()

    def generate(self, requests: Sequence[TurnRequest], sampling: Sampling) -> list[TurnOutput]:
        if not requests:
            return []
        if len({request.session for request in requests}) != len(requests):
            raise ValueError("two requests of one batch name the same session")
        self._check_lengths(requests, sampling)
        keys = [f"{request.session}.{next(self._keys)}" for request in requests]
        prompts = [{"prompt_token_ids": [*map(int, request.ids), *map(int, request.forced)]} for request in requests]
        params = [self._params(request, key, sampling) for request, key in zip(requests, keys)]
        answers = self.llm.generate(prompts, params, use_tqdm=False)
        records = self.llm.collective_rpc("latent_records", args=(keys,))[0]
        return [self._replay(*row, sampling) for row in zip(requests, answers, records)]

    def _check_lengths(self, requests: Sequence[TurnRequest], sampling: Sampling) -> None:
        limit = self.config.model_config.max_model_len
        longest = max(len(request.ids) for request in requests) + sampling.max_new_tokens + self.codec.num_latent + 16
        if longest > limit:
            raise ValueError(
                f"a context of {longest} tokens (prompt and new ones) exceeds the engine's {limit} positions: lower "
                "rollout.max_turns or rollout.max_new_tokens, or raise max_model_len"
            )

    def _params(self, request: TurnRequest, key: str, sampling: Sampling):
        from vllm import SamplingParams

        extra = {"latent_record": key, "latent_stops": list(sampling.stop)}
        if not request.allow_latent:
            extra["latent_mode"] = "off"
        if request.forced:
            extra["latent_written"] = len(request.forced)
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=request.seed if sampling.temperature > 0 else None,
            max_tokens=max(1, sampling.max_new_tokens - len(request.forced)),
            ignore_eos=True,
            stop_token_ids=[self.codec.tokenizer.eos_token_id],
            detokenize=False,
            extra_args=extra,
        )

    def _replay(self, request: TurnRequest, answer, record: dict | None, sampling: Sampling) -> TurnOutput:
        written = answer.outputs[0]
        if written.finish_reason == "error":
            raise IntegrityError(f"session {request.session}: {written.stop_reason or 'vLLM failed the request'}")
        if record is None:
            raise IntegrityError(f"session {request.session}: its record is gone; send fewer requests at a time")
        width = self.config.model_config.hf_config.hidden_size
        latents = dict(zip(record["positions"], np.frombuffer(record["latents"], np.float32).reshape(-1, width)))
        writer = TurnWriter(self.codec, request, sampling)
        for token in request.forced:
            writer.push(token, NAN)
        for index, token in enumerate(written.token_ids):
            if writer.done:
                break
            due = writer.forced()
            if due is not None and due[0] != token:
                raise IntegrityError(f"session {request.session}: token {index} is {token}, the open block asks for {due[0]}")
            thought = latents.get(index) if due is not None and due[1] is Origin.LATENT else None
            writer.push(token, record["logprobs"][index], thought)
        if not writer.done:
            raise IntegrityError(f"session {request.session}: vLLM ended the turn early ({written.finish_reason})")
        return writer.output

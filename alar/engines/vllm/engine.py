"""`VLLMEngine`: the interface and the results of the in-process engine, written by vLLM.

Contexts go in as token ids. vLLM recomputes the z of their latent positions exactly, with its own
weights, so it does not read the z of the request. Ids, log-probs and z come back, and `TurnWriter`
replays them: it gives the origins and the end of the turn, and it notices a wrong block.
"""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from alar.engines.vllm.checks import engine_arguments, require_entry_point, require_vllm
from alar.model.dtype import stored_dtype
from alar.records import Origin
from alar.rollout.engine import Engine, Sampling, TurnOutput, TurnRequest, TurnWriter

NAN = float("nan")


class IntegrityError(RuntimeError):
    """z of a request could not be trusted, or its answer contradicts the rules of a block."""


class VLLMEngine(Engine):
    """`Engine` on a checkpoint folder, latent or not.

    `arguments` go to `vllm.LLM` and override the defaults: eager on a CPU, CUDA graphs on a GPU.
    Close the engine, or use it as a context manager, because vLLM holds memory and processes. If a
    turn fails, `step` raises IntegrityError. The next call of `step` returns the other turns that
    ended with it.
    """

    def __init__(self, folder: str | Path, *, async_scheduling: bool = True, **arguments):
        require_vllm()
        # With this variable at 0 vLLM runs in this process, where `register` below is enough.
        if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "1") != "0":
            require_entry_point()
        from vllm import LLM
        from vllm.platforms import current_platform

        from alar.engines.vllm.plugin import register
        from alar.engines.vllm.turns import engine_codec

        register(imported=current_platform.is_cpu())
        defaults = {
            "enforce_eager": current_platform.is_cpu(),
            "skip_tokenizer_init": True,  # ids go in and come out; the codec has the tokenizer
            "seed": 0,
            "disable_log_stats": True,
            # vLLM would narrow float32 to 16 bits. On a GPU FlashAttention refuses float32; vLLM
            # then takes its Triton attention, which computes it and tells us what
            # `LatentModel._batch` asks for.
            "dtype": stored_dtype(folder),
            # As many positions as one request may have in the KV cache at hand, at most the
            # model's. vLLM refuses to start where the model's own number does not fit: 262,144 of
            # Qwen3-4B are 36 GiB in 16 bits. It takes the blocks of a request as the request
            # grows, so a high limit reserves nothing, and one computed from prompt and turns could
            # be too low, because nobody knows the length of an observation beforehand.
            "max_model_len": -1,
        }
        ours = engine_arguments(async_scheduling=async_scheduling)
        self.llm = LLM(str(folder), **{**defaults, **ours, **arguments})
        self.config = self.llm.llm_engine.vllm_config
        self.codec = engine_codec(self.config)
        self._keys = itertools.count()  # makes request ids unique over the turns of a session
        # vLLM's request id → the turn being written.
        self._written: dict[str, tuple[TurnRequest, Sampling]] = {}
        # Turns that ended in the same step as a failed one; the next step returns them.
        self._ended: list[tuple[TurnRequest, TurnOutput]] = []

    def close(self) -> None:
        """Free the memory and end the processes that vLLM holds. A second call does nothing."""
        if self.llm is None:
            return
        from vllm.distributed import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        self.llm = None
        gc.collect()
        cleanup_dist_env_and_memory()

    def release(self, sessions: Sequence[int]) -> None:
        """Abort the unfinished turns of these sessions.

        Their contexts stay in vLLM's prefix cache until newer ones push them out.
        """
        gone = set(sessions)
        keys = [key for key, (request, _) in self._written.items() if request.session in gone]
        if keys:
            self.llm.llm_engine.abort_request(keys)
            self._notes(keys)  # so that the worker forgets them
        for key in keys:
            del self._written[key]
        self._ended = [turn for turn in self._ended if turn[0].session not in gone]

    def reset(self) -> None:
        """Forget all turns and the prefix cache. Call it after the weights have changed."""
        known = [*self._written.values(), *self._ended]
        self.release([request.session for request, _ in known])
        if not self.llm.reset_prefix_cache():
            raise RuntimeError(
                "vLLM kept its prefix cache, and with it keys of other weights, because requests"
                " are under way that this engine did not send: end them, then call reset again"
            )

    def load(self, folder: str | Path) -> None:
        """Take the weights of another checkpoint of the same shape, its projector included."""
        self.llm.collective_rpc("latent_reload", args=(str(folder),))
        self.reset()

    @property
    def busy(self) -> bool:
        return bool(self._written or self._ended)

    def submit(self, requests: Sequence[TurnRequest], sampling: Sampling) -> None:
        sessions = [request.session for request in requests]
        sessions += [request.session for request, _ in self._written.values()]
        if len(set(sessions)) != len(sessions):
            raise ValueError("two turns of one session are asked for at the same time")
        self._check_lengths(requests, sampling)
        for request in requests:
            key = f"{request.session}.{next(self._keys)}"
            # How many forced ids go into the prompt; `latent_forced` brings the others.
            written = len(self._opened(request, sampling).output.ids)
            ids = [*map(int, request.ids), *map(int, request.forced[:written])]
            params = self._params(request, key, written, sampling)
            self.llm.llm_engine.add_request(key, {"prompt_token_ids": ids}, params)
            self._written[key] = (request, sampling)

    def step(self) -> list[tuple[TurnRequest, TurnOutput]]:
        ended = [answer for answer in self.llm.llm_engine.step() if answer.finished]
        notes = self._notes([answer.request_id for answer in ended]) if ended else []
        turns, self._ended, failure = self._ended, [], None
        for answer, noted in zip(ended, notes):
            request, sampling = self._written.pop(answer.request_id)
            try:
                turns.append((request, self._replay(request, answer, noted, sampling)))
            except IntegrityError as error:
                failure = failure or error  # first handle the other turns, or they would be lost
        if failure:
            self._ended = turns
            raise failure
        return turns

    def _notes(self, keys: list[str]) -> list[dict | None]:
        """What the worker noted of these requests (`Notes.fetch`). The worker forgets it then."""
        # Every tensor-parallel rank answers. The first answer is read.
        return self.llm.collective_rpc("latent_records", args=(keys,))[0]

    def _check_lengths(self, requests: Sequence[TurnRequest], sampling: Sampling) -> None:
        limit = self.config.model_config.max_model_len
        longest = max((len(request.ids) for request in requests), default=0)
        longest += sampling.max_new_tokens + self.codec.num_latent + 16  # 16: tags of a last block
        if longest > limit:
            raise ValueError(
                f"a context of {longest} tokens (prompt and new ones) exceeds the engine's {limit}"
                " positions: lower rollout.max_turns or rollout.max_new_tokens, or raise"
                " max_model_len"
            )

    def _opened(self, request: TurnRequest, sampling: Sampling) -> TurnWriter:
        """The turn as far as the prompt can hold it: the forced ids before the first latent block.

        vLLM has to write that block itself, because its z must be computed and recorded.
        """
        writer = TurnWriter(self.codec, request, sampling)
        for token in request.forced:
            if writer.forced() != (token, Origin.FORCED):
                break
            writer.push(token, NAN)
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
            # `BlockForcer` draws with this seed as `HFEngine` does, so both sample the same tokens.
            seed=request.seed if sampling.temperature > 0 else None,
            max_tokens=max(1, sampling.max_new_tokens - written),
            ignore_eos=True,  # EOS ends a turn as a stop token, so it is part of the answer
            stop_token_ids=[self.codec.tokenizer.eos_token_id],
            detokenize=False,  # the codec reads the ids
            extra_args=extra,
            output_kind=RequestOutputKind.FINAL_ONLY,  # a turn is replayed whole
        )

    def _replay(
        self, request: TurnRequest, answer, noted: dict | None, sampling: Sampling
    ) -> TurnOutput:
        """The turn that vLLM wrote, checked token by token. A wrong one is an IntegrityError."""

        def failure(problem: str) -> IntegrityError:
            return IntegrityError(f"session {request.session}: {problem}")

        written = answer.outputs[0]
        if written.finish_reason == "error":
            raise failure(written.stop_reason or "vLLM failed the request")
        if noted is None:
            raise failure("its log-probs and z are gone; send fewer requests at a time")
        width = self.config.model_config.hf_config.hidden_size
        z = np.frombuffer(noted["latents"], np.float32).reshape(-1, width)  # (N, H)
        latents = dict(zip(noted["positions"], z))  # index in the output → z (H,)
        writer = self._opened(request, sampling)
        for index, token in enumerate(written.token_ids):
            if writer.done:
                break
            due, origin = writer.forced() or (token, Origin.SAMPLED)
            if due != token:
                raise failure(f"token {index} is {token}, the open block asks for {due}")
            thought = latents.get(index) if origin is Origin.LATENT else None
            writer.push(token, noted["logprobs"][index], thought)
        if not writer.done:
            raise failure(f"vLLM ended the turn early ({written.finish_reason})")
        return writer.output

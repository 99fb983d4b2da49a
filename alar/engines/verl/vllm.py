"""vLLM with our plugin as verl's rollout server, as "alar_vllm". Not yet run on a GPU.

verl's vLLM server leaves hooks to subclasses: the worker extension, the engine's arguments, the
name. Our subclass adds the latent scheduler, forcing and records of `alar.engines.vllm`. New
weights, the projector's among them, come by verl's own route into `load_weights` of our model
class. Two things are verified without a GPU: `ServedEngine` agrees with the in-process engine, and
these classes fit the installed verl. verl names vLLM 0.24 to 0.26, but the plugin is verified on
0.30. `require_vllm` decides.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
from collections.abc import Sequence
from typing import Any

import numpy as np

from alar.engines.vllm.checks import engine_arguments, require_vllm
from alar.records import Origin, Trajectory
from alar.rl.summary import TrajectorySummary
from alar.rollout.codec import Codec
from alar.rollout.engine import Engine, Sampling, TurnOutput, TurnRequest, TurnWriter

NAN = float("nan")


class ServedEngine(Engine):
    """`Engine` on verl's LLM client. Every turn is one request, which is answered when it is done.

    `loop` is the event loop in which the client lives. The engine itself is used from another
    thread.
    """

    def __init__(self, client, codec: Codec, loop: asyncio.AbstractEventLoop):
        self.client, self.codec, self.loop = client, codec, loop
        self.keys = itertools.count()  # makes the records of a session distinct
        self.tasks: dict[int, Any] = {}  # session → the request under way
        self.answers: queue.Queue = queue.Queue()  # (request, sampling, its task), from the loop

    @property
    def busy(self) -> bool:
        return bool(self.tasks)

    def submit(self, requests: Sequence[TurnRequest], sampling: Sampling) -> None:
        for request in requests:
            opened(self.codec, request, sampling)  # refuses them all before any is sent
        for request in requests:
            task = asyncio.run_coroutine_threadsafe(self._ask(request, sampling), self.loop)
            self.tasks[request.session] = task
            task.add_done_callback(
                # `request=request` binds this turn of the loop, not its last.
                lambda done, request=request: self.answers.put((request, sampling, done))
            )

    def step(self) -> list[tuple[TurnRequest, TurnOutput]]:
        if not self.tasks:
            return []
        request, sampling, done = self.answers.get()
        if done.cancelled() or self.tasks.get(request.session) is not done:
            return []  # released in the meantime
        del self.tasks[request.session]
        return [(request, replay(self.codec, request, sampling, done.result()))]

    def release(self, sessions: Sequence[int]) -> None:
        for session in sessions:
            if task := self.tasks.pop(session, None):
                task.cancel()

    def latent_probabilities(self, trajectories: Sequence[Trajectory]) -> list[list[float]]:
        """p(latent | state) as far as the samples show it.

        For a latent turn it is the probability of the open tag `<latent>`, for text one minus the
        probability of `<think>`. The exact value would renormalise over the two tags. The two
        values differ by the probability of everything that is neither tag.
        """
        seen = (
            [_seen_probability(t, turn, self.codec) for turn in range(len(t.turns))]
            for t in trajectories
        )
        return [[p for p in row if p is not None] for row in seen]

    async def _ask(self, request: TurnRequest, sampling: Sampling):
        extra = {
            "latent_stops": list(sampling.stop),
            "latent_record": f"{id(self)}.{request.session}.{next(self.keys)}",
        }
        if not request.allow_latent:
            extra["latent_mode"] = "off"
        if request.forced:
            extra["latent_written"] = len(request.forced)
        return await self.client.generate(
            # verl sends equal ids to one server, whose prefix cache then knows the earlier turns.
            f"{id(self)}.{request.session}",
            prompt_ids=[*map(int, request.ids), *map(int, request.forced)],
            sampling_params={
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "max_tokens": max(1, sampling.max_new_tokens - len(request.forced)),
                "seed": request.seed if sampling.temperature > 0 else None,
                "ignore_eos": True,
                "stop_token_ids": [self.codec.tokenizer.eos_token_id],  # keeps EOS in the answer
                "detokenize": False,
                "logprobs": True,
                "extra_args": extra,
            },
        )


def opened(codec: Codec, request: TurnRequest, sampling: Sampling) -> TurnWriter:
    """The turn after its forced ids, which the prompt holds.

    Raises ValueError for forced ids that are no text, and for those that go on behind `<latent>`.
    """
    writer, reserved = TurnWriter(codec, request, sampling), codec.latent_token_id
    for token in map(int, request.forced):
        if not 0 <= token < reserved:
            raise ValueError(
                f"session {request.session}: the forced id {token} is no text; ids of text are 0 to"
                f" {reserved - 1}, and {reserved} is reserved for latent positions"
            )
        if writer.forced() != (token, Origin.FORCED):
            raise ValueError(
                f"session {request.session}: forced ids go on behind <latent>, but the server must"
                " compute the z of that block: let them end with the tag"
            )
        writer.push(token, NAN)
    return writer


def replay(codec: Codec, request: TurnRequest, sampling: Sampling, answer) -> TurnOutput:
    """The turn in verl's `TokenOutput`, with its origins.

    Raises RuntimeError if the turn breaks the rules of a block, ValueError as `opened`.
    """
    writer = opened(codec, request, sampling)
    latents = iter(answer.extra_fields["latents"])  # rows (H,) of the latent positions, in order
    for token, logprob in zip(answer.token_ids, answer.log_probs, strict=True):
        if writer.done:
            break
        due = writer.forced()  # (id, origin) or None
        if due is not None and due[0] != token:
            raise RuntimeError(
                f"session {request.session}: the server wrote {token}, the open block asks for"
                f" {due[0]}"
            )
        thought = next(latents, None) if due is not None and due[1] is Origin.LATENT else None
        writer.push(token, logprob, thought)
    if not writer.done:
        raise RuntimeError(
            f"session {request.session}: the server ended the turn early ({answer.stop_reason})"
        )
    return writer.output


def _seen_probability(trajectory: Trajectory, turn: int, codec: Codec) -> float | None:
    summary = TrajectorySummary.of(trajectory, codec)
    latent, (begin, end) = summary.modes[turn], summary.tags[turn]
    logprobs = trajectory.logprobs[begin:end]  # of the tag's pieces; NaN where the tag was forced
    if latent is None or not logprobs or np.isnan(logprobs).any():
        return None
    written = float(np.exp(np.sum(logprobs)))
    return written if latent else 1.0 - written


def server_classes():
    """verl's server and replica with our hooks.

    A function, so that importing this module needs neither vLLM nor Ray.
    """
    require_vllm()
    import ray
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

    class LatentVLLMServer(vLLMHttpServer):
        def _get_worker_extension_cls(self) -> str:
            return "alar.engines.verl.vllm_worker.LatentColocateWorker"

        def _preprocess_engine_kwargs(self, engine_kwargs: dict) -> None:
            super()._preprocess_engine_kwargs(engine_kwargs)
            ours = engine_arguments()
            del ours["worker_extension_cls"]  # the method above names it
            engine_kwargs.update(ours)

        async def generate(self, prompt_ids, sampling_params, request_id, **kwargs):
            """verl's answer, with the log-probs of our own records and with z (N, H) of the latent
            positions."""
            key = sampling_params["extra_args"]["latent_record"]
            answer = await super().generate(prompt_ids, sampling_params, request_id, **kwargs)
            record = (await self.engine.collective_rpc("latent_records", args=([key],)))[0][0]
            if record is None:
                raise RuntimeError(
                    f"request {request_id}: its record is gone; send fewer rollouts at a time"
                )
            width = self.model_config.hf_config.hidden_size
            answer.log_probs = record["logprobs"]
            answer.extra_fields["latents"] = np.frombuffer(record["latents"], np.float32).reshape(
                -1, width
            )
            return answer

    class LatentVLLMReplica(vLLMReplica):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.server_class = ray.remote(LatentVLLMServer)

        def _get_server_name_prefix(self) -> str:
            return "alar_vllm_"  # verl's weight updates look the server up by the rollout's name

    return LatentVLLMServer, LatentVLLMReplica

"""The in-process engine behind verl's rollout registry, as "alar_hf". Every training process has
one server.

A server holds a whole model and an `HFEngine`. The agent loop talks to it through `RemoteEngine`.
So a batch of rollouts makes the same calls, and gets the same numbers, as in one process. New
weights come by verl's route: the actor streams named tensors to the `BaseRollout` of its own
process, which hands them to the server in buckets of verl's own size. A tensor larger than a
bucket comes in parts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import ray
import torch
from verl.checkpoint_engine.base import TensorMeta, split_weight_chunks
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

from alar.engines.verl.worker import load_whole
from alar.model import load
from alar.records import Trajectory
from alar.rollout.codec import Codec
from alar.rollout.engine import Engine, Sampling, TurnOutput, TurnRequest
from alar.rollout.hf import HFEngine
from alar.rollout.modes import latent_probabilities


def server_name(rank: int) -> str:
    return f"alar_hf_server_{rank}"  # Ray's name of the actor, by which other processes find it


class HFServer:
    """A Ray actor. `step` works until a turn has ended, so that a turn costs one remote call."""

    def __init__(self, folder: str):
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        model, tokenizer = load(folder)
        self.engine = HFEngine(model, tokenizer)
        self.arrived: dict[str, torch.Tensor] = {}  # new weights, until the last bucket is here

    def submit(self, requests: list[TurnRequest], sampling: Sampling) -> None:
        self.engine.submit(requests, sampling)

    def step(self) -> list[tuple[int, TurnOutput]]:
        ended = []
        while self.engine.busy and not ended:
            ended = self.engine.step()
        # Without the requests: `RemoteEngine` has them, and their contexts are long.
        return [(request.session, output) for request, output in ended]

    def release(self, sessions: list[int]) -> None:
        self.engine.release(sessions)

    def latent_probabilities(self, trajectories: list[Trajectory]) -> list[list[float]]:
        return latent_probabilities(self.engine.model, self.engine.codec, trajectories)

    def receive(self, bucket: list[tuple[TensorMeta, torch.Tensor]], last: bool) -> None:
        """Parts of new weights, each as bytes. With the `last` bucket the model takes them over.

        Raises RuntimeError if the weights are then not those of the whole model.
        """
        for part, data in bucket:
            if part.name not in self.arrived:
                self.arrived[part.name] = torch.empty(part.shape, dtype=part.dtype)
            whole = self.arrived[part.name].view(-1).view(torch.uint8)
            whole[part.chunk_offset : part.chunk_offset + part.chunk_size] = data
        if last:
            weights, self.arrived = self.arrived, {}
            load_whole(self.engine.model, weights)
            self.engine.reset()  # its KV caches belong to the old weights

    def nothing(self, *args, **kwargs) -> None:
        """The answer to verl's calls to sleep, wake up, profile or clear caches.

        Those make room on a GPU that rollout and training share. Here they share none.
        """

    wake_up = sleep = abort_all_requests = resume_generation = nothing
    clear_kv_cache = release_kv_cache = resume_kv_cache = start_profile = stop_profile = nothing


class RemoteEngine(Engine):
    """`Engine` on an `HFServer`. Every call of it is one remote call."""

    def __init__(self, server, codec: Codec):
        self.server, self.codec = server, codec
        self.written: dict[int, TurnRequest] = {}  # session → the turn under way

    @property
    def busy(self) -> bool:
        return bool(self.written)

    def submit(self, requests: Sequence[TurnRequest], sampling: Sampling) -> None:
        if requests:
            ray.get(self.server.submit.remote(list(requests), sampling))
            self.written.update((request.session, request) for request in requests)

    def step(self) -> list[tuple[TurnRequest, TurnOutput]]:
        return [
            (self.written.pop(session), output)
            for session, output in ray.get(self.server.step.remote())
        ]

    def latent_probabilities(self, trajectories: Sequence[Trajectory]) -> list[list[float]]:
        return ray.get(self.server.latent_probabilities.remote(list(trajectories)))

    def release(self, sessions: Sequence[int]) -> None:
        for session in sessions:
            self.written.pop(session, None)
        if sessions:
            ray.get(self.server.release.remote(list(sessions)))


class HFReplica(RolloutReplica):
    async def launch_servers(self):
        actor = ray.remote(HFServer).options(name=server_name(self.replica_rank), num_cpus=0)
        self.servers = [actor.remote(self.model_config.path)]
        self._server_handle, self._server_address = self.servers[0], f"alar_hf:{self.replica_rank}"


class HFRollout(BaseRollout):
    """The training process's side: it takes the actor's weights and gives them to its server."""

    async def resume(self, tags):
        pass  # as `HFServer.nothing`

    async def release(self):
        pass  # as `HFServer.nothing`

    async def update_weights(self, weights, wire_format="named_tensors", **kwargs):
        if wire_format != "named_tensors" or kwargs.get("peft_config"):
            raise ValueError(
                "alar_hf takes whole weights: leave the checkpoint engine naive and"
                " model.lora.merge True"
            )
        limit = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20  # bytes
        server = ray.get_actor(server_name(torch.distributed.get_rank()))
        plain = ((name, tensor.detach().contiguous()) for name, tensor in weights)
        bucket, size = [], 0
        async for part, data in split_weight_chunks(plain, limit):
            if size + part.chunk_size > limit:
                await server.receive.remote(bucket, last=False)
                bucket, size = [], 0
            # A copy on the CPU: the actor goes on training its own tensor.
            bucket.append((part, data.cpu().clone()))
            size += part.chunk_size
        await server.receive.remote(bucket, last=True)


def _vllm_replica():
    from alar.engines.verl.vllm import server_classes

    return server_classes()[1]


# verl registers replicas by a method, and the training side in a plain table.
RolloutReplicaRegistry.register("alar_hf", lambda: HFReplica)
RolloutReplicaRegistry.register("alar_vllm", _vllm_replica)
_ROLLOUT_REGISTRY["alar_hf", "async"] = f"{__name__}.HFRollout"
_ROLLOUT_REGISTRY["alar_vllm", "async"] = "verl.workers.rollout.vllm_rollout.ServerAdapter"

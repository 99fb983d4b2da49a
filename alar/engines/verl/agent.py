"""The agent loop under verl: it runs `alar.rollout.loop` over a whole step and puts the
trajectories into verl's queue.

verl asks two things of an agent loop manager: take a batch of prompts, and put finished
trajectories into the TransferQueue. Each worker runs our loop over its prompts × group in a thread,
with the rows, seeds and forced modes of the single-process trainer. For each trajectory it reports
token ids, the mask of SAMPLED tokens, their behaviour log-probs, and a `TrajectorySummary` for
rewards, credit and metrics. It adds the z if the actor is to be fed the recorded ones.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorData
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

from alar.domains import catalogue
from alar.domains.prompts import EMBEDDED_PROMPT
from alar.engines.verl.data import question_of
from alar.engines.verl.rollout import RemoteEngine, server_name
from alar.engines.verl.settings import Job
from alar.engines.verl.vllm import ServedEngine
from alar.records import Environment, Origin, Question, Trajectory
from alar.rl.summary import TrajectorySummary
from alar.rollout.codec import Codec
from alar.rollout.engine import Sampling
from alar.rollout.loop import run, with_form

logger = logging.getLogger(__name__)


class LatentOutput(AgentLoopOutput):
    """One rollout. `latents` (N, H) travel to the actor as a multi-modal input beside the tokens.

    They never enter the queue's own fields.
    """

    latents: Any = None

    def as_dict(self) -> dict[str, Any]:
        fields = super().as_dict()
        fields.pop("latents", None)
        return fields


def to_output(
    trajectory: Trajectory,
    codec: Codec,
    *,
    step: int,
    p_latent: Sequence[float],
    cached: bool,
    explorer: bool = False,
) -> LatentOutput:
    """verl's form of a trajectory. Everything after the prompt is the response, with observations.

    The mask is 1 on SAMPLED tokens only. `p_latent` has one probability per turn, or none;
    `cached`: send z along.
    """
    trajectory.check()
    prompt = trajectory.turns[0].start  # tokens before the first turn
    origins, logprobs = trajectory.origins[prompt:], trajectory.logprobs[prompt:]
    note = asdict(TrajectorySummary.of(trajectory, codec, explorer=explorer)) | {
        "prompt_length": prompt,
        "p_latent": list(p_latent),
    }
    return LatentOutput(
        prompt_ids=trajectory.ids[:prompt],
        response_ids=trajectory.ids[prompt:],
        response_mask=[int(origin == Origin.SAMPLED) for origin in origins],
        response_logprobs=[
            # 0 in place of NaN, which would survive a product with the mask.
            lp if origin == Origin.SAMPLED else 0.0
            for origin, lp in zip(origins, logprobs)
        ],
        reward_score=float(trajectory.correct),
        num_turns=len(trajectory.turns),
        metrics=AgentLoopMetrics(),
        latents=torch.as_tensor(trajectory.latents) if cached and len(trajectory.latents) else None,
        extra_fields={
            # verl asks which weights wrote a rollout; here one step's weights wrote all of it.
            "min_global_steps": step,
            "max_global_steps": step,
            "alar": note,  # for training
            "reward_extra_info": {
                "acc": float(trajectory.correct),
                "alar": json.dumps(note),  # for validation
            },
        },
    )


class LatentAgentLoopWorker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):
    """verl's agent loop worker. `generate_sequences` returns at once, as verl expects; the batch
    is written in the background."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.job = Job.from_json(OmegaConf.to_container(self.config.alar, resolve=True))
        self.retrieval = dict(self.job.environment)  # settings of the environment alone
        self.domain = catalogue.of(self.retrieval.pop("domain", "search"))
        prompt = self.retrieval.pop("prompt", EMBEDDED_PROMPT)
        self.form = self.domain.prompted(prompt, self.tokenizer)
        self.environment: Environment | None = None  # made with the first prompts
        self.codec = Codec(
            self.tokenizer, self._latent("num_latent"), self._latent("latent_token_id"), self.form
        )

    def _latent(self, name: str):
        return getattr(self.model_config.hf_config, name)

    async def generate_sequences(
        self, batch: TensorDict, first_row: int = 0, server: int = 0
    ) -> None:
        validate = bool(batch["validate"]) if "validate" in batch else False
        prompts = [
            {key: _plain(value, i) for key, value in batch.items() if key != "validate"}
            for i in range(len(batch))
        ]
        task = asyncio.create_task(self._write(prompts, validate, first_row, server))
        self.background_tasks.add(task)  # asyncio keeps only a weak reference to a task
        task.add_done_callback(self.background_tasks.discard)

    async def _write(
        self, prompts: list[dict], validate: bool, first_row: int, server: int
    ) -> None:
        """Write the groups of some prompts. Mark each as finished, or as failed with the reason."""
        partition = "val" if validate else "train"
        for prompt in prompts:
            await tq.async_kv_put(
                key=prompt["uid"], partition_id=partition, tag={"status": "running"}
            )
        tag = {"status": "finished"}
        try:
            group = 1 if validate else self.job.strategy.sampler.group_size
            # Prompt-major: the rows of a group follow one another.
            questions = [
                question_of(prompt["extra_info"]) for prompt in prompts for _ in range(group)
            ]
            step = int(prompts[0]["global_steps"])
            self.events = asyncio.get_running_loop()  # `ServedEngine` sends its requests there
            outputs = await asyncio.to_thread(
                self._rollouts, questions, step, validate, first_row * group, server
            )
            for index, output in enumerate(outputs):
                prompt = prompts[index // group]
                await self._agent_loop_postprocess(
                    output, validate, session_id=index % group, **prompt
                )
        except Exception as error:
            # Whatever it is, the trainer reads it from the queue and stops.
            tag = {"status": "failure", "error": f"{type(error).__name__}: {error}"}
            logger.exception("the rollouts of a batch failed")
        for prompt in prompts:
            await tq.async_kv_put(key=prompt["uid"], partition_id=partition, tag=tag)

    def alive(self) -> bool:
        return True  # the answer itself is the news, see `LatentReplayBuffer.watched`

    def _rollouts(
        self, questions: list[Question], step: int, validate: bool, first_row: int, server: int
    ) -> list[LatentOutput]:
        job, engine = self.job, self._engine(server)
        reward, sampler = job.strategy.reward, job.strategy.sampler
        if self.environment is None:
            plain = self.domain.environment(questions, **self.retrieval)
            self.environment = reward.environment(with_form(plain, self.form))
        if validate:
            temperature, modes, seed, first_row = 0.0, reward.modes, 0, 0  # greedy
        else:
            temperature, seed = job.rl.temperature, sampler.rollout_seed(step)
            modes = sampler.modes(step) if reward.modes == "free" else "off"
        trajectories = run(
            questions,
            engine,
            self.environment,
            Sampling(job.max_new_tokens, temperature, stop=self.environment.stop),
            modes=modes,
            max_turns=job.max_turns,
            batch_size=job.batch_size,
            seed=seed,
            first_row=first_row,
        )
        rows = range(len(trajectories))
        explorer = [not validate and sampler.explores(first_row + row) for row in rows]
        # Row → p(latent | state) of each turn, for the rows whose modes the policy chose itself.
        p_latent: dict[int, list[float]] = {}
        free = [row for row in rows if not explorer[row]]
        if free and not validate and reward.modes == "free":
            found = engine.latent_probabilities([trajectories[row] for row in free])
            p_latent = dict(zip(free, found))
        return [
            to_output(
                trajectory,
                self.codec,
                step=step,
                p_latent=p_latent.get(row, ()),
                cached=job.rl.latents == "cached",
                explorer=explorer[row],
            )
            for row, trajectory in enumerate(trajectories)
        ]

    def _engine(self, server: int) -> RemoteEngine | ServedEngine:
        if self.job.rollout == "alar_hf":
            return RemoteEngine(ray.get_actor(server_name(server)), self.codec)
        return ServedEngine(self.llm_client, self.codec, self.events)

    def _compute_multi_modal_inputs(self, output, input_ids) -> dict[str, torch.Tensor]:
        latents = getattr(output, "latents", None)
        return {} if latents is None else {"latents": latents}


class LatentAgentLoopManager(AgentLoopManagerTQ):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(LatentAgentLoopWorker)

    def generate_sequences(self, prompts: TensorDict) -> None:
        # There is one HF server per training process; the workers share them out in turn.
        servers = self.config.trainer.nnodes * self.config.trainer.n_gpus_per_node
        row, calls = 0, []
        for number, (worker, chunk) in enumerate(
            zip(self.agent_loop_workers, prompts.chunk(len(self.agent_loop_workers)))
        ):
            calls.append(worker.generate_sequences.remote(chunk, row, number % servers))
            row += len(chunk)  # the first prompt of the next worker, so that seeds do not repeat
        ray.get(calls)


def _plain(value: Any, index: int) -> Any:
    """The value of prompt `index` in a batch's column, without tensordict's wrappers."""
    if isinstance(value, torch.Tensor):
        return value[index]
    if isinstance(value, NonTensorData):
        return value.data
    item = value[index]
    return getattr(item, "data", item)

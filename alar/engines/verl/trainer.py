"""verl's synchronous trainer with the strategy's reward and credit, and our metrics.

`_compute_advantage` sees all trajectories of a step and the trainer's own step number, so d_t (the
weight of the diversity reward) goes on correctly after a resume. verl's own GRPO advantages are not
used. They are one number per trajectory, and in float32 the rounding of equal rewards becomes an
advantage of up to 0.1. Padding rows get no reward and no advantage.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from pathlib import Path

import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorStack
from verl.trainer.main_ppo import TaskRunnerV1
from verl.trainer.ppo.v1 import PPOTrainerSync
from verl.utils.logging_utils import configure_verl_logging

from alar.engines.verl.settings import Job, refuse_wrong
from alar.engines.verl.worker import LatentActorRolloutRefWorker
from alar.files import append_jsonl, rewind_jsonl, write_json
from alar.rl.config import learning_rate_at
from alar.rl.summary import TrajectorySummary, rollout_metrics, validation_metrics

ROW_OF = {  # name in metrics.jsonl → verl's name
    "loss": "actor/pg_loss",
    "kl": "actor/kl_loss",
    "clip_fraction": "actor/pg_clipfrac",
    "ratio_error": "actor/ratio_error",
    "gradient_norm": "actor/grad_norm",
}


class VerlARGRPO(PPOTrainerSync):
    def __init__(self, config):
        refuse_wrong(config)
        super().__init__(config)
        self.job = Job.from_json(OmegaConf.to_container(config.alar, resolve=True))
        self.row: dict = {}  # what this step adds to metrics.jsonl
        self.started = time.perf_counter()

    def _init_resource_pool_mgr(self):
        super()._init_resource_pool_mgr()
        for role in self.role_worker_mapping:
            self.role_worker_mapping[role] = ray.remote(LatentActorRolloutRefWorker)

    def _load_checkpoint(self):
        super()._load_checkpoint()
        # The steps after the checkpoint are done again and would otherwise have two rows.
        rewind_jsonl(self.job.metrics, lambda row: row["step"] <= self.global_steps)
        self._keep_best([entry for entry in self._best() if entry["step"] <= self.global_steps])

    def on_train_begin(self):
        super().on_train_begin()
        self.replay_buffer.watched = self.agent_loop_manager.agent_loop_workers

    def on_step_begin(self):
        super().on_step_begin()
        self.row, self.started = {}, time.perf_counter()

    def _fetch_one_gen_batch(self) -> TensorDict:
        batch = super()._fetch_one_gen_batch()
        infos = [getattr(info, "data", info) for info in batch["extra_info"]]
        # Zeros in front, so that sorting these ids as text gives the order of the file.
        batch["uid"] = NonTensorStack(*(f"{info['index']:08d}" for info in infos))
        return batch

    def _compute_advantage(self, batch, metrics):
        """Write `rm_scores`, `advantages` and `returns` of a step's rollouts.

        Each has one row (T,) per response. `rm_scores` has the shaped reward on the last token.
        """
        strategy, step, total = self.job.strategy, self.global_steps, self.job.rl.steps
        fields = ["uid", "extra_fields", "response_mask"]
        data = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=fields
        )
        uids, extras = data.pop("uid").tolist(), data.pop("extra_fields").tolist()  # one a row
        masks = list(data["response_mask"].unbind())  # of each row (T,), 1 on SAMPLED
        # verl pads a batch so that it divides over the ranks. `real` are the rows that are
        # no padding; `notes` and all that is made from it have one entry for each of these.
        real = [i for i, tag in enumerate(batch.tags) if not tag.get("is_padding", False)]
        notes, groups = [extras[i]["alar"] for i in real], [uids[i] for i in real]
        prompts = [note["prompt_length"] for note in notes]  # tokens
        summaries = [summary_of(note) for note in notes]
        rewards = strategy.reward.rewards(summaries, groups, step, total)
        lengths = [prompt + len(masks[i]) for prompt, i in zip(prompts, real)]
        advantages = strategy.credit.advantages(summaries, lengths, rewards, groups, step, total)
        # Whether each rollout carries loss; a sampler may drop whole groups.
        trained = strategy.sampler.kept(rewards, groups)
        scores = [torch.zeros(len(mask)) for mask in masks]
        tokens = [torch.zeros(len(mask)) for mask in masks]
        for place, i in enumerate(real):
            scores[i][-1] = rewards[place]
            # Advantages cover the whole trajectory, verl's rows only the response.
            tokens[i] = torch.tensor(advantages[place][prompts[place] :]) * masks[i]
            if not trained[place]:
                masks[i] = torch.zeros_like(masks[i])  # nor in the loss's count of tokens
        # There is no critic, so returns are never read; verl's metrics ask for them.
        written = {"rm_scores": scores, "advantages": tokens, "returns": tokens}
        if not all(trained):
            written |= {"response_mask": masks, "loss_mask": masks}
        batch = tq.kv_batch_put(
            keys=batch.keys,
            partition_id=batch.partition_id,
            fields=TensorDict(
                {name: _nested(rows) for name, rows in written.items()}, batch_size=len(masks)
            ),
        )
        p_latent = [note["p_latent"] for note in notes if note["p_latent"]]
        self.row |= rollout_metrics(
            summaries, p_latent, rewards, groups, trained, step=step, total_steps=total
        )
        self.row["learning_rate"] = learning_rate_at(step - 1, self.job.rl)  # updates done before
        self.row["trained_tokens"] = sum(length for length, used in zip(lengths, trained) if used)
        self.nothing_to_learn = not any(trained)
        metrics.update({f"alar/{name}": value for name, value in self.row.items()})
        return batch

    def _update_actor(self, batch, metrics):
        if self.nothing_to_learn:  # no group was kept: a step without an update
            return batch
        return super()._update_actor(batch, metrics)

    def _val_metrics_update(
        self, data_sources, sample_uids, reward_extra_infos_dict, sample_turns, **kwargs
    ):
        """Add the validation to the row of metrics.jsonl, and export the best policy so far."""
        # JSON texts. verl would average what is left here as numbers.
        notes = reward_extra_infos_dict.pop("alar")
        reward = self.job.strategy.reward
        summaries = [summary_of(json.loads(note)) for note in notes]
        checked = validation_metrics(summaries, reward.validation(summaries, self.job.rl.steps))
        self.row |= checked
        best, found = self._best(), checked["validation_reward"]
        selects = reward.selects and self.job.rl.returned_weights == "best"
        if selects and (not best or found > best[-1]["reward"]):
            self.actor_rollout_wg.export_checkpoint(str(self._best_folder(self.global_steps)))
            # The one before stays: a resume may go back to a step before this one.
            self._keep_best([*best[-1:], {"step": self.global_steps, "reward": found}])
        metrics = super()._val_metrics_update(
            data_sources, sample_uids, reward_extra_infos_dict, sample_turns, **kwargs
        )
        return metrics | {f"alar/{name}": value for name, value in checked.items()}

    def _compute_metrics(self, batch, metrics, timing_raw, global_steps, epoch):
        super()._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)
        # NaN in a step without an update.
        found = {ours: float(metrics.get(theirs, math.nan)) for ours, theirs in ROW_OF.items()}
        seconds = {"seconds": round(time.perf_counter() - self.started, 2)}
        append_jsonl(self.job.metrics, self.row | found | seconds)

    def finish(self) -> None:
        """Make the selected policy, or without one the last, the job's checkpoint folder."""
        if best := self._best():
            self._best_folder(best[-1]["step"]).rename(self.job.checkpoint)
        else:
            self.actor_rollout_wg.export_checkpoint(str(self.job.checkpoint))

    def _best(self) -> list[dict]:
        """Step and reward of the last two policies that were the best so far.

        Two, because a resumed job may go back to a step before the last one.
        """
        path = self.job.state / "best.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []

    def _best_folder(self, step: int) -> Path:
        return self.job.state / f"best-{step}"

    def _keep_best(self, entries: list[dict]) -> None:
        dropped = {entry["step"] for entry in self._best()} - {entry["step"] for entry in entries}
        write_json(self.job.state / "best.json", entries)  # first, so that it names no lost folder
        for step in dropped:
            shutil.rmtree(self._best_folder(step), ignore_errors=True)


def summary_of(note: dict) -> TrajectorySummary:
    """The `TrajectorySummary` in an agent loop worker's note of a rollout."""
    return TrajectorySummary(
        **{name: _tuples(note[name]) for name in TrajectorySummary.__dataclass_fields__}
    )


def _tuples(value):
    # JSON and verl's queue turn tuples into lists.
    return tuple(_tuples(item) for item in value) if isinstance(value, list | tuple) else value


def _nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


class LatentTaskRunner(TaskRunnerV1.__ray_metadata__.modified_class):
    """verl's task runner with our trainer. It also writes the checkpoint folder at the end."""

    def run(self, config):
        configure_verl_logging()
        OmegaConf.resolve(config)
        config.transfer_queue.enable = True
        self.config = config
        tq.init(config.transfer_queue)
        try:
            self.trainer = VerlARGRPO(config)
            self.trainer.init()
            # A job that was stopped after its last step only has to finish.
            if self.trainer.global_steps < config.trainer.total_training_steps:
                self.init_agent_loop_manager()
                self.trainer.fit(self.agent_loop_manager)
            self.trainer.finish()
        finally:
            tq.close()

"""One `Job` for verl, and verl's configuration made from it.

`hydra_values` is a plain mapping from verl's dotted keys to values, so that a test or a reader can
see everything that we set. `compose` lays it over verl's own defaults. `Job.overrides` comes last.
It may change memory, parallelism and logging; `refuse_wrong` refuses what would change the
algorithm.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from alar.files import write_json
from alar.rl.config import RLConfig
from alar.rl.strategy import ClippedLoss, Reward, Strategy

TESTED_VERL = "0.9.1"
INSTALL = "python run_all.py --install engines"
ROOM = "alar.engines.verl"
VENDOR = "alar"  # verl chooses an engine by device and vendor; ours is registered under this one
GIGABYTE = 2**30
ROLLOUTS = ("alar_hf", "alar_vllm")
COMPUTED = {"float32": "fp32", "bfloat16": "bf16"}  # a checkpoint's dtype → verl's word for it


class VerlUnavailable(RuntimeError):
    """verl is not installed, or not in the version that this integration was verified on."""


def require_verl() -> None:
    """Raise VerlUnavailable, with the command that installs it, unless the tested verl is here."""
    try:
        found = importlib.metadata.version("verl")
    except importlib.metadata.PackageNotFoundError:
        raise VerlUnavailable(
            f"verl is not installed. Install it with: {INSTALL} (or set rl.trainer=single)"
        ) from None
    if found != TESTED_VERL:
        raise VerlUnavailable(
            f"verl {found} is installed; verified is {TESTED_VERL}. Install it with: {INSTALL}"
        )
    if importlib.util.find_spec("ray") is None:
        raise VerlUnavailable(f"ray is not installed, which verl needs. Install it with: {INSTALL}")


@dataclass(frozen=True)
class Job:
    """All that verl's processes need to know, as `job.json` holds it.

    `environment` gives the domain, its prompt and the settings of its environment. `rollout` is
    "alar_hf", the in-process engine on CPUs, or "alar_vllm". `overrides` are keys of verl's own
    configuration. Raises ValueError for a job that verl cannot run.
    """

    model: str  # the checkpoint folder that the policy starts from
    folder: str  # everything that the job writes
    prompts: str  # Parquet files, see `alar.engines.verl.data`
    validation: str
    rl: RLConfig
    strategy: Strategy
    environment: dict[str, Any] = field(default_factory=lambda: {"domain": "search"})
    max_turns: int = 6
    max_new_tokens: int = 128  # per turn
    batch_size: int = 256  # trajectories at once
    gpus: int = 0  # per node; 0: train in CPU processes
    processes: int = 1  # how many CPU processes, if there are no GPUs
    rollout: str = "alar_hf"
    threads: int = 1  # of each CPU process
    overrides: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        self.rl.refuse_inconsistencies()
        if self.rollout not in ROLLOUTS:
            raise ValueError(f"rollout {self.rollout!r}: expected one of {', '.join(ROLLOUTS)}")
        if self.rollout == "alar_hf" and self.rl.tensor_parallel > 1:
            raise ValueError(
                "rollout alar_hf serves a whole model per process; set rl.tensor_parallel to 1, or"
                " use alar_vllm"
            )
        if self.rollout == "alar_vllm" and self.gpus == 0:
            raise ValueError(
                "rollout alar_vllm needs GPUs: verl moves weights to vLLM through their memory; use"
                " alar_hf"
            )
        _refuse_strategy(self.strategy)

    @property
    def workers(self) -> int:
        """Training processes per node."""
        return self.gpus or self.processes

    @property
    def metrics(self) -> Path:
        return Path(self.folder) / "metrics.jsonl"

    @property
    def state(self) -> Path:
        """The folder of verl's own checkpoints, from which a stopped job goes on."""
        return Path(self.folder) / "state"

    @property
    def checkpoint(self) -> Path:
        """The checkpoint folder that the job ends with."""
        return Path(self.folder) / "checkpoint"

    def to_json(self) -> dict[str, Any]:
        plain = {one.name: getattr(self, one.name) for one in fields(self)}
        return plain | {"rl": self.rl.model_dump(), "strategy": self.strategy.to_json()}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Job:
        rl, strategy = RLConfig(**plain["rl"]), Strategy.from_json(plain["strategy"])
        return cls(**{**plain, "rl": rl, "strategy": strategy})

    def save(self) -> Path:
        path = Path(self.folder) / "job.json"
        write_json(path, self.to_json())
        return path

    @classmethod
    def read(cls, path: str | Path) -> Job:
        return cls.from_json(json.loads(Path(path).read_text(encoding="utf-8")))


def _refuse_strategy(strategy: Strategy) -> None:
    """Raise ValueError for a strategy that only the single-process trainer can follow."""
    single = "; set rl.trainer to single"
    if type(strategy.reward).scorer is not Reward.scorer:
        raise ValueError("verl: this reward scores with a model of its own process" + single)
    if strategy.sampler.writer != "policy":
        raise ValueError(
            "verl: only the policy itself writes trajectories, not a reference" + single
        )
    if type(strategy.loss) is not ClippedLoss:
        raise ValueError("verl: its own clipped loss is the only one" + single)


def environment_variables(job: Job) -> dict[str, str]:
    """verl's own switches for the processes of a job. They name code, never hyper-parameters."""
    variables = {
        "VERL_ENGINE_VENDOR": VENDOR,
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    if job.gpus == 0:
        variables |= {
            "VERL_PLATFORM": "cpu",
            "VERL_USE_EXTERNAL_MODULES": f"{ROOM}.cpu",
            "OMP_NUM_THREADS": str(job.threads),
            # Seconds. Ray and verl take long to import on a busy machine.
            "RAY_worker_register_timeout_seconds": "600",
            "RAY_raylet_start_wait_time_s": "600",
            # Ray's own agent has 30 seconds to start. A worker for each CPU would start beside it.
            "RAY_prestart_worker_first_driver": "0",
        }
    return variables


def hydra_values(job: Job) -> dict[str, Any]:
    """verl's configuration key → value.

    The batch of a step is one mini-batch, cut into `gradient_accumulation` micro-batches. Raises
    ValueError if the rollouts of a step do not divide over the processes.
    """
    # Here, because they bring transformers along.
    from alar.model.dtype import stored_dtype
    from alar.train.supervised import LORA_TARGETS

    rl, sampler, loss = job.rl, job.strategy.sampler, job.strategy.loss
    world = job.workers * rl.nodes  # training processes in all
    rollouts = sampler.prompts_per_step * sampler.group_size
    if rollouts % world:
        raise ValueError(
            f"{rollouts} rollouts per step do not divide over {world} processes: change"
            " rl.prompts_per_step"
        )
    # Rollouts that one process takes in one micro-batch, rounded up.
    micro = max(1, -(-rollouts // world // rl.gradient_accumulation))
    on_gpu = job.gpus > 0
    dtype = stored_dtype(job.model)  # as every other engine does
    if dtype not in COMPUTED:
        raise ValueError(
            f"{job.model} is stored in {dtype}; verl trains what is stored in"
            f" {' or '.join(COMPUTED)}: set model.dtype and run notebook 01 again"
        )
    root = "actor_rollout_ref"
    actor, rollout, model, ref = f"{root}.actor", f"{root}.rollout", f"{root}.model", f"{root}.ref"
    precision = {"param_dtype": COMPUTED[dtype], "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    longest = job.max_turns * job.max_new_tokens  # tokens; verl's limit of a response
    values = {
        "algorithm.adv_estimator": "grpo",
        "algorithm.use_kl_in_reward": False,
        # The ratio is taken to the log-probs noted while sampling; verl computes none anew.
        "algorithm.rollout_correction.bypass_mode": True,
        "data.train_files": job.prompts,
        "data.val_files": job.validation,
        "data.train_batch_size": sampler.prompts_per_step,
        "data.shuffle": False,  # the file stands in the order of the steps
        "data.validation_shuffle": False,
        "data.filter_overlong_prompts": False,
        "data.dataloader_num_workers": 0,
        "data.max_response_length": longest,
        "data.seed": sampler.seed,
        f"{model}.path": job.model,
        f"{model}.external_lib": f"{ROOM}.external",
        f"{model}.use_remove_padding": True,
        f"{model}.enable_gradient_checkpointing": on_gpu,  # saves GPU memory, costs time on CPUs
        # verl applies only `model_config` to the checkpoint's config. Our engine reads `alar`.
        f"{model}.override_config": {
            "attn_implementation": "sdpa",
            "model_config": {},
            "alar": {"rl": rl.model_dump()},
        },
        f"{model}.lora_rank": rl.lora_rank if rl.trainable == "lora" else 0,
        f"{model}.lora_alpha": rl.lora_alpha,
        f"{model}.target_modules": list(LORA_TARGETS),
        f"{model}.lora.merge": True,  # the rollout receives whole weights, the projector among them
        f"{actor}.strategy": "fsdp2",
        f"{actor}.ppo_mini_batch_size": sampler.prompts_per_step,  # the whole step: one update
        f"{actor}.ppo_micro_batch_size_per_gpu": micro,
        f"{actor}.use_dynamic_bsz": False,
        f"{actor}.use_torch_compile": False,
        f"{actor}.loss_agg_mode": "token-mean",
        f"{actor}.clip_ratio_low": loss.clip_low,
        f"{actor}.clip_ratio_high": loss.clip_high,
        f"{actor}.clip_ratio_c": 3.0,  # verl's own default, for dual clipping
        f"{actor}.policy_loss.loss_mode": "alar",  # `loss.alar_loss`
        f"{actor}.entropy_coeff": 0.0,
        f"{actor}.use_kl_loss": rl.kl_coefficient > 0,
        f"{actor}.kl_loss_coef": rl.kl_coefficient,
        f"{actor}.kl_loss_type": "low_var_kl",  # the low-variance estimator of AR-GRPO
        f"{actor}.optim.lr": rl.learning_rate,
        f"{actor}.optim.weight_decay": rl.weight_decay,
        f"{actor}.optim.clip_grad": 1.0,
        # Loaded in float32: these are the master weights, which AdamW steps on. They compute, and
        # are rolled out and exported, in the dtype of the checkpoint.
        f"{actor}.fsdp_config.model_dtype": "fp32",
        f"{actor}.fsdp_config.use_torch_compile": False,
        f"{actor}.fsdp_config.mixed_precision": dict(precision),
        f"{ref}.log_prob_micro_batch_size_per_gpu": micro,
        f"{ref}.log_prob_use_dynamic_bsz": False,
        f"{ref}.fsdp_config.model_dtype": "fp32",
        f"{ref}.fsdp_config.mixed_precision": dict(precision),
        f"{ref}.use_torch_compile": False,
        f"{rollout}.name": job.rollout,
        f"{rollout}.dtype": dtype,
        f"{rollout}.n": sampler.group_size,
        f"{rollout}.val_kwargs.n": 1,
        f"{rollout}.temperature": rl.temperature,
        f"{rollout}.calculate_log_probs": True,
        f"{rollout}.response_length": longest,
        f"{rollout}.tensor_model_parallel_size": rl.tensor_parallel,
        f"{rollout}.free_cache_engine": on_gpu,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": micro,
        f"{rollout}.log_prob_use_dynamic_bsz": False,
        # One worker for every HF server, so that the servers work at the same time.
        f"{rollout}.agent.num_workers": world if job.rollout == "alar_hf" else rl.nodes,
        f"{rollout}.agent.agent_loop_manager_class": f"{ROOM}.agent.LatentAgentLoopManager",
        "reward.num_workers": 0,  # the agent loop judges answers itself
        "trainer.device": "cuda" if on_gpu else "cpu",
        "trainer.use_v1": True,
        "trainer.v1.trainer_mode": "sync",
        "trainer.v1.sampler.custom_sampler": {
            "path": f"pkg://{ROOM}.buffer",
            "name": "LatentReplayBuffer",
        },
        "trainer.n_gpus_per_node": job.workers,
        "trainer.nnodes": rl.nodes,
        "trainer.total_training_steps": rl.steps,
        "trainer.total_epochs": 1,
        "trainer.save_freq": rl.checkpoint_every,
        "trainer.test_freq": rl.validation_every or -1,  # −1: never
        "trainer.val_before_train": False,
        "trainer.max_actor_ckpt_to_keep": 2,
        "trainer.resume_mode": "auto",
        "trainer.default_local_dir": str(job.state),
        "trainer.logger": ["console"],
        "trainer.project_name": "alar",
        "trainer.experiment_name": Path(job.folder).name,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": (
            2 * rl.nodes if on_gpu else 1
        ),
        "alar": job.to_json(),
        "ray_kwargs.ray_init.runtime_env": {"env_vars": environment_variables(job)},
    }
    if not on_gpu:
        values |= {
            # Logical CPUs: each of verl's controllers holds one.
            "ray_kwargs.ray_init.num_cpus": 8 + 4 * world,
            "ray_kwargs.ray_init.num_gpus": world,  # logical as well: one per training process
            "ray_kwargs.ray_init.include_dashboard": False,
            "ray_kwargs.ray_init.object_store_memory": GIGABYTE // 4,  # bytes
        }
    return values | job.overrides


def compose(job: Job):
    """verl's configuration of a job. Raises ValueError for wrong overrides. Needs verl."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module
    from omegaconf import OmegaConf

    with initialize_config_module("verl.trainer.config", version_base=None):
        config = hydra_compose("ppo_trainer")
    OmegaConf.set_struct(config, False)  # so that keys which verl does not know can be added
    for key, value in hydra_values(job).items():
        # A mapping replaces verl's own; merging would keep those of its keys that we leave out.
        OmegaConf.update(config, key, value, merge=not isinstance(value, Mapping), force_add=True)
    refuse_wrong(config)
    return config


def refuse_wrong(config) -> None:
    """Raise ValueError for settings that would give wrong results, and name the remedy of each."""
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    cut = [part.get("ulysses_sequence_parallel_size", 1) for part in (actor, actor.fsdp_config)]
    mode, batch = config.trainer.v1.trainer_mode, config.data.train_batch_size
    sync = config.actor_rollout_ref.rollout.get("checkpoint_engine", {})
    bucket = sync.get("update_weights_bucket_megabytes", 1)
    one_update = actor.ppo_mini_batch_size == batch and actor.get("ppo_epochs", 1) == 1
    wrong = {  # problem and remedy → whether it is present
        "sequence parallelism cuts latent blocks: set ulysses_sequence_parallel_size to 1, use more"
        " processes": max(cut) > 1,
        f"actor.strategy {actor.strategy}: the latent engine is FSDP2's; set it to fsdp2": (
            actor.strategy != "fsdp2"
        ),
        "model.use_fused_kernels replaces the latent model's forward; set it to False": (
            model.get("use_fused_kernels", False)
        ),
        "model.use_remove_padding must be True: the engine packs sequences and numbers them": (
            not model.use_remove_padding
        ),
        f"trainer_mode {mode}: groups are rewarded step by step; set it to sync": mode != "sync",
        "algorithm.use_kl_in_reward would change the shaped reward; use actor.use_kl_loss": (
            config.algorithm.use_kl_in_reward
        ),
        "one update per step: set actor.ppo_mini_batch_size to data.train_batch_size and ppo_epochs"
        " to 1": not one_update,
        f"checkpoint_engine.update_weights_bucket_megabytes is {bucket}: new weights travel in"
        " buckets of this size; set it to a whole number of at least 1": (
            type(bucket) is not int or bucket < 1
        ),
    }
    problems = [problem for problem, found in wrong.items() if found]
    if problems:
        raise ValueError("this job cannot run under verl:\n- " + "\n- ".join(problems))

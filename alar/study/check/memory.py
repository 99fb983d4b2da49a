"""What each stage holds on one GPU, on the host and on the disk.

Training, AR-GRPO's update and the passes that score tokens are measured: one step at its true
shapes and dtypes on fake tensors (`alar.study.check.steps`). Rollouts are estimated, because their
tokens cannot be drawn without weights: weights, and the KV cache of the longest trajectories that
the parameters allow. A GPU must also have room for what no tracker sees (`UNSEEN`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from alar.methods.config import SelfTraining, Tokenskip
from alar.rollout.cache import CUDA_SHARE, HOST_BUDGET
from alar.study.check.sizes import Size
from alar.study.check.steps import MeasuredStep, peak_bytes
from alar.study.params.sections import Experiment

GIB = 2**30
PROMPT_TOKENS = {"search": 300, "tool": 3000}  # instruction and question; in tool also schemas
PASSAGE_TOKENS = 150  # 500 characters and a title
UNSEEN = 2 * GIB  # CUDA's context, workspaces of kernels, NCCL's buffers, the allocator's rounding
VLLM_SHARE = 0.92  # of a GPU that vLLM takes by default
VLLM_SHARE_IN_VERL = 0.5  # verl's own default: the trainer stays beside it
VLLM_WORK = 4 * GIB  # activations of one step, logits, CUDA graphs
SYNC = 4 * GIB  # verl's bucket of new weights, filled and being read
KEPT_STATES = 2  # of verl's own checkpoints

# stage → the parameter to lower if the stage does not fit into memory
BATCHES = {
    "03": "aasd.batch_size",
    "04": "warmup.batch_size",
    "12": "tokenskip.batch_size",
    "13": "self_training.batch_size",
}


@dataclass(frozen=True)
class Machine:
    """GPUs of one node; 0: the host itself computes, with `memory` bytes."""

    gpus: int
    memory: int  # bytes of each GPU, or of the host

    def __str__(self) -> str:
        return f"{self.gpus} × {gib(self.memory)} GiB" if self.gpus else f"{gib(self.memory)} GiB"


@dataclass(frozen=True)
class Need:
    """Peak of one stage on each GPU: `bytes`, of which the tracker has seen all ("measured") or
    that are computed from sizes ("estimated")."""

    stage: str
    bytes: int
    source: str
    capacity: int  # bytes that the stage may take
    remedy: str  # what to change if it does not fit

    @property
    def fits(self) -> bool:
        return self.bytes <= self.capacity


def gib(count: float) -> str:
    """Bytes in GiB, three figures at most: 123, 12.3, 0.45, 0.001."""
    value = count / GIB
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def written_tokens(experiment: Experiment, *, teacher: bool = False) -> int:
    """Tokens that the policy may write in one trajectory, or the teacher within its own limits."""
    turns, tokens = experiment.rollout.max_turns, experiment.rollout.max_new_tokens
    if teacher:
        turns = experiment.teacher.max_turns or turns
        tokens = experiment.teacher.max_new_tokens or tokens
    return turns * tokens


def observed_tokens(experiment: Experiment, domain: str, *, teacher: bool = False) -> int:
    """Tokens of the passages that one trajectory may read."""
    if domain != "search":
        return 0
    turns = experiment.rollout.max_turns
    if teacher:
        turns = experiment.teacher.max_turns or turns
    # The last turn answers and observes nothing.
    return (turns - 1) * experiment.retrieval.topk * PASSAGE_TOKENS


def context_tokens(
    experiment: Experiment, size: Size, domain: str, *, teacher: bool = False
) -> int:
    """Tokens of the longest trajectory that the parameters and the model's positions allow."""
    written = written_tokens(experiment, teacher=teacher)
    observed = observed_tokens(experiment, domain, teacher=teacher)
    return min(size.positions, PROMPT_TOKENS[domain] + written + observed)


def dtype_of(experiment: Experiment, machine: Machine) -> str:
    """What `model.dtype` will mean on that machine."""
    named = experiment.model.dtype
    if named != "auto":
        return named
    return "bfloat16" if machine.gpus else "float32"


def itemsize(experiment: Experiment, machine: Machine) -> int:
    return 4 if dtype_of(experiment, machine) == "float32" else 2


def needs(
    experiment: Experiment, size: Size, domain: str, stages: frozenset[str], machine: Machine
) -> Iterator[Need]:
    """What the given stages ("02", …) hold on each GPU of a machine."""
    tokens = context_tokens(experiment, size, domain)
    written = min(written_tokens(experiment), tokens - 2)
    base = MeasuredStep(
        family=size.family,
        config=size.config,
        dtype=dtype_of(experiment, machine),
        rows=1,
        tokens=tokens,
        scored=written,
    )
    # Traces, and what is trained on them, are as long as the teacher may write.
    traced = context_tokens(experiment, size, domain, teacher=True)
    learnt = min(written_tokens(experiment, teacher=True), traced - 2)
    trace = replace(base, tokens=traced, scored=learnt)
    room = machine.memory - (UNSEEN if machine.gpus else 0)
    if "02" in stages:
        yield _rollouts("02 rollouts", experiment, size, traced, machine)
    if "06" in stages:
        yield _rollouts("06 rollouts", experiment, size, tokens, machine)
    supervised = {"03_aasd": experiment.aasd, "04_mode_warmup": experiment.warmup}
    for name, section in supervised.items():
        if name[:2] not in stages:
            continue
        yield _supervised(name, section, trace, room)
        if machine.gpus > 1:
            yield _supervised(f"{name}, torchrun", section, trace, room, machine.gpus)
    sampled = {"12_tokenskip": experiment.tokenskip, "13_self_training": experiment.self_training}
    for name, section in sampled.items():
        if name[:2] in stages:
            yield from _sampled_and_trained(name, section, experiment, size, base, machine)
    if "05" in stages:
        yield from _reinforcement(experiment, size, base, machine)
    if "06" in stages:  # p(latent): one long trajectory at a time
        scored = replace(base, scored=2)
        yield Need("06 p(latent)", peak_bytes(scored), "measured", room, "a larger GPU")


def _rollouts(
    stage: str, experiment: Experiment, size: Size, tokens: int, machine: Machine
) -> Need:
    """Weights and KV cache. vLLM can work with one trajectory at a time; the engine in this process
    has a budget for its cache."""
    each = itemsize(experiment, machine)
    weights, trajectory = each * size.parameters, each * size.kv_values * tokens
    if experiment.rollout.engine == "vllm":
        room = int(VLLM_SHARE * machine.memory)
        remedy = "lower rollout.max_turns or rollout.max_new_tokens"
        return Need(stage, weights + VLLM_WORK + trajectory, "estimated", room, remedy)
    room = machine.memory - (UNSEEN if machine.gpus else 0)
    budget = int(CUDA_SHARE * max(0, room - weights)) if machine.gpus else HOST_BUDGET
    cache = max(trajectory, min(budget, experiment.rollout.batch_size * trajectory))
    remedy = "lower rollout.batch_size, or set rollout.engine: vllm"
    return Need(stage, weights + cache, "estimated", room, remedy)


def _supervised(stage: str, section, base: MeasuredStep, room: int, processes: int = 0) -> Need:
    step = replace(
        base,
        rows=section.batch_size,
        # Added rows are few: what trains with them is counted as LoRA.
        trainable="full" if section.trainable == "full" else "lora",
        lora_rank=section.lora_rank,
        lora_targets=section.lora_targets,
        accumulates=section.gradient_accumulation > 1,
        checkpointed=section.gradient_checkpointing,
        processes=processes,
    )
    remedy = "use a larger GPU, or train with torchrun on several (alar.study.train_stage)"
    if section.batch_size > 1:
        remedy = f"lower {BATCHES[stage[:2]]} and raise gradient_accumulation as much"
    return Need(stage, peak_bytes(step), "measured", room, remedy)


def _sampled_and_trained(
    name: str,
    section: Tokenskip | SelfTraining,
    experiment: Experiment,
    size: Size,
    base: MeasuredStep,
    machine: Machine,
) -> Iterator[Need]:
    """Needs of sampling and of training. A sample's prompt may hold exemplars, each as long as a
    trajectory."""
    tokens, scored = base.tokens, base.scored
    if section.dataset:  # a question and one answer
        scored = experiment.rollout.max_new_tokens
        tokens = min(size.positions, PROMPT_TOKENS["search"] + scored)
    exemplars = section.exemplars if isinstance(section, SelfTraining) else 0
    longest = min(size.positions, (1 + exemplars) * tokens)  # the model cannot read more
    yield _rollouts(f"{name[:2]} samples", experiment, size, longest, machine)
    step = replace(base, tokens=tokens, scored=min(scored, tokens - 2))
    yield _supervised(name, section, step, machine.memory - (UNSEEN if machine.gpus else 0))


def _reinforcement(
    experiment: Experiment, size: Size, base: MeasuredStep, machine: Machine
) -> Iterator[Need]:
    rl = experiment.rl
    rollouts = rl.prompts_per_step * rl.group_size
    room = machine.memory - (UNSEEN if machine.gpus else 0)
    update = replace(
        base,
        trainable=rl.trainable,
        lora_rank=rl.lora_rank,
        train_projector=rl.train_projector,
        accumulates=rl.gradient_accumulation > 1,
        latents_given=rl.latents == "cached",
        optimizer="foreach",  # PyTorch's choice on a GPU
    )
    remedy = "raise rl.gradient_accumulation"
    if rl.trainer == "single":
        rows = math.ceil(rollouts / rl.gradient_accumulation)  # in one backward pass
        step = replace(update, rows=rows, reference=True)
        yield _rollouts("05 rollouts", experiment, size, base.tokens, machine)
        yield Need("05 update", peak_bytes(step), "measured", room, remedy)
        return
    world = max(1, machine.gpus) * rl.nodes  # FSDP shards over all of them
    rows = math.ceil(math.ceil(rollouts / world) / rl.gradient_accumulation)
    # verl's actor trains with gradient checkpointing; the reference is the actor without adapters,
    # or of the same shards again.
    step = replace(update, rows=rows, processes=world, checkpointed=True, logprobs=True)
    shards = math.ceil(4 * size.parameters / world)  # float32
    reference = 0 if rl.trainable == "lora" else shards
    need = peak_bytes(step) + reference
    source = "estimated" if reference else "measured"  # its shards are not part of the step
    yield Need("05 update, verl", need, source, room, f"{remedy}, or use more GPUs")
    # During rollouts the trainer's shards and states lie beside vLLM, which has its own share.
    trained = size.trainable(rl.trainable, rl.lora_rank, projector=rl.train_projector)
    beside = shards + reference + math.ceil(8 * trained / world) + SYNC
    served = itemsize(experiment, machine) * size.parameters + VLLM_WORK
    served += itemsize(experiment, machine) * size.kv_values * base.tokens
    served = max(math.ceil(served / rl.tensor_parallel), int(VLLM_SHARE_IN_VERL * machine.memory))
    more = "raise rl.tensor_parallel, or use more GPUs"
    yield Need("05 rollouts, verl", beside + served, "estimated", room, more)


def host_bytes(experiment: Experiment, size: Size, machine: Machine) -> int:
    """Notebook 01 holds the latent model, and beside it once more in float64."""
    return (itemsize(experiment, machine) + 8) * size.parameters


def written_bytes(experiment: Experiment, size: Size, machine: Machine) -> int:
    """Bytes of a run: base, latent model and the checkpoints of 03, 04 and 05 as they are stored,
    and what AR-GRPO needs to go on.

    One process keeps the trained weights and two moments, in float32. verl keeps whole states:
    all weights in float32, the adapters among them, and the moments. It also exports the best
    policy so far, and deletes the one before only after the next.
    """
    rl = experiment.rl
    trained = size.trainable(rl.trainable, rl.lora_rank, projector=rl.train_projector)
    stored = itemsize(experiment, machine) * size.parameters
    if rl.trainer == "single":
        return 5 * stored + 12 * trained
    adapters = rl.lora_rank * size.lora_per_rank if rl.trainable == "lora" else 0
    state = 4 * (size.parameters + adapters) + 8 * trained
    return 5 * stored + KEPT_STATES * state + stored

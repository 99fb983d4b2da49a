"""Bytes that each stage holds on one device, estimated from above by model size and parameters.

    training   weights 4 P + gradients 4 t + AdamW 8 t
               + activations 4 a · tokens + logits 3 · 4 V · tokens with loss
    rollouts   weights + KV cache of the rollouts that run at once, each at its longest
               (vLLM queues what has no room, so 16 at once are asked of it)
    AR-GRPO    single: training of one part + the reference's 4 P + KV cache
               verl:   training of a micro-batch under gradient checkpointing in bfloat16, its first
                       three terms divided by the GPUs of all nodes (FSDP),
                       + vLLM's weights and KV cache, divided by tensor_parallel

P: parameters, t: those that train, a: activation values per token, V: vocabulary. Notebooks train
and decode on one device. Notebooks and verl's actor keep weights in float32; vLLM computes in
bfloat16. With LoRA, verl's reference is the actor without its adapters, so it takes no memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from alar.methods.config import SelfTraining, Tokenskip
from alar.model.dtype import resolved_dtype
from alar.study.check.sizes import Size
from alar.study.params.sections import Experiment

GIB = 2**30
PROMPT_TOKENS = {"search": 300, "tool": 3000}  # instruction and question; in tool also schemas
PASSAGE_TOKENS = 150  # 500 characters and a title
VLLM_SEQUENCES = 16  # rollouts at once; the rest waits in its queue
GPU_COUNTS = (1, 2, 4, 8, 16)  # numbers that are tried, per node


@dataclass(frozen=True)
class Need:
    """Memory of one stage on one device. `parts`: name → bytes."""

    stage: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def __str__(self) -> str:
        shown = " + ".join(f"{name} {gib(value)}" for name, value in self.parts.items() if value)
        return f"{shown} = {gib(self.total)} GiB"


def gib(count: float) -> str:
    """Bytes in GiB, three figures at most: 123, 12.3, 0.45, 0.001."""
    value = count / GIB
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def context_tokens(experiment: Experiment, domain: str) -> int:
    """Tokens of the longest trajectory that the parameters allow."""
    rollout = experiment.rollout
    observed = 0
    if domain == "search":
        # The last turn answers and observes nothing.
        observed = (rollout.max_turns - 1) * experiment.retrieval.topk * PASSAGE_TOKENS
    return PROMPT_TOKENS[domain] + rollout.max_turns * rollout.max_new_tokens + observed


def training(
    size: Size, trainable: int, *, tokens: int, scored: int, processes: int = 1
) -> dict[str, int]:
    """Part → bytes of one process, for a training step over `tokens` tokens, `scored` with loss."""
    return {
        "weights": math.ceil(4 * size.parameters / processes),  # float32: 4 bytes
        "gradients": math.ceil(4 * trainable / processes),
        "optimizer": math.ceil(8 * trainable / processes),  # AdamW: two float32 moments
        "activations": 4 * size.activation_values * tokens,
        "logits": 3 * 4 * size.vocabulary * scored,
    }


def decoding(size: Size, rows: int, tokens: int, *, itemsize: int) -> dict[str, int]:
    """Part → bytes for `rows` rollouts of `tokens` tokens at once, `itemsize` bytes per number."""
    return {
        "weights": itemsize * size.parameters,
        "KV cache": itemsize * size.kv_values * rows * tokens,  # keys and values of all layers
    }


def needs(
    experiment: Experiment, size: Size, domain: str, stages: frozenset[str], gpus: int = 1
) -> list[Need]:
    """What the given stages ("02", …) hold on one device. verl has `gpus` GPUs on each node."""
    tokens = context_tokens(experiment, domain)
    # Only what the policy writes carries loss.
    scored = experiment.rollout.max_turns * experiment.rollout.max_new_tokens
    found = []
    if stages & {"02", "06"}:
        found.append(Need("02 and 06, rollouts", _rollouts(experiment, size, tokens)))
    supervised = {"03_aasd": experiment.aasd, "04_mode_warmup": experiment.warmup}
    for name, section in supervised.items():
        if name[:2] in stages:
            found.append(Need(name, _supervised(section, size, tokens, scored)))
    sampled = {"12_tokenskip": experiment.tokenskip, "13_self_training": experiment.self_training}
    for name, section in sampled.items():
        if name[:2] in stages:
            found += _sampled_and_trained(name, section, experiment, size, tokens)
    if "05" in stages:
        found.append(_reinforcement(experiment, size, tokens, scored, gpus))
    return found


def _rollouts(experiment: Experiment, size: Size, tokens: int) -> dict[str, int]:
    rows = experiment.rollout.batch_size
    if experiment.rollout.engine == "vllm":
        itemsize = 4 if experiment.model.dtype == "float32" else 2  # vLLM's place is a GPU
        return decoding(size, min(rows, VLLM_SEQUENCES), tokens, itemsize=itemsize)
    itemsize = resolved_dtype(experiment.model.dtype).itemsize
    return decoding(size, rows, tokens, itemsize=itemsize)


def _supervised(section, size: Size, tokens: int, scored: int) -> dict[str, int]:
    rows = section.batch_size
    trainable = size.trainable(section.trainable, section.lora_rank)
    return training(size, trainable, tokens=rows * tokens, scored=rows * scored)


def _sampled_and_trained(
    name: str, section: Tokenskip | SelfTraining, experiment: Experiment, size: Size, tokens: int
) -> list[Need]:
    """Needs of sampling and of training. A sample's prompt may hold exemplars, each as long as a
    trajectory."""
    turns = experiment.rollout.max_turns
    if section.dataset:  # a question and one answer
        tokens, turns = PROMPT_TOKENS["search"] + experiment.rollout.max_new_tokens, 1
    exemplars = section.exemplars if isinstance(section, SelfTraining) else 0
    longest = min(size.positions, (1 + exemplars) * tokens)  # the model cannot read more
    scored = turns * experiment.rollout.max_new_tokens
    return [
        Need(f"{name[:2]}, samples", _rollouts(experiment, size, longest)),
        Need(name, _supervised(section, size, tokens, scored)),
    ]


def _reinforcement(experiment: Experiment, size: Size, tokens: int, scored: int, gpus: int) -> Need:
    rl = experiment.rl
    trainable = size.trainable(rl.trainable, rl.lora_rank, projector=rl.train_projector)
    rows = rl.prompts_per_step * rl.group_size  # rollouts of one step
    if rl.trainer == "single":
        part = math.ceil(rows / rl.gradient_accumulation)  # rollouts in one backward pass
        parts = training(size, trainable, tokens=part * tokens, scored=part * scored)
        rollouts = decoding(size, min(rows, experiment.rollout.batch_size), tokens, itemsize=4)
        extra = {"reference": 4 * size.parameters, "KV cache": rollouts["KV cache"]}
        return Need("05_ar_grpo", parts | extra)
    gpus *= rl.nodes  # FSDP spreads the weights over all of them
    own = math.ceil(rows / gpus)  # rollouts of one GPU
    part = math.ceil(own / rl.gradient_accumulation)
    parts = training(size, trainable, tokens=part * tokens, scored=part * scored, processes=gpus)
    # 2 bytes: bfloat16. verl's actor trains with gradient checkpointing.
    parts["activations"] = 2 * size.checkpointed_values * part * tokens
    rollouts = decoding(size, min(VLLM_SEQUENCES, own), tokens, itemsize=2)
    extra = {
        "reference": 0 if rl.trainable == "lora" else math.ceil(4 * size.parameters / gpus),
        "vLLM weights": math.ceil(rollouts["weights"] / rl.tensor_parallel),
        "KV cache": math.ceil(rollouts["KV cache"] / rl.tensor_parallel),
    }
    return Need("05_ar_grpo", parts | extra)


def fewest_gpus(
    experiment: Experiment, size: Size, domain: str, stages: frozenset[str], memory: int
) -> int | None:
    """The smallest of `GPU_COUNTS` that is enough, each GPU with `memory` bytes; None if none
    is."""
    for gpus in GPU_COUNTS:
        if all(need.total <= memory for need in needs(experiment, size, domain, stages, gpus)):
            return gpus
    return None


def host_bytes(size: Size) -> int:
    """Notebook 01 holds the base in float32 and the latent model, which it turns into float64."""
    return 4 * size.base + 8 * size.parameters


def written_bytes(experiment: Experiment, size: Size) -> int:
    """Bytes of a run: base, latent model and three checkpoints in the dtype of the model (5 times),
    and AR-GRPO's resume state (12 per trained parameter: weights and two moments)."""
    rl = experiment.rl
    trainable = size.trainable(rl.trainable, rl.lora_rank, projector=rl.train_projector)
    itemsize = resolved_dtype(experiment.model.dtype).itemsize
    return 5 * itemsize * size.parameters + 12 * trainable

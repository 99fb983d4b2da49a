"""One training step, or one pass that scores tokens, on fake tensors: its peak memory in bytes.

What runs is the study's own code: the latent model's forward, LoRA and masters as the trainers
make them, FSDP with a process group that sends nothing, AdamW. All layers are alike, and so are all
rows, so memory grows by equal amounts with each. We run models of few layers on one and on two
rows, and go on in straight lines, separately for every phase of the step, because the
largest phase of a small model need not be that of a large one.

A row is as long as the parameters allow, with one latent block of one position. Further blocks and
positions make more calls but change the peak by less than 2 % (`tests/test_check_memory.py`), and
each call costs time.
"""

from __future__ import annotations

import copy
import json
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from alar.model.families import FAMILIES
from alar.study.check.fake import PeakTracker, fake_processes, fake_tensors
from alar.train.distributed import shard
from alar.train.masters import keep_masters
from alar.train.supervised import mark_trainable

UNLABELLED = -100


@dataclass(frozen=True)
class MeasuredStep:
    """What a step computes with. `config` is the latent model's, as JSON."""

    family: str  # "qwen2", …
    config: str
    dtype: str  # of the trunk: "float32" or "bfloat16"
    rows: int
    tokens: int  # of a row
    scored: int  # of these, the ones that carry loss
    trainable: str = ""  # "full" or "lora"; "": a pass without gradients
    lora_rank: int = 1
    lora_targets: str = "attention"
    train_projector: bool = True
    accumulates: bool = False  # are there gradients of an earlier part?
    checkpointed: bool = False
    logprobs: bool = False  # of the labels, as verl takes them, in place of a loss
    reference: bool = False  # a second, frozen model scores the same tokens
    processes: int = 0  # over which FSDP shards; 0: the model is whole
    latents_given: bool = False  # z are fed as recorded
    optimizer: str = "fused"  # how AdamW steps on a GPU: "fused", or "foreach" with temporaries

    @property
    def layers(self) -> int:
        return json.loads(self.config)["num_hidden_layers"]


def peak_bytes(step: MeasuredStep) -> int:
    """Peak of the step on each GPU, its weights included."""
    layers, rows = _few_layers(step), (1, min(step.rows, 2))
    if (layers[1], rows[1]) == (step.layers, step.rows):
        return max(_phases(step, step.layers))
    more_layers, more_rows = step.layers - layers[1], step.rows - rows[1]
    corners = [_phases(replace(step, rows=r), n) for n in layers for r in rows]
    found = []
    for least, wider, deeper, both in zip(*corners):  # one phase
        by_row, by_layer = both - deeper, both - wider
        crossed = by_row - (wider - least)  # what each layer keeps of each row
        grown = by_row * more_rows + by_layer * more_layers + crossed * more_rows * more_layers
        found.append(both + grown)
    return max(found)


def _few_layers(step: MeasuredStep) -> tuple[int, int]:
    """Two neighbouring depths from which on memory grows by equal amounts; equal at full depth.

    FSDP gathers a layer while the one before computes, so a single layer is a case of its own.
    """
    fewest = min(step.layers, 2 if step.processes else 1)
    return fewest, min(step.layers, fewest + 1)


@cache
def _phases(step: MeasuredStep, layers: int) -> tuple[int, ...]:
    """The peak of each phase; of the backward pass also what is left at its end."""
    alone = nullcontext() if step.processes == 0 else fake_processes(step.processes)
    with alone, fake_tensors():
        model = _model(step, layers)
        if not step.trainable:
            return (_scoring(step, model),)
        return _training(step, model)


def _model(step: MeasuredStep, layers: int):
    config_class, model_class = FAMILIES[step.family]
    settings = json.loads(step.config) | {"num_hidden_layers": layers}
    settings.pop("layer_types", None)  # one entry for each layer; all have full attention
    settings["num_latent"] = min(1, settings["num_latent"])
    return model_class(config_class(**settings)).to(getattr(torch, step.dtype))


def _batch(step: MeasuredStep, model) -> tuple[Tensor, Tensor]:
    """Real ids and labels, each (rows, tokens): text, a latent block and one more token, with loss
    on the last ones of the text.

    Text that follows a block needs a mask on the CPU, and none on a GPU: one token needs none.
    """
    ids = torch.ones(step.rows, step.tokens, dtype=torch.long)
    end = step.tokens - 1
    block = slice(end - model.config.num_latent, end)
    ids[:, block] = model.config.latent_token_id
    labels = torch.full_like(ids, UNLABELLED)
    labels[:, step.tokens - step.scored :] = 1
    labels[:, block] = UNLABELLED
    return ids, labels


def _scored(step: MeasuredStep, model, ids: Tensor, labels: Tensor) -> Tensor:
    """A number to differentiate: a loss, or under verl the sum of log-probs."""
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if step.latents_given:
        count = int((ids == model.config.latent_token_id).sum())
        inputs["latents"] = torch.zeros(count, model.config.hidden_size)
    if step.logprobs:  # verl's way: alar/engines/verl/engine.py
        shifted = labels.roll(-1, dims=1)  # (rows, tokens): the label of the next position
        return model(**inputs, shift_labels=shifted).log_probs.sum()
    return model(**inputs, labels=labels).loss


def _scoring(step: MeasuredStep, model) -> int:
    tracker = PeakTracker(model.eval())
    ids, labels = _batch(step, model)
    with torch.no_grad(), tracker:
        _scored(step, model, ids, labels)
    return tracker.bytes


def _training(step: MeasuredStep, model) -> tuple[int, ...]:
    frozen = [copy.deepcopy(model).requires_grad_(False)] if step.reference else []
    wrapped = mark_trainable(
        model.train(),
        step.trainable,
        lora_rank=step.lora_rank,
        lora_alpha=step.lora_rank,
        lora_targets=step.lora_targets,
        train_projector=step.train_projector,
    )
    if step.checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if step.processes:
        # Float32 shards are the masters: alar/train/distributed.py.
        shard(wrapped.float(), "cpu", getattr(torch, step.dtype))
    weights = [p for p in wrapped.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, **{step.optimizer: True})
    keep_masters(optimizer)
    tracker = PeakTracker(wrapped, *frozen)
    ids, labels = _batch(step, model)
    with tracker:  # a first step, which makes the optimiser's state
        _no_gradients(weights)
        optimizer.step()
    found = [tracker.bytes]
    wrapped.zero_grad()
    optimizer.zero_grad()
    with tracker:
        if step.accumulates:
            _no_gradients(weights)
        loss = _scored(step, wrapped, ids, labels)
        if frozen:
            with torch.no_grad():
                _scored(step, frozen[0], ids, labels)
    found.append(tracker.bytes)
    with tracker:
        loss.backward()
    found += [tracker.bytes, tracker.held]
    with tracker:
        optimizer.step()
    return *found, tracker.bytes


def _no_gradients(weights: list[torch.nn.Parameter]) -> None:
    for weight in weights:
        weight.grad = torch.zeros_like(weight)

"""Float32 master weights: what an optimiser steps on where the model is stored in bfloat16.

A bfloat16 number has 8 significant bits, so an update below 1/512 of a weight is rounded away. At a
learning rate of 1e-4 nearly all of them are, and full training would stand still. LoRA needs none
of this: its adapters and the projector are float32 beside a trunk that never moves.

The model itself stays in bfloat16: training computes with the very weights that decoding and the
saved checkpoint have, rounded once, which autocast over a float32 model would not do (it keeps
embeddings and the residual stream in float32). FSDP does the same with its shards.
"""

from __future__ import annotations

import torch


def keep_masters(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Let the optimiser step on float32 copies of all parameters that are stored in 16 bits.

    Each step takes the gradients over from the model, and writes the rounded result back. Float32
    parameters are stepped on as they are. Call it before the first step; clear gradients with the
    model's `zero_grad`. Returns the optimiser.
    """
    pairs = []  # (a weight of the model, its master)
    for group in optimizer.param_groups:
        for place, weight in enumerate(group["params"]):
            if weight.dtype.itemsize < 4:
                master = weight.detach().float().requires_grad_()
                group["params"][place] = master
                pairs.append((weight, master))

    def take_gradients(*_) -> None:
        for weight, master in pairs:
            if weight.grad is not None:
                master.grad = weight.grad.float()
                weight.grad = None  # one by one, so that only one gradient is held twice

    @torch.no_grad()
    def write_back(*_) -> None:
        for weight, master in pairs:
            weight.copy_(master)
            master.grad = None

    if pairs:
        optimizer.register_step_pre_hook(take_gradients)
        optimizer.register_step_post_hook(write_back)
    return optimizer

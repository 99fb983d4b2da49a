"""What tests/test_distributed.py starts with torchrun: torchrun --nproc-per-node 2
tests/distributed_ranks.py FOLDER

FOLDER/model is a latent checkpoint. Rank r writes FOLDER/rank-r.json: for every case what it
computed under FSDP, against the same model in one process on the rows of all ranks together.
"""

import copy
import json
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from alar.model import load, save, scoring
from alar.train.config import Supervised
from alar.train.distributed import leave, shard
from alar.train.examples import Example, collate
from alar.train.supervised import mark_trainable, train

PAD = 0
CASES = {  # trainable, gradient checkpointing, latent_gradient, scored
    "full": ("full", False, "full"),
    "full, checkpointing": ("full", True, "published"),
    "lora": ("lora", False, "published"),
    "lora, checkpointing": ("lora", True, "projector_only"),
    "full, scored": ("full", True, "full", True),
    "lora, scored": ("lora", False, "published", True),
}
ROWS = [  # of each rank: length, starts of blocks
    [(41, (5, 18, 30)), (23, ())],
    [(30, ()), (12, ())],
]

TRAINING = {
    "epochs": 1.0,
    "batch_size": 2,
    "learning_rate": 1e-3,
}  # two steps of two processes over training_examples


def example(model, length: int, starts: tuple[int, ...], seed: int) -> Example:
    generator, num_latent = torch.Generator().manual_seed(seed), model.config.num_latent
    ids = torch.randint(3, 900, (length,), generator=generator)
    labels = ids.clone()
    labels[:3] = -100
    for start in starts:
        ids[start : start + num_latent] = model.config.latent_token_id
        labels[start : start + num_latent] = -100
    return Example(ids.tolist(), labels.tolist(), len(starts))


def prepared(model, trainable: str, checkpointing: bool):
    model = copy.deepcopy(model).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    torch.manual_seed(0)
    wrapped = mark_trainable(model, trainable, lora_rank=4, lora_alpha=8)
    with torch.no_grad():  # peft starts B at zero, which leaves A without a gradient
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    return wrapped


def loss_of(model, rows: list[Example], num_items_in_batch: int, **options) -> torch.Tensor:
    return model(**collate(rows, PAD), num_items_in_batch=num_items_in_batch, **options).loss


def score_of(model, rows: list[Example], num_items_in_batch: int, **options) -> torch.Tensor:
    """The same mean from log-probs of single tokens, as RL takes them."""
    batch = collate(rows, PAD)
    labels = batch.pop("labels").roll(-1, 1)
    labels[:, -1] = -100
    return -model(**batch, shift_labels=labels, **options).log_probs.sum() / num_items_in_batch


def compare(
    model, rank: int, trainable: str, checkpointing: bool, latent_gradient: str, scored=False
) -> dict:
    rows = [
        [example(model, *row, seed=10 * r + i) for i, row in enumerate(part)]
        for r, part in enumerate(ROWS)
    ]
    loss_on = score_of if scored else loss_of
    if scored:
        for row in rows[1]:  # this rank has nothing to score, and must gather weights all the same
            row.labels[:] = [-100] * len(row.labels)
    tokens = sum(label != -100 for part in rows for row in part for label in row.labels)
    options = {"latent_gradient": latent_gradient, "num_items_in_batch": tokens}

    one = prepared(model, trainable, checkpointing)
    expected = loss_on(one, [row for part in rows for row in part], **options)
    expected.backward()
    gradients = {name: p.grad for name, p in one.named_parameters() if p.grad is not None}

    many = shard(prepared(model, trainable, checkpointing), "cpu")
    calls = []
    base = many.get_base_model() if trainable == "lora" else many
    base.model.register_forward_pre_hook(lambda *_: calls.append("trunk"))
    base.model.projector.register_forward_pre_hook(lambda *_: calls.append("projector"))
    with mock.patch.object(scoring, "LOGITS_AT_ONCE", 5 * model.config.latent_token_id):
        loss = loss_on(many, rows[rank], **options)  # from five tokens at a time, if scored
    (loss * len(ROWS)).backward()  # FSDP averages the gradients of the ranks
    total = loss.detach().clone()
    dist.all_reduce(total)
    worst = {}
    for name, parameter in many.named_parameters():
        if parameter.grad is None:
            assert name not in gradients, name
            continue
        found, wanted = parameter.grad.full_tensor(), gradients.pop(name)
        worst[name] = float((found - wanted).norm() / max(wanted.norm(), 1e-4))
    return {
        "loss": total.item(),
        "expected_loss": expected.item(),
        "calls": calls,
        "worst_gradient": max(worst.values()),
        "worst_name": max(worst, key=worst.get),
        "without_gradient": sorted(gradients),
    }


def half(model, rank: int) -> dict:
    """The trunk in bfloat16: dtypes of what the projector reads and of what is optimised."""
    many = shard(prepared(model, "full", False), "cpu", torch.bfloat16)
    seen = {}
    layer, projector = many.model.layers[0], many.model.projector
    layer.register_forward_pre_hook(
        lambda *_: seen.update(layer=str(layer.mlp.up_proj.weight.dtype))
    )
    projector.register_forward_pre_hook(
        lambda *_: seen.update(projector=str(projector.up.weight.dtype))
    )
    rows = [example(model, *row, seed=i) for i, row in enumerate(ROWS[rank])]
    loss = many(**collate(rows, PAD)).loss
    loss.backward()
    return seen | {
        "gradients": sorted({str(p.grad.dtype) for p in many.parameters()}),
        "finite": bool(loss.isfinite()),
    }


def training_examples(model) -> list[Example]:
    return [example(model, 20 + i, (4, 12)[: i % 3], seed=i) for i in range(8)]


def trained(model, rank: int, trainable: str, folder: Path, tokenizer) -> list[dict]:
    log = []
    config = Supervised(**TRAINING, trainable=trainable)
    model = train(copy.deepcopy(model), training_examples(model), PAD, config, log=log.append)
    if rank == 0:
        save(model, tokenizer, folder / f"trained-{trainable}")
    return log


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model, tokenizer = load(folder / "model")
    results = {name: compare(model, rank, *case) for name, case in CASES.items()}
    results["half"] = half(model, rank)
    for trainable in ("full", "lora"):
        results[f"train {trainable}"] = trained(model, rank, trainable, folder, tokenizer)
    narrow, _ = load(folder / "model", dtype="bfloat16")
    for trainable in ("full", "lora"):
        results[f"half {trainable}"] = trained(narrow, rank, trainable, folder / "half", tokenizer)
    (folder / f"rank-{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()
    leave(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

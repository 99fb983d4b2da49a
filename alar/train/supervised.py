"""Supervised training (AASD, mode warm-up) on transformers' Trainer: all weights, or LoRA.

The projector is always trained in full, in float32. The result is an ordinary latent model, with
LoRA merged, in the dtype in which it came. Under torchrun the weights are sharded over the
processes (`alar.train.distributed`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from alar.model.outline import StoredWeights
from alar.train.config import Supervised
from alar.train.distributed import collect, num_processes, rank, sharded_copy
from alar.train.examples import NO_LOSS, Example, SimilarBatches, collate
from alar.train.masters import keep_masters

LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]  # the published targets: attention only
# With these, all linear layers of a decoder layer. peft's own "all-linear" would take the projector
# too, which is trained in full.
MLP_TARGETS = ["gate_proj", "up_proj", "down_proj"]
SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}
TRAINABLE = ("lora", "full", "rows", "lora+rows")


def mark_trainable(
    model,
    trainable: str,
    *,
    lora_rank: int,
    lora_alpha: int,
    lora_targets: str = "attention",
    train_projector: bool = True,
):
    """Mark what trains: LoRA ("lora") or every weight ("full").

    LoRA is on q, k, v, o, or with `lora_targets` "all-linear" on the MLP's three layers too.
    `train_projector` decides about the projector. For a model with added tokens, "rows" trains only
    their rows of embedding and head, and "lora+rows" trains both. The other rows are then no
    parameters: neither gradient nor weight decay reaches them.
    """
    if trainable not in TRAINABLE:
        raise ValueError(f"trainable {trainable!r}: expected one of {', '.join(TRAINABLE)}")
    rows = _added_rows(model) if "rows" in trainable else None
    if trainable == "full":
        wrapped = model.requires_grad_(True)
    else:
        more = MLP_TARGETS if lora_targets == "all-linear" else []
        config = LoraConfig(
            r=lora_rank,
            lora_alpha=lora_alpha,
            target_modules=[*LORA_TARGETS, *more],
            lora_dropout=0.0,
            task_type="CAUSAL_LM",
            trainable_token_indices=rows,
        )
        wrapped = get_peft_model(model, config)
        # LoRA is there but stays at its start, where it adds nothing.
        if trainable == "rows":
            for name, parameter in wrapped.named_parameters():
                parameter.requires_grad_(parameter.requires_grad and "lora_" not in name)
    projector = getattr(model.model, "projector", None)
    if projector is not None:
        projector.requires_grad_(train_projector)
    return wrapped


def _added_rows(model) -> dict[str, list[int]]:
    """Module name → rows of the tokens that a checkpoint has beyond its base's.

    `config.added_rows` is (first, end), end excluded. A tied head follows the embedding.
    """
    span = getattr(model.config, "added_rows", None)
    if span is None:
        raise ValueError(
            "trainable names the rows of added tokens, but this model's config has no added_rows;"
            " use 'lora' or 'full'"
        )
    tables = ["embed_tokens"] if model.config.tie_word_embeddings else ["embed_tokens", "lm_head"]
    return {name: list(range(*span)) for name in tables}


def merged(model):
    """The plain latent model again, LoRA folded into its weights."""
    return model.merge_and_unload() if hasattr(model, "merge_and_unload") else model


class SupervisedTrainer(Trainer):
    """Trainer with batches of similar shape and float32 master weights; the loss is the model's
    own."""

    def __init__(self, *args, config: Supervised, **kwargs):
        super().__init__(*args, **kwargs)
        self.config = config

    def get_train_dataloader(self) -> DataLoader:
        sampler = SimilarBatches(
            self.train_dataset,
            self.args.train_batch_size,
            self.args.seed,
            self.config.batch_pool,
            rank=self.args.process_index,
            processes=self.args.world_size,
        )
        return DataLoader(self.train_dataset, batch_sampler=sampler, collate_fn=self.data_collator)

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        return keep_masters(super().create_optimizer(model))

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if hasattr(model.config, "num_latent"):
            inputs = inputs | {"latent_gradient": self.config.latent_gradient}
        elif self.args.world_size == 1 and not return_outputs:
            return labelled_loss(model, inputs, num_items_in_batch)
        # The count covers the labelled tokens of a whole step, all accumulated batches included.
        if num_items_in_batch is None:
            outputs = model(**inputs)
            loss = outputs.loss
        else:
            outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
            # The labelled tokens are counted over all processes, but the gradients of the
            # processes are averaged, which divides by their number once too often.
            loss = outputs.loss * self.args.world_size
        return (loss, outputs) if return_outputs else loss


def labelled_loss(model, inputs, num_items: int | Tensor | None = None) -> Tensor:
    """Mean cross-entropy of an ordinary causal LM over the labelled tokens, `num_items` of them.

    transformers' own loss takes logits in float32 at every position, (B, T, V), the prompt's and
    the padding's among them; latent models take them where a label is, and so does this.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    states = base.model(inputs["input_ids"], inputs["attention_mask"], use_cache=False)
    targets = inputs["labels"][:, 1:]  # (B, T − 1)
    labelled = targets != NO_LOSS
    logits = base.lm_head(states.last_hidden_state[:, :-1][labelled]).float()  # (n, V)
    total = cross_entropy(logits, targets[labelled], reduction="sum")
    return total / (labelled.sum() if num_items is None else num_items)


class _Report(TrainerCallback):
    """Passes the rows that the Trainer logs to `log`, in the first process only."""

    def __init__(self, log: Callable[[dict], None]):
        self.log = log

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not logs or "loss" not in logs or not state.is_world_process_zero:
            return
        self.log(
            {
                "step": state.global_step,
                "steps": state.max_steps,
                "loss": logs["loss"],
                "learning_rate": logs["learning_rate"],
                "gradient_norm": logs.get("grad_norm"),
            }
        )


def train(
    model,
    examples: Sequence[Example],
    pad_token_id: int,
    config: Supervised,
    *,
    seed: int = 0,
    log: Callable[[dict], None] = print,
    weights: StoredWeights | None = None,
):
    """Train a model, latent or not, on `examples`; returns it, merged and in eval mode.

    ValueError for an example that is longer than the model's positions, because a cut could fall
    inside a latent block. ValueError also for an example without a token to learn. Under torchrun
    every process calls this: they train one model, the first one logs and gets it, the others get
    None. `weights` are those of a model that is an outline.
    """
    _check(examples, model.config.max_position_embeddings)
    torch.manual_seed(seed)  # for adapters and dropout
    whole = mark_trainable(
        model.train(),
        config.trainable,
        lora_rank=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_targets=config.lora_targets,
    )
    processes = num_processes()
    steps = config.optimiser_steps(len(examples), processes)
    # Nothing that the Trainer writes is kept.
    with tempfile.TemporaryDirectory() as scratch:
        arguments = _arguments(scratch, config, steps, processes, seed)
        trained = whole
        if processes > 1:
            trained = sharded_copy(whole, arguments.device, weights)
        trainer = SupervisedTrainer(
            trained,
            arguments,
            config=config,
            train_dataset=examples,
            data_collator=partial(collate, pad_token_id=pad_token_id),
            callbacks=[_Report(log)],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    if trained is not whole:  # sharded: the copy holds the trained weights
        collect(trained, whole)
        if rank() > 0:
            return None
    return merged(whole).requires_grad_(True).eval()


def _check(examples: Sequence[Example], limit: int) -> None:
    for number, example in enumerate(examples):
        if len(example.ids) > limit:
            raise ValueError(
                f"example {number} has {len(example.ids)} tokens, the model has {limit} positions"
            )
        # Its mean loss would be 0 / 0.
        if all(label == -100 for label in example.labels):
            raise ValueError(f"example {number} has no token that carries loss")


def _arguments(
    scratch: str, config: Supervised, steps: int, processes: int, seed: int
) -> TrainingArguments:
    arguments = TrainingArguments(
        output_dir=scratch,
        # Without a GPU, accelerate joins the processes only if it is told to use the CPU.
        use_cpu=processes > 1 and not torch.cuda.is_available(),
        per_device_train_batch_size=config.batch_size,
        gradient_accumulation_steps=config.gradient_accumulation,
        max_steps=steps,
        learning_rate=config.learning_rate,
        lr_scheduler_type=SCHEDULES[config.schedule],
        warmup_steps=int(config.warmup_ratio * steps),
        weight_decay=config.weight_decay,
        gradient_checkpointing=config.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        logging_steps=max(1, steps // 50),  # about 50 rows
        save_strategy="no",  # the caller saves
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,  # examples are no dictionaries
        seed=seed,
        dataloader_num_workers=0,
    )
    if processes == 1 and arguments.n_gpu > 1:
        # The Trainer would spread each batch over all GPUs with DataParallel.
        arguments._n_gpu = 1
    return arguments

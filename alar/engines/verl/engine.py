"""verl's FSDP2 engine for latent models. It overrides the hooks that verl leaves to subclasses, and
nothing more.

- Sequences travel packed in one row. `segment_ids` tells them apart, so that every z sees only its
  own sequence. The model's own weights recompute z, or z are fed as recorded (`rl.latents`) through
  verl's multi-modal inputs.
- Probabilities are those of the rollout: the latent id and the spare rows after it have none. Only
  tokens that carry loss are scored, a part of them at a time (`alar.model.scoring`), so that no
  logits of all tokens are ever made.
- The projector is frozen or trained (`rl.train_projector`), with LoRA as well. It is an FSDP unit
  of its own.
- The learning rate follows `learning_rate_at`, as in the single-process trainer.

On GPUs the trunk and the projector compute in bfloat16 over float32 weights. That path is written
but has not run yet.
"""

from __future__ import annotations

import dataclasses

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.utils.fsdp_utils import (
    merged_lora_context,
    normalize_peft_param_name,
    offload_fsdp_model_to_cpu,
)
from verl.utils.model import convert_weight_keys
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from alar.engines.verl.settings import VENDOR
from alar.model.scoring import UNSCORED
from alar.rl.config import RLConfig, learning_rate_at


@EngineRegistry.register(
    model_type="language_model", backend="fsdp2", device=["cuda", "cpu"], vendor=VENDOR
)
class LatentFSDPEngine(FSDPEngineWithLMHead):
    def __init__(self, model_config, engine_config, optimizer_config, checkpoint_config):
        options = model_config.override_config.get("alar")
        if options is None:
            raise ValueError(
                "model.override_config has no `alar`: start the job with alar.engines.verl.launch"
            )
        self.rl = RLConfig(**options["rl"])
        if engine_config.ulysses_sequence_parallel_size > 1:
            raise ValueError(
                "sequence parallelism cuts latent blocks: set ulysses_sequence_parallel_size to 1"
            )
        if (
            not model_config.use_remove_padding
            or engine_config.pad_to_length
            or model_config.use_fused_kernels
        ):
            raise ValueError(
                "latent models need use_remove_padding, without pad_to_length and without verl's"
                " fused kernels"
            )
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)

    def _build_module(self):
        module = super()._build_module()
        projector = module.model.projector.requires_grad_(self.rl.train_projector)
        units = module._no_split_modules or ()  # names of the classes that FSDP2 shards one by one
        module._no_split_modules = [*units, type(projector).__name__]
        return module

    def _build_lora_module(self, module):
        module = super()._build_lora_module(module)
        # peft has frozen everything but its adapters, the projector too.
        module.get_base_model().model.projector.requires_grad_(self.rl.train_projector)
        return module

    def _build_fsdp_module(self, module):
        if not self.engine_config.forward_only or get_device_name() != "cpu":
            return super()._build_fsdp_module(module)
        # verl moves a reference's weights to pinned memory, which needs an accelerator.
        config = self.engine_config
        self.engine_config = dataclasses.replace(config, forward_only=False)
        try:
            return super()._build_fsdp_module(module)
        finally:
            self.engine_config = config

    def _build_lr_scheduler(self, optimizer):
        return LambdaLR(
            optimizer,
            lambda done: (
                learning_rate_at(min(done, self.rl.steps), self.rl) / self.rl.learning_rate
            ),
        )

    def prepare_model_inputs(self, micro_batch):
        # The form in which verl takes log-probs instead of logits. Its own kernels stay unused.
        tu.assign_non_tensor(micro_batch, use_fused_kernels=True)
        inputs, arguments = super().prepare_model_inputs(micro_batch)
        labels = inputs["shift_labels"]  # (1, tokens), at each position the next id
        inputs["shift_labels"] = labels.masked_fill(~_carries_loss(micro_batch), UNSCORED)
        inputs["calculate_entropy"] = tu.get_non_tensor_data(
            micro_batch, "calculate_entropy", default=False
        )
        lengths = micro_batch["input_ids"].offsets().diff()  # (B,) tokens of each sequence
        numbers = torch.arange(1, len(lengths) + 1, device=lengths.device)
        inputs["segment_ids"] = numbers.repeat_interleave(lengths)[None]  # (1, tokens)
        inputs.pop("position_ids")  # every segment starts at 0
        if self.rl.latents == "cached":
            # A rank without latents gets them too, (0, H), so that all ranks make the same calls.
            width = self.model_config.hf_config.hidden_size
            inputs.setdefault("latents", torch.zeros(0, width, device=lengths.device))
        else:
            inputs.pop("latents", None)
        return inputs, arguments

    def _merged_lora_per_tensor_param(self):
        """Whole weights with the adapters merged, in the dtype in which they are trained.

        verl's own method would round them to bfloat16.
        """
        device = get_device_id()
        try:
            with merged_lora_context(self.module, backup_adapters=True):
                params = normalize_peft_param_name(self.module.state_dict())
                for name, parameter in convert_weight_keys(params, self.module).items():
                    sharded = isinstance(parameter, DTensor)
                    yield (
                        name,
                        (
                            parameter.to(device).full_tensor()
                            if sharded
                            else parameter.detach().clone()
                        ),
                    )
        finally:
            if self._is_offload_param:
                offload_fsdp_model_to_cpu(self.module)


def _carries_loss(micro_batch) -> Bool[Tensor, "1 tokens"]:
    """Whether the token after each position of the packed row is a response's that carries loss."""
    ends = micro_batch["input_ids"].offsets()[1:].tolist()
    mask = torch.zeros_like(micro_batch["input_ids"].values(), dtype=torch.bool)  # (tokens,)
    # A response stands at the end of its sequence.
    for end, response in zip(ends, micro_batch["response_mask"].unbind(), strict=True):
        mask[end - len(response) : end] = response.bool()
    # The first token of a sequence belongs to its prompt, so nothing moves into the one before.
    return mask.roll(-1)[None]

"""Qwen2 and Qwen3 with latent blocks as vLLM model classes; one implementation for both.

At a latent position that opens its chunk (every decoding step; every chunk that the scheduler cut
before one) the input is z = f(h) with h the last hidden state of the token before. Where that h is
found: each KV block has one row here that holds the hidden state, the position and the run length
of the block's latest token. The row is written, shared and reused with the block it belongs to, so
prefix caching and preemption need no code of their own.

Every chunk is checked: a latent position that did not open its chunk, or whose row belongs to
another position, marks the request as violated, and the forcing then makes it fail. All tensors
have fixed shapes and addresses (CUDA graphs).
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from alar.engines.vllm.checks import EngineRefused, check_engine
from alar.engines.vllm.notes import StepLatents, shared
from alar.model.projector import PROJECTORS

PREFIX = "model.projector."
UNWRITTEN = -2  # position of a row that no token has written


class BlockRows:
    """By KV block: hidden state (H), position and latent run length of its latest token; the last
    row is for padding."""

    def __init__(self, blocks: int, hidden_size: int, dtype: torch.dtype, device: torch.device):
        self.hidden = torch.zeros(blocks + 1, hidden_size, dtype=dtype, device=device)
        self.position = torch.full((blocks + 1,), UNWRITTEN, dtype=torch.int64, device=device)
        self.run = torch.zeros(
            blocks + 1, dtype=torch.int64, device=device
        )  # latent positions up to and with that token
        self.padding = blocks


class LatentModel:
    """Mixin over a vLLM causal LM."""

    def __init__(self, *, vllm_config, prefix: str = ""):
        check_engine(vllm_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config, scheduling = self.config, vllm_config.scheduler_config
        self.latent_token_id, self.num_latent = config.latent_token_id, config.num_latent
        self.projector = (
            PROJECTORS[config.projector_kind](config).float().eval().requires_grad_(False)
        )
        weight = self.model.embed_tokens.weight
        self.tokens = scheduling.max_num_batched_tokens
        inputs = torch.zeros(
            self.tokens + 1, config.hidden_size, dtype=weight.dtype, device=weight.device
        )
        self.register_buffer(
            "inputs", inputs, persistent=False
        )  # the last row takes what no request asked for
        self.cache_config = vllm_config.cache_config
        self.blueprints: dict[str, tuple] | None = None
        self.rows: BlockRows | None = None
        self.step = StepLatents(
            scheduling.max_num_seqs, config.hidden_size, weight.dtype, weight.device
        )
        self.eager_checks = (
            weight.device.type == "cpu"
        )  # looking at values costs no synchronisation there
        shared(vllm_config).step = self.step

    def load_weights(self, weights) -> set[str]:
        """Trunk by vLLM's loader, projector here. Raises ValueError when the projector is not
        whole, as `alar.model.load` does: nothing is ever filled in."""
        self._unpack()
        projector: dict[str, Tensor] = {}

        def trunk():
            for name, tensor in weights:
                if name.startswith(PREFIX):
                    projector[name.removeprefix(PREFIX)] = tensor
                else:
                    yield name, tensor

        loaded = super().load_weights(trunk())
        missing, unexpected = self.projector.load_state_dict(projector, strict=False)
        if missing or unexpected:
            what = (
                f"{', '.join(missing)} missing"
                if missing
                else f"{', '.join(unexpected)} unexpected"
            )
            raise ValueError(
                f"the checkpoint's projector does not fit: {what}; save the model again with"
                " alar.model.save"
            )
        return loaded | {f"projector.{name}" for name, _ in self.projector.named_parameters()}

    def _unpack(self) -> None:
        """Make every weight loadable again: on a CPU vLLM keeps matrices packed for oneDNN and
        drops the originals."""
        if self.blueprints is None:
            weights = {
                name: module._parameters.get("weight") for name, module in self.named_modules()
            }
            self.blueprints = {
                name: (type(weight), weight.shape, weight.dtype, weight.device, dict(vars(weight)))
                for name, weight in weights.items()
                if weight is not None
            }
        for name, (kind, shape, dtype, device, attributes) in self.blueprints.items():
            module = self.get_submodule(name)
            if module.weight.numel() == 0:
                weight = torch.Tensor._make_subclass(
                    kind, torch.empty(shape, dtype=dtype, device=device), False
                )
                vars(weight).update(attributes)
                module.weight = weight

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Logits of the policy: the latent id and the spare rows after it can never be chosen."""
        logits = super().compute_logits(hidden_states)
        if logits is not None:
            logits[..., self.latent_token_id :] = float("-inf")
        return logits

    def forward(
        self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None
    ) -> Tensor:
        if inputs_embeds is not None or input_ids is None:
            raise EngineRefused(
                "a context must be given as token ids: prompt embeddings carry no latent positions"
            )
        count = input_ids.shape[0]
        inputs = self.inputs[:count]
        inputs.copy_(self.model.embed_input_ids(input_ids))
        batch = self._batch()
        if batch is None:  # a profiling run
            return self.model(None, positions, intermediate_tensors, inputs)
        latent = input_ids == self.latent_token_id  # (T,)
        thinking = not self.eager_checks or bool(latent.any())
        run = self._feed(batch, latent, positions) if thinking else None
        hidden = self.model(None, positions, intermediate_tensors, inputs)
        self._remember(batch, hidden, positions, run)
        return hidden

    def _batch(self):
        """Attention metadata of the step, or None in a profiling run. All layers share one KV cache
        group."""
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict) or not metadata:
            return None
        batch = next(iter(metadata.values()))
        absent = [
            name
            for name in ("query_start_loc", "block_table", "slot_mapping")
            if not hasattr(batch, name)
        ]
        if absent:
            raise EngineRefused(
                f"{type(batch).__name__} does not say {', '.join(absent)}; choose another attention"
                " backend: on GPUs --attention-backend FLASH_ATTN"
            )
        if self.rows is None:
            blocks = self.cache_config.num_gpu_blocks
            self.rows = BlockRows(
                blocks, self.inputs.shape[1], self.inputs.dtype, self.inputs.device
            )
        return batch

    def _feed(self, batch, latent: Tensor, positions: Tensor) -> Tensor:
        """Put z where a chunk opens with a latent position; run length (R,) of every row's first
        token."""
        rows, count = self.rows, latent.shape[0]
        bounds = batch.query_start_loc.long()
        requests = bounds.shape[0] - 1
        start, end = bounds[:-1], bounds[1:]
        first = start.clamp(max=count - 1)
        opens = (end > start) & latent[first]  # (R,)
        before = positions[first] - 1
        column = before.clamp(min=0) // self.cache_config.block_size
        index = torch.arange(requests, device=latent.device)
        source = torch.where(
            opens & (before >= 0), batch.block_table[index, column].long(), rows.padding
        )
        step = rows.run[source]
        z = self.projector(
            rows.hidden[source], step.clamp(max=max(self.num_latent - 1, 0))
        )  # (R, H)
        self.inputs[torch.where(opens, first, self.tokens)] = z
        total = torch.nn.functional.pad(latent.long().cumsum(0), (1, 0))
        inside = total[end.clamp(max=count)] - total[start.clamp(max=count)]
        self.step.latents[:requests] = z
        self.step.violated[:requests] = (inside != opens.long()) | (
            opens & (rows.position[source] != before)
        )
        return torch.where(opens, step + 1, 0)

    def _remember(self, batch, hidden: Tensor, positions: Tensor, run: Tensor | None) -> None:
        """Write the rows of the blocks that this step's tokens lie in: chunk ends, and block ends
        inside a chunk."""
        rows, size = self.rows, self.cache_config.block_size
        slots = batch.slot_mapping[: hidden.shape[0]].long()
        count, requests = slots.shape[0], batch.query_start_loc.shape[0] - 1
        if requests == count:  # one token a request: decoding
            kept = slots
            runs = run
        else:
            last = (batch.query_start_loc[1:].long() - 1).clamp(0, count - 1)
            keep = (positions[:count] + 1) % size == 0
            keep = keep.index_fill(0, last, True)
            kept = torch.where(keep, slots, -1)
            runs = None
            if run is not None:  # a run can only be under way at the end of a chunk of one token
                single = batch.query_start_loc[1:] - batch.query_start_loc[:-1] == 1
                runs = torch.zeros(count + 1, dtype=torch.int64, device=slots.device)
                runs = runs.scatter_(0, torch.where(single, last, count), run)[:count]
        row = torch.where(kept >= 0, kept // size, rows.padding)
        rows.hidden[row] = hidden[:count]
        rows.position[row] = positions[:count]
        rows.run[row] = 0 if runs is None else runs
        if run is None and self.eager_checks:
            self.step.violated.zero_()


class LatentQwen2ForCausalLM(LatentModel, Qwen2ForCausalLM):
    """`model_type: latent_qwen2`."""


class LatentQwen3ForCausalLM(LatentModel, Qwen3ForCausalLM):
    """`model_type: latent_qwen3`."""

"""Latent blocks as vLLM model classes: one mixin, `LatentModel`, over vLLM's own Qwen2, Qwen3 and
Llama. A further family is one class at the end of this file.

At a latent position that opens its chunk the input is z = f(h), where h is the last hidden state of
the token before. Such a position is a decoding step, or begins a chunk because the scheduler cut
there. Where is that h? Each KV block has one row here, which holds the hidden state, the position
and the run length of the block's latest token. The row is written, shared and reused with its
block, so prefix caching and preemption need no code of their own.

Every chunk is checked. If a latent position did not open its chunk, or its row belongs to another
position, the request is marked as violated, and the forcing makes it fail. All tensors have fixed
shapes and addresses, as CUDA graphs need.

Letters in shapes: T tokens of the step, R requests, H hidden size, B KV blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from alar.engines.vllm.checks import EngineRefused, check_engine
from alar.engines.vllm.notes import StepLatents, shared
from alar.model.projector import PROJECTORS

PREFIX = "model.projector."
UNWRITTEN = -2  # position of a row that no token has written


class BlockRows:
    """For each KV block, the hidden state (B + 1, H), position and latent run length (B + 1,)
    of its latest token. The last row is for padding."""

    def __init__(self, blocks: int, hidden_size: int, dtype: torch.dtype, device: torch.device):
        self.hidden = torch.zeros(blocks + 1, hidden_size, dtype=dtype, device=device)
        self.position = torch.full((blocks + 1,), UNWRITTEN, dtype=torch.int64, device=device)
        # How many latent positions without a gap end with that token.
        self.run = torch.zeros(blocks + 1, dtype=torch.int64, device=device)
        self.padding = blocks


class LatentModel:
    """Mixin over a vLLM causal LM whose base model is `.model` with `embed_tokens`."""

    def __init__(self, *, vllm_config, prefix: str = ""):
        check_engine(vllm_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config, scheduling = self.config, vllm_config.scheduler_config
        self.latent_token_id, self.num_latent = config.latent_token_id, config.num_latent
        self.projector = (
            PROJECTORS[config.projector_kind](config).float().eval().requires_grad_(False)
        )
        weight = self.model.embed_tokens.weight
        dtype, device = weight.dtype, weight.device
        self.tokens = scheduling.max_num_batched_tokens
        # (tokens + 1, H); the last row takes the z of requests that have no latent position.
        inputs = torch.zeros(self.tokens + 1, config.hidden_size, dtype=dtype, device=device)
        self.register_buffer("inputs", inputs, persistent=False)
        self.cache_config = vllm_config.cache_config
        self.blueprints: dict[str, tuple] | None = None  # see `_unpack`
        # Projector tensors of the update under way; None between updates.
        self.arrived: set[str] | None = None
        self.rows: BlockRows | None = None  # sized in `_batch`, by the number of KV blocks
        self.step = StepLatents(scheduling.max_num_seqs, config.hidden_size, dtype, device)
        self.eager_checks = device.type == "cpu"  # looking at values does not synchronise there
        shared(vllm_config).step = self.step

    def load_weights(self, weights) -> set[str]:
        """Load the trunk by vLLM's loader and the projector here. Both may be a part only: verl
        hands an update over in buckets, one call each. Raises ValueError for an unknown tensor of
        the projector."""
        self._unpack()
        projector: dict[str, Tensor] = {}

        def trunk():
            for name, tensor in weights:
                if name.startswith(PREFIX):
                    projector[name.removeprefix(PREFIX)] = tensor
                else:
                    yield name, tensor

        loaded = super().load_weights(trunk())
        _, unexpected = self.projector.load_state_dict(projector, strict=False)
        if unexpected:
            raise ValueError(_misfit(unexpected, "unexpected"))
        self.arrived = (self.arrived or set()) | projector.keys()
        # vLLM's loader compares these with all parameters. What is still missing of the projector
        # comes later, or is refused by the method below in clearer words.
        return loaded | {f"projector.{name}" for name, _ in self.projector.named_parameters()}

    def process_weights_after_loading(self) -> None:
        """vLLM's hook for the end of a load, which verl calls once after the last bucket. Raises
        ValueError when the projector is not whole, as `alar.model.load` does: nothing is ever
        filled in. Without a load before it, weights are dummies that a first update replaces."""
        arrived, self.arrived = self.arrived, None
        if arrived is None:
            return
        missing = [name for name in self.projector.state_dict() if name not in arrived]
        if missing:
            raise ValueError(_misfit(missing, "missing"))

    def _unpack(self) -> None:
        """Make every weight loadable again.

        On a CPU vLLM packs matrices for oneDNN and drops the originals. The first call notes what
        the originals were, later calls make empty ones in their place.
        """
        if self.blueprints is None:
            self.blueprints = {}
            for name, module in self.named_modules():
                weight = module._parameters.get("weight")
                if weight is not None:
                    kind, attributes = type(weight), dict(vars(weight))
                    self.blueprints[name] = (
                        kind,
                        weight.shape,
                        weight.dtype,
                        weight.device,
                        attributes,
                    )
        for name, (kind, shape, dtype, device, attributes) in self.blueprints.items():
            module = self.get_submodule(name)
            if module.weight.numel() == 0:
                empty = torch.empty(shape, dtype=dtype, device=device)
                weight = torch.Tensor._make_subclass(kind, empty, False)
                vars(weight).update(attributes)
                module.weight = weight

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Logits (R, V) of the policy. The latent id and the spare rows after it are banned."""
        logits = super().compute_logits(hidden_states)
        if logits is not None:
            logits[..., self.latent_token_id :] = float("-inf")
        return logits

    def forward(
        self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None
    ) -> Tensor:
        """Last hidden states (T, H) of the step's tokens `input_ids` (T,)."""
        if inputs_embeds is not None or input_ids is None:
            raise EngineRefused(
                "a context must be given as token ids: prompt embeddings carry no latent positions"
            )
        count = input_ids.shape[0]
        inputs = self.inputs[:count]  # (T, H)
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
        """Attention metadata of the step, None in a profiling run.

        All layers share one KV cache group, so the metadata of any layer will do.
        """
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict) or not metadata:
            return None
        batch = next(iter(metadata.values()))
        needed = ("query_start_loc", "block_table", "slot_mapping")
        absent = [name for name in needed if not hasattr(batch, name)]
        if absent:
            raise EngineRefused(
                f"{type(batch).__name__} does not say {', '.join(absent)}; choose another attention"
                " backend: on GPUs --attention-backend FLASH_ATTN"
            )
        blocks, inputs = self.cache_config.num_gpu_blocks, self.inputs
        # vLLM first runs with a few blocks, to see what its CUDA graphs take. It throws those
        # graphs away, so none of them holds the address of the rows that are replaced here.
        if self.rows is None or self.rows.padding != blocks:
            self.rows = BlockRows(blocks, inputs.shape[1], inputs.dtype, inputs.device)
        return batch

    def _feed(self, batch, latent: Tensor, positions: Tensor) -> Tensor:
        """Put z where a chunk opens with a latent position, and flag chunks that break the rules.

        `latent` is (T,). Returns the run length (R,) after the first token of every chunk.
        """
        rows, count = self.rows, latent.shape[0]
        bounds = batch.query_start_loc.long()  # (R + 1,): where each request's chunk begins
        requests = bounds.shape[0] - 1
        start, end = bounds[:-1], bounds[1:]
        first = start.clamp(max=count - 1)  # padding requests are empty chunks at the end
        opens = (end > start) & latent[first]  # (R,)
        before = positions[first] - 1  # position of the token whose h is needed
        column = before.clamp(min=0) // self.cache_config.block_size
        index = torch.arange(requests, device=latent.device)
        block = batch.block_table[index, column].long()
        source = torch.where(opens & (before >= 0), block, rows.padding)  # (R,)
        step = rows.run[source]  # k of z_{k+1}
        z = self.projector(rows.hidden[source], step.clamp(max=max(self.num_latent - 1, 0)))
        self.inputs[torch.where(opens, first, self.tokens)] = z  # (R, H)

        # Latent positions of each chunk, by differences of running totals.
        total = torch.nn.functional.pad(latent.long().cumsum(0), (1, 0))  # (T + 1,)
        inside = total[end.clamp(max=count)] - total[start.clamp(max=count)]
        stray = inside != opens.long()  # one that does not open its chunk
        stale = opens & (rows.position[source] != before)  # the row is of another token
        self.step.latents[:requests] = z
        self.step.violated[:requests] = stray | stale
        return torch.where(opens, step + 1, 0)

    def _remember(self, batch, hidden: Tensor, positions: Tensor, run: Tensor | None) -> None:
        """Write the rows of the KV blocks that this step's tokens lie in. `hidden` is (T, H).

        The latest token of a block is the last one of the chunk, or the block's own last one.
        """
        rows, size = self.rows, self.cache_config.block_size
        slots = batch.slot_mapping[: hidden.shape[0]].long()  # (T,): block · size + offset
        count, requests = slots.shape[0], batch.query_start_loc.shape[0] - 1
        if requests == count:  # one token a request: decoding
            kept, runs = slots, run
        else:
            bounds = batch.query_start_loc
            last = (bounds[1:].long() - 1).clamp(0, count - 1)
            keep = (positions[:count] + 1) % size == 0
            keep = keep.index_fill(0, last, True)
            kept = torch.where(keep, slots, -1)
            runs = None
            if run is not None:  # only a chunk of one token can end within a run
                single = bounds[1:] - bounds[:-1] == 1
                runs = torch.zeros(count + 1, dtype=torch.int64, device=slots.device)
                runs = runs.scatter_(0, torch.where(single, last, count), run)[:count]
        row = torch.where(kept >= 0, kept // size, rows.padding)  # (T,)
        rows.hidden[row] = hidden[:count]
        rows.position[row] = positions[:count]
        rows.run[row] = 0 if runs is None else runs
        if run is None and self.eager_checks:
            self.step.violated.zero_()


def _misfit(names: list[str], what: str) -> str:
    return (
        f"the checkpoint's projector does not fit: {', '.join(names)} {what}; save the model again"
        " with alar.model.save"
    )


class LatentQwen2ForCausalLM(LatentModel, Qwen2ForCausalLM):
    """`model_type: latent_qwen2`."""


class LatentQwen3ForCausalLM(LatentModel, Qwen3ForCausalLM):
    """`model_type: latent_qwen3`."""


class LatentLlamaForCausalLM(LatentModel, LlamaForCausalLM):
    """`model_type: latent_llama`."""

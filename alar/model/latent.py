"""Qwen2 and Qwen3 with latent blocks: one implementation for both.

A latent position (id `config.latent_token_id`) has no embedding of its own. Its input is z,
computed from the hidden state just before it:

    z₁ = f(h₀), z_{k+1} = f(h_k),  h₀ at the last piece of `<latent>`

`latent_states` runs a batch call by call (`alar.model.packing`): the text of all rows up to their
next block, then K latent steps for all rows at once, each call attending to what earlier calls
stored (`alar.model.packed_attention`). Every real token passes through the trunk once and padding
never does; the hidden states of the calls are the result, so z in training is the z of decoding.
Gradient checkpointing changes none of that.

Under FSDP every call gathers weights from all ranks, forward and backward, so the ranks must make
the same calls whatever blocks their rows have. They agree on the longest schedule, and a rank with
a shorter one takes along a filler row, whose hidden states reach no loss.

A third model family is one line, `family(its config, its causal LM)`, as at the end of this file:
any decoder of transformers serves whose base model is `.model`, whose attention goes through
`AttentionInterface` and whose layers all have full attention. List it in
`alar.model.checkpoints.FAMILIES` for `from_base`.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from alar.model.attention import attention_of
from alar.model.packed_attention import PACKED, PackedCall, PackedPass, attention_kind
from alar.model.packing import Packing, pack, pack_text, sequence_ids, with_filler
from alar.model.projector import PROJECTORS

LATENT_GRADIENTS = ("published", "full", "projector_only")


@dataclass
class LatentStates:
    """`hidden` (B, T, H): last hidden state, after the final norm, at every position. `latents` (N,
    H): the z that was fed at each latent position, in row-major order."""

    hidden: Tensor
    latents: Tensor


class LatentCausalLM:
    """Mixin over a transformers causal LM: adds `model.projector`, `latent_states` and a
    latent-aware `forward`."""

    _keep_in_fp32_modules_strict = ["projector"]

    def __init__(self, config):
        if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
            raise ValueError(
                f"{config.model_type}: sliding-window layers are not supported, a block's z must"
                " see all of its past; set use_sliding_window: false in the base model's"
                " config.json if the contexts fit the window"
            )
        super().__init__(config)
        self.model.projector = PROJECTORS[config.projector_kind](config)
        self.post_init()

    def latent_states(
        self,
        input_ids: Int[Tensor, "B T"],
        attention_mask: Int[Tensor, "B T"] | None = None,
        *,
        segment_ids: Int[Tensor, "B T"] | None = None,
        latent_gradient: str = "published",
        latents: Float[Tensor, "N H"] | None = None,
    ) -> LatentStates:
        """Hidden states of a batch whose latent positions hold the reserved id.

        `attention_mask` marks real tokens, padding on either side; `segment_ids` tells sequences
        that share a row apart (0 = padding), each of which starts at position 0 and sees itself
        only. `latent_gradient`: "published" keeps h₀ attached and detaches later h; "full" attaches
        all; "projector_only" detaches all. With `latents` given (row-major), nothing is recomputed:
        they are fed as they are in one ordinary forward. Hidden states at padding are zero. Raises
        ValueError for blocks that are not K long.
        """
        if latent_gradient not in LATENT_GRADIENTS:
            raise ValueError(
                f"latent_gradient {latent_gradient!r}: expected one of"
                f" {', '.join(LATENT_GRADIENTS)}"
            )
        sequences = sequence_ids(input_ids, attention_mask, segment_ids)
        config, (rows, width) = self.config, input_ids.shape
        if latents is None:
            blocks = (config.latent_token_id, config.num_latent)
            packing = pack(input_ids, sequences, *blocks)
            own, calls = packing.num_latents, self._most_calls(len(packing.calls))
            if calls > len(packing.calls):
                input_ids, sequences = with_filler(input_ids, sequences, *blocks, calls)
                packing = pack(input_ids, sequences, *blocks)
        else:
            packing = pack_text(sequences)
        where = packing.where.to(input_ids.device)
        embeddings = self.get_input_embeddings()(
            input_ids.flatten()[where]
        )  # (N, H), in the order of the calls
        if latents is not None:
            embeddings = _placed(
                embeddings, input_ids.flatten()[where] == config.latent_token_id, where, latents
            )
        hidden, fed = self._run(packing, embeddings, latent_gradient)
        table = hidden.new_zeros(input_ids.numel(), hidden.shape[1]).index_copy(0, where, hidden)
        if latents is None:
            latents = fed[
                packing.latent_places().argsort()[:own].to(fed.device)
            ]  # without the filler row's, the last ones
        return LatentStates(table.view(*input_ids.shape, -1)[:rows, :width], latents)

    @property
    def _sharded(self) -> bool:
        return isinstance(self.model.layers[0], FSDPModule)

    def _most_calls(self, calls: int) -> int:
        """The number of calls of the rank that has most, if the weights are sharded over the ranks."""
        if not self._sharded:
            return calls
        most = torch.tensor(calls, device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return int(most)

    def _run(
        self, packing: Packing, embeddings: Tensor, latent_gradient: str
    ) -> tuple[Tensor, Tensor]:
        """Hidden states (N, H) of all tokens and z of the latent ones, both in the order of the
        calls."""
        kind = attention_kind(self.config, embeddings)
        shared = PackedPass(
            packing, kind, checkpointed=self.training and self.is_gradient_checkpointing
        )
        pieces, fed = [embeddings[:0]], [embeddings[:0]]
        try:
            with attention_of(self.config, PACKED):
                for call, inputs in zip(
                    packing.calls, embeddings.split([call.tokens for call in packing.calls])
                ):
                    if call.step is not None:
                        attached = latent_gradient == "full" or (
                            latent_gradient == "published" and call.step == 0
                        )
                        state = pieces[-1][call.before.to(inputs.device)]  # (n, H)
                        inputs = self.model.projector(
                            state if attached else state.detach(), call.step
                        )
                        fed.append(inputs)
                    pieces.append(
                        self.model(
                            inputs_embeds=inputs[None],
                            position_ids=call.positions()[None].to(inputs.device),
                            use_cache=False,
                            packed=PackedCall(shared, call, inputs.device),
                        ).last_hidden_state[0]
                    )
        finally:
            shared.links.clear()  # they would tie the graph to itself
        return torch.cat(pieces), torch.cat(fed)

    def _set_gradient_checkpointing(self, enable=True, gradient_checkpointing_func=checkpoint):
        """Non-reentrant checkpointing whose recomputation runs with the attention of its forward."""
        if enable:
            options = getattr(gradient_checkpointing_func, "keywords", {})
            if options.get("use_reentrant", True):
                raise ValueError(
                    "reentrant gradient checkpointing loses the gradients between the segments of a"
                    " sequence: use gradient_checkpointing_enable({'use_reentrant': False}), which"
                    " is also the default"
                )
            gradient_checkpointing_func = partial(self._checkpointed, gradient_checkpointing_func)
        super()._set_gradient_checkpointing(enable, gradient_checkpointing_func)

    def _checkpointed(self, checkpoint_function, layer_call, *inputs):
        """One layer's call. Latent steps, K tokens per block, keep their activations: that costs
        less than a second run."""
        packed = layer_call.keywords.get("packed")
        if packed is not None and not packed.checkpointed:
            return layer_call(*inputs)
        implementation = self.config._attn_implementation
        return checkpoint_function(
            layer_call,
            *inputs,
            context_fn=lambda: (nullcontext(), attention_of(self.config, implementation)),
        )

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        labels=None,
        inputs_embeds=None,
        past_key_values=None,
        segment_ids=None,
        latents=None,
        latent_gradient="published",
        **kwargs,
    ):
        """With `labels` the loss only, averaged over the labelled tokens (`num_items_in_batch` of
        them, if given); without, logits (B, T, V). Plain text without labels goes through the base
        class."""
        plain = (
            labels is None
            and segment_ids is None
            and not self._sharded
            and not self._has_latents(input_ids)
        )
        if plain or inputs_embeds is not None or past_key_values is not None:
            return super().forward(
                input_ids=input_ids,
                attention_mask=attention_mask,
                labels=labels,
                inputs_embeds=inputs_embeds,
                past_key_values=past_key_values,
                **kwargs,
            )
        hidden = self.latent_states(
            input_ids,
            attention_mask,
            segment_ids=segment_ids,
            latents=latents,
            latent_gradient=latent_gradient,
        ).hidden
        if labels is None:
            return CausalLMOutputWithPast(logits=self.lm_head(hidden))
        targets = labels[:, 1:]
        scored = targets != -100
        if (
            segment_ids is not None
        ):  # the first token of a sequence does not follow from the sequence before it
            scored = scored & (segment_ids[:, 1:] == segment_ids[:, :-1])
        if not bool(scored.any()):
            raise ValueError("no token of this batch carries loss: the mean over none would be NaN")
        loss = torch.nn.functional.cross_entropy(
            self.lm_head(hidden[:, :-1][scored]).float(), targets[scored], reduction="sum"
        )
        return CausalLMOutputWithPast(loss=loss / kwargs.get("num_items_in_batch", scored.sum()))

    def _has_latents(self, input_ids: Tensor | None) -> bool:
        return input_ids is not None and bool((input_ids == self.config.latent_token_id).any())


def _placed(embeddings: Tensor, latent: Tensor, where: Tensor, latents: Tensor) -> Tensor:
    """`embeddings` (N, H) with the given z, which are in reading order, at the `latent` (N,) ones."""
    places = latent.nonzero()[:, 0]
    if len(places) != len(latents):
        raise ValueError(
            f"{len(latents)} latent vectors were given for {len(places)} latent positions"
        )
    return embeddings.index_copy(0, places[where[places].argsort()], latents.to(embeddings.dtype))


@dataclass(kw_only=True)
class LatentOptions:
    """What a latent config adds to its base: K, the reserved id, the tags and the projector's
    options."""

    num_latent: int = 4
    latent_token_id: int | None = None
    projector_kind: str = "mlp"
    projector_size: int = 0
    projector_dropout: float = 0.0
    projector_layer_norm: bool = True
    projector_residual: bool = False
    projector_scale: str = "one"


def family(base_config: type, base_model: type) -> tuple[type, type]:
    """Config and model class of a latent family, registered with transformers' Auto classes."""
    options = {
        name: value
        for name, value in vars(LatentOptions).items()
        if name in LatentOptions.__annotations__
    }
    name = base_model.__name__.removesuffix("ForCausalLM")
    config = type(
        f"Latent{name}Config",
        (base_config,),
        {
            "__module__": __name__,
            "__doc__": LatentOptions.__doc__,
            "__annotations__": dict(LatentOptions.__annotations__),
            "model_type": f"latent_{base_config.model_type}",
            **options,
        },
    )
    model = type(
        f"Latent{name}ForCausalLM",
        (LatentCausalLM, base_model),
        {"__module__": __name__, "__doc__": LatentCausalLM.__doc__, "config_class": config},
    )
    AutoConfig.register(config.model_type, config)
    AutoModelForCausalLM.register(config, model)
    return config, model


LatentQwen2Config, LatentQwen2ForCausalLM = family(Qwen2Config, Qwen2ForCausalLM)
LatentQwen3Config, LatentQwen3ForCausalLM = family(Qwen3Config, Qwen3ForCausalLM)

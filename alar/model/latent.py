"""The latent model: a causal LM of transformers with a projector, trained on whole batches.

What it computes stands in `alar.model.recurrence`, for one sequence. Here the same is computed for
a batch in few calls of the trunk. Read it in this order:

    packing.py            a batch (B, T) → logical rows → a schedule: which tokens go in which call
    latent.py             `latent_states` feeds the schedule; `_run_calls` is the loop over it
    packed_attention.py   in each call: attention over the keys and values of earlier calls

Every real token passes through the trunk once, padding never does, and the hidden states of the
calls are the result. So z in training is the z of decoding, with gradient checkpointing too.

Under FSDP every call gathers weights from all ranks, forward and backward, so all ranks must make
the same calls, whatever blocks their rows have. They agree on the longest schedule, and a rank with
a shorter one adds a filler row, whose hidden states reach no loss.

`alar.model.families` makes a class for each family of base models out of this mixin.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import CausalLMOutputWithPast

from alar.model.attention import attention_of
from alar.model.packed_attention import PACKED, PackedCall, PackedPass, attention_kind
from alar.model.packing import Packing, pack, sequence_ids, with_filler
from alar.model.projector import PROJECTORS
from alar.model.recurrence import LatentStates, reaches_state
from alar.model.scoring import score_tokens


class LatentCausalLM:
    """Mixin over a transformers causal LM: adds `model.projector` and `latent_states`, and a
    `forward` that knows latent positions."""

    _keep_in_fp32_modules_strict = ["projector"]

    def __init__(self, config):
        if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
            raise ValueError(
                f"{config.model_type}: sliding-window layers are not supported, because z must see"
                " the whole past of its block. If your contexts fit into the window, set"
                " use_sliding_window: false in the base model's config.json"
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
        """Hidden states (B, T, H) and z (N, H) of a batch whose latent positions hold the reserved
        id. Hidden states at padding are zero.

        - `attention_mask` is 1 at real tokens; padding may stand on either side.
        - `segment_ids` tells sequences in one row apart (0 = padding). Each of them starts at
          position 0 and sees itself only.
        - `latent_gradient`: see `alar.model.recurrence.reaches_state`.
        - `latents`: z to feed as they are, in reading order, in one ordinary forward. Without them
          z is computed.

        Raises ValueError for blocks that are not K long.
        """
        config, (num_rows, width) = self.config, input_ids.shape
        attached = [reaches_state(latent_gradient, step) for step in range(config.num_latent)]
        sequences = sequence_ids(input_ids, attention_mask, segment_ids)  # (B, T)
        if latents is None:
            packing, num_latents, input_ids = self._schedule(input_ids, sequences)
        else:  # no position has to wait for another one: all is text, in one call
            packing = pack(input_ids, sequences, None, config.num_latent)
        # From here on all R real tokens stand in one line, in the order of the calls.
        where = packing.where.to(input_ids.device)  # (R,) places in the flattened grid
        ids = input_ids.flatten()[where]  # (R,)
        embeddings = self.get_input_embeddings()(ids)  # (R, H)
        if latents is not None:
            embeddings = _with_given(embeddings, ids == config.latent_token_id, latents)
        hidden, z = self._run_calls(packing, embeddings, attached)
        grid = hidden.new_zeros(input_ids.numel(), hidden.shape[1])  # (B·T, H)
        grid = grid.index_copy(0, where, hidden).view(*input_ids.shape, -1)
        if latents is None:
            order = packing.latents_in_reading_order()[:num_latents]  # the filler row's come last
            latents = z[order.to(z.device)]
        return LatentStates(grid[:num_rows, :width], latents)

    def _schedule(
        self, input_ids: Int[Tensor, "B T"], sequences: Int[Tensor, "B T"]
    ) -> tuple[Packing, int, Tensor]:
        """The schedule, how many z the batch itself has, and the ids that the schedule is for: with
        a filler row where another rank makes more calls."""
        block = (self.config.latent_token_id, self.config.num_latent)
        packing = pack(input_ids, sequences, *block)
        num_latents, calls = packing.num_latents, self._most_calls(len(packing.calls))
        if calls > len(packing.calls):
            input_ids, sequences = with_filler(input_ids, sequences, *block, calls)
            packing = pack(input_ids, sequences, *block)
        return packing, num_latents, input_ids

    @property
    def _sharded(self) -> bool:
        return isinstance(self.model.layers[0], FSDPModule)

    def _most_calls(self, calls: int) -> int:
        """How many calls the rank with the longest schedule makes, if the weights are sharded."""
        if not self._sharded:
            return calls
        most = torch.tensor(calls, device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return int(most)

    def _run_calls(
        self, packing: Packing, embeddings: Float[Tensor, "R H"], attached: list[bool]
    ) -> tuple[Float[Tensor, "R H"], Float[Tensor, "N H"]]:
        """Hidden states of all tokens and the z of the latent ones, both in the order of the calls.

        `attached[k]` says whether the gradient of z_{k+1} goes on into h_k.
        """
        device = embeddings.device
        kind = attention_kind(self.config, embeddings)
        checkpointed = self.training and self.is_gradient_checkpointing
        hidden, latents = [embeddings[:0]], [embeddings[:0]]  # one (n, H) for each call
        inputs_of_calls = embeddings.split([call.tokens for call in packing.calls])
        previous = None
        with attention_of(self.config, PACKED), PackedPass(packing, kind, checkpointed) as shared:
            for call, inputs in zip(packing.calls, inputs_of_calls):  # inputs: (n, H)
                if call.is_latent:
                    # h_k of the rows 0 … n − 1, each at the end of its part of the previous call.
                    last = previous.last_tokens()[: len(call.rows)].to(device)
                    h = hidden[-1][last]  # (n, H)
                    if not attached[call.step]:
                        h = h.detach()
                    inputs = self.model.projector(h, call.step)  # (n, H), z_{k+1}
                    latents.append(inputs)
                output = self.model(
                    inputs_embeds=inputs[None],  # (1, n, H)
                    position_ids=call.positions()[None].to(device),
                    use_cache=False,
                    packed=PackedCall(shared, call, device),
                )
                hidden.append(output.last_hidden_state[0])
                previous = call
        return torch.cat(hidden), torch.cat(latents)

    def _set_gradient_checkpointing(self, enable=True, gradient_checkpointing_func=checkpoint):
        """Non-reentrant checkpointing; what runs again runs with the attention of its forward."""
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
        """One call of a layer. Latent steps keep their activations: a block has K tokens only, so
        keeping them costs less than running it again."""
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
        shift_labels=None,
        temperature=1.0,
        calculate_entropy=False,
        **kwargs,
    ):
        """With `labels` only the loss: the mean over the labelled tokens, or their sum divided by
        `num_items_in_batch` where that is given. With `shift_labels`, each at the position that
        predicts it, their log-probs (`alar.model.scoring.TokenScores`). Else logits (B, T, V).

        Text without labels, and a call that brings its own embeddings or cache (decoding), go
        through the base class.
        """
        plain = (
            labels is None
            and shift_labels is None
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
        ).hidden  # (B, T, H)
        if shift_labels is not None:
            return score_tokens(
                self.lm_head,
                hidden,
                shift_labels,
                self.config.latent_token_id,  # this id and the spare rows after it are never chosen
                temperature=temperature,
                entropy=calculate_entropy,
            )
        if labels is None:
            return CausalLMOutputWithPast(logits=self.lm_head(hidden))
        targets = labels[:, 1:]  # (B, T - 1)
        scored = targets != -100
        if segment_ids is not None:
            # The first token of a sequence does not follow from the sequence before it.
            scored = scored & (segment_ids[:, 1:] == segment_ids[:, :-1])
        if not bool(scored.any()):
            raise ValueError("no token of this batch carries loss: the mean over none would be NaN")
        logits = self.lm_head(hidden[:, :-1][scored])  # (S, V), of the scored positions only
        loss = cross_entropy(logits.float(), targets[scored], reduction="sum")
        return CausalLMOutputWithPast(loss=loss / kwargs.get("num_items_in_batch", scored.sum()))

    def _has_latents(self, input_ids: Tensor | None) -> bool:
        return input_ids is not None and bool((input_ids == self.config.latent_token_id).any())


def _with_given(
    embeddings: Float[Tensor, "R H"], is_latent: Bool[Tensor, " R"], latents: Float[Tensor, "N H"]
) -> Float[Tensor, "R H"]:
    """The embeddings with the given z at the latent positions, both in reading order."""
    places = is_latent.nonzero()[:, 0]  # (N,)
    if len(places) != len(latents):
        raise ValueError(
            f"{len(latents)} latent vectors were given for {len(places)} latent positions"
        )
    return embeddings.index_copy(0, places, latents.to(embeddings.dtype))

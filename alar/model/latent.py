"""Qwen2 and Qwen3 with latent blocks: one implementation for both.

A latent position (id `config.latent_token_id`) has no embedding of its own. Its input is z, computed from the hidden
state just before it:

    z₁ = f(h₀), z_{k+1} = f(h_k),  h₀ at the last piece of `<latent>`

`latent_states` runs a batch segment by segment with a KV cache: the text up to each row's next block, then K latent
steps for all rows at once. Every token passes through the trunk once, and the hidden states of the segments are the
result, so z in training is the z of decoding. Model calls: at most (blocks + 1) + blocks·K, whatever the batch size.

A third model family is added by naming its config, its base model and its causal-LM class at the end of this file.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from alar.model.projector import PROJECTORS

LATENT_GRADIENTS = ("published", "full", "projector_only")


@dataclass
class LatentStates:
    """`hidden` (B, T, H): last hidden state, after the final norm, at every position. `latents` (N, H): the z that was
    fed at each latent position, in row-major order."""

    hidden: Tensor
    latents: Tensor


class SegmentCache:
    """KV cache that grows by concatenation and knows each key's position and validity.

    A query attends to the valid keys at its own position or before; padding keys are never valid. That one rule serves
    left and right padding and rows with different numbers of blocks.
    """

    def __init__(self, layers: int):
        self.keys: list[Tensor | None] = [None] * layers  # each (B, kv heads, T, D)
        self.values: list[Tensor | None] = [None] * layers
        self.positions: Tensor | None = None  # (B, T)
        self.valid: Tensor | None = None  # (B, T)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        if self.keys[layer_idx] is not None:
            key_states = torch.cat([self.keys[layer_idx], key_states], dim=2)
            value_states = torch.cat([self.values[layer_idx], value_states], dim=2)
        self.keys[layer_idx], self.values[layer_idx] = key_states, value_states
        return key_states, value_states

    def extend(self, positions: Int[Tensor, "B L"], valid: Bool[Tensor, "B L"]) -> Bool[Tensor, "B 1 L T"]:
        """Announce the next chunk; returns its attention mask over all keys so far and its own."""
        if self.positions is not None:
            positions_all = torch.cat([self.positions, positions], dim=1)
            valid_all = torch.cat([self.valid, valid], dim=1)
        else:
            positions_all, valid_all = positions, valid
        self.positions, self.valid = positions_all, valid_all
        mask = valid_all[:, None, :] & (positions_all[:, None, :] <= positions[:, :, None])
        # A padding query sees its own chunk's column only, so that its softmax is finite.
        own = torch.arange(positions_all.shape[1], device=positions.device)[None, None, :]
        first = positions_all.shape[1] - positions.shape[1]
        own = own == first + torch.arange(positions.shape[1], device=positions.device)[None, :, None]
        return (mask | (own & ~valid[:, :, None]))[:, None]

    def get_seq_length(self, *args) -> int:
        return 0 if self.positions is None else self.positions.shape[1]


def check_blocks(input_ids: Tensor, latent: Tensor, num_latent: int) -> Tensor:
    """Start flags (B, T) of the latent blocks; every run of latent ids must be exactly K long and follow some text."""
    previous = torch.zeros_like(latent)
    previous[:, 1:] = latent[:, :-1]
    starts = latent & ~previous
    lengths = latent.sum(1)
    run = latent
    for _ in range(num_latent - 1):  # erode every run by K − 1 from its end: what is left of a K-run is its start
        shifted = torch.zeros_like(run)
        shifted[:, :-1] = run[:, 1:]
        run = run & shifted
    if num_latent == 0 or not torch.equal(run, starts) or not torch.equal(lengths, starts.sum(1) * num_latent):
        raise ValueError(
            f"latent blocks in the data do not have K = {num_latent} positions each: the model's config.num_latent "
            "and the K that the trajectories were made with differ, or a block was cut"
        )
    if bool(latent[:, 0].any()):
        raise ValueError("a sequence starts with a latent position: z needs the hidden state of the token before it")
    return starts


class LatentCausalLM:
    """Mixin over a transformers causal LM: adds `model.projector`, `latent_states` and a latent-aware `forward`."""

    def __init__(self, config):
        super().__init__(config)
        self.model.projector = PROJECTORS[config.projector_kind](config)
        self.post_init()

    def latent_states(
        self,
        input_ids: Int[Tensor, "B T"],
        attention_mask: Int[Tensor, "B T"] | None = None,
        *,
        latent_gradient: str = "published",
        latents: Float[Tensor, "N H"] | None = None,
    ) -> LatentStates:
        """Hidden states of a batch whose latent positions hold the reserved id.

        `attention_mask` marks real tokens, padding on either side. `latent_gradient`: "published" keeps h₀ attached and
        detaches later h; "full" attaches all; "projector_only" detaches all. With `latents` given (row-major), nothing
        is recomputed: they are fed as they are in one ordinary forward. Raises ValueError for blocks that are not K long.
        """
        if latent_gradient not in LATENT_GRADIENTS:
            raise ValueError(f"latent_gradient {latent_gradient!r}: expected one of {', '.join(LATENT_GRADIENTS)}")
        valid = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        latent = (input_ids == self.config.latent_token_id) & valid  # (B, T)
        positions = (valid.cumsum(1) - 1).clamp(min=0)
        embeddings = self.get_input_embeddings()(input_ids)  # (B, T, H)
        if latents is not None:
            return self._with_given_latents(embeddings, latent, valid, positions, latents)
        if not bool(latent.any()):
            hidden = self._trunk(embeddings, positions, valid)
            return LatentStates(hidden, embeddings.new_zeros(0, embeddings.shape[-1]))
        starts = check_blocks(input_ids, latent, self.config.num_latent)
        return self._by_segments(embeddings, starts, valid, positions, latent_gradient)

    def _trunk(self, embeddings: Tensor, positions: Tensor, valid: Tensor) -> Tensor:
        if bool(valid[:, 0].all()):  # padding on the right only: causal attention never sees it
            return self.model(inputs_embeds=embeddings, use_cache=False).last_hidden_state
        return self.model(
            inputs_embeds=embeddings, attention_mask=valid.long(), position_ids=positions, use_cache=False
        ).last_hidden_state

    def _with_given_latents(self, embeddings, latent, valid, positions, latents) -> LatentStates:
        if latents.shape[0] != int(latent.sum()):
            raise ValueError(f"{latents.shape[0]} latent vectors were given for {int(latent.sum())} latent positions")
        rows, columns = latent.nonzero(as_tuple=True)
        embeddings = embeddings.index_put((rows, columns), latents.to(embeddings.dtype))
        return LatentStates(self._trunk(embeddings, positions, valid), latents)

    def _by_segments(self, embeddings, starts, valid, positions, latent_gradient) -> LatentStates:
        batch, length, width = embeddings.shape
        num_latent = self.config.num_latent
        blocks = [row.nonzero()[:, 0].tolist() for row in starts.cpu()]
        bounds = [(int(row.nonzero()[0, 0]), int(row.nonzero()[-1, 0]) + 1) for row in valid.cpu()]
        cursor = [first for first, _ in bounds]
        cache = SegmentCache(self.config.num_hidden_layers)
        pieces: list[tuple[Tensor, Tensor, Tensor]] = []  # (rows, columns, hidden states) of every chunk
        fed: list[tuple[Tensor, Tensor, Tensor]] = []  # (rows, columns, z)
        for turn in range(max(map(len, blocks)) + 1):
            ends = [row[turn] if turn < len(row) else end for row, (_, end) in zip(blocks, bounds)]
            chunk = max(end - start for start, end in zip(cursor, ends))
            if chunk == 0:  # every sequence ends with its last block
                break
            columns = torch.tensor(cursor, device=embeddings.device)[:, None] + torch.arange(
                chunk, device=embeddings.device
            )
            real = columns < torch.tensor(ends, device=embeddings.device)[:, None]  # (B, chunk)
            columns = columns.clamp(max=length - 1)
            hidden = self._step(
                cache, embeddings.gather(1, columns[..., None].expand(-1, -1, width)), positions.gather(1, columns), real
            )
            rows, offsets = real.nonzero(as_tuple=True)
            pieces.append((rows, columns[rows, offsets], hidden[rows, offsets]))
            opening = torch.tensor([turn < len(row) for row in blocks], device=embeddings.device)  # (B,)
            if bool(opening.any()):
                last = real.sum(1).sub(1).clamp(min=0)  # where h₀ stands in this chunk
                state = hidden[torch.arange(batch, device=embeddings.device), last]  # (B, H)
                begin = torch.tensor(ends, device=embeddings.device).clamp(max=length - 1)
                (rows,) = opening.nonzero(as_tuple=True)
                for step in range(num_latent):
                    attached = latent_gradient == "full" or (latent_gradient == "published" and step == 0)
                    z = self.model.projector(state if attached else state.detach(), step)  # (B, H)
                    column = (begin + step).clamp(max=length - 1)
                    state = self._step(
                        cache, z[:, None], positions.gather(1, column[:, None]), opening[:, None]
                    )[:, 0]
                    pieces.append((rows, column[rows], state[rows]))
                    fed.append((rows, column[rows], z[rows]))
            cursor = [end + (num_latent if turn < len(row) else 0) for end, row in zip(ends, blocks)]
        rows, columns, values = (torch.cat(part) for part in zip(*pieces))
        hidden = values.new_zeros(batch, length, width).index_put((rows, columns), values)
        rows, columns, values = (torch.cat(part) for part in zip(*fed))
        return LatentStates(hidden, values[torch.argsort(rows * length + columns)])

    def _step(self, cache: SegmentCache, inputs: Tensor, positions: Tensor, valid: Tensor) -> Tensor:
        """One trunk call over (B, L, H) inputs; returns hidden states (B, L, H)."""
        mask = cache.extend(positions, valid)
        if self.config._attn_implementation == "eager":
            mask = torch.where(mask, 0.0, torch.finfo(inputs.dtype).min).to(inputs.dtype)
        return self.model(
            inputs_embeds=inputs,
            attention_mask={"full_attention": mask},
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        labels=None,
        inputs_embeds=None,
        past_key_values=None,
        latents=None,
        latent_gradient="published",
        **kwargs,
    ):
        """With `labels` the loss only, averaged over the labelled tokens (`num_items_in_batch` of them, if given);
        without, logits (B, T, V). Plain text without labels goes through the base class."""
        plain = labels is None and not (input_ids is not None and bool((input_ids == self.config.latent_token_id).any()))
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
            input_ids, attention_mask, latents=latents, latent_gradient=latent_gradient
        ).hidden
        if labels is None:
            return CausalLMOutputWithPast(logits=self.lm_head(hidden))
        targets = labels[:, 1:]
        scored = targets != -100
        if not bool(scored.any()):
            raise ValueError("no token of this batch carries loss: the mean over none would be NaN")
        loss = torch.nn.functional.cross_entropy(
            self.lm_head(hidden[:, :-1][scored]).float(), targets[scored], reduction="sum"
        )
        return CausalLMOutputWithPast(loss=loss / kwargs.get("num_items_in_batch", scored.sum()))


@dataclass(kw_only=True)
class LatentOptions:
    """What a latent config adds to its base: K, the reserved id, the tags and the projector's options."""

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
    options = {name: value for name, value in vars(LatentOptions).items() if name in LatentOptions.__annotations__}
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

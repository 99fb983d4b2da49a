"""The in-process engine: batched decoding with the latent state machine on a transformers model.

Each trajectory has a slot in a preallocated KV cache, where key j is the token at position j, so rows of different
lengths share a batch without padding columns and the cache survives from turn to turn. Rows that are still writing
occupy the first slots: finished rows are swapped out of the batch, and the attention reads a slice, never a copy.
"""

from __future__ import annotations

import random
from typing import Sequence

import numpy as np
import torch
from torch import Tensor

from alar.model.attention import grouped_attention
from alar.records import Origin
from alar.rollout.codec import Codec
from alar.rollout.engine import Sampling, TurnOutput, TurnRequest, TurnWriter


def policy_logits(model, hidden: Tensor) -> Tensor:
    """Logits (…, V) of the ids that the policy may choose: the latent id and the spare rows after it are excluded.

    Decoding and the RL log-prob pass use this one function, so that their probabilities agree.
    """
    logits = model.lm_head(hidden).float()
    reserved = getattr(model.config, "latent_token_id", None)
    return logits if reserved is None else logits[..., :reserved]


class SlotCache:
    """Keys and values by slot and position. `rows` slots are in use by the current call; column C is a scratch column
    that padding writes to and nobody reads."""

    def __init__(self, config, slots: int, capacity: int, dtype: torch.dtype, device: torch.device):
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, 2, slots, config.num_key_value_heads, capacity + 1, head)
        self.data = torch.zeros(shape, dtype=dtype, device=device)
        self.rows = 0
        self.columns: Tensor | None = None  # (rows, L): where the current chunk is written
        self.length = 0  # keys visible to the current call

    @property
    def slots(self) -> int:
        return self.data.shape[2]

    @property
    def capacity(self) -> int:
        return self.data.shape[4] - 1

    def resized(self, slots: int, capacity: int) -> SlotCache:
        layers, _, old_slots, heads, columns, head = self.data.shape
        bigger = self.data.new_zeros((layers, 2, max(slots, old_slots), heads, max(capacity + 1, columns), head))
        bigger[:, :, :old_slots, :, :columns] = self.data
        self.data = bigger
        return self

    def swap(self, one: int, other: int) -> None:
        self.data[:, :, [one, other]] = self.data[:, :, [other, one]]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        keys, values = self.data[layer_idx, 0, : self.rows], self.data[layer_idx, 1, : self.rows]
        rows = torch.arange(self.rows, device=keys.device)[:, None]
        keys[rows, :, self.columns] = key_states.transpose(1, 2)  # (rows, L, kv heads, D)
        values[rows, :, self.columns] = value_states.transpose(1, 2)
        return keys[:, :, : self.length], values[:, :, : self.length]

    def get_seq_length(self, *args) -> int:
        return self.length


class HFEngine:
    """`Engine` on a transformers Qwen2 or Qwen3, latent or not, in the dtype and on the device of the model."""

    def __init__(self, model, tokenizer, *, prefill_tokens: int = 16384):
        self.model = model.eval()
        self.codec = Codec.of(model, tokenizer)
        self.prefill_tokens = prefill_tokens
        self.device = next(model.parameters()).device
        self.dtype = next(model.parameters()).dtype
        self.cache = SlotCache(model.config, 0, 0, self.dtype, self.device)
        self.slot_of: dict[int, int] = {}  # session → slot
        self.held: list[list[int]] = []  # ids whose keys are in each slot

    def release(self, sessions: Sequence[int]) -> None:
        for session in sessions:
            slot = self.slot_of.pop(session, None)
            if slot is not None:
                self.held[slot] = []

    def reset(self) -> None:
        """Forget everything: call after the model's weights have changed."""
        self.slot_of.clear()
        self.held = [[] for _ in self.held]

    @torch.no_grad()
    def generate(self, requests: Sequence[TurnRequest], sampling: Sampling) -> list[TurnOutput]:
        if not requests:
            return []
        longest = max(len(request.ids) for request in requests) + sampling.max_new_tokens + 32
        limit = self.model.config.max_position_embeddings
        if longest > limit:
            raise ValueError(
                f"a context of {longest} tokens (prompt and new ones) exceeds the model's {limit} positions: lower "
                "rollout.max_turns or rollout.max_new_tokens"
            )
        with grouped_attention(self.model):
            self._seat(requests, longest)
            writers = [TurnWriter(self.codec, request, sampling) for request in requests]
            rngs = [random.Random(request.seed) for request in requests]
            hidden = self._prefill(requests)  # (n, H)
            self._decode(writers, rngs, hidden, sampling)
        return [writer.output for writer in writers]

    def _seat(self, requests: Sequence[TurnRequest], longest: int) -> None:
        """Give every request the slot of its own index; keep what its slot already holds if the ids agree."""
        if len({request.session for request in requests}) != len(requests):
            raise ValueError("two requests of one batch name the same session")
        newcomers = sum(request.session not in self.slot_of for request in requests)
        needed = len(self.slot_of) + newcomers
        if needed > self.cache.slots or longest > self.cache.capacity:
            self.cache.resized(needed, 128 * -(-longest // 128))
            self.held += [[] for _ in range(self.cache.slots - len(self.held))]
        free = [slot for slot in range(self.cache.slots) if slot not in set(self.slot_of.values())]
        for request in requests:
            if request.session not in self.slot_of:
                self.slot_of[request.session] = free.pop()
        session_at = {slot: session for session, slot in self.slot_of.items()}
        for index, request in enumerate(requests):
            slot = self.slot_of[request.session]
            if slot != index:
                self._swap(slot, index, session_at)
            if self.held[index] != list(request.ids[: len(self.held[index])]) or len(self.held[index]) >= len(request.ids):
                self.held[index] = []

    def _swap(self, one: int, other: int, session_at: dict[int, int]) -> None:
        self.cache.swap(one, other)
        self.held[one], self.held[other] = self.held[other], self.held[one]
        first, second = session_at.pop(one, None), session_at.pop(other, None)
        for session, slot in ((first, other), (second, one)):
            if session is not None:
                session_at[slot], self.slot_of[session] = session, slot

    def _trunk(self, embeddings: Tensor, starts: list[int], counts: list[int]) -> Tensor:
        """Feed (n, L, H) inputs, `counts[i]` of them real, to the first n slots from position `starts[i]` on."""
        rows, length, _ = embeddings.shape
        start = torch.tensor(starts, device=self.device)[:, None]
        offset = torch.arange(length, device=self.device)[None]
        real = offset < torch.tensor(counts, device=self.device)[:, None]
        positions = start + offset  # (n, L)
        self.cache.rows, self.cache.length = rows, max(s + c for s, c in zip(starts, counts))
        self.cache.columns = positions.masked_fill(~real, self.cache.capacity)
        keys = torch.arange(self.cache.length, device=self.device)
        mask = keys[None, None] <= positions[:, :, None]  # (n, L, T)
        return self.model.model(
            inputs_embeds=embeddings,
            attention_mask={"full_attention": mask[:, None]},
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
        ).last_hidden_state

    def _prefill(self, requests: Sequence[TurnRequest]) -> Tensor:
        """Feed what each slot does not hold yet; hidden state (n, H) at the last token of every context."""
        total = len(requests)
        last = torch.zeros(total, self.model.config.hidden_size, dtype=self.dtype, device=self.device)
        pending = [list(request.ids[len(held) :]) for request, held in zip(requests, self.held)]
        width = max(1, self.prefill_tokens // total)
        while any(pending):
            chunk = min(width, max(map(len, pending)))
            counts = [min(chunk, len(ids)) for ids in pending]
            table = [ids[:chunk] + [0] * (chunk - count) for ids, count in zip(pending, counts)]
            embeddings = self.model.get_input_embeddings()(torch.tensor(table, device=self.device))
            for index, (request, count) in enumerate(zip(requests, counts)):
                self._place_latents(embeddings, index, request, count)
            starts = [len(held) for held in self.held[:total]]
            hidden = self._trunk(embeddings, starts, counts)
            for index, count in enumerate(counts):
                if count:
                    self.held[index] = self.held[index] + pending[index][:count]
                    pending[index] = pending[index][count:]
                    last[index] = hidden[index, count - 1]
        return last

    def _place_latents(self, embeddings: Tensor, index: int, request: TurnRequest, count: int) -> None:
        """Put z where the chunk of row `index` has latent positions: a bullet's own embedding is never fed."""
        reserved = self.codec.latent_token_id
        start = len(self.held[index])
        span = request.ids[start : start + count]
        if reserved is None or reserved not in span:
            return
        before = sum(token == reserved for token in request.ids[:start])
        columns = [column for column, token in enumerate(span) if token == reserved]
        if before + len(columns) > len(request.latents):
            raise ValueError(
                f"session {request.session}: the context has more latent positions than the {len(request.latents)} "
                "latent vectors given with it; a context must carry the z of every latent position"
            )
        z = np.asarray(request.latents[before : before + len(columns)])
        embeddings[index, columns] = torch.as_tensor(z, dtype=self.dtype, device=self.device)

    def _decode(self, writers: list[TurnWriter], rngs: list[random.Random], hidden: Tensor, sampling: Sampling) -> None:
        """Write until every row is done. Slot i < active always belongs to `order[i]`."""
        order = list(range(len(writers)))  # slot → request
        active = len(order)
        embed = self.model.get_input_embeddings()
        while active:
            rows = [writers[order[slot]] for slot in range(active)]
            tokens, logprobs = self._choose(rows, [rngs[order[slot]] for slot in range(active)], hidden, sampling)
            inputs = embed(torch.tensor(tokens, device=self.device))  # (active, H)
            thinking: dict[int, list[int]] = {}  # latent step → slots
            for slot, writer in enumerate(rows):
                following = writer.forced()
                if following and following[1] is Origin.LATENT:
                    thinking.setdefault(writer.thoughts, []).append(slot)
            fed: dict[int, np.ndarray] = {}
            for step, slots in thinking.items():
                z = self.model.model.projector(hidden[slots], step)
                inputs[slots] = z
                fed.update(zip(slots, z.float().cpu().numpy()))
            for slot, (writer, token, logprob) in enumerate(zip(rows, tokens, logprobs)):
                writer.push(token, logprob, fed.get(slot))
            keep = self._drop_finished(writers, order, active)
            inputs, active = inputs[keep], len(keep)
            if active:
                starts = [len(self.held[slot]) for slot in range(active)]
                for slot in range(active):
                    self.held[slot].append(writers[order[slot]].output.ids[-1])
                hidden = self._trunk(inputs[:, None], starts, [1] * active)[:, 0]

    def _choose(self, rows, rngs, hidden: Tensor, sampling: Sampling) -> tuple[list[int], list[float]]:
        """Next token of every row, forced or chosen, with the log-prob of the chosen ones."""
        logits = policy_logits(self.model, hidden)
        if sampling.temperature > 0:
            logits = logits / sampling.temperature
        logprobs = torch.log_softmax(logits, dim=-1)  # (n, V)
        if sampling.temperature == 0:
            chosen = logprobs.argmax(-1)
        else:
            draws = [rng.random() for rng in rngs]
            chosen = _inverse_cdf(logprobs.exp(), torch.tensor(draws, device=self.device), sampling.top_p)
        picked = logprobs.gather(1, chosen[:, None])[:, 0].tolist()
        tokens = chosen.tolist()
        for index, writer in enumerate(rows):
            following = writer.forced()
            if following:
                tokens[index] = following[0]
        return tokens, picked

    def _drop_finished(self, writers: list[TurnWriter], order: list[int], active: int) -> list[int]:
        """Swap finished rows behind the active ones; returns, per remaining slot, its row in the step just done."""
        source = list(range(active))
        session_at = {slot: session for session, slot in self.slot_of.items()}
        slot = 0
        while slot < active:
            if not writers[order[slot]].done:
                slot += 1
                continue
            active -= 1
            if slot != active:
                self._swap(slot, active, session_at)
                order[slot], order[active] = order[active], order[slot]
                source[slot] = source[active]
        return source[:active]


def _inverse_cdf(probabilities: Tensor, draws: Tensor, top_p: float) -> Tensor:
    """Sample by inverting the cumulative distribution: one uniform draw a row, whatever the rest of the batch is."""
    if top_p < 1.0:
        ranked, ids = probabilities.sort(dim=-1, descending=True)
        ranked = ranked * ((ranked.cumsum(-1) - ranked) < top_p)
    else:
        ranked, ids = probabilities, None
    cumulative = ranked.double().cumsum(-1)
    column = torch.searchsorted(cumulative, (draws.double() * cumulative[:, -1])[:, None], right=True)
    column = column.clamp(max=ranked.shape[-1] - 1)
    return (column if ids is None else ids.gather(1, column))[:, 0]

"""The in-process engine: continuous batching with the latent state machine on a transformers model.

One step is one forward pass over everything that is known and not yet fed: the last token of every
row that is writing, the contexts of rows that have just entered, and forced tokens (`</latent>`
after z_K goes in with z_K). Rows enter and leave at any step. A context's keys are taken from
wherever they already are, in its own slot from earlier turns or in another's slot with the same
beginning: prompts of one question are computed once, and so is the instruction that all prompts
share. z belongs to the identity of a beginning: equal ids with other latents share nothing from the
first such z on.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from alar.model.attention import attention_of
from alar.records import Origin
from alar.rollout.cache import SLOT_ATTENTION, Slot, SlotCache, StepLayout
from alar.rollout.codec import Codec
from alar.rollout.engine import Engine, Sampling, TurnOutput, TurnRequest, TurnWriter
from alar.rollout.sampling import inverse_cdf

MIN_SHARED = 16  # tokens that make it worth waiting one step for another row's keys


def policy_logits(model, hidden: Tensor) -> Tensor:
    """Logits (…, V) of the ids that the policy may choose: the latent id and the spare rows after
    it are excluded.

    Decoding and the RL log-prob pass use this one function, so that their probabilities agree.
    """
    logits = model.lm_head(hidden).float()
    reserved = getattr(model.config, "latent_token_id", None)
    return logits if reserved is None else logits[..., :reserved]


@dataclass(eq=False)
class Row:
    """One turn being written. `feed` holds ids that are known and not yet in the cache, `thoughts`
    the z of those that are latent positions, in order."""

    request: TurnRequest
    sampling: Sampling
    writer: TurnWriter
    slot: Slot
    feed: list[int]
    thoughts: list[np.ndarray]
    draws: random.Random = field(init=False)

    def __post_init__(self):
        self.draws = random.Random(self.request.seed)
        self.take_forced()

    def take_forced(self) -> None:
        """Write what must come next, as far as it is known without the model; z is not."""
        writer = self.writer
        while (
            writer.queue
            and not writer.done
            and (following := writer.forced())[1] is not Origin.LATENT
        ):
            writer.push(following[0], float("nan"))
            self.feed.append(following[0])

    @property
    def thinking(self) -> bool:
        """Whether the next position is a latent one."""
        queue = self.writer.queue
        return bool(queue) and queue[0][1] is Origin.LATENT

    def write(self, token: int, logprob: float, z: np.ndarray | None = None) -> None:
        self.writer.push(token, logprob, z)
        self.feed.append(token)
        if z is not None:
            self.thoughts.append(z)
        if self.writer.queue:
            self.take_forced()


class HFEngine(Engine):
    """`Engine` on a transformers Qwen2 or Qwen3, latent or not, in the dtype and on the device of
    the model.

    A step feeds at most `step_tokens` tokens, or one per row if that is more.
    """

    def __init__(self, model, tokenizer, *, step_tokens: int = 4096):
        if set(getattr(model.config, "layer_types", ())) - {"full_attention"}:
            raise ValueError(
                "the in-process engine has full attention only: set use_sliding_window to false in"
                " config.json"
            )
        self.model = model.eval()
        self.codec = Codec.of(model, tokenizer)
        self.step_tokens = step_tokens
        self.device = next(model.parameters()).device
        self.dtype = next(model.parameters()).dtype
        self.constraint = self.codec.constraint(self.device)
        self.group = model.config.num_attention_heads // model.config.num_key_value_heads
        self.cache = SlotCache(model.config, self.dtype, self.device)
        self.slot_of: dict[int, Slot] = {}  # session → slot
        self.waiting: list[tuple[TurnRequest, Sampling]] = []
        self.rows: dict[int, Row] = {}  # session → turn being written

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.rows)

    def release(self, sessions: Sequence[int]) -> None:
        forgotten = set(sessions)
        self.waiting = [entry for entry in self.waiting if entry[0].session not in forgotten]
        for session in forgotten:
            self.rows.pop(session, None)
            if session in self.slot_of:
                self.slot_of.pop(session).owned = False

    def reset(self) -> None:
        """Forget everything: call after the model's weights have changed."""
        self.waiting.clear()
        self.rows.clear()
        self.slot_of.clear()
        self.cache.clear()

    def submit(self, requests: Sequence[TurnRequest], sampling: Sampling) -> None:
        limit, reserved = self.model.config.max_position_embeddings, self.codec.latent_token_id
        taken = {request.session for request, _ in self.waiting} | set(self.rows)
        for request in requests:
            if request.session in taken:
                raise ValueError(
                    f"session {request.session} is named by two requests that are written at the"
                    " same time"
                )
            taken.add(request.session)
            longest = len(request.ids) + sampling.max_new_tokens + 32
            if longest > limit:
                raise ValueError(
                    f"a context of {longest} tokens (prompt and new ones) exceeds the model's"
                    f" {limit} positions: lower rollout.max_turns or rollout.max_new_tokens"
                )
            if reserved is not None and request.ids.count(reserved) != len(request.latents):
                raise ValueError(
                    f"session {request.session}: the context has {request.ids.count(reserved)}"
                    f" latent positions and {len(request.latents)} latent vectors; a context must"
                    " carry the z of every latent position"
                )
        self.waiting += [(request, sampling) for request in requests]

    @torch.no_grad()
    def step(self) -> list[tuple[TurnRequest, TurnOutput]]:
        """One forward pass; returns the turns that ended in it."""
        self._admit()
        if not self.rows:
            return []
        ready, hidden = self._forward()
        if not ready:
            return []
        self._advance(ready, hidden)
        ended = [row for row in ready if row.writer.done]
        for row in ended:
            del self.rows[row.request.session]
        return [(row.request, row.writer.output) for row in ended]

    def _admit(self) -> None:
        """Seat the waiting requests; one whose beginning another is about to compute stays until
        the next step."""
        waiting, self.waiting = self.waiting, []
        computed: set[tuple[int, ...]] = set()  # beginnings that rows seated now will compute
        for request, sampling in waiting:
            slot, known = self._known(request)
            beginning = tuple(request.ids[: known + MIN_SHARED])
            if beginning in computed:
                self.waiting.append((request, sampling))
                continue
            if len(beginning) == known + MIN_SHARED:
                computed.add(beginning)
            seat = self._seat(request, slot, known)
            thoughts = list(request.latents[len(seat.latents) :])
            writer = TurnWriter(self.codec, request, sampling)
            self.rows[request.session] = Row(
                request, sampling, writer, seat, list(request.ids[known:]), thoughts
            )

    def _known(self, request: TurnRequest) -> tuple[Slot | None, int]:
        """The slot that shares the longest beginning with a context, and its length; the last token
        is always fed."""
        reserved, ids, latents = self.codec.latent_token_id, request.ids, request.latents
        own = self.slot_of.get(request.session)
        best, known = own, own.shared(ids, latents, reserved) if own else 0
        if not own:
            for slot in self.cache.slots():
                if len(slot.ids) > known < len(ids) and slot.ids[known] == ids[known]:
                    if shared := slot.shared(ids, latents, reserved, known):
                        best, known = slot, shared
        return best, min(known, len(ids) - 1)

    def _seat(self, request: TurnRequest, source: Slot | None, known: int) -> Slot:
        """A slot of the session's own that holds the first `known` keys of the context and has room
        for the rest."""
        reserved, own = self.codec.latent_token_id, self.slot_of.get(request.session)
        if own is not None and own.shelf.capacity > len(request.ids):
            own.keep(known, reserved)
            return own
        return self._settle(request.session, len(request.ids) + 1, source, known)

    def _settle(self, session: int, length: int, source: Slot | None, known: int) -> Slot:
        """Move a session to a new slot with room for `length` keys, the first `known` of them
        copied from `source`."""
        reserved, slot = self.codec.latent_token_id, self.cache.take(length)
        if source is not None and source is not slot:
            self.cache.copy(source, slot, known, reserved)
        slot.keep(known, reserved)
        if session in self.slot_of:
            self.slot_of[session].owned = False
        self.slot_of[session] = slot
        return slot

    def _forward(self) -> tuple[list[Row], Tensor]:
        """Feed every row; returns the rows that have nothing left to feed and their hidden states
        (n, H)."""
        entries = self._entries()
        reserved, tokens, thoughts, last = self.codec.latent_token_id, [], [], []
        layout = StepLayout(
            [(row.slot, count) for row, count in entries], self.group, self.dtype, self.device
        )
        for row, count in entries:
            fed, row.feed = (
                (row.feed, []) if count == len(row.feed) else (row.feed[:count], row.feed[count:])
            )
            if row.thoughts and reserved in fed:
                latent = fed.count(reserved)
                row.slot.latents += row.thoughts[:latent]
                thoughts += row.thoughts[:latent]
                row.thoughts = row.thoughts[latent:]
            row.slot.ids += fed
            tokens += fed
            if not row.feed:
                last.append(len(tokens) - 1)
        ids = torch.tensor(tokens, device=self.device)
        embeddings = self.model.get_input_embeddings()(ids)  # (N, H)
        if thoughts:
            embeddings[ids == reserved] = torch.as_tensor(np.stack(thoughts)).to(embeddings)
        with attention_of(self.model.config, SLOT_ATTENTION):
            hidden = self.model.model(
                inputs_embeds=embeddings[None],
                attention_mask={"full_attention": None},
                position_ids=layout.positions,
                use_cache=False,
                layout=layout,
            ).last_hidden_state[0]
        ready = [row for row, _ in entries if not row.feed]
        return ready, (
            hidden
            if len(last) == len(tokens)
            else hidden[torch.tensor(last, dtype=torch.long, device=self.device)]
        )

    def _entries(self) -> list[tuple[Row, int]]:
        """(row, tokens to feed now), ordered as `StepLayout` likes it, with a place for every key."""
        budget = max(self.step_tokens, len(self.rows))
        spare = budget - len(self.rows)
        singles, chunks = {}, []
        for row in self.rows.values():
            count = min(len(row.feed), 1 + spare)
            spare -= count - 1
            length = len(row.slot.ids) + count
            if length > row.slot.shelf.capacity:
                row.slot = self._settle(row.request.session, length, row.slot, len(row.slot.ids))
            if count == 1:
                singles[row.slot] = row
            else:
                chunks.append((row, count))
        entries = []
        for shelf in self.cache.shelves.values():
            inside = shelf.bring_forward(singles)
            entries += [(singles[slot], 1) for slot in shelf.slots[:inside]]
        return entries + chunks

    def _advance(self, rows: list[Row], hidden: Tensor) -> None:
        """Write the next position of every row: z where a block is open, else a token that the
        policy chooses."""
        thinking: dict[int, list[int]] = {}  # latent step → rows
        choosing: dict[Sampling, list[int]] = {}
        for index, row in enumerate(rows):
            if row.thinking:
                thinking.setdefault(row.writer.thoughts, []).append(index)
            elif not row.writer.done:
                choosing.setdefault(row.sampling, []).append(index)
        for step, places in thinking.items():
            z = self.model.model.projector(hidden[places], step)
            z = (
                z.to(torch.promote_types(z.dtype, torch.float32)).cpu().numpy()
            )  # NumPy has no bfloat16
            for index, vector in zip(places, z):
                rows[index].write(self.codec.latent_token_id, float("nan"), vector)
        for sampling, places in choosing.items():
            states = hidden if len(places) == len(rows) else hidden[places]
            draws = (
                [rows[index].draws.random() for index in places]
                if sampling.temperature > 0
                else None
            )
            logits = policy_logits(self.model, states)
            if self.constraint is not None:
                logits = self.constraint(logits, [rows[index].writer.phase.row for index in places])
            tokens, logprobs = choose(logits, sampling, draws)
            for index, token, logprob in zip(places, tokens, logprobs):
                rows[index].write(token, logprob)


def choose(
    logits: Tensor, sampling: Sampling, draws: Sequence[float] | None
) -> tuple[list[int], list[float]]:
    """A token for each row of logits (n, V), and its log-prob at this temperature; `draws` are
    uniform in [0, 1)."""
    if sampling.temperature not in (0, 1):
        logits = logits / sampling.temperature
    logprobs = torch.log_softmax(logits, dim=-1)  # (n, V)
    if sampling.temperature == 0:
        chosen = logits.argmax(-1)
    else:
        chosen = inverse_cdf(
            logprobs.exp(), torch.tensor(draws, device=logits.device), sampling.top_p
        )
    return chosen.tolist(), logprobs.gather(1, chosen[:, None])[:, 0].tolist()

"""The in-process engine: continuous batching with the latent state machine on a transformers model.

One step is one forward pass over everything that is known and not yet fed: the last token of every
turn that is being written, the contexts of turns that have just entered, and forced tokens
(`</latent>` after z_K goes in together with z_K). Turns enter and leave at any step.

The keys of a context are taken from wherever they already are: the trajectory's own slot from
earlier turns, or another slot with the same beginning. So a prompt that several rollouts share is
computed once, and so is the instruction that all prompts share. z is part of a beginning: contexts
with equal ids but other z share nothing from the first such z on.

Keys and values stay within a budget (`alar.rollout.cache`). Where it is used up, turns wait, or one
that has begun pauses: it gives up its slot, and its context, with the z that it recorded, is fed
again later. That changes no result beyond rounding.
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
from alar.rollout.cache import SLOT_ATTENTION, Slot, SlotCache, StepLayout, give_memory_back
from alar.rollout.codec import Codec
from alar.rollout.engine import Engine, Sampling, TurnOutput, TurnRequest, TurnWriter
from alar.rollout.sampling import inverse_cdf

MIN_SHARED = 16  # tokens that make it worth waiting one step for another turn's keys
ADMITTED = 7 / 8  # of the budget; the rest is for turns that grow, so that few have to pause
NAN = float("nan")  # the log-prob of tokens that the policy did not choose


def policy_logits(model, hidden: Tensor) -> Tensor:
    """Logits (…, V) of the ids that the policy may choose, of hidden states (…, H). The latent id
    and the spare rows after it are left out.

    Decoding and the log-prob pass of RL both use this function, so their probabilities agree.
    """
    logits = model.lm_head(hidden).float()
    reserved = getattr(model.config, "latent_token_id", None)
    return logits if reserved is None else logits[..., :reserved]


@dataclass(eq=False)
class OpenTurn:
    """One turn, waiting or being written. `feed` holds ids that are known and not yet in the cache,
    `thoughts` the z (H,) of those that are latent positions, in order. Without a slot that is all
    of the context."""

    request: TurnRequest
    sampling: Sampling
    writer: TurnWriter
    slot: Slot | None = None
    feed: list[int] = field(init=False)
    thoughts: list[np.ndarray] = field(init=False)
    draws: random.Random = field(init=False)

    def __post_init__(self):
        self.draws = random.Random(self.request.seed)
        self.leave_slot()

    def leave_slot(self) -> None:
        written = self.writer.output
        self.slot = None
        self.feed = [*self.request.ids, *written.ids]
        self.thoughts = [*self.request.latents, *written.latents]

    def take_slot(self, slot: Slot) -> None:
        """Go on in a slot that holds the beginning of the context."""
        self.slot = slot
        self.feed = self.feed[len(slot.ids) :]
        self.thoughts = self.thoughts[len(slot.latents) :]
        self.take_forced()

    def take_forced(self) -> None:
        """Write what must come next, as far as it is known without the model; z is not."""
        while self.writer.queue and not self.writer.done and not self.thinking:
            token, _ = self.writer.queue[0]
            self.writer.push(token, NAN)
            self.feed.append(token)

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
        self.take_forced()


class HFEngine(Engine):
    """`Engine` on a transformers model with full attention, latent or not, in the dtype and on the
    device of the model.

    A step feeds at most `step_tokens` tokens, or one per open turn if that is more. Keys and values
    take at most `cache_bytes`; None: `alar.rollout.cache.cache_budget`.
    """

    def __init__(
        self, model, tokenizer, *, step_tokens: int = 4096, cache_bytes: int | None = None
    ):
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
        self.cache = SlotCache(model.config, self.dtype, self.device, cache_bytes)
        # session → slot, kept from turn to turn; the session that ended a turn last stands last
        self.slot_of: dict[int, Slot] = {}
        self.waiting: list[OpenTurn] = []
        self.open: dict[int, OpenTurn] = {}  # session → turn being written

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.open)

    def release(self, sessions: Sequence[int]) -> None:
        forgotten = set(sessions)
        self.waiting = [turn for turn in self.waiting if turn.request.session not in forgotten]
        for session in forgotten:
            self.open.pop(session, None)
            if session in self.slot_of:
                self.slot_of.pop(session).owned = False  # its keys stay until the slot is reused

    def reset(self) -> None:
        """Forget everything: call after the model's weights have changed."""
        self.waiting.clear()
        self.open.clear()
        self.slot_of.clear()
        self.cache.clear()

    def close(self) -> None:
        """Give the memory of keys and model back, which also leaves the GPU where nobody else holds
        the model. The engine then has its codec, and writes no more."""
        self.reset()
        self.model = self.constraint = None
        give_memory_back()

    def submit(self, requests: Sequence[TurnRequest], sampling: Sampling) -> None:
        if self.model is None:
            raise ValueError("this engine is closed: open another one")
        limit, reserved = self.model.config.max_position_embeddings, self.codec.latent_token_id
        taken = {turn.request.session for turn in self.waiting} | set(self.open)
        for request in requests:
            session = request.session
            if session in taken:
                raise ValueError(f"session {session}: two turns of it are asked for at once")
            taken.add(session)
            longest = len(request.ids) + sampling.max_new_tokens + 32  # 32: a block at the end
            if longest > limit:
                raise ValueError(
                    f"a context of {longest} tokens (prompt and new ones) exceeds the model's"
                    f" {limit} positions: lower rollout.max_turns or rollout.max_new_tokens"
                )
            needed = self.cache.slot_bytes(longest)
            if needed > self.cache.limit:
                raise ValueError(
                    f"a context of {longest} tokens has {needed:,} bytes of keys and values, and"
                    f" the cache may take {self.cache.limit:,}: lower rollout.max_turns or"
                    " rollout.max_new_tokens, free memory, or give HFEngine more cache_bytes"
                )
            places = 0 if reserved is None else request.ids.count(reserved)
            if reserved is not None and places != len(request.latents):
                raise ValueError(
                    f"session {session}: the context has {places} latent positions and"
                    f" {len(request.latents)} latent vectors; give the z of every latent position"
                )
        for request in requests:
            writer = TurnWriter(self.codec, request, sampling)
            self.waiting.append(OpenTurn(request, sampling, writer))

    @torch.no_grad()
    def step(self) -> list[tuple[TurnRequest, TurnOutput]]:
        """One forward pass; returns the turns that ended in it."""
        self._admit()
        if not self.open:
            return []
        entries = self._entries()
        if not entries:  # the only open turn pauses to enter again with a longer slot
            return []
        ready, hidden = self._forward(entries)
        self._advance(ready, hidden)
        ended = [turn for turn in ready if turn.writer.done]
        for turn in ended:
            session = turn.request.session
            del self.open[session]
            self.slot_of[session] = self.slot_of.pop(session)  # now the last one used
        return [(turn.request, turn.writer.output) for turn in ended]

    # Entering: which keys of a context are known, and where the rest will stand.

    def _admit(self) -> None:
        """Open the waiting turns, as far as there is room. One whose beginning another is about to
        compute waits until the next step, when it can copy the keys."""
        queue, self.waiting = self.waiting, []
        computed: set[tuple[int, ...]] = set()  # beginnings that turns opened now will compute
        full = False
        for place, turn in enumerate(queue):
            own = self.slot_of.get(turn.request.session)
            if full and (own is None or own.shelf.capacity <= len(turn.feed)):
                self.waiting.append(turn)
                continue
            source, known = self._known(turn.request.session, turn.feed, turn.thoughts)
            beginning = tuple(turn.feed[: known + MIN_SHARED])
            if beginning in computed:
                self.waiting.append(turn)
                continue
            slot = self._seat(turn, source, known)
            while slot is None and self._make_room(len(turn.feed) + 1, ADMITTED, queue, place):
                slot = self._seat(turn, source, known)
            if slot is None:
                full = True
                self.waiting.append(turn)
                continue
            if len(beginning) == known + MIN_SHARED:
                computed.add(beginning)
            turn.take_slot(slot)
            self.open[turn.request.session] = turn
        if self.waiting and not self.open:  # the first one alone: `submit` saw to it that it fits
            for slot in self.slot_of.values():
                slot.owned = False
            self.slot_of.clear()
            turn = self.waiting.pop(0)
            turn.take_slot(self._move(turn.request.session, len(turn.feed) + 1, None, 0))
            self.open[turn.request.session] = turn

    def _known(
        self, session: int, ids: list[int], latents: list[np.ndarray]
    ) -> tuple[Slot | None, int]:
        """The slot that shares the longest beginning with a context, and the length of that. The
        last token is never known: its hidden state is needed, so it must be fed."""
        reserved = self.codec.latent_token_id
        own = self.slot_of.get(session)
        if own is not None:
            return own, min(own.shared(ids, latents, reserved), len(ids) - 1)
        best, known = None, 0
        for slot in self.cache.slots():
            # Most slots are ruled out by one comparison: they do not go on as the context does.
            if len(slot.ids) > known < len(ids) and slot.ids[known] == ids[known]:
                shared = slot.shared(ids, latents, reserved, known)
                if shared:
                    best, known = slot, shared
        return best, min(known, len(ids) - 1)

    def _seat(self, turn: OpenTurn, source: Slot | None, known: int) -> Slot | None:
        """A slot of the session's own that holds the first `known` keys of the context and has room
        for the rest; None if there is too little memory."""
        session, length = turn.request.session, len(turn.feed)
        own = self.slot_of.get(session)
        if own is not None and own.shelf.capacity > length:
            own.keep(known, self.codec.latent_token_id)
            return own
        return self._move(session, length + 1, source, known, ADMITTED)

    def _move(
        self, session: int, length: int, source: Slot | None, known: int, share: float = 1.0
    ) -> Slot | None:
        """Move a session to a new slot with room for `length` keys, the first `known` of them
        copied from `source`. None if `share` of the cache's limit is too little for that."""
        reserved, slot = self.codec.latent_token_id, self.cache.take(length, share, source)
        if slot is None:
            return None
        if source is not None and source is not slot:
            self.cache.copy(source, slot, known, reserved)
        slot.keep(known, reserved)
        if session in self.slot_of:
            self.slot_of[session].owned = False
        self.slot_of[session] = slot
        return slot

    # Where the budget is used up.

    def _make_room(self, length: int, share: float, queue: Sequence[OpenTurn], place: int) -> bool:
        """Take the slot of one session that writes no turn and is not among the first in the queue,
        up to `place`. False where `length` keys would not fit into `share` of the limit even then.

        Sessions without a waiting turn go first, the least recently used of them before the others;
        then those at the end of the queue.
        """
        last = len(queue)
        places = {turn.request.session: number for number, turn in enumerate(queue)}
        idle = {
            session: places.get(session, last)
            for session in self.slot_of
            if session not in self.open and places.get(session, last) > place
        }
        kept = self.cache.bytes_of(s for one, s in self.slot_of.items() if one not in idle)
        needed = kept + self.cache.slot_bytes(length)
        if not idle or needed > share * self.cache.limit:
            return False
        victim = max(idle, key=idle.get)  # the first of several at the same place
        self.slot_of.pop(victim).owned = False
        return True

    def _grow(self, turn: OpenTurn, length: int) -> bool:
        """Move an open turn to a slot with room for `length` keys. Where there is none, the turns
        that began last pause; False if it came to this one."""
        session, known = turn.request.session, len(turn.slot.ids)
        while True:
            slot = self._move(session, length, turn.slot, known)
            if slot is not None:
                turn.slot = slot
                return True
            if self._make_room(length, 1.0, self.waiting, -1):
                continue
            newest = next(reversed(self.open.values()))
            self._pause(newest)
            if newest is turn:
                return False

    def _pause(self, turn: OpenTurn) -> None:
        session = turn.request.session
        del self.open[session]
        self.slot_of.pop(session).owned = False
        turn.leave_slot()
        self.waiting.insert(0, turn)  # those that pause later began earlier

    # One forward pass.

    def _forward(self, entries: list[tuple[OpenTurn, int]]) -> tuple[list[OpenTurn], Tensor]:
        """Feed the open turns. Returns those that have nothing left to feed, and the hidden state
        (n, H) of their last token."""
        slots = [(turn.slot, count) for turn, count in entries]
        layout = StepLayout(slots, self.group, self.dtype, self.device)
        tokens: list[int] = []
        thoughts: list[np.ndarray] = []
        ready: list[OpenTurn] = []
        last: list[int] = []  # place of each ready turn's last token
        for turn, count in entries:
            fed, turn.feed = turn.feed[:count], turn.feed[count:]
            if turn.thoughts:
                latent = fed.count(self.codec.latent_token_id)
                turn.slot.latents += turn.thoughts[:latent]
                thoughts += turn.thoughts[:latent]
                turn.thoughts = turn.thoughts[latent:]
            turn.slot.ids += fed
            tokens += fed
            if not turn.feed:
                ready.append(turn)
                last.append(len(tokens) - 1)

        ids = torch.tensor(tokens, device=self.device)  # (N,)
        embeddings = self.model.get_input_embeddings()(ids)  # (N, H)
        if thoughts:
            z = torch.as_tensor(np.stack(thoughts))  # in the order of the latent positions
            embeddings[ids == self.codec.latent_token_id] = z.to(embeddings)
        with attention_of(self.model.config, SLOT_ATTENTION):
            hidden = self.model.model(
                inputs_embeds=embeddings[None],
                attention_mask={"full_attention": None},
                position_ids=layout.positions,
                use_cache=False,
                layout=layout,
            ).last_hidden_state[0]  # (N, H)
        if len(last) < len(tokens):
            hidden = hidden[torch.tensor(last, dtype=torch.long, device=self.device)]
        return ready, hidden

    def _entries(self) -> list[tuple[OpenTurn, int]]:
        """(turn, how many tokens to feed now), in the order that `StepLayout` wants, with a place
        for every key."""
        spare = max(0, self.step_tokens - len(self.open))  # beyond one token for each
        singles: dict[Slot, OpenTurn] = {}
        chunks: list[tuple[OpenTurn, int]] = []
        for turn in list(self.open.values()):
            if turn.slot is None:  # it paused for one before it
                continue
            count = min(len(turn.feed), 1 + spare)
            spare -= count - 1
            length = len(turn.slot.ids) + count
            if length > turn.slot.shelf.capacity and not self._grow(turn, length):
                continue
            if count == 1:
                singles[turn.slot] = turn
            else:
                chunks.append((turn, count))
        entries = []
        for shelf in self.cache.shelves.values():
            inside = shelf.bring_forward(singles)
            entries += [(singles[slot], 1) for slot in shelf.slots[:inside]]
        return entries + chunks

    # What comes next.

    def _advance(self, turns: list[OpenTurn], hidden: Tensor) -> None:
        """Write the next position of every turn, given its last hidden states (n, H): z where a
        block is open, else a token that the policy chooses."""
        thinking: dict[int, list[int]] = {}  # latent step → indices of turns
        choosing: dict[Sampling, list[int]] = {}
        for index, turn in enumerate(turns):
            if turn.thinking:
                thinking.setdefault(turn.writer.thoughts, []).append(index)
            elif not turn.writer.done:
                choosing.setdefault(turn.sampling, []).append(index)
        for step, indices in thinking.items():
            z = self.model.model.projector(hidden[indices], step)  # (n, H)
            z = z.to(torch.promote_types(z.dtype, torch.float32))  # NumPy has no bfloat16
            for index, vector in zip(indices, z.cpu().numpy()):
                turns[index].write(self.codec.latent_token_id, NAN, vector)
        for sampling, indices in choosing.items():
            states = hidden if len(indices) == len(turns) else hidden[indices]
            self._choose([turns[index] for index in indices], states, sampling)

    def _choose(self, turns: list[OpenTurn], hidden: Tensor, sampling: Sampling) -> None:
        """Let the policy write one token in each turn, given their hidden states (n, H)."""
        draws = None
        if sampling.temperature > 0:
            draws = [turn.draws.random() for turn in turns]
        logits = policy_logits(self.model, hidden)  # (n, V)
        if self.constraint is not None:
            logits = self.constraint(logits, [turn.writer.phase.row for turn in turns])
        tokens, logprobs = choose(logits, sampling, draws)
        for turn, token, logprob in zip(turns, tokens, logprobs):
            turn.write(token, logprob)


def choose(
    logits: Tensor, sampling: Sampling, draws: Sequence[float] | None
) -> tuple[list[int], list[float]]:
    """A token for each row of logits (n, V), and its log-prob at this temperature. `draws` are
    uniform in [0, 1), one for each row; None where the temperature is 0."""
    if sampling.temperature not in (0, 1):
        logits = logits / sampling.temperature
    logprobs = torch.log_softmax(logits, dim=-1)  # (n, V)
    if sampling.temperature == 0:
        chosen = logits.argmax(-1)  # (n,)
    else:
        uniform = torch.tensor(draws, device=logits.device)
        chosen = inverse_cdf(logprobs.exp(), uniform, sampling.top_p)  # (n,)
    return chosen.tolist(), logprobs.gather(1, chosen[:, None])[:, 0].tolist()

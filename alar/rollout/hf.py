"""The in-process engine: continuous batching with the latent state machine on a transformers model.

One step is one forward pass over everything that is known and not yet fed: the last token of every
turn that is being written, the contexts of turns that have just entered, and forced tokens
(`</latent>` after z_K goes in together with z_K). Turns enter and leave at any step.

The keys of a context are taken from wherever they already are: the trajectory's own slot from
earlier turns, or another slot with the same beginning. So a prompt that several rollouts share is
computed once, and so is the instruction that all prompts share. z is part of a beginning: contexts
with equal ids but other z share nothing from the first such z on.
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

MIN_SHARED = 16  # tokens that make it worth waiting one step for another turn's keys
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
    """One turn being written. `feed` holds ids that are known and not yet in the cache, `thoughts`
    the z (H,) of those that are latent positions, in order."""

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

    A step feeds at most `step_tokens` tokens, or one per open turn if that is more.
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
        self.slot_of: dict[int, Slot] = {}  # session → slot, kept from turn to turn
        self.waiting: list[tuple[TurnRequest, Sampling]] = []
        self.open: dict[int, OpenTurn] = {}  # session → turn being written

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.open)

    def release(self, sessions: Sequence[int]) -> None:
        forgotten = set(sessions)
        self.waiting = [entry for entry in self.waiting if entry[0].session not in forgotten]
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

    def submit(self, requests: Sequence[TurnRequest], sampling: Sampling) -> None:
        limit, reserved = self.model.config.max_position_embeddings, self.codec.latent_token_id
        taken = {request.session for request, _ in self.waiting} | set(self.open)
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
            places = 0 if reserved is None else request.ids.count(reserved)
            if reserved is not None and places != len(request.latents):
                raise ValueError(
                    f"session {session}: the context has {places} latent positions and"
                    f" {len(request.latents)} latent vectors; give the z of every latent position"
                )
        self.waiting += [(request, sampling) for request in requests]

    @torch.no_grad()
    def step(self) -> list[tuple[TurnRequest, TurnOutput]]:
        """One forward pass; returns the turns that ended in it."""
        self._admit()
        if not self.open:
            return []
        ready, hidden = self._forward()
        self._advance(ready, hidden)
        ended = [turn for turn in ready if turn.writer.done]
        for turn in ended:
            del self.open[turn.request.session]
        return [(turn.request, turn.writer.output) for turn in ended]

    # Entering: which keys of a context are known, and where the rest will stand.

    def _admit(self) -> None:
        """Open the waiting turns. One whose beginning another is about to compute waits until the
        next step, when it can copy the keys."""
        waiting, self.waiting = self.waiting, []
        computed: set[tuple[int, ...]] = set()  # beginnings that turns opened now will compute
        for request, sampling in waiting:
            source, known = self._known(request)
            beginning = tuple(request.ids[: known + MIN_SHARED])
            if beginning in computed:
                self.waiting.append((request, sampling))
                continue
            if len(beginning) == known + MIN_SHARED:
                computed.add(beginning)
            slot = self._seat(request, source, known)
            writer = TurnWriter(self.codec, request, sampling)
            feed = list(request.ids[known:])
            thoughts = list(request.latents[len(slot.latents) :])
            turn = OpenTurn(request, sampling, writer, slot, feed, thoughts)
            self.open[request.session] = turn

    def _known(self, request: TurnRequest) -> tuple[Slot | None, int]:
        """The slot that shares the longest beginning with a context, and the length of that. The
        last token is never known: its hidden state is needed, so it must be fed."""
        reserved, ids, latents = self.codec.latent_token_id, request.ids, request.latents
        own = self.slot_of.get(request.session)
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

    def _seat(self, request: TurnRequest, source: Slot | None, known: int) -> Slot:
        """A slot of the session's own that holds the first `known` keys of the context and has room
        for the rest."""
        own = self.slot_of.get(request.session)
        if own is not None and own.shelf.capacity > len(request.ids):
            own.keep(known, self.codec.latent_token_id)
            return own
        return self._move(request.session, len(request.ids) + 1, source, known)

    def _move(self, session: int, length: int, source: Slot | None, known: int) -> Slot:
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

    # One forward pass.

    def _forward(self) -> tuple[list[OpenTurn], Tensor]:
        """Feed every open turn. Returns the turns that have nothing left to feed, and the hidden
        state (n, H) of their last token."""
        entries = self._entries()
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
        for turn in self.open.values():
            count = min(len(turn.feed), 1 + spare)
            spare -= count - 1
            known = len(turn.slot.ids)
            if known + count > turn.slot.shelf.capacity:
                turn.slot = self._move(turn.request.session, known + count, turn.slot, known)
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

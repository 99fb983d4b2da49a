"""What an engine is: it writes one turn for each request. It knows nothing of domains.

Requests may be submitted at any time, and every step reports those that have ended. So the next
turn of one trajectory, or a new question, enters while the others go on writing.

`TurnWriter` is the state machine of a latent block. There is one per request, and all engines share
it: it watches the bytes that the policy has written in this turn and says what comes next.

    text ends in <latent>, outside a think block
    → K latent positions
    → the pieces of </latent>, forced
    → text again
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from alar import protocol
from alar.records import Origin
from alar.rollout.codec import Codec


@dataclass(frozen=True)
class Sampling:
    """How one turn is decoded. `temperature` 0 is greedy. A turn ends when its text ends in one of
    the `stop` strings."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    stop: tuple[str, ...] = protocol.SEARCH_STOPS

    def __post_init__(self):
        if self.max_new_tokens < 1 or self.temperature < 0 or not 0 < self.top_p <= 1:
            raise ValueError(
                f"{self}: expected max_new_tokens ≥ 1, temperature ≥ 0 and 0 < top_p ≤ 1"
            )


@dataclass
class TurnRequest:
    """The context of one turn: all ids so far, and z (N, H) of their latent positions in order.

    `session` names the trajectory, so that an engine can keep its KV cache from turn to turn.
    `forced` ids open the turn (a forced mode). `seed` makes sampling independent of the other
    requests in the batch. `allow_latent=False` leaves `<latent>` ordinary text.
    """

    session: int
    ids: Sequence[int]
    latents: np.ndarray
    forced: Sequence[int] = ()
    seed: int = 0
    allow_latent: bool = True


@dataclass
class TurnOutput:
    """What the policy wrote: ids, origins, behaviour log-probs (NaN unless SAMPLED), and z (H,) of
    each latent position.

    The log-probs are those of the distribution at the sampling temperature, before `top_p` cuts it.
    """

    ids: list[int] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    latents: list[np.ndarray] = field(default_factory=list)
    finish: str = ""  # "stop" | "eos" | "length"


class Engine(ABC):
    """Writes turns for many trajectories at once. `codec` turns text into the ids of this engine's
    model and back."""

    codec: Codec

    @abstractmethod
    def submit(self, requests: Sequence[TurnRequest], sampling: Sampling) -> None:
        """Take requests in. Raises ValueError for one that cannot be served; none is taken then."""

    @abstractmethod
    def step(self) -> list[tuple[TurnRequest, TurnOutput]]:
        """Do some work and return the turns that ended in it, often none."""

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether a submitted turn has not ended yet."""

    @abstractmethod
    def release(self, sessions: Sequence[int]) -> None:
        """Forget what is kept for these trajectories, turns in the making included."""

    def close(self) -> None:
        """Free what the engine holds. `with engine:` does it at the end."""
        return None  # many hold nothing

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def generate(self, requests: Sequence[TurnRequest], sampling: Sampling) -> list[TurnOutput]:
        """One turn for each request, in order. The engine must not be busy."""
        if self.busy:
            raise ValueError(
                "the engine still writes submitted turns: call `step` until it is not busy, or"
                " `release` them"
            )
        self.submit(requests, sampling)
        outputs: dict[int, TurnOutput] = {}
        while self.busy:
            for request, output in self.step():
                outputs[request.session] = output
        return [outputs[request.session] for request in requests]


class TurnWriter:
    """State of one turn being written: `forced()` says what must come next, `push` takes what was
    written.

    `queue` holds what must come next, with its origins. `phase` is what a codec's constraint must
    know of this turn, None without a constraint.
    """

    LATENT_OPEN, THINK_OPEN, THINK_CLOSE = (
        tag.encode() for tag in (protocol.LATENT_OPEN, protocol.THINK_OPEN, protocol.THINK_CLOSE)
    )
    WINDOW = 24  # bytes kept; longer than any tag plus one piece

    def __init__(self, codec: Codec, request: TurnRequest, sampling: Sampling):
        self.codec, self.sampling = codec, sampling
        self.output = TurnOutput()
        self.allow_latent = request.allow_latent and codec.latent_token_id is not None
        self.queue: deque[tuple[int, Origin]] = deque((i, Origin.FORCED) for i in request.forced)
        self.stops = tuple(stop.encode() for stop in sampling.stop)
        self.pieces, self.eos = codec.piece_bytes, codec.tokenizer.eos_token_id
        self.tail = b""  # the last bytes of this turn
        self.thoughts = 0  # latent steps done in the open block
        # The context may end in an open tag, but forced ids would stand between it and the turn.
        before = b"" if request.forced else codec.text(list(request.ids)[-8:]).encode()
        opened = before.rstrip().endswith(self.THINK_OPEN)  # templates add a line break
        self.phase = codec.turn_phase(opened)
        # Without a constraint, a think block counts only if this turn opened it.
        self.in_think = opened and self.phase is not None
        if self.allow_latent and before.endswith(self.LATENT_OPEN):
            self._open_block()

    def forced(self) -> tuple[int, Origin] | None:
        """The next token if it is not the policy's to choose."""
        return self.queue[0] if self.queue else None

    @property
    def done(self) -> bool:
        return bool(self.output.finish)

    def push(self, token_id: int, logprob: float, latent: np.ndarray | None = None) -> None:
        """Record one token; `latent` is its z (H,) if it is a latent position."""
        origin = self.queue.popleft()[1] if self.queue else Origin.SAMPLED
        out = self.output
        out.ids.append(token_id)
        out.origins.append(int(origin))
        out.logprobs.append(logprob if origin is Origin.SAMPLED else float("nan"))
        if origin is Origin.LATENT:
            out.latents.append(latent)
            self.thoughts += 1
            return  # a latent position has no text and cannot end the turn
        piece = self.pieces[token_id] if token_id < len(self.pieces) else b""
        self.tail = (self.tail + piece)[-self.WINDOW - len(piece) :]
        if b">" in piece:
            self._see_tags(len(piece))
        if self.phase is not None:
            self.phase.push(token_id, self.in_think)
        if origin is Origin.SAMPLED and token_id == self.eos:
            out.finish = "eos"
        elif not out.finish and len(out.ids) >= self.sampling.max_new_tokens and not self.queue:
            out.finish = "length"  # never inside a block: its queue is finished first

    def _see_tags(self, fresh: int) -> None:
        """The last `fresh` bytes closed a tag. `<latent>` counts only at the very end of the text,
        the others anywhere in these bytes."""

        def closed(tag: bytes) -> bool:
            return tag in self.tail[-fresh - len(tag) + 1 :]

        if self.in_think:
            if not closed(self.THINK_CLOSE):
                return
            self.in_think = False
        if self.tail.endswith(self.LATENT_OPEN) and self.allow_latent:
            self._open_block()
        elif closed(self.THINK_OPEN):
            self.in_think = True
        elif any(closed(stop) for stop in self.stops):
            # Also when the piece overshoots: the parser then finds the turn malformed.
            self.output.finish = "stop"

    def _open_block(self) -> None:
        """Queue the K latent positions and the close tag."""
        codec = self.codec
        thoughts = [(codec.latent_token_id, Origin.LATENT)] * codec.num_latent
        closing = [(token, Origin.FORCED) for token in codec.latent_close]
        self.queue.extendleft(reversed(thoughts + closing))  # before any forced ids that are left
        self.thoughts = 0

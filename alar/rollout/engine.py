"""What an engine is: it writes one turn for each request, and knows nothing of domains.

Requests are submitted at any time, and every step reports those that have ended: a finished
trajectory's next turn, or a new question, enters while the others go on writing.

`TurnWriter` is the latent state machine, one per request, shared by all engines: it watches the
bytes that the policy has written in this turn and says what comes next.

    text ends in <latent> outside a think block → K latent positions → the pieces of </latent>,
    forced → text again
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from alar import protocol
from alar.methods.dual.vocabulary import ThinkPhase
from alar.records import Origin, Trajectory
from alar.rollout.codec import Codec


@dataclass(frozen=True)
class Sampling:
    """Decoding of one turn. `temperature` 0 is greedy; `stop` strings end the turn when the text
    ends in one of them."""

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
    """Context of one turn: all ids so far, and z (N, H) of their latent positions in order.

    `session` names the trajectory, so that an engine can keep its KV cache from turn to turn.
    `forced` ids open the turn (a forced mode). `seed` makes sampling independent of the batch that
    a request happens to share. `allow_latent=False` leaves `<latent>` ordinary text.
    """

    session: int
    ids: Sequence[int]
    latents: np.ndarray
    forced: Sequence[int] = ()
    seed: int = 0
    allow_latent: bool = True


@dataclass
class TurnOutput:
    """What the policy wrote: ids, origins, behaviour log-probs (NaN unless SAMPLED), z of the
    latent positions.

    The log-probs are those of the distribution at the sampling temperature, before `top_p` cuts it.
    """

    ids: list[int] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    latents: list[np.ndarray] = field(default_factory=list)
    finish: str = ""  # "stop" | "eos" | "length"


class Engine(ABC):
    """`codec` turns text into the ids of this engine's model and back."""

    codec: Codec

    @abstractmethod
    def submit(self, requests: Sequence[TurnRequest], sampling: Sampling) -> None:
        """Take requests in. ValueError, before anything is taken, for one that cannot be served."""

    @abstractmethod
    def step(self) -> list[tuple[TurnRequest, TurnOutput]]:
        """Do some work; returns the turns that ended in it, often none."""

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether a submitted turn has not ended yet."""

    @abstractmethod
    def release(self, sessions: Sequence[int]) -> None:
        """Forget what is kept for these trajectories, turns in the making included."""

    def generate(self, requests: Sequence[TurnRequest], sampling: Sampling) -> list[TurnOutput]:
        """One turn for each request, in order. Only for an engine that is not busy."""
        if self.busy:
            raise ValueError(
                "the engine still writes submitted turns: call `step` until it is not busy, or"
                " `release` them"
            )
        self.submit(requests, sampling)
        outputs: dict[int, TurnOutput] = {}
        while self.busy:
            outputs.update((request.session, output) for request, output in self.step())
        return [outputs[request.session] for request in requests]


def phases_of(trajectory: Trajectory, codec: Codec) -> list[int]:
    """For every token of a trajectory the row of the dual vocabulary's constraint under which it
    was written, 0 where it was not: as the engines knew it, by the same `TurnWriter`."""
    phases, ids, origins = [0] * len(trajectory.ids), trajectory.ids, trajectory.origins
    for turn in trajectory.turns:
        opens = (
            origins[turn.start] == Origin.SAMPLED
        )  # a forced opening comes before what the context ends in
        writer = TurnWriter(
            codec,
            TurnRequest(0, ids[: turn.start] if opens else (), (), allow_latent=False),
            Sampling(max_new_tokens=len(ids) + 1, stop=()),
        )
        for place in range(turn.start, turn.end):
            phases[place] = writer.phase
            writer.push(ids[place], float("nan"))
    return phases


class TurnWriter:
    """State of one turn being written; `forced()` is what must come next, `push` takes what was
    written."""

    _TAGS = tuple(
        tag.encode() for tag in (protocol.LATENT_OPEN, protocol.THINK_OPEN, protocol.THINK_CLOSE)
    )
    _WINDOW = 24  # bytes kept; longer than any tag plus one piece

    def __init__(self, codec: Codec, request: TurnRequest, sampling: Sampling):
        self.codec, self.sampling = codec, sampling
        self.output = TurnOutput()
        self.allow_latent = request.allow_latent and codec.latent_token_id is not None
        self.queue: deque[tuple[int, Origin]] = deque((i, Origin.FORCED) for i in request.forced)
        self.stops = tuple(stop.encode() for stop in sampling.stop)
        self.tail = b""
        self.in_think = False
        self.thoughts = 0  # latent steps done in the open block
        self.pieces, self.eos = codec.piece_bytes, codec.tokenizer.eos_token_id
        tail = codec.text(list(request.ids)[-8:]).encode() if not request.forced else b""
        if self.allow_latent and tail.endswith(self._TAGS[0]):
            self._open_block()
        self.think_phase = None if codec.dual is None else ThinkPhase(codec.dual.think_end_ids)
        if self.think_phase is not None and tail.rstrip().endswith(
            self._TAGS[1]
        ):  # templates end in `<think>\n`
            self.in_think, self.think_phase.row = True, 1

    @property
    def phase(self) -> int | None:
        """Of a dual vocabulary: the row of `PhaseConstraint` for the next token."""
        return None if self.think_phase is None else self.think_phase.row

    def forced(self) -> tuple[int, Origin] | None:
        """The next token if it is not the policy's to choose."""
        return self.queue[0] if self.queue else None

    @property
    def done(self) -> bool:
        return bool(self.output.finish)

    def push(self, token_id: int, logprob: float, latent: np.ndarray | None = None) -> None:
        """Record one token; `latent` is the z that was fed if the token is a latent position."""
        origin = self.queue.popleft()[1] if self.queue else Origin.SAMPLED
        out = self.output
        out.ids.append(token_id)
        out.origins.append(int(origin))
        out.logprobs.append(logprob if origin is Origin.SAMPLED else float("nan"))
        if origin is Origin.LATENT:
            out.latents.append(latent)
            self.thoughts += 1
            return
        piece = self.pieces[token_id] if token_id < len(self.pieces) else b""
        self.tail = (self.tail + piece)[-self._WINDOW - len(piece) :]
        if b">" in piece:
            self._see_tags(len(piece))
        if self.think_phase is not None:
            self.think_phase.push(token_id, self.in_think)
        if origin is Origin.SAMPLED and token_id == self.eos:
            out.finish = "eos"
        elif not out.finish and len(out.ids) >= self.sampling.max_new_tokens and not self.queue:
            out.finish = "length"

    def _see_tags(self, fresh: int) -> None:
        """A tag was closed in the last `fresh` bytes; it counts only if it is the very end of the
        text."""
        latent_open, think_open, think_close = self._TAGS
        if self.in_think:
            self.in_think = think_close not in self.tail[-fresh - len(think_close) + 1 :]
            if self.in_think:
                return
        if self.tail.endswith(latent_open) and self.allow_latent:
            self._open_block()
        elif think_open in self.tail[-fresh - len(think_open) + 1 :]:
            self.in_think = True
        elif any(stop in self.tail[-fresh - len(stop) + 1 :] for stop in self.stops):
            # also when the piece overshoots: the parser then finds the turn malformed
            self.output.finish = "stop"

    def _open_block(self) -> None:
        self.thoughts = 0
        codec = self.codec
        self.queue.extendleft((token, Origin.FORCED) for token in reversed(codec.latent_close))
        self.queue.extendleft(
            (codec.latent_token_id, Origin.LATENT) for _ in range(codec.num_latent)
        )

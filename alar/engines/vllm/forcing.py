"""The logits processor: opens and closes latent blocks for the whole batch, and draws for seeded
requests.

Each tracked request has a `TurnWriter`, brought up to date when the step's tokens are known; one
indexed write then forces all rows that have something to be forced. The latent id is never sampled:
the model class bans it.

Two things are done here because the place is right:

* Requests with a seed are drawn by inverting the cumulative distribution, with a number that
depends on (seed, how many
  tokens the policy chose before it) only. So a sample does not depend on the batch, on chunks or on
  preemption, and is the one `HFEngine` draws. (vLLM's own generators rewind at a discarded chunk,
  which a CPU generator cannot do.)
* A request whose chunk violated the model's checks gets a token that contradicts its block's
grammar, from then on; the
  scheduler sees it and fails the request. Nothing waits for the device.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.platforms import current_platform
from vllm.v1.sample.logits_processor import (
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
    process_dict_updates,
)

from alar.engines.vllm.records import Record, shared
from alar.engines.vllm.turns import TurnOptions, engine_codec, open_turn
from alar.records import Origin
from alar.rollout.codec import Codec
from alar.rollout.sampling import inverse_cdf

NAN = float("nan")


class Row:
    """A tracked request: its writer, and what its sampling needs."""

    __slots__ = (
        "codec",
        "options",
        "prompt",
        "outputs",
        "writer",
        "seen",
        "temperature",
        "top_p",
        "record",
        "random",
        "draws",
    )

    def __init__(
        self,
        codec: Codec,
        options: TurnOptions,
        params: SamplingParams,
        prompt,
        outputs,
        record: Record | None,
    ):
        self.codec, self.options, self.prompt, self.outputs = codec, options, prompt, outputs
        self.temperature, self.top_p, self.record = params.temperature, params.top_p, record
        self.random = None if options.seed is None else random.Random(options.seed)
        self.draws: list[float] = []
        self._start()

    def _start(self) -> None:
        self.writer, self.seen = open_turn(self.codec, self.options, self.prompt), 0

    @property
    def decided(self) -> bool:
        """Whether the log-prob, or the choice itself, is computed here."""
        return self.record is not None or self.random is not None

    def forced(self) -> int:
        """The id that must come next, or −1; reads the ids that have come since."""
        outputs = self.outputs
        if self.writer is None:
            return -1
        if len(outputs) < self.seen:  # vLLM took ids back
            self._start()
        while self.seen < len(outputs):
            if outputs[self.seen] < 0:
                raise RuntimeError(
                    "a token of the last step is not known yet: vLLM did not resolve its"
                    " placeholder"
                )
            self.writer.push(outputs[self.seen], NAN)
            self.seen += 1
        following = self.writer.forced()
        return -1 if following is None else following[0]

    def draw(self) -> float:
        """The uniform number of the next token, if the n-th that the policy chooses in this turn:
        always the n-th number."""
        if self.writer is None:  # no blocks: every token is chosen
            index = len(self.outputs)
        else:
            index = self.writer.output.origins.count(Origin.SAMPLED)
        while len(self.draws) <= index:
            self.draws.append(self.random.random())
        return self.draws[index]


class BlockForcer(LogitsProcessor):
    """Set by `alar.engines.serve` and `VLLMEngine`; options of a request:
    `alar.engines.vllm.turns`."""

    def __init__(self, vllm_config, device: torch.device, is_pin_memory: bool):
        self.codec = engine_codec(vllm_config)
        self.device = device
        self.shared = shared(vllm_config)
        self.constraint = self.codec.constraint(device)
        self.rows: dict[int, Row] = {}
        size = vllm_config.scheduler_config.max_num_seqs
        self.broken = torch.zeros(size, dtype=torch.bool, device=device)
        self.any_broken = (
            device.type != "cpu"
        )  # on a CPU the flags are looked at only once there are some

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        options = TurnOptions.of(params.extra_args)
        if params.structured_outputs is not None and options.mode != "off":
            raise ValueError(
                "structured outputs would forbid the pieces of a latent block; send latent_mode:"
                " off with them"
            )
        if options.record and params.n > 1:
            raise ValueError(
                f"latent_record with n = {params.n}: a record belongs to one sample; send n"
                " requests"
            )
        if options.record and not plain(params):
            raise ValueError(
                "latent_record goes with temperature and top_p only: leave top_k, min_p and"
                " penalties out"
            )
        if (
            params.seed is not None
            and params.temperature > 0
            and not plain(params)
            and current_platform.is_cpu()
        ):
            raise ValueError(
                "seed on a CPU goes with temperature and top_p only: leave top_k, min_p and"
                " penalties out"
            )

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.rows, batch_update, self._row)
        if batch_update and self.any_broken:
            self._move_flags(batch_update)

    def _row(
        self, params: SamplingParams, prompt: list[int] | None, outputs: list[int]
    ) -> Row | None:
        options = TurnOptions.of(params.extra_args)
        record = self.shared.store.of(options.record, anew=not outputs) if options.record else None
        row = Row(self.codec, options, params, prompt or [], outputs, record)
        return row if row.writer is not None or row.decided else None

    def _move_flags(self, update: BatchUpdate) -> None:
        """Carry the flags along when rows are added, removed and moved; a new request starts
        without."""
        source = list(range(len(self.broken)))
        for index in (*update.removed, *(added[0] for added in update.added)):
            source[index] = -1
        for one, other, direction in update.moved:
            swap = direction is MoveDirectionality.SWAP
            source[one], source[other] = (source[other] if swap else -1), source[one]
        index = torch.tensor(source, device=self.device)
        self.broken = self.broken[index.clamp(min=0)] & (index >= 0)

    def apply(self, logits: Tensor) -> Tensor:
        forced: dict[int, int] = {}
        decided: list[int] = []
        for index, row in self.rows.items():
            token = row.forced()
            if token >= 0:
                forced[index] = token
            if row.decided:
                decided.append(index)
        if self.constraint is not None:
            self._constrain(logits)
        if decided:
            self._decide(logits, decided, forced)
        elif forced:
            self._force(
                logits, list(forced), torch.tensor(list(forced.values()), device=self.device)
            )
        if self.shared.step is not None:
            self._signal(logits, forced)
        return logits

    def _constrain(self, logits: Tensor) -> None:
        """Forbid what the phase of each row's turn forbids; the writers are up to date."""
        places = list(self.rows)
        rows = self.constraint.rows([self.rows[index].writer.phase.row for index in places])
        if places == list(range(logits.shape[0])):
            logits += rows
        else:
            logits.index_add_(0, torch.tensor(places, device=self.device), rows.to(logits.dtype))

    def _force(self, logits: Tensor, rows: Sequence[int], ids: Tensor) -> None:
        index = torch.tensor(rows, device=self.device)
        logits[index] = float("-inf")
        logits[index, ids] = 0.0

    def _decide(self, logits: Tensor, decided: list[int], forced: dict[int, int]) -> None:
        """Choose for the seeded rows, note log-probs and z for the recorded ones, and force
        whatever is known then."""
        rows = [self.rows[index] for index in decided]
        whole = decided == list(range(logits.shape[0]))
        policy = logits if whole else logits[torch.tensor(decided, device=self.device)]  # (n, V)
        temperatures = [row.temperature for row in rows]
        if any(value not in (0.0, 1.0) for value in temperatures):
            policy = (
                policy
                / torch.tensor([value or 1.0 for value in temperatures], device=self.device)[
                    :, None
                ]
            )
        logprobs = torch.log_softmax(policy, dim=-1, dtype=torch.float32)
        chosen = logprobs.argmax(-1)
        if any(temperatures):
            drawn = [
                row.random is not None for row in rows
            ]  # all that have a temperature, see the scheduler
            draws = torch.tensor(
                [row.draw() if row.random else 0.0 for row in rows], device=self.device
            )
            nucleus = torch.tensor([row.top_p for row in rows], device=self.device)
            sampled = inverse_cdf(logprobs.exp(), draws, nucleus)
            chosen = torch.where(torch.tensor(drawn, device=self.device), sampled, chosen)
        given = torch.tensor([forced.get(index, -1) for index in decided], device=self.device)
        chosen = torch.where(given >= 0, given, chosen)
        self._record(decided, rows, forced, logprobs.gather(1, chosen[:, None])[:, 0])
        writes = [
            i
            for i, (index, row) in enumerate(zip(decided, rows))
            if row.temperature > 0 or index in forced
        ]
        others = [index for index in forced if not self.rows[index].decided]
        if writes or others:
            ids = chosen[torch.tensor(writes, dtype=torch.long, device=self.device)]
            ids = torch.cat(
                [
                    ids,
                    torch.tensor([forced[i] for i in others], dtype=torch.long, device=self.device),
                ]
            )
            self._force(logits, [decided[i] for i in writes] + others, ids)

    def _record(
        self, decided: list[int], rows: list[Row], forced: dict[int, int], logprobs: Tensor
    ) -> None:
        latent = self.codec.latent_token_id
        for place, (index, row) in enumerate(zip(decided, rows)):
            if row.record is None:
                continue
            # A chunk that does not finish the context passes here too: what it leaves is
            # overwritten by the last one.
            row.record.logprobs[len(row.outputs)] = (logprobs, place)
            if index in forced:
                row.record.forced.add(len(row.outputs))
            if row.outputs and row.outputs[-1] == latent and self.shared.step is not None:
                self.shared.store.keep(
                    row.record, len(row.outputs) - 1, self.shared.step.latents[index].clone()
                )

    def _signal(self, logits: Tensor, forced: dict[int, int]) -> None:
        """Make violated requests contradict themselves: the latent id, or where that is due, a
        piece of the close tag."""
        count = logits.shape[0]
        violated = self.shared.step.violated[:count]
        if self.device.type == "cpu" and not self.any_broken:
            if not bool(violated.any()):
                return
            self.any_broken = True
        self.broken[:count] |= violated
        broken, latent = self.broken[:count], self.codec.latent_token_id
        signals = torch.full((count,), latent, device=self.device)
        due = [index for index, token in forced.items() if token == latent]
        if due:
            signals[torch.tensor(due, device=self.device)] = self.codec.latent_close[0]
        logits.masked_fill_(broken[:, None], float("-inf"))
        place = torch.arange(count, device=self.device)
        logits[place, signals] = torch.where(broken, 0.0, logits[place, signals])


def plain(params: SamplingParams) -> bool:
    """Whether temperature and top_p say all about the distribution."""
    penalties = (
        params.presence_penalty,
        params.frequency_penalty,
        params.repetition_penalty - 1.0,
        params.min_p,
    )
    return not any(penalties) and params.top_k in (0, -1, None)

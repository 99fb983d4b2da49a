"""The logits processor: opens and closes latent blocks for the whole batch, and draws tokens.

Each request that needs one has a `TurnWriter`. The writer reads the tokens of the last step as soon
as they are known. One indexed write then forces the next token of all rows that have one due. The
latent id is never sampled, because the model class bans it.

This is the place where logits and tokens meet, so it does two more things:

* It draws the tokens of requests with a seed by inverting the cumulative distribution: the n-th
  token that the policy chooses takes the n-th number of its seed. So a sample does not depend on
  the batch, on chunks or on preemption, and `HFEngine` draws the same one. (vLLM's own generators
  rewind at a discarded chunk, and a CPU generator cannot do that.)
* It marks a request whose chunk broke the model's rules: from then on its tokens contradict the
  grammar of its block. The scheduler sees this and fails the request. Nothing waits for the device.
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

from alar.engines.vllm.notes import Notes, shared
from alar.engines.vllm.turns import TurnOptions, engine_codec, open_turn
from alar.records import Origin
from alar.rollout.codec import Codec
from alar.rollout.sampling import inverse_cdf

NAN = float("nan")
PLAIN_ONLY = "goes with temperature and top_p only: leave top_k, min_p and penalties out"


class FollowedRequest:
    """A request with its writer and what its sampling needs.

    `outputs` is vLLM's own list of the ids written so far. vLLM appends to it.
    """

    def __init__(
        self,
        codec: Codec,
        options: TurnOptions,
        params: SamplingParams,
        prompt: Sequence[int],
        outputs: list[int],
        notes: Notes | None,
    ):
        self.codec, self.options, self.prompt, self.outputs = codec, options, prompt, outputs
        self.temperature, self.top_p, self.notes = params.temperature, params.top_p, notes
        self.random = None if options.seed is None else random.Random(options.seed)
        self.draws: list[float] = []  # numbers drawn so far
        self._start()

    def _start(self) -> None:
        self.writer = open_turn(self.codec, self.options, self.prompt)
        self.seen = 0  # outputs that the writer knows

    @property
    def decided(self) -> bool:
        """Whether the log-prob, or the choice itself, is computed here."""
        return self.notes is not None or self.random is not None

    def forced(self) -> int:
        """The id that must come next, or −1. First the writer reads the ids that came since."""
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
        """The uniform number of the next token. A step that vLLM repeats takes the same one."""
        if self.writer is None:  # no blocks: every token is chosen
            index = len(self.outputs)
        else:
            index = self.writer.output.origins.count(Origin.SAMPLED)
        while len(self.draws) <= index:
            self.draws.append(self.random.random())
        return self.draws[index]


class BlockForcer(LogitsProcessor):
    """vLLM's logits processor, which `alar.engines.serve` and `VLLMEngine` set.

    `alar.engines.vllm.turns` lists the options of a request.
    """

    def __init__(self, vllm_config, device: torch.device, is_pin_memory: bool):
        self.codec = engine_codec(vllm_config)
        self.device = device
        self.shared = shared(vllm_config)
        self.constraint = self.codec.constraint(device)
        self.requests: dict[int, FollowedRequest] = {}  # by batch row
        size = vllm_config.scheduler_config.max_num_seqs
        self.broken = torch.zeros(size, dtype=torch.bool, device=device)  # by batch row
        # On a CPU the flags are read only once one is set. On a GPU reading them would wait for it.
        self.any_broken = device.type != "cpu"

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
        if plain(params):
            return
        if options.record:
            raise ValueError(f"latent_record {PLAIN_ONLY}")
        if params.seed is not None and params.temperature > 0 and current_platform.is_cpu():
            raise ValueError(f"seed on a CPU {PLAIN_ONLY}")

    def is_argmax_invariant(self) -> bool:
        return False  # else vLLM would leave this processor out for greedy batches

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.requests, batch_update, self._follow)
        if batch_update and self.any_broken:
            self._move_flags(batch_update)

    def _follow(
        self, params: SamplingParams, prompt: list[int] | None, outputs: list[int]
    ) -> FollowedRequest | None:
        options = TurnOptions.of(params.extra_args)
        notes = None
        if options.record:
            notes = self.shared.store.of(options.record, anew=not outputs)
        request = FollowedRequest(self.codec, options, params, prompt or [], outputs, notes)
        return request if request.writer is not None or request.decided else None

    def _move_flags(self, update: BatchUpdate) -> None:
        """Move the flags with their rows as rows are added, removed and moved.

        A new request starts without a flag.
        """
        source = list(range(len(self.broken)))  # where each row's flag comes from, −1: nowhere
        for index in (*update.removed, *(added[0] for added in update.added)):
            source[index] = -1
        for one, other, direction in update.moved:
            came = source[other] if direction is MoveDirectionality.SWAP else -1
            source[one], source[other] = came, source[one]
        index = torch.tensor(source, device=self.device)
        self.broken = self.broken[index.clamp(min=0)] & (index >= 0)

    def apply(self, logits: Tensor) -> Tensor:
        """Change logits (R, V) in place."""
        forced: dict[int, int] = {}  # batch row → id
        decided: list[int] = []  # batch rows
        for index, request in self.requests.items():
            token = request.forced()
            if token >= 0:
                forced[index] = token
            if request.decided:
                decided.append(index)
        if self.constraint is not None:
            self._constrain(logits)
        if decided:
            self._decide(logits, decided, forced)
        elif forced:
            self._force(logits, list(forced), self._tensor(list(forced.values())))
        if self.shared.step is not None:
            self._signal(logits, forced)
        return logits

    def _tensor(self, values: Sequence, dtype: torch.dtype | None = None) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def _constrain(self, logits: Tensor) -> None:
        """Forbid what the phase of each request's turn forbids. The writers must be up to date."""
        places = list(self.requests)
        phases = [request.writer.phase.row for request in self.requests.values()]
        rows = self.constraint.rows(phases)  # (n, V)
        if places == list(range(logits.shape[0])):
            logits += rows
        else:
            logits.index_add_(0, self._tensor(places), rows.to(logits.dtype))

    def _force(self, logits: Tensor, rows: Sequence[int], ids: Tensor) -> None:
        index = self._tensor(rows)
        logits[index] = float("-inf")
        logits[index, ids] = 0.0  # the only finite one, so its probability is 1

    def _decide(self, logits: Tensor, decided: list[int], forced: dict[int, int]) -> None:
        """Choose tokens for the seeded rows, note log-probs and z of the recorded ones, then force.

        `decided` are the rows (n) of seeded and recorded requests, `forced` maps rows to due ids.
        """
        requests = [self.requests[index] for index in decided]
        whole = decided == list(range(logits.shape[0]))
        policy = logits if whole else logits[self._tensor(decided)]  # (n, V)
        temperatures = [request.temperature for request in requests]
        if any(value not in (0.0, 1.0) for value in temperatures):
            divisors = self._tensor([value or 1.0 for value in temperatures])
            policy = policy / divisors[:, None]
        logprobs = torch.log_softmax(policy, dim=-1, dtype=torch.float32)  # (n, V)
        chosen = logprobs.argmax(-1)  # (n,)
        if any(temperatures):
            # The scheduler has given a seed to every request here that has a temperature.
            drawn = self._tensor([request.random is not None for request in requests])  # (n,)
            draws = self._tensor([r.draw() if r.random else 0.0 for r in requests])
            nucleus = self._tensor([request.top_p for request in requests])  # (n,)
            chosen = torch.where(drawn, inverse_cdf(logprobs.exp(), draws, nucleus), chosen)
        given = self._tensor([forced.get(index, -1) for index in decided])  # (n,), −1: none due
        chosen = torch.where(given >= 0, given, chosen)
        self._note(decided, requests, forced, logprobs.gather(1, chosen[:, None])[:, 0])

        # vLLM takes the argmax of rows at temperature 0 itself; all others are forced.
        writes = []  # places among `decided`
        for place, (index, request) in enumerate(zip(decided, requests)):
            if request.temperature > 0 or index in forced:
                writes.append(place)
        others = [index for index in forced if not self.requests[index].decided]
        if writes or others:
            ours = chosen[self._tensor(writes, torch.long)]
            theirs = self._tensor([forced[index] for index in others], torch.long)
            rows = [decided[place] for place in writes] + others
            self._force(logits, rows, torch.cat([ours, theirs]))

    def _note(
        self,
        decided: list[int],
        requests: list[FollowedRequest],
        forced: dict[int, int],
        logprobs: Tensor,
    ) -> None:
        latent, step = self.codec.latent_token_id, self.shared.step
        for place, (index, request) in enumerate(zip(decided, requests)):
            notes, written = request.notes, len(request.outputs)
            if notes is None:
                continue
            # A chunk that does not finish the context passes here too; the last one overwrites what
            # it leaves.
            notes.logprobs[written] = (logprobs, place)
            if index in forced:
                notes.forced.add(written)
            if written and request.outputs[-1] == latent and step is not None:
                self.shared.store.keep(notes, written - 1, step.latents[index].clone())

    def _signal(self, logits: Tensor, forced: dict[int, int]) -> None:
        """Make violated requests contradict their blocks.

        They get the latent id, or, where that is due, the first piece of the close tag.
        """
        count = logits.shape[0]
        violated = self.shared.step.violated[:count]  # (R,)
        if self.device.type == "cpu" and not self.any_broken:
            if not bool(violated.any()):
                return  # the common case: no work at all
            self.any_broken = True
        # A broken request stays broken, because its later tokens build on a wrong z.
        self.broken[:count] |= violated
        broken, latent = self.broken[:count], self.codec.latent_token_id
        signals = torch.full((count,), latent, device=self.device)  # (R,) ids
        due = [index for index, token in forced.items() if token == latent]
        if due:
            signals[self._tensor(due)] = self.codec.latent_close[0]
        # No branch on values: it would wait for the device.
        logits.masked_fill_(broken[:, None], float("-inf"))
        place = torch.arange(count, device=self.device)
        logits[place, signals] = torch.where(broken, 0.0, logits[place, signals])


def plain(params: SamplingParams) -> bool:
    """Whether temperature and top_p alone describe the distribution."""
    penalties = (
        params.presence_penalty,
        params.frequency_penalty,
        params.repetition_penalty - 1.0,
        params.min_p,
    )
    return not any(penalties) and params.top_k in (0, -1, None)

"""Client of the log-prob scorer (`alar.methods.logprob.server`): `HTTPScorer.score` gives what
`LogProbScorer.score` gives.

Trajectories travel as records, with their z, so that the numbers are those of a scorer in process.
A server that is down, slow or broken is asked again with growing pauses; after that ScorerError
names it, the cause and what to do. A failure never turns into a score.
"""

from __future__ import annotations

from collections.abc import Sequence

from alar import protocol
from alar.domains.search.json_client import JSONClient
from alar.methods.logprob.reward import LogProbReward
from alar.methods.logprob.scoring import Case, LogProbScorer, Score, Scorer
from alar.rollout.codec import Codec


class ScorerError(RuntimeError):
    """The scorer server cannot be used; the message says why."""


class HTTPScorer(JSONClient, Scorer):
    """`timeout` is in seconds per attempt; a request is attempted 1 + `retries` times, and holds
    `batch` cases at most."""

    error = ScorerError
    service = "scorer server"
    parameter = "logprob.url"
    path = "/score_batch"
    command = "python -m alar.methods.logprob.server FOLDER --port …"

    def __init__(
        self,
        url: str,
        codec: Codec,
        form: protocol.Form = protocol.SEARCH,
        *,
        timeout: float = 120.0,
        retries: int = 4,
        backoff: float = 0.5,
        batch: int = 64,
    ):
        super().__init__(url, timeout, retries, backoff)
        self.codec, self.form, self.batch = codec, form, batch

    def score_cases(self, cases: Sequence[Case]) -> list[Score]:
        """One score per case, in order. Raises ScorerError."""
        known = [case.without_model() for case in cases]
        sent = [case for case, score in zip(cases, known) if score is None]
        found = [
            score
            for first in range(0, len(sent), self.batch)
            for score in self._send(sent[first : first + self.batch])
        ]
        scores = iter(found)
        return [score or next(scores) for score in known]

    def _send(self, cases: Sequence[Case]) -> list[Score]:
        body = [
            vars(c) | {"ids": list(c.ids), "latents": c.latents.tolist(), "golds": list(c.golds)}
            for c in cases
        ]
        answer = self._request("POST", "/score_batch", json={"cases": body})
        scores = answer.get("scores") if isinstance(answer, dict) else None
        if not isinstance(scores, list):
            raise self._failure('the answer has no list "scores"')
        if len(scores) != len(cases):
            raise self._failure(f"{len(cases)} cases were sent but {len(scores)} scores came back")
        return [self._score(item, number) for number, item in enumerate(scores)]

    def _score(self, item: object, number: int) -> Score:
        value = item.get("score") if isinstance(item, dict) else None
        if not isinstance(value, (int, float)) or isinstance(value, bool) or value != value:
            raise self._failure(f"case {number} has no score: {str(item)[:80]}")
        return Score(float(value), str(item.get("gold", "")), str(item.get("problem", "")))


def scorer_of(
    settings: LogProbReward | None, model, tokenizer, form: protocol.Form
) -> Scorer | None:
    """What scores the rollouts under these settings: a server, or `model` in process; None where
    nothing is to be scored."""
    if settings is None or settings.weight == 0:
        return None
    if settings.url:
        return HTTPScorer(settings.url, Codec.of(model, tokenizer, form), form)
    return LogProbScorer(model, tokenizer, form)

"""Mean log-probability of the gold answers after a trajectory's reasoning, many trajectories in one
forward pass.

The context is the record itself: ids as they were written, z of the latent positions fed again as
they were. What follows is written as the policy would write it, closing tag, separator and answer
tokenised as one text; a token counts as the gold's if it holds any of its bytes, for a piece may
reach over the edge of the tag (`>Peru`). Probabilities are those of decoding: the latent id, the
spare rows and, outside of thoughts, mirrors have none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from unicodedata import normalize

import numpy as np
import torch

from alar import protocol
from alar.records import Origin, Trajectory
from alar.rollout.codec import Codec
from alar.rollout.hf import policy_logits

OPEN = -2.0  # the reasoning never closes
INVALID = -100.0  # nothing to score: no gold answer, or a context longer than the model's

_MARK = "\0"  # stands for an answer in the form's action


@dataclass(frozen=True)
class Score:
    """`gold` is the answer that fits best; `problem` says in words why a value is OPEN or INVALID."""

    value: float
    gold: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Case:
    """One thing to score. `ids` and the z of their latent positions (N, H) are the record up to the
    closing tag, `before` and `after` the text around an answer that goes on from there. `closed` is
    False where the reasoning never closes.
    """

    ids: Sequence[int]
    latents: np.ndarray
    before: str
    after: str
    golds: tuple[str, ...]
    closed: bool = True

    @property
    def answers(self) -> list[str]:
        """The golds that are not blank, each once."""
        return list(dict.fromkeys(gold.strip() for gold in self.golds if gold.strip()))

    def without_model(self) -> Score | None:
        """The score that needs no model, if there is one."""
        if not self.answers:
            return Score(INVALID, problem="the question has no gold answer")
        return None if self.closed else Score(OPEN, problem="the reasoning never closes")


def around_answer(form: protocol.Form) -> tuple[str, str]:
    """What a turn of this form writes between its reasoning and its answer, and behind the answer."""
    opening, _, closing = form.action("answer", _MARK).partition(_MARK)
    return protocol.BLOCK_SEPARATOR + opening, closing


def case_of(trajectory: Trajectory, codec: Codec, form: protocol.Form = protocol.SEARCH) -> Case:
    """The trajectory up to the end of its last turn's reasoning block, and what follows where its
    `form` gives an answer.

    Forced pieces of `</latent>` stay as they are; the piece that completes a written `</think>` may
    hold more than the tag (`>\\n\\n`), so its part of the tag is tokenised again with the answer.
    """
    golds, (opening, after) = trajectory.question.answers, around_answer(form)
    last = trajectory.turns[-1] if trajectory.turns else None
    if last is None or last.mode not in ("think", "latent"):
        return Case((), _latents(trajectory, 0), "", "", golds, closed=False)
    tag = (protocol.THINK_CLOSE if last.mode == "think" else protocol.LATENT_CLOSE).encode()
    table, written = codec.piece_bytes, b""
    for place in range(last.start, last.end):
        before, token = len(written), trajectory.ids[place]
        written += table[token] if token < len(table) else b""
        end = written.find(tag) + len(tag)
        if end >= len(tag):
            break
    if trajectory.origins[place] == Origin.FORCED:
        return Case(trajectory.ids[: place + 1], _latents(trajectory, place), opening, after, golds)
    tail = written[before:end].decode(errors="replace")
    return Case(trajectory.ids[:place], _latents(trajectory, place), tail + opening, after, golds)


def _latents(trajectory: Trajectory, length: int) -> np.ndarray:
    """z of the latent positions among the first `length` tokens."""
    return trajectory.latents[: trajectory.count(Origin.LATENT, span=(0, length))]


def answer_tokens(codec: Codec, before: str, gold: str, after: str) -> tuple[list[int], int]:
    """(ids, how many of them stand before the gold) of the text around a gold answer, up to the
    gold's last piece."""
    before, gold = (
        normalize("NFC", before),
        normalize("NFC", gold),
    )  # as Qwen's tokenizers do, before bytes are counted
    ids = codec.untrusted(before + gold + after)
    edges = np.cumsum(
        [len(codec.piece_bytes[token]) for token in ids]
    )  # byte at which each piece ends
    start = len(before.encode())
    first = int(np.searchsorted(edges, start, side="right"))
    last = int(np.searchsorted(edges, start + len(gold.encode()), side="left"))
    return ids[: last + 1], first


class Scorer(ABC):
    """Scores trajectories whose turns are written in `form`; `codec` is that of the policy which
    wrote them."""

    codec: Codec
    form: protocol.Form

    def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        return self.score_cases(
            [case_of(trajectory, self.codec, self.form) for trajectory in trajectories]
        )

    @abstractmethod
    def score_cases(self, cases: Sequence[Case]) -> list[Score]:
        """One score per case, in order."""


class LogProbScorer(Scorer):
    """Scores with a model of this process, latent or ordinary, in its dtype and on its device.

    A forward pass takes about `batch_tokens` tokens, padding included.
    """

    def __init__(
        self, model, tokenizer, form: protocol.Form = protocol.SEARCH, *, batch_tokens: int = 16384
    ):
        self.codec, self.form = Codec.of(model, tokenizer, form), form
        self.model, self.batch_tokens = model.eval(), batch_tokens
        self.constraint = self.codec.constraint(next(model.parameters()).device)

    @property
    def positions(self) -> int:
        return self.model.config.max_position_embeddings

    def check(self, case: Case) -> None:
        """ValueError, naming the field, for a case that no trajectory of this model can be."""
        rows, reserved = (
            self.model.get_input_embeddings().num_embeddings,
            self.codec.latent_token_id,
        )
        outside = next((token for token in case.ids if not 0 <= token < rows), None)
        if outside is not None:
            raise ValueError(f"ids: {outside} is no token of this model, which has {rows}")
        places = sum(token == reserved for token in case.ids) if reserved is not None else 0
        if places != len(case.latents):
            raise ValueError(
                f"latents: {len(case.latents)} vectors for {places} latent positions among the ids"
            )
        width = self.model.config.hidden_size
        if len(case.latents) and case.latents.shape[1:] != (width,):
            raise ValueError(
                f"latents: vectors of size {case.latents.shape[1:]}, this model's have {width}"
                " numbers"
            )
        if not np.isfinite(case.latents).all():
            raise ValueError("latents: a number is not finite")
        if case.closed and not len(case.ids):
            raise ValueError("ids: is empty; the context of an answer has at least one token")

    def score_cases(self, cases: Sequence[Case]) -> list[Score]:
        """One score per case, in order. Raises ValueError for a case that does not belong to this
        model (`check`)."""
        scores, rows = [], []  # rows: (case, gold, ids, index of the gold's first piece)
        for number, case in enumerate(cases):
            self.check(case)
            known = case.without_model()
            answers = [] if known else case.answers
            found = [
                (gold, *answer_tokens(self.codec, case.before, gold, case.after))
                for gold in answers
            ]
            fitting = [
                (number, gold, [*case.ids, *ids], len(case.ids) + first)
                for gold, ids, first in found
                if len(case.ids) + len(ids) <= self.positions
            ]
            rows += fitting
            scores.append(
                known
                or Score(
                    INVALID, problem=f"the context exceeds the model's {self.positions} positions"
                )
            )
        for part in self._parts(rows):
            for (number, gold, _, _), value in zip(part, self._means(part, cases)):
                if not scores[number].gold or value > scores[number].value:
                    scores[number] = Score(value, gold)
        return scores

    def _parts(self, rows: list[tuple]) -> Iterator[list[tuple]]:
        """Rows of similar lengths, as many as `batch_tokens` allows."""
        rows = sorted(rows, key=lambda row: len(row[2]), reverse=True)
        while rows:
            count = max(1, self.batch_tokens // len(rows[0][2]))
            yield rows[:count]
            rows = rows[count:]

    @torch.no_grad()
    def _means(self, rows: Sequence[tuple], cases: Sequence[Case]) -> list[float]:
        width, device = len(rows[0][2]), next(self.model.parameters()).device
        ids = torch.tensor(
            [row[2] + [0] * (width - len(row[2])) for row in rows], device=device
        )  # (B, T)
        mask = torch.tensor(
            [[1] * len(row[2]) + [0] * (width - len(row[2])) for row in rows], device=device
        )
        z = [
            torch.as_tensor(cases[number].latents)
            for number, *_ in rows
            if len(cases[number].latents)
        ]
        if hasattr(self.model, "latent_states"):
            hidden = self.model.latent_states(
                ids, mask, latents=torch.cat(z).to(device) if z else None
            ).hidden
        else:
            hidden = self.model.model(
                input_ids=ids, attention_mask=mask, use_cache=False
            ).last_hidden_state
        row_of = [
            row for row, (_, _, tokens, first) in enumerate(rows) for _ in range(first, len(tokens))
        ]
        place = [p for _, _, tokens, first in rows for p in range(first, len(tokens))]
        states = hidden[row_of, torch.tensor(place) - 1]  # (n, H): before each token of a gold
        logits = policy_logits(self.model, states)
        if self.constraint is not None:
            logits = self.constraint(logits, torch.zeros(len(states)))  # answers are visible text
        logprobs = torch.log_softmax(logits, -1)
        chosen = (
            logprobs.gather(1, ids[row_of, place][:, None])[:, 0]
            .double()
            .split([len(r[2]) - r[3] for r in rows])
        )
        return [float(part.mean()) for part in chosen]

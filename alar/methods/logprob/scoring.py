"""Mean log-probability of the gold answers after a trajectory's reasoning.

The context is the record itself: the ids that were written, and the recorded z at the latent
positions. What follows is written as the policy would write it: closing tag, separator and answer
are tokenised as one text. A token counts as the gold's if it holds any of its bytes, because a
piece may reach over the edge of the tag (`>Peru`). Probabilities are those of decoding: the latent
id, the spare rows and, outside of thoughts, mirrors have none. Many trajectories share a forward
pass.
"""

from __future__ import annotations

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
    """`gold` is the answer that fits best; `problem` says why a value is OPEN or INVALID."""

    value: float
    gold: str = ""
    problem: str = ""


@dataclass(frozen=True)
class ScoredContext:
    """What a gold answer is scored after.

    `ids` and the z (N, H) of their latent positions are the record up to the closing tag. `before`
    and `after` are the text around the answer that continues it. `closed` is False where the
    reasoning never closes.
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
    """What a turn of this form writes between its reasoning and its answer, and after that."""
    opening, _, closing = form.action("answer", _MARK).partition(_MARK)
    return protocol.BLOCK_SEPARATOR + opening, closing


def context_of(
    trajectory: Trajectory, codec: Codec, form: protocol.Form = protocol.SEARCH
) -> ScoredContext:
    """The trajectory up to the end of its last reasoning block, and what surrounds an answer.

    `form` says what stands around an answer. Forced pieces of `</latent>` stay as they are. The
    piece that completes a written `</think>` may hold more than the tag (`>\\n\\n`), so its part of
    the tag is tokenised again with the answer.
    """
    golds, (opening, after) = trajectory.question.answers, around_answer(form)
    last = trajectory.turns[-1] if trajectory.turns else None
    if last is None or last.mode not in ("think", "latent"):
        return ScoredContext((), _latents(trajectory, 0), "", "", golds, closed=False)
    tag = (protocol.THINK_CLOSE if last.mode == "think" else protocol.LATENT_CLOSE).encode()
    table, written = codec.piece_bytes, b""
    for place in range(last.start, last.end):
        before, token = len(written), trajectory.ids[place]
        written += table[token] if token < len(table) else b""
        end = written.find(tag) + len(tag)
        if end >= len(tag):
            break
    if trajectory.origins[place] == Origin.FORCED:
        return ScoredContext(
            trajectory.ids[: place + 1], _latents(trajectory, place), opening, after, golds
        )
    tail = written[before:end].decode(errors="replace")
    return ScoredContext(
        trajectory.ids[:place], _latents(trajectory, place), tail + opening, after, golds
    )


def _latents(trajectory: Trajectory, length: int) -> np.ndarray:
    """z of the latent positions among the first `length` tokens."""
    return trajectory.latents[: trajectory.count(Origin.LATENT, span=(0, length))]


def answer_tokens(codec: Codec, before: str, gold: str, after: str) -> tuple[list[int], int]:
    """(ids of the text up to the gold's last piece, how many of them stand before the gold)."""
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


@dataclass(frozen=True)
class _Row:
    """One gold answer to score: `ids` are its context and, from place `first` on, the gold."""

    number: int  # of the trajectory
    gold: str
    ids: list[int]
    first: int


class LogProbScorer:
    """Scores trajectories whose turns are written in `form`.

    The model is a latent or an ordinary one; it keeps its dtype and its device.

    A forward pass takes about `batch_tokens` tokens, padding included.
    """

    def __init__(
        self, model, tokenizer, form: protocol.Form = protocol.SEARCH, *, batch_tokens: int = 16384
    ):
        self.codec, self.form = Codec.of(model, tokenizer, form), form
        self.model, self.batch_tokens = model.eval(), batch_tokens
        self.constraint = self.codec.constraint(next(model.parameters()).device)

    def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """One score per trajectory, in order.

        Raises ValueError for a trajectory that lacks z at its latent positions.
        """
        contexts = [context_of(t, self.codec, self.form) for t in trajectories]
        positions = self.model.config.max_position_embeddings
        too_long = Score(INVALID, problem=f"the context exceeds the model's {positions} positions")
        scores, rows = [], []
        for number, context in enumerate(contexts):
            known = context.without_model()
            scores.append(known or too_long)
            if known is None:
                rows += [r for r in self._rows(number, context) if len(r.ids) <= positions]
        for part in self._parts(rows):
            for row, value in zip(part, self._means(part, contexts)):
                best = scores[row.number]
                if not best.gold or value > best.value:
                    scores[row.number] = Score(value, row.gold)
        return scores

    def _rows(self, number: int, context: ScoredContext) -> Iterator[_Row]:
        """One for every gold answer of the context."""
        for gold in context.answers:
            ids, first = answer_tokens(self.codec, context.before, gold, context.after)
            yield _Row(number, gold, [*context.ids, *ids], len(context.ids) + first)

    def _parts(self, rows: list[_Row]) -> Iterator[list[_Row]]:
        """Rows of similar lengths, as many as `batch_tokens` allows."""
        rows = sorted(rows, key=lambda row: len(row.ids), reverse=True)
        while rows:
            count = max(1, self.batch_tokens // len(rows[0].ids))
            yield rows[:count]
            rows = rows[count:]

    @torch.no_grad()
    def _means(self, rows: Sequence[_Row], contexts: Sequence[ScoredContext]) -> list[float]:
        """Mean log-prob of each row's gold; the longest row comes first."""
        width, device = len(rows[0].ids), next(self.model.parameters()).device
        gaps = [width - len(row.ids) for row in rows]
        ids = torch.tensor(
            [r.ids + [0] * gap for r, gap in zip(rows, gaps)], device=device
        )  # (B, T)
        mask = torch.tensor(
            [[1] * len(r.ids) + [0] * gap for r, gap in zip(rows, gaps)], device=device
        )
        if hasattr(self.model, "latent_states"):
            z = [torch.as_tensor(contexts[row.number].latents) for row in rows]  # (n, H) each
            z = [one for one in z if len(one)]
            recorded = torch.cat(z).to(device) if z else None
            hidden = self.model.latent_states(ids, mask, latents=recorded).hidden  # (B, T, H)
        else:
            output = self.model.model(input_ids=ids, attention_mask=mask, use_cache=False)
            hidden = output.last_hidden_state
        # Every token of a gold is predicted by the state before it.
        lengths = [len(row.ids) - row.first for row in rows]
        row_of = [index for index, length in enumerate(lengths) for _ in range(length)]
        place = [p for row in rows for p in range(row.first, len(row.ids))]
        states = hidden[row_of, torch.tensor(place) - 1]  # (n, H)
        logits = policy_logits(self.model, states)  # (n, V)
        if self.constraint is not None:
            logits = self.constraint(logits, torch.zeros(len(states)))  # answers are visible text
        logprobs = torch.log_softmax(logits, -1)
        chosen = logprobs.gather(1, ids[row_of, place][:, None])[:, 0].double()  # (n,)
        return [float(part.mean()) for part in chosen.split(lengths)]

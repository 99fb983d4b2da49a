"""Word scores from a language model, where LLMLingua-2 cannot be had.

surprisal: words that the model would have written anyway can go. A word's score is 1 − exp(−s),
with s the mean of −log P(token | what is before) over its tokens. So it is one minus the geometric
mean of their probabilities.

gain: words that the *action* makes likelier matter for the action. The score is the logistic
function of the mean of log P(token | what is before, action) − log P(token | what is before). For
the first term, the action that the turn ended in stands before the thought. LLMLingua-2 was
distilled from a model that was told to keep what matters; this asks the policy itself.

Both score the thought inside its turn, `<think>…</think>`, tokenised as the policy's turns are.
Many thoughts share a forward pass. Only positions that predict a token of a thought get logits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch

from alar import protocol
from alar.methods.tokenskip.words import Thought, Word, in_chunks, split_words
from alar.rollout.codec import Codec
from alar.rollout.hf import policy_logits

CHUNK_TOKENS = 510  # as LLMLingua-2's
BELOW_ONE = float(np.nextafter(1.0, 0.0))  # 1 is for forced words


class LanguageModelScorer(ABC):
    """A scorer on a causal model; a forward pass is over about `step_tokens` tokens."""

    name: str

    def __init__(
        self, model, codec: Codec, *, chunk_tokens: int = CHUNK_TOKENS, step_tokens: int = 2**14
    ):
        self.model, self.codec = model.eval(), codec
        self.chunk_tokens, self.step_tokens = chunk_tokens, step_tokens

    def score_words(self, thoughts: Sequence[Thought]) -> list[list[Word]]:
        blocks = [_Block(thought.text, self.codec) for thought in thoughts]
        return [
            in_chunks(block.words(scores), block.counts, self.chunk_tokens)
            for block, scores in zip(blocks, self._token_scores(thoughts, blocks))
        ]

    @abstractmethod
    def _token_scores(
        self, thoughts: Sequence[Thought], blocks: Sequence[_Block]
    ) -> list[list[float]]:
        """For each thought, one score in [0, 1) for each of its words."""

    @torch.no_grad()
    def _logprobs(
        self, contexts: Sequence[Sequence[int]], blocks: Sequence[_Block]
    ) -> list[np.ndarray]:
        """log P of every token of each block behind its context: one array per block."""
        start = [self.codec.tokenizer.eos_token_id]
        rows = [
            [*(context or start), *block.ids]
            for context, block in zip(contexts, blocks, strict=True)
        ]
        device = next(self.model.parameters()).device
        results: list[np.ndarray] = [np.zeros(0)] * len(rows)
        # Longest first, so that rows of one batch are about equally long.
        order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
        while order:
            width = len(rows[order[0]])
            count = max(1, self.step_tokens // width)
            batch, order = order[:count], order[count:]
            ids = torch.zeros(len(batch), width, dtype=torch.long, device=device)  # (B, T)
            mask = torch.zeros_like(ids)
            for row, index in enumerate(batch):
                length = len(rows[index])
                ids[row, :length] = torch.tensor(rows[index])
                mask[row, :length] = 1
            hidden = self.model.model(
                input_ids=ids, attention_mask=mask, use_cache=False
            ).last_hidden_state  # (B, T, H)
            spans = [(len(rows[i]) - len(blocks[i].ids), len(rows[i])) for i in batch]
            states = torch.cat(
                [hidden[row, a - 1 : b - 1] for row, (a, b) in enumerate(spans)]
            )  # (N, H)
            targets = torch.cat([ids[row, a:b] for row, (a, b) in enumerate(spans)])  # (N)
            logits = policy_logits(self.model, states)  # (N, V)
            found = -torch.nn.functional.cross_entropy(logits, targets, reduction="none")
            ends = np.cumsum([b - a for a, b in spans])
            pieces = np.split(found.cpu().numpy().astype(np.float64), ends[:-1])
            for index, piece in zip(batch, pieces):
                results[index] = piece
        return results


class Surprisal(LanguageModelScorer):
    name = "surprisal"

    def _token_scores(self, thoughts, blocks):
        logprobs = self._logprobs([thought.context for thought in thoughts], blocks)
        scores = []
        for block, found in zip(blocks, logprobs):
            means = block.word_means(found)
            # 1 − e^mean; expm1 stays exact near 0.
            scores.append([min(BELOW_ONE, float(-np.expm1(mean))) for mean in means])
        return scores


class Gain(LanguageModelScorer):
    name = "answer-conditioned gain"

    def _token_scores(self, thoughts, blocks):
        """Raises ValueError for a thought whose action is unknown."""
        if any(not thought.action for thought in thoughts):
            raise ValueError(
                "scorer gain needs the action that each thought led to; for a bare text use"
                " surprisal"
            )
        told = [[*thought.context, *self.codec.untrusted(thought.action)] for thought in thoughts]
        before = self._logprobs([thought.context for thought in thoughts], blocks)
        after = self._logprobs(told, blocks)
        scores = []
        for block, guessing, knowing in zip(blocks, before, after):
            means = block.word_means(knowing - guessing)
            scores.append([min(BELOW_ONE, float(1 / (1 + np.exp(-mean)))) for mean in means])
        return scores


class _Block:
    """A thought as `<think>text</think>`: its ids, and which of them make which word.

    A token may belong to two words.
    """

    def __init__(self, text: str, codec: Codec):
        encoded = codec.tokenizer(
            protocol.think_block(text),
            add_special_tokens=False,
            split_special_tokens=True,
            return_offsets_mapping=True,
        )
        self.ids, self.texts = list(encoded["input_ids"]), split_words(text)
        self.members: list[list[int]] = []
        offsets, end = encoded["offset_mapping"], len(protocol.THINK_OPEN)
        for word in self.texts:
            start, end = end, end + len(word)
            members = [i for i, (first, last) in enumerate(offsets) if first < end and last > start]
            self.members.append(members)
        self.counts = [max(1, len(codec.untrusted(word))) for word in self.texts]

    def word_means(self, values: np.ndarray) -> list[float]:
        """Mean over the tokens of each word; 0 for a word that has none of its own."""
        return [float(values[tokens].mean()) if tokens else 0.0 for tokens in self.members]

    def words(self, scores: Sequence[float]) -> list[Word]:
        return [Word(text, score) for text, score in zip(self.texts, scores, strict=True)]

"""Word scores of LLMLingua-2 (arXiv 2403.12968) by its own library.

The library is among the core packages; the weights (2.2 GB) come from the hub or from a folder. The
library's chunking, words and probabilities are used as they are. Three habits of it would disturb a
run and are left out: its constructor seeds every generator of the process and fetches a tokenizer
of OpenAI's, and it pads every text to 512 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from alar.methods.tokenskip.words import OPERATORS, Thought, Word

WEIGHTS = "microsoft/llmlingua-2-xlm-roberta-large-meetingbank"
# Model type → the model whose words the library makes.
RULES = {"xlm-roberta": "xlm-roberta-large", "bert": "bert-base-multilingual-cased"}
INSTALL = "python -m pip install nltk tiktoken && python -m pip install --no-deps llmlingua"


class LLMLingua2:
    """The library's scores. `weights`: a name on the hub or a folder.

    `force_tokens` always begin a word, and score 1. Raises ImportError without the library and
    OSError without the weights, each with the command that gets them.
    """

    name = "LLMLingua-2"

    def __init__(
        self,
        weights: str = WEIGHTS,
        *,
        device: str = "cpu",
        force_tokens: Sequence[str] = OPERATORS,
        batch_size: int = 32,
    ):
        self.compressor = _compressor(weights, device)
        self.force_tokens, self.batch_size = list(force_tokens), batch_size

    @torch.no_grad()
    def score_words(self, thoughts: Sequence[Thought]) -> list[list[Word]]:
        chunks = [
            (index, number, text)
            for index, thought in enumerate(thoughts)
            for number, text in enumerate(self.compressor.chunks(thought.text))
        ]
        found: list[list[Word]] = [[] for _ in thoughts]
        for start in range(0, len(chunks), self.batch_size):
            batch = chunks[start : start + self.batch_size]
            scored = self.compressor.word_probabilities(
                [text for _, _, text in batch], self.force_tokens
            )
            for (index, number, _), words in zip(batch, scored):
                found[index] += [Word(text, score, number) for text, score in words]
        return found


def _compressor(weights: str, device: str):
    try:
        from llmlingua import PromptCompressor
        from llmlingua.utils import TokenClfDataset
    except ImportError as error:
        raise ImportError(
            f"scorer llmlingua2 needs the library llmlingua ({error}): {INSTALL}"
        ) from error

    class WordCompressor(PromptCompressor):
        """The library's compressor, asked for words and probabilities instead of a text."""

        def __init__(self):
            self.load_model(weights, device, {"trust_remote_code": False})
            kind = self.model.config.model_type
            if kind not in RULES:
                raise ValueError(
                    f"{weights}: a {kind} model; LLMLingua-2's are {' and '.join(RULES)}"
                )
            self.model_name, self.max_seq_len = RULES[kind], 512
            # The library looks here which tokens are no words.
            self.special_tokens = set(self.tokenizer.all_special_tokens)

        def chunks(self, text: str) -> list[str]:
            return self._PromptCompressor__chunk_context(text, chunk_end_tokens={".", "\n"})

        def word_probabilities(
            self, texts: Sequence[str], force_tokens: list[str]
        ) -> list[list[tuple[str, float]]]:
            """(word with its white space, probability that it is kept) for each text."""
            longest = min(  # 2: the marks at both ends of a text
                self.max_seq_len, 2 + max(len(self.tokenizer.tokenize(text)) for text in texts)
            )
            # The library does not pass the model's name, and neither does this. The ends of a text
            # are then BERT's [CLS] and [SEP], which XLM-R reads as <unk>. Published compressions
            # were made that way.
            data = TokenClfDataset(texts, tokenizer=self.tokenizer, max_len=longest)
            ids, mask = (
                torch.stack([row[key] for row in data]).to(self.device) for key in ("ids", "mask")
            )
            kept = torch.softmax(
                self.model(input_ids=ids, attention_mask=mask == 1).logits.float(), -1
            )[..., 1].cpu()  # (B, T): class 1 is "keep"
            results = []
            for row, probabilities, here in zip(ids.cpu(), kept, mask.cpu() == 1):
                tokens = self.tokenizer.convert_ids_to_tokens(row[here].tolist())
                words, by_token, _ = self._PromptCompressor__merge_token_to_word(
                    tokens,
                    probabilities[here].tolist(),
                    force_tokens=force_tokens,
                    token_map={},
                    force_reserve_digit=False,
                )
                means = self._PromptCompressor__token_prob_to_word_prob(
                    by_token, convert_mode="mean"
                )
                results.append(list(zip(map(self._surface, words), means)))
            return results

        def _surface(self, word: str) -> str:
            return word.replace("▁", " ") if self.model_name.startswith("xlm") else f" {word}"

    try:
        return WordCompressor()
    except OSError as error:
        raise OSError(
            f"scorer llmlingua2: {weights!r} is neither a folder nor within reach on the hub. With"
            f" a connection: hf download {WEIGHTS} --local-dir llmlingua-2, then"
            f" tokenskip.scorer_model=./llmlingua-2; without: tokenskip.scorer=surprisal ({error})"
        ) from error

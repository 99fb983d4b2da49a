"""Text encoders: what turns passages and queries into the vectors that FAISS compares by inner
product.

`TfidfEncoder` is the embedded default and needs no download. `E5Encoder` runs E5 or any other
Hugging Face encoder of the sentence-transformers kind, with the recipe of Wang et al. (2022, arXiv
2212.03533).
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import scipy.sparse
from sklearn.feature_extraction.text import TfidfVectorizer

from alar.domains.search.corpus import Passage, RetrievalError


class Encoder(Protocol):
    """Two functions from texts to float32 vectors of one dimension. A query that says nothing is a
    zero vector.

    `name` tells whether an index was built by this encoder. A passage whose score is at most
    `min_score` is no hit.
    """

    name: str
    min_score: float

    def encode_passages(self, texts: Sequence[str]) -> np.ndarray:
        """Contents of passages, `"Title"\\ntext` → float32 [len(texts), dimension]."""

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        """Queries → float32 [len(texts), dimension]."""


class TfidfEncoder:
    """TF-IDF words (scikit-learn: sublinear tf, smooth idf), title and text weighted apart, at most
    `dimension` wide.

    Words weigh √idf on either side, so that an inner product weighs them by idf, as BM25 does. With
    idf² the last word of "Peru, currency" would hardly count beside the name.

    A passage is `title_weight · unit(title) + (1 − title_weight) · unit(text)`: a query that names
    a title exactly earns the whole `title_weight`, which no passage that merely mentions the words
    can reach.

    A vocabulary larger than `dimension` is projected: each word gets four signed coordinates from
    its hash (sparse Johnson–Lindenstrauss, Kane and Nelson 2014). With one coordinate per word, as
    in plain feature hashing, two names in the same bucket would be the same word to the index.

    The vocabulary is that of the first passages encoded, or of `fit`.
    """

    def __init__(self, dimension: int = 2048, title_weight: float = 0.9):
        if dimension < 1 or not 0 <= title_weight <= 1:
            raise ValueError(
                f"TfidfEncoder: dimension {dimension} must be ≥ 1 and title_weight {title_weight}"
                " in [0, 1]"
            )
        self.name = f"tfidf-{dimension}-{title_weight:g}"
        self.min_score = 1e-6  # nothing in common with the query, up to rounding
        self.dimension = dimension
        self.title_weight = title_weight
        self._vectorizer = TfidfVectorizer(
            token_pattern=r"(?u)\w+",
            strip_accents="unicode",
            sublinear_tf=True,
            smooth_idf=True,
            dtype=np.float32,
        )
        self._projection: scipy.sparse.csr_matrix | None = None
        self._fitted = False

    def fit(self, texts: Sequence[str]) -> "TfidfEncoder":
        self._vectorizer.fit(texts)
        self._vectorizer.idf_ = np.sqrt(self._vectorizer.idf_)
        vocabulary = self._vectorizer.get_feature_names_out()
        if len(vocabulary) > self.dimension:
            self._projection = _sparse_projection(vocabulary, self.dimension)
        self._fitted = True
        return self

    def encode_passages(self, texts: Sequence[str]) -> np.ndarray:
        if not self._fitted:
            self.fit(texts)
        passages = [Passage.from_contents("", contents) for contents in texts]
        titles = self._vectorizer.transform([passage.title for passage in passages])
        bodies = self._vectorizer.transform([passage.text for passage in passages])
        return self._dense(self.title_weight * titles + (1 - self.title_weight) * bodies)

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        if not self._fitted:
            raise RuntimeError("TfidfEncoder: encode the passages (or call fit) before the queries")
        return self._dense(self._vectorizer.transform(texts))

    def _dense(self, matrix: scipy.sparse.csr_matrix) -> np.ndarray:
        if self._projection is not None:
            matrix = matrix @ self._projection
        return np.ascontiguousarray(matrix.toarray(), dtype=np.float32)


class E5Encoder:
    """E5, or another Hugging Face text encoder with the same recipe as E5-base-v2.

    Prefixes `query: ` and `passage: `, at most 256 tokens, mean of the last hidden states under the
    attention mask, unit length. Texts are batched by length, so that little padding is computed;
    the order of the results is that of the texts. Pooling is float32 whatever `dtype` the model
    runs in ("auto": float16 on a GPU, float32 on a CPU). `device` "auto" takes a GPU if there is
    one.
    """

    min_score = -float("inf")

    def __init__(
        self,
        model: str = "intfloat/e5-base-v2",
        *,
        device: str = "auto",
        dtype: str = "auto",
        batch_size: int = 64,
        max_length: int = 256,
        query_prefix: str = "query: ",
        passage_prefix: str = "passage: ",
    ):
        import torch
        from transformers import AutoModel, AutoTokenizer

        if batch_size < 1 or max_length < 1:
            raise ValueError(
                f"E5Encoder: batch_size {batch_size} and max_length {max_length} must be at least 1"
            )
        # The last part of a path, so that a hub id and its downloaded folder are one encoder.
        self.name = f"{Path(model).name}|{query_prefix}|{passage_prefix}|{max_length}"
        self.device = torch.device(
            ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        )
        if dtype == "auto":
            dtype = "float16" if self.device.type == "cuda" else "float32"
        self.batch_size = batch_size
        self.max_length = max_length
        self._prefixes = {"query": query_prefix, "passage": passage_prefix}
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(model)
            self._model = AutoModel.from_pretrained(model, dtype=getattr(torch, dtype))
        except (OSError, ValueError) as error:
            raise RetrievalError(
                f"the text encoder {model!r} cannot be loaded: {error}\nGive a hub id or the folder"
                " of a downloaded encoder (retrieval.model), or use the embedded backend"
                " (retrieval.backend: tfidf)"
            ) from error
        if getattr(self._model.config, "is_encoder_decoder", False):
            raise RetrievalError(
                f"{model!r} is an encoder-decoder model; a text encoder such as E5 is needed"
            )
        if self._tokenizer.pad_token_id is None:
            raise RetrievalError(
                f"the tokenizer of {model!r} has no padding token; a text encoder such as E5 is"
                " needed"
            )
        self._model.eval().to(self.device)
        self.dimension = self._model.config.hidden_size

    def encode_passages(self, texts: Sequence[str]) -> np.ndarray:
        return self._encode(texts, "passage")

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        vectors = self._encode(texts, "query")
        vectors[[not text.strip() for text in texts]] = 0
        return vectors

    def _encode(self, texts: Sequence[str], kind: str) -> np.ndarray:
        import torch

        vectors = np.zeros((len(texts), self.dimension), dtype=np.float32)
        if not len(texts):
            return vectors
        prefix = self._prefixes[kind]
        tokens = self._tokenizer(
            [prefix + text for text in texts], truncation=True, max_length=self.max_length
        )
        by_length = sorted(range(len(texts)), key=lambda i: len(tokens["input_ids"][i]))
        for start in range(0, len(texts), self.batch_size):
            rows = by_length[start : start + self.batch_size]
            batch = self._tokenizer.pad(
                {name: [values[i] for i in rows] for name, values in tokens.items()},
                return_tensors="pt",
            ).to(self.device)
            with torch.inference_mode():
                hidden = self._model(**batch).last_hidden_state.float()  # (B, T, H)
                mask = batch["attention_mask"].unsqueeze(-1).float()  # (B, T, 1)
                pooled = (hidden * mask).sum(dim=1) / mask.sum(dim=1)
                vectors[rows] = torch.nn.functional.normalize(pooled, dim=-1).cpu().numpy()
        return vectors


def _sparse_projection(
    words: Sequence[str], dimension: int, coordinates: int = 4
) -> scipy.sparse.csr_matrix:
    """[len(words), dimension] with `coordinates` entries ±1/√coordinates per row, one in each block
    of columns.

    Python's `hash` would be salted anew in every process, and CRC32 is linear: words that collide
    once collide everywhere.
    """
    coordinates = min(coordinates, dimension)
    edges = np.linspace(0, dimension, coordinates + 1).astype(np.int64)
    digests = b"".join(
        hashlib.blake2b(word.encode(), digest_size=4 * coordinates).digest() for word in words
    )
    codes = np.frombuffer(digests, dtype="<u4").reshape(len(words), coordinates)
    columns = edges[:-1] + (codes >> 1) % (edges[1:] - edges[:-1])
    signs = np.where(codes & 1, 1.0, -1.0).astype(np.float32) / np.sqrt(
        coordinates, dtype=np.float32
    )
    rows = np.repeat(np.arange(len(words)), coordinates)
    return scipy.sparse.csr_matrix(
        (signs.ravel(), (rows, columns.ravel())), shape=(len(words), dimension)
    )

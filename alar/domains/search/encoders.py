"""Text encoders: they turn passages and queries into the vectors that FAISS compares.

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
    """Two functions from texts to float32 vectors of one dimension.

    A query that says nothing is a zero vector. `name` tells whether this encoder built an index. A
    passage whose inner product with the query is at most `min_score` is no hit.
    """

    name: str
    min_score: float

    def encode_passages(self, texts: Sequence[str]) -> np.ndarray:
        """Contents of passages, `"Title"\\ntext` → float32 [len(texts), dimension]."""

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        """Queries → float32 [len(texts), dimension]."""


class TfidfEncoder:
    """TF-IDF of words (scikit-learn: sublinear tf, smooth idf) in at most `dimension` dimensions.

    Words weigh √idf on either side, so an inner product weighs them by idf, as BM25 does. With idf²
    the last word of "Peru, currency" would hardly count beside the name.

    A passage is `title_weight · unit(title) + (1 − title_weight) · unit(text)`. A query that names
    a title exactly earns the whole `title_weight`. A passage that merely mentions the words cannot
    reach that.

    A vocabulary larger than `dimension` is projected: each word gets four signed coordinates from
    its hash (sparse Johnson–Lindenstrauss, Kane and Nelson 2014). With one coordinate per word, as
    in plain feature hashing, two names in the same bucket would be the same word to the index.

    The vocabulary comes from the first passages encoded, or from `fit`.
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
            token_pattern=r"(?u)\w+",  # scikit-learn's default drops words of one letter or digit
            strip_accents="unicode",
            sublinear_tf=True,
            smooth_idf=True,
            dtype=np.float32,
        )
        self._projection: scipy.sparse.csr_matrix | None = None
        self._fitted = False

    def fit(self, texts: Sequence[str]) -> "TfidfEncoder":
        self._vectorizer.fit(texts)
        # Passages and queries both carry this weight, so their product carries idf.
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
        # Sparse (passages, vocabulary), every row of unit length.
        titles = self._vectorizer.transform([passage.title for passage in passages])
        bodies = self._vectorizer.transform([passage.text for passage in passages])
        return self._dense(self.title_weight * titles + (1 - self.title_weight) * bodies)

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        if not self._fitted:
            raise RuntimeError("TfidfEncoder: encode the passages (or call fit) before the queries")
        return self._dense(self._vectorizer.transform(texts))

    def _dense(self, matrix: scipy.sparse.csr_matrix) -> np.ndarray:
        if self._projection is not None:
            matrix = matrix @ self._projection  # (texts, vocabulary) → (texts, dimension)
        return np.ascontiguousarray(matrix.toarray(), dtype=np.float32)


class E5Encoder:
    """E5, or another Hugging Face text encoder with the recipe of E5-base-v2.

    The recipe: prefixes `query: ` and `passage: `, at most 256 tokens, the mean of the last hidden
    states under the attention mask, unit length. Pooling is in float32 whatever `dtype` the model
    runs in ("auto": float16 on a GPU, float32 on a CPU). `device` "auto" takes a GPU if there is
    one.
    """

    min_score = -float("inf")  # every passage is a hit, however far

    def __init__(
        self,
        model: str = "intfloat/e5-base-v2",
        *,
        device: str = "auto",
        dtype: str = "auto",
        batch_size: int = 64,
        max_length: int = 256,
    ):
        import torch
        from transformers import AutoModel, AutoTokenizer

        # The last part of a path, so that a hub id and its downloaded folder are one encoder.
        self.name = f"{Path(model).name}|query: |passage: |{max_length}"
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(device)
        if dtype == "auto":
            dtype = "float16" if self.device.type == "cuda" else "float32"
        self.batch_size = batch_size
        self.max_length = max_length
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(model)
            self._model = AutoModel.from_pretrained(model, dtype=getattr(torch, dtype))
        except (OSError, ValueError) as error:
            raise RetrievalError(
                f"the text encoder {model!r} cannot be loaded: {error}\nGive a hub id or the folder"
                " of a downloaded encoder (retrieval.model), or use the embedded backend"
                " (retrieval.backend: tfidf)"
            ) from error
        has_decoder = getattr(self._model.config, "is_encoder_decoder", False)
        if has_decoder or self._tokenizer.pad_token_id is None:
            raise RetrievalError(f"{model!r} is not a text encoder; one such as E5 is needed")
        self._model.eval().to(self.device)

    def encode_passages(self, texts: Sequence[str]) -> np.ndarray:
        return self._encode([f"passage: {text}" for text in texts])

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        vectors = self._encode([f"query: {text}" for text in texts])
        vectors[[not text.strip() for text in texts]] = 0  # the prefix alone says nothing
        return vectors

    def _encode(self, texts: Sequence[str]) -> np.ndarray:
        import torch

        width = self._model.config.hidden_size
        vectors = np.zeros((len(texts), width), dtype=np.float32)
        if not len(texts):
            return vectors
        tokens = self._tokenizer(texts, truncation=True, max_length=self.max_length)
        # Texts of similar length share a batch, so that little padding is computed.
        by_length = sorted(range(len(texts)), key=lambda i: len(tokens["input_ids"][i]))
        for start in range(0, len(texts), self.batch_size):
            rows = by_length[start : start + self.batch_size]
            chosen = {name: [values[i] for i in rows] for name, values in tokens.items()}
            batch = self._tokenizer.pad(chosen, return_tensors="pt").to(self.device)
            with torch.inference_mode():
                hidden = self._model(**batch).last_hidden_state.float()  # (B, T, H)
                mask = batch["attention_mask"].unsqueeze(-1).float()  # (B, T, 1)
                pooled = (hidden * mask).sum(dim=1) / mask.sum(dim=1)  # (B, H)
                vectors[rows] = torch.nn.functional.normalize(pooled, dim=-1).cpu().numpy()
        return vectors


def _sparse_projection(
    words: Sequence[str], dimension: int, coordinates: int = 4
) -> scipy.sparse.csr_matrix:
    """A matrix [len(words), dimension] that gives every word its signed coordinates.

    Each row has `coordinates` entries ±1/√coordinates, one in each block of columns. They come from
    BLAKE2. Python's `hash` has another salt in every process. CRC32 is linear, so words that
    collide once would collide in every block.
    """
    coordinates = min(coordinates, dimension)
    # Block b has the columns edges[b] … edges[b + 1] − 1.
    edges = np.linspace(0, dimension, coordinates + 1).astype(np.int64)
    digests = b"".join(
        hashlib.blake2b(word.encode(), digest_size=4 * coordinates).digest() for word in words
    )
    codes = np.frombuffer(digests, dtype="<u4").reshape(len(words), coordinates)
    # The lowest bit of a code is the sign, the other bits choose the column within its block.
    columns = edges[:-1] + (codes >> 1) % (edges[1:] - edges[:-1])  # (words, coordinates)
    signs = np.where(codes & 1, 1.0, -1.0).astype(np.float32)
    signs /= np.sqrt(coordinates, dtype=np.float32)
    rows = np.repeat(np.arange(len(words)), coordinates)  # (words · coordinates,)
    return scipy.sparse.csr_matrix(
        (signs.ravel(), (rows, columns.ravel())), shape=(len(words), dimension)
    )

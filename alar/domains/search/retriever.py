"""Dense retrieval: an encoder and a FAISS inner-product index behind `search(queries, k)`.

`Retriever` serves passages in memory (the embedded world) as well as a corpus on disk with an index
that was built before (`alar.domains.search.index`). Deliberate: passages with equal scores come in
corpus order, whatever FAISS makes of the tie, so that two runs read the same observations; a query
without any known word finds nothing instead of the first passages.
"""

from collections.abc import Sequence
from typing import Protocol

import faiss
import numpy as np

from alar.domains.search.client import HTTPRetriever
from alar.domains.search.corpus import Corpus, Hit, Passage, RetrievalError, refuse_duplicate_ids
from alar.domains.search.encoders import E5Encoder, Encoder, TfidfEncoder
from alar.domains.search.index import make_index, open_index, to_gpus

__all__ = ["Hit", "Passage", "RetrievalError", "Retriever", "Searcher", "build"]

# BLAS sums in another order for another batch size; scores closer than this are the same score.
TIE = 1e-6


class Searcher(Protocol):
    """What the search environment needs from retrieval, local or over HTTP."""

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """The best k passages of each query, best first."""


class Retriever:
    """Encode queries, search the index, return passages.

    `passages` may be any sequence whose items are `Passage`; row i of `index` belongs to
    `passages[i]`. Without `index` the passages are encoded now into an exact index
    (`faiss.IndexFlatIP`).
    """

    def __init__(
        self, passages: Sequence[Passage], encoder: Encoder, index: faiss.Index | None = None
    ):
        if not len(passages):
            raise RetrievalError("the corpus has no passages: there is nothing to retrieve")
        if index is None:
            refuse_duplicate_ids(passages)
            index = make_index(
                encoder.encode_passages([passage.contents for passage in passages]), "flat"
            )
        if index.ntotal != len(passages):
            raise RetrievalError(
                f"the index has {index.ntotal} rows but the corpus{_path_of(passages)} has"
                f" {len(passages)} passages; row i must be line i: use the corpus of this index, or"
                " build the index again (python -m alar.domains.search.index)"
            )
        self.passages = passages
        self.encoder = encoder
        self.index = index
        self._min_score = getattr(encoder, "min_score", -np.inf)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """The best k passages of each query, best first.

        Fewer than k where the corpus is smaller or the others score at most the encoder's
        `min_score` (for TF-IDF: share no word with the query); none for a query that encodes to
        zero.
        """
        if isinstance(queries, str):
            raise TypeError("queries must be a list of strings, not one string")
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        if not queries:
            return []
        vectors = self.encoder.encode_queries(list(queries))  # (queries, dimension)
        if vectors.shape[1] != self.index.d:
            raise RetrievalError(
                f"the encoder makes vectors of dimension {vectors.shape[1]} but the index holds"
                f" {self.index.d}: use the encoder that the index was built with"
            )
        answered = np.flatnonzero(np.abs(vectors).max(axis=1) > 0)
        hits: list[list[Hit]] = [[] for _ in queries]
        for query, rows in zip(answered, self._ranked(vectors[answered], k), strict=True):
            hits[query] = [Hit(self.passages[row], score) for row, score in rows]
        return hits

    def _ranked(self, vectors: np.ndarray, k: int) -> list[list[tuple[int, float]]]:
        """Top k (row, score) of each vector; candidates are fetched until the tie at place k is
        seen whole."""
        ranked: list[list[tuple[int, float]]] = [[] for _ in vectors]
        pending = np.arange(len(vectors))
        fetch = k + 8
        while len(pending):
            fetch = min(fetch, self.index.ntotal)
            scores, rows = self.index.search(vectors[pending], fetch)  # (pending, fetch)
            cut = []
            for query, row_scores, row_ids in zip(pending, scores, rows, strict=True):
                found = (row_ids >= 0) & (
                    row_scores > self._min_score
                )  # approximate indexes pad with -1
                row_scores, row_ids = row_scores[found], row_ids[found]
                if (
                    len(row_ids) == fetch < self.index.ntotal
                    and row_scores[k - 1] - row_scores[-1] <= TIE
                ):
                    cut.append(query)
                    continue
                ranked[query] = _in_corpus_order(row_scores, row_ids)[:k]
            pending = np.asarray(cut, dtype=np.int64)
            fetch *= 4
        return ranked


def _in_corpus_order(scores: np.ndarray, rows: np.ndarray) -> list[tuple[int, float]]:
    """Sort descending scores stably, rows ascending within each run of tied scores; a run shares
    its best score."""
    tie = np.cumsum(np.diff(scores, prepend=scores[:1]) < -TIE) if len(scores) else scores
    order = np.lexsort((rows, tie))
    starts = np.searchsorted(tie, tie)
    return [(int(rows[i]), float(scores[starts[i]])) for i in order]


def _path_of(passages: Sequence[Passage]) -> str:
    return f" {passages.path}" if isinstance(passages, Corpus) else ""


# TF-IDF vectors are dense and in memory: 8 KB a passage.
LARGEST_TFIDF_CORPUS = 200_000


def build(
    backend: str = "tfidf",
    *,
    passages: Sequence[Passage] | None = None,
    corpus: str = "",
    index: str = "",
    model: str = "intfloat/e5-base-v2",
    url: str = "",
    device: str = "auto",
    mmap: bool = False,
    gpu: bool = False,
) -> Searcher:
    """A retriever as the `retrieval` parameters describe it.

    "tfidf": `passages`, or all of a small `corpus` file, indexed now. "e5": `passages` encoded now,
    or `corpus` and `index` files. "http": the server at `url`. `mmap` leaves the index file on
    disk, `gpu` moves the index to the GPUs (an error where FAISS sees none). Raises RetrievalError
    that says what is missing, ValueError for an unknown backend.
    """
    if backend == "http":
        if not url:
            raise RetrievalError(
                "retrieval.backend is http but retrieval.url is empty: give the address of the"
                " server"
            )
        return HTTPRetriever(url)
    if backend not in ("tfidf", "e5"):
        raise ValueError(f"retrieval.backend: unknown backend {backend!r}: one of tfidf, e5, http")
    if passages is None and not corpus:
        raise RetrievalError(
            f"retrieval.backend is {backend} but there is no corpus: set retrieval.corpus"
        )
    if passages is None:
        passages = Corpus(corpus)
    if backend == "tfidf":
        if len(passages) > LARGEST_TFIDF_CORPUS:
            raise RetrievalError(
                f"the corpus{_path_of(passages)} has {len(passages):,} passages; TF-IDF vectors are"
                f" held in memory, at most {LARGEST_TFIDF_CORPUS:,}: use retrieval.backend e5 with"
                " an index, or http"
            )
        retriever = Retriever(list(passages), TfidfEncoder())
    elif isinstance(passages, Corpus):
        if not index:
            raise RetrievalError(
                "retrieval.backend is e5 but retrieval.index is empty: build the index once with"
                f" python -m alar.domains.search.index --corpus {corpus} --index e5.index --model"
                f" {model}"
            )
        encoder = E5Encoder(model, device=device)
        retriever = Retriever(passages, encoder, open_index(index, encoder=encoder, mmap=mmap))
    else:
        retriever = Retriever(passages, E5Encoder(model, device=device))
    if gpu:
        retriever.index = to_gpus(retriever.index)
    return retriever

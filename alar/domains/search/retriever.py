"""Dense retrieval: an encoder and a FAISS inner-product index behind `search(queries, k)`.

`Retriever` serves passages in memory (the embedded world), and also a corpus on disk with an index
that was built before (`alar.domains.search.index`). Two things are deliberate. Passages with equal
scores come in corpus order, whatever FAISS makes of the tie, so that two runs read the same
observations. A query without any known word finds nothing; it does not find the first passages.
"""

from collections.abc import Sequence
from typing import Protocol

import faiss
import numpy as np

from alar.domains.search.client import HTTPRetriever
from alar.domains.search.corpus import Corpus, Hit, Passage, RetrievalError, refuse_duplicate_ids
from alar.domains.search.encoders import E5Encoder, Encoder, TfidfEncoder
from alar.domains.search.index import make_index, open_index, to_gpus

# BLAS sums in another order for another batch size; scores closer than this are the same score.
TIE = 1e-6
# Passages. TF-IDF vectors are dense and in memory: 2048 float32 are 8 KB a passage.
LARGEST_TFIDF_CORPUS = 200_000


class Searcher(Protocol):
    """What the search environment needs from retrieval, local or over HTTP."""

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """The best k passages of each query, best first."""


class Retriever:
    """Encode queries, search the index, return passages.

    `passages` may be any sequence of `Passage`; row i of `index` belongs to `passages[i]`. Without
    `index`, the passages are encoded now into an exact index (`faiss.IndexFlatIP`).
    """

    def __init__(
        self, passages: Sequence[Passage], encoder: Encoder, index: faiss.Index | None = None
    ):
        if not len(passages):
            raise RetrievalError("the corpus has no passages: there is nothing to retrieve")
        if index is None:
            refuse_duplicate_ids(passages)
            vectors = encoder.encode_passages([passage.contents for passage in passages])
            index = make_index([vectors])
        # An index of another corpus would answer with wrong passages and no error.
        if index.ntotal != len(passages):
            raise RetrievalError(
                f"the index has {index.ntotal} rows but the corpus{_path_of(passages)} has"
                f" {len(passages)} passages; row i must be line i: use the corpus of this index, or"
                " build the index again (python -m alar.domains.search.index)"
            )
        self.passages = passages
        self.encoder = encoder
        self.index = index

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """The best k passages of each query, best first.

        There are fewer than k if the corpus is smaller, or if the other passages score at most the
        encoder's `min_score` (for TF-IDF: they share no word with the query). A query that encodes
        to zero finds none.
        """
        if isinstance(queries, str):  # also a sequence of strings: its characters
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
        answered = np.flatnonzero(np.abs(vectors).max(axis=1) > 0)  # indices of queries
        hits: list[list[Hit]] = [[] for _ in queries]
        for query, rows in zip(answered, self._ranked(vectors[answered], k), strict=True):
            hits[query] = [Hit(self.passages[row], score) for row, score in rows]
        return hits

    def _ranked(self, vectors: np.ndarray, k: int) -> list[list[tuple[int, float]]]:
        """The top k (row, score) of each vector.

        It fetches more candidates until all rows that tie with the one at place k are among them.
        """
        ranked: list[list[tuple[int, float]]] = [[] for _ in vectors]
        pending = np.arange(len(vectors))  # vectors that need more candidates
        fetch = k + 8  # a few more than k: most ties are then settled in one search
        while len(pending):
            fetch = min(fetch, self.index.ntotal)
            scores, rows = self.index.search(vectors[pending], fetch)  # both (pending, fetch)
            unfinished = []
            for query, row_scores, row_ids in zip(pending, scores, rows, strict=True):
                # Approximate indexes pad with row −1 when they find fewer than `fetch`.
                found = (row_ids >= 0) & (row_scores > self.encoder.min_score)
                row_scores, row_ids = row_scores[found], row_ids[found]
                more_exist = len(row_ids) == fetch < self.index.ntotal
                # The last candidate still ties with place k, so rows beyond it may tie too.
                if more_exist and row_scores[k - 1] - row_scores[-1] <= TIE:
                    unfinished.append(query)
                else:
                    ranked[query] = _in_corpus_order(row_scores, row_ids)[:k]
            pending = np.asarray(unfinished, dtype=np.int64)
            fetch *= 4
        return ranked


def _in_corpus_order(scores: np.ndarray, rows: np.ndarray) -> list[tuple[int, float]]:
    """(row, score) with rows ascending within each run of tied scores.

    All of a run get its best score. `scores` descend; both arrays are (candidates,).
    """
    # Number of the run that each score belongs to: a new run begins where the score drops.
    run = np.cumsum(np.diff(scores, prepend=scores[:1]) < -TIE) if len(scores) else scores
    order = np.lexsort((rows, run))  # by run, then by row
    starts = np.searchsorted(run, run)  # where the run of each candidate begins
    return [(int(rows[i]), float(scores[starts[i]])) for i in order]


def _path_of(passages: Sequence[Passage]) -> str:
    return f" {passages.path}" if isinstance(passages, Corpus) else ""


def open_retriever(
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

    "tfidf" indexes `passages`, or all of a small `corpus` file, now. "e5" encodes `passages` now,
    or opens `corpus` and `index` files. "http" asks the server at `url`. `mmap` leaves the index
    file on disk, `gpu` moves the index to the GPUs. Raises a RetrievalError that says what is
    missing, and ValueError for an unknown backend.
    """
    if backend == "http":
        return HTTPRetriever(url)
    if backend not in ("tfidf", "e5"):
        raise ValueError(f"retrieval.backend: unknown backend {backend!r}: one of tfidf, e5, http")
    if passages is None:
        if not corpus:
            raise RetrievalError(
                f"retrieval.backend is {backend} but there is no corpus: set retrieval.corpus"
            )
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

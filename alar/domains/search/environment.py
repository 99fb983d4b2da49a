"""The search domain as an environment.

A search returns passages of the question's world; an answer is judged by exact match.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from alar import protocol
from alar.domains.search.client import HTTPRetriever
from alar.domains.search.corpus import Hit, RetrievalError
from alar.domains.search.metrics import exact_match
from alar.domains.search.retriever import Searcher, open_retriever
from alar.domains.search.world import world
from alar.records import Observation, Question, Trajectory

MAX_CHARACTERS = 500  # of a passage that the policy reads, as in ALAR's evaluation
# Searches under way at a server, which puts them into one batch. More would leave more of the
# engine's slots empty: the trajectories of a search wait in theirs.
SEARCHES_AHEAD = 3


@lru_cache(maxsize=8)  # an index takes 16 MB, and questions of one world come together
def _world_searcher(name: str) -> Searcher:
    return open_retriever("tfidf", passages=world(name).passages())


class SearchEnvironment:
    """`searcher` serves every question. Without one, each question searches its embedded world.

    A search returns `topk` passages. `source` tells one searcher from another where results are
    compared.
    """

    form = protocol.SEARCH
    final = ("answer",)
    stop = protocol.SEARCH_STOPS

    def __init__(self, searcher: Searcher | None = None, *, topk: int = 2, source: str = ""):
        self.searcher = searcher
        self.topk = topk
        self.source = source
        # A search in this process would only take the cores that write the turns.
        self.ahead = SEARCHES_AHEAD if isinstance(searcher, HTTPRetriever) else 0

    def observe(self, steps: Sequence[tuple[Question, protocol.Turn]]) -> list[Observation]:
        # One search for all questions of a world: encoding is cheaper for many queries at once.
        by_world: dict[str, list[int]] = {}  # world → indices into `steps`
        for index, (question, _) in enumerate(steps):
            by_world.setdefault(question.world, []).append(index)
        observations: dict[int, Observation] = {}
        for name, indices in by_world.items():
            queries = [steps[index][1].argument for index in indices]  # in order of `indices`
            hits = self._searcher(name).search(queries, self.topk)
            for index, found in zip(indices, hits):
                observations[index] = _observation(found)
        return [observations[index] for index in range(len(steps))]

    def correct(self, trajectory: Trajectory) -> bool:
        return exact_match(trajectory.prediction, trajectory.question.answers)

    def _searcher(self, world_name: str) -> Searcher:
        if self.searcher is not None:
            return self.searcher
        if not world_name:
            raise RetrievalError(
                "a question without a world of its own needs a corpus: set retrieval.backend with"
                " retrieval.corpus and retrieval.index, or with the url of a server"
            )
        return _world_searcher(world_name)


def _observation(hits: Sequence[Hit]) -> Observation:
    passages = [(hit.passage.title, hit.passage.text[:MAX_CHARACTERS]) for hit in hits]
    titles = tuple(title for title, _ in passages)
    return Observation(protocol.observation_text(passages), titles)

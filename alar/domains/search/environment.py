"""The search domain as an environment: a search returns passages of the question's world, an answer
is judged by EM."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from alar import protocol
from alar.domains.search.corpus import RetrievalError
from alar.domains.search.metrics import exact_match
from alar.domains.search.retriever import Searcher, build
from alar.domains.search.world import world
from alar.records import Observation, Question, Trajectory


class SearchEnvironment:
    """`searcher` serves every question; without one, each question's own embedded world is
    searched.

    `topk` passages come back, each cut to `max_characters`. `source` tells one searcher from
    another where results are compared.
    """

    form = protocol.SEARCH
    final = ("answer",)
    stop = protocol.SEARCH_STOPS

    def __init__(
        self,
        searcher: Searcher | None = None,
        *,
        topk: int = 2,
        max_characters: int = 500,
        kept_worlds: int = 8,
        source: str = "",
    ):
        self.searcher, self.topk, self.max_characters, self.source = (
            searcher,
            topk,
            max_characters,
            source,
        )
        self.kept_worlds = kept_worlds
        self._worlds: OrderedDict[str, Searcher] = OrderedDict()

    def _searcher(self, name: str) -> Searcher:
        if self.searcher is not None:
            return self.searcher
        if not name:
            raise RetrievalError(
                "a question without a world of its own needs a corpus: set retrieval.backend with"
                " retrieval.corpus and retrieval.index, or with the url of a server"
            )
        if name not in self._worlds:
            self._worlds[name] = build("tfidf", passages=world(name).passages())
            while len(self._worlds) > self.kept_worlds:
                self._worlds.popitem(last=False)
        self._worlds.move_to_end(name)
        return self._worlds[name]

    def observe(self, steps: Sequence[tuple[Question, protocol.Turn]]) -> list[Observation]:
        by_world: dict[str, list[int]] = {}
        for index, (question, _) in enumerate(steps):
            by_world.setdefault(question.world, []).append(index)
        observations: dict[int, Observation] = {}
        for name, indices in by_world.items():
            hits = self._searcher(name).search([steps[i][1].argument for i in indices], self.topk)
            for i, found in zip(indices, hits):
                passages = [
                    (hit.passage.title, hit.passage.text[: self.max_characters]) for hit in found
                ]
                observations[i] = Observation(
                    protocol.observation_text(passages), tuple(title for title, _ in passages)
                )
        return [observations[i] for i in range(len(steps))]

    def correct(self, trajectory: Trajectory) -> bool:
        return exact_match(trajectory.prediction, trajectory.question.answers)

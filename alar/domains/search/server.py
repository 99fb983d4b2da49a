"""Retrieval over HTTP with the protocol of Search-R1's server, which verl and vLLM rollouts call.

    python -m alar.domains.search.server --corpus wiki-18.jsonl --index e5_Flat.index --backend e5
    --port 8000

`POST /retrieve {"queries": [...], "topk": 3, "return_scores": true}` answers `{"result":
[[{"document": {"id", "contents"}, "score"}, ...], ...]}`, one list per query; without scores the
lists hold the documents themselves. `GET /health` answers once the index is loaded. Encoding, not
searching, takes the time, so requests that arrive together are encoded together.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Annotated

import uvicorn
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, ConfigDict, Field

from alar.domains.search import json_service
from alar.domains.search.corpus import Hit, RetrievalError
from alar.domains.search.retriever import Searcher, build


class RetrieveRequest(BaseModel):
    """A misspelt field is refused: it would silently change the number of passages."""

    model_config = ConfigDict(extra="forbid")

    queries: list[str]
    topk: Annotated[int, Field(ge=1, le=1000)] | None = None
    return_scores: bool = False


class Batcher(json_service.Batcher):
    """Searches that arrive together become one call of the retriever, with the largest of their
    numbers of passages."""

    def __init__(self, retriever: Searcher, max_batch: int, max_wait: float):
        super().__init__(self._search, max_batch, max_wait)
        self.retriever = retriever

    async def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        return await self.submit([(query, k) for query in queries])

    def _search(self, wanted: list[tuple[str, int]]) -> list[list[Hit]]:
        hits = self.retriever.search([query for query, _ in wanted], max(k for _, k in wanted))
        return [found[:k] for found, (_, k) in zip(hits, wanted, strict=True)]


def create_app(
    retriever: Searcher, *, default_topk: int = 3, max_batch: int = 256, max_wait: float = 0.004
) -> FastAPI:
    """The server around any object with `search(queries, k)`. Invalid requests get 422, a failing
    search 500 with its cause."""
    batcher = Batcher(retriever, max_batch, max_wait)
    app = json_service.service("alar retrieval", batcher)

    @app.post("/retrieve")
    async def retrieve(request: RetrieveRequest) -> dict:
        if not request.queries:
            return {"result": []}
        try:
            hits = await batcher.search(request.queries, request.topk or default_topk)
        except json_service.BatchFailed as error:
            raise HTTPException(500, detail=f"the search failed: {error}") from error
        if request.return_scores:
            return {
                "result": [
                    [{"document": _document(hit), "score": hit.score} for hit in found]
                    for found in hits
                ]
            }
        return {"result": [[_document(hit) for hit in found] for found in hits]}

    @app.get("/health")
    async def health() -> dict:
        passages = getattr(retriever, "passages", None)
        return {"status": "ok", "passages": None if passages is None else len(passages)}

    return app


def _document(hit: Hit) -> dict[str, str]:
    return {"id": hit.passage.id, "contents": hit.passage.contents}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m alar.domains.search.server", description="Serve retrieval over HTTP."
    )
    parser.add_argument("--corpus", required=True, help='JSONL with "id" and "contents"')
    parser.add_argument("--index", default="", help="FAISS index of the corpus (backend e5)")
    parser.add_argument("--backend", default="e5", choices=["e5", "tfidf"])
    parser.add_argument(
        "--model", default="intfloat/e5-base-v2", help="hub id or folder of the text encoder"
    )
    parser.add_argument("--device", default="auto", help="of the text encoder: auto, cpu, cuda, …")
    parser.add_argument("--mmap", action="store_true", help="leave the index on disk")
    parser.add_argument("--gpu", action="store_true", help="move the index to the GPUs")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--topk", type=int, default=3, help="passages per query when the request names no number"
    )
    parser.add_argument("--max-batch", type=int, default=256, help="queries encoded together")
    parser.add_argument(
        "--max-wait", type=float, default=4.0, help="milliseconds that a batch waits for company"
    )
    options = parser.parse_args(arguments)
    try:
        retriever = build(
            options.backend,
            corpus=options.corpus,
            index=options.index,
            model=options.model,
            device=options.device,
            mmap=options.mmap,
            gpu=options.gpu,
        )
    except RetrievalError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    app = create_app(
        retriever,
        default_topk=options.topk,
        max_batch=options.max_batch,
        max_wait=options.max_wait / 1000,
    )
    uvicorn.run(app, host=options.host, port=options.port, log_level="warning")
    return 0


if __name__ == "__main__":
    sys.exit(main())

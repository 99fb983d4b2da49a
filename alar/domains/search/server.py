"""Retrieval over HTTP in the protocol of Search-R1's server, which verl and vLLM rollouts call.

    python -m alar.domains.search.server --corpus wiki-18.jsonl --index e5_Flat.index --port 8000

`POST /retrieve {"queries": [...], "topk": 3, "return_scores": true}` answers
`{"result": [[{"document": {"id", "contents"}, "score"}, ...], ...]}`, one list per query. Without
scores the lists hold the documents themselves. `GET /health` answers once the index is loaded.

Encoding takes longer than searching, and it is cheaper for many queries at once. So requests that
arrive together share one call of the retriever (`SearchBatcher`).
"""

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Sequence
from typing import Annotated

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from alar.domains.search.corpus import Hit, RetrievalError
from alar.domains.search.retriever import Searcher, open_retriever


class RetrieveRequest(BaseModel):
    """Unknown fields are errors: a misspelt `topk` would silently change the number of passages."""

    model_config = ConfigDict(extra="forbid")

    queries: list[str]
    topk: Annotated[int, Field(ge=1, le=1000)] | None = None  # None: the server's `--topk`
    return_scores: bool = False


class SearchFailed(RuntimeError):
    """The search that served this request, maybe with others, failed. The message is the cause."""


class SearchBatcher:
    """Merges concurrent searches into one call of the retriever, in a thread, one call at a time.

    A batch closes `max_wait` seconds after its first request, or as soon as it has `max_batch`
    queries. A request is never split, so a batch may hold more. While a call runs, requests wait
    for the next batch.
    """

    def __init__(self, retriever: Searcher, max_batch: int, max_wait: float):
        self.retriever = retriever
        self.max_batch = max_batch
        self.max_wait = max_wait
        # (queries, k, future of their hits)
        self._queue: asyncio.Queue[tuple[list[str], int, asyncio.Future]] = asyncio.Queue()

    async def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        """The best k passages of each query. Raises SearchFailed."""
        future = asyncio.get_running_loop().create_future()
        await self._queue.put((queries, k, future))
        return await future

    async def run(self) -> None:
        """Serve searches until cancelled."""
        while True:
            batch = await self._next_batch()
            queries = [query for asked, _, _ in batch for query in asked]
            largest = max(k for _, k, _ in batch)  # each request keeps its own first k
            try:
                # In a thread, so that requests of the next batch are accepted meanwhile.
                hits = await asyncio.to_thread(self.retriever.search, queries, largest)
            except Exception as error:
                # A failure concerns these requests only: the server goes on.
                for _, _, future in batch:
                    if not future.done():
                        future.set_exception(SearchFailed(f"{type(error).__name__}: {error}"))
                continue
            start = 0  # of this request's queries in `hits`
            for asked, k, future in batch:
                own = hits[start : start + len(asked)]
                start += len(asked)
                if not future.done():  # it is cancelled if the client has left
                    future.set_result([found[:k] for found in own])

    async def _next_batch(self) -> list[tuple[list[str], int, asyncio.Future]]:
        batch = [await self._queue.get()]  # an idle server waits here, without a limit
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.max_wait):
                while sum(len(queries) for queries, _, _ in batch) < self.max_batch:
                    batch.append(await self._queue.get())
        return batch


def create_app(
    retriever: Searcher, *, default_topk: int = 3, max_batch: int = 256, max_wait: float = 0.004
) -> FastAPI:
    """The server around any retriever with `search(queries, k)` and `passages`.

    An invalid request gets status 422 with the field and the reason. A failed search gets status
    500 with its cause. `max_wait` is in seconds.
    """
    batcher = SearchBatcher(retriever, max_batch, max_wait)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI):
        worker = asyncio.create_task(batcher.run())  # kept in a name, or it may be collected
        yield
        worker.cancel()

    app = FastAPI(title="alar retrieval", lifespan=lifespan)

    @app.exception_handler(RequestValidationError)
    async def refuse(request: Request, error: RequestValidationError) -> JSONResponse:
        # FastAPI's own answer repeats the input, which may be long or hold what JSON cannot (NaN).
        detail = [
            {name: found[name] for name in ("loc", "msg", "type")} for found in error.errors()
        ]
        return JSONResponse({"detail": detail}, status_code=422)

    @app.post("/retrieve")
    async def retrieve(request: RetrieveRequest) -> dict:
        if not request.queries:
            return {"result": []}
        try:
            hits = await batcher.search(request.queries, request.topk or default_topk)
        except SearchFailed as error:
            raise HTTPException(500, detail=f"the search failed: {error}") from error
        return {
            "result": [[_answer(hit, request.return_scores) for hit in found] for found in hits]
        }

    @app.get("/health")
    async def health() -> dict:
        return {"status": "ok", "passages": len(retriever.passages)}

    return app


def _answer(hit: Hit, with_score: bool) -> dict:
    document = {"id": hit.passage.id, "contents": hit.passage.contents}
    return {"document": document, "score": hit.score} if with_score else document


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m alar.domains.search.server", description="Serve retrieval over HTTP."
    )
    option = parser.add_argument
    option("--corpus", required=True, help='JSONL with "id" and "contents"')
    option("--index", default="", help="FAISS index of the corpus (backend e5)")
    option("--backend", default="e5", choices=["e5", "tfidf"])
    option("--model", default="intfloat/e5-base-v2", help="hub id or folder of the text encoder")
    option("--device", default="auto", help="of the text encoder: auto, cpu, cuda, …")
    option("--mmap", action="store_true", help="leave the index on disk")
    option("--gpu", action="store_true", help="move the index to the GPUs")
    option("--host", default="127.0.0.1")
    option("--port", type=int, default=8000)
    option("--topk", type=int, default=3, help="passages per query where a request names no number")
    option("--max-batch", type=int, default=256, help="queries encoded together")
    option("--max-wait", type=float, default=4.0, help="milliseconds that a batch waits for more")
    options = parser.parse_args(arguments)
    try:
        retriever = open_retriever(
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
        max_wait=options.max_wait / 1000,  # milliseconds → seconds
    )
    uvicorn.run(app, host=options.host, port=options.port, log_level="warning")
    return 0


if __name__ == "__main__":
    sys.exit(main())

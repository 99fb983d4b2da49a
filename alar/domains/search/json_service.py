"""A FastAPI application around a function that is cheaper for many items at once.

Requests that arrive together are served by one call (`Batcher`); what a request gets wrong is
answered with 422, the place and the reason (`service`). Ending the server with SIGTERM or Ctrl-C
lets the requests under way finish: that is uvicorn's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse


class BatchFailed(RuntimeError):
    """The call that served this request together with others raised; the message is its cause."""


class Batcher:
    """Coalesces concurrent requests into one `call(items) → one result per item`, in a thread, one
    call at a time.

    A batch closes `max_wait` seconds after its first request, or with `max_batch` items; while a
    call runs the next batch fills. A request is never split.
    """

    def __init__(self, call: Callable[[list], Sequence], max_batch: int, max_wait: float):
        self.call = call
        self.max_batch = max_batch
        self.max_wait = max_wait
        self._queue: asyncio.Queue[tuple[list, asyncio.Future]] = asyncio.Queue()

    async def submit(self, items: list) -> list:
        """The results of `items`. Raises BatchFailed."""
        future = asyncio.get_running_loop().create_future()
        await self._queue.put((items, future))
        return await future

    async def run(self) -> None:
        while True:
            batch = await self._collect()
            try:
                results = list(
                    await asyncio.to_thread(
                        self.call, [item for items, _ in batch for item in items]
                    )
                )
            except (
                Exception
            ) as error:  # any failure belongs to the requests of this batch; the server lives on
                for _, future in batch:
                    if not future.done():
                        future.set_exception(BatchFailed(f"{type(error).__name__}: {error}"))
                continue
            start = 0
            for items, future in batch:
                if not future.done():  # done already when the client has gone
                    future.set_result(results[start : start + len(items)])
                start += len(items)

    async def _collect(self) -> list[tuple[list, asyncio.Future]]:
        batch = [await self._queue.get()]
        deadline = asyncio.get_running_loop().time() + self.max_wait
        while sum(len(items) for items, _ in batch) < self.max_batch:
            try:
                batch.append(self._queue.get_nowait())
            except asyncio.QueueEmpty:
                left = deadline - asyncio.get_running_loop().time()
                if left <= 0:
                    break
                await asyncio.sleep(min(left, 0.001))
        return batch


def service(title: str, batcher: Batcher) -> FastAPI:
    """An application while which runs, the batcher does."""

    @asynccontextmanager
    async def lifespan(app: FastAPI):
        worker = asyncio.create_task(batcher.run())
        yield
        worker.cancel()

    app = FastAPI(title=title, lifespan=lifespan)

    @app.exception_handler(RequestValidationError)
    async def refuse(request: Request, error: RequestValidationError) -> JSONResponse:
        # Without the input, which may hold what JSON cannot (NaN, half a surrogate pair) or be very
        # long.
        detail = [
            {"loc": list(found["loc"]), "msg": found["msg"], "type": found["type"]}
            for found in error.errors()
        ]
        return JSONResponse({"detail": detail}, status_code=422)

    return app

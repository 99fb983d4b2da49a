"""The log-prob scorer over HTTP, so that a frozen model elsewhere pays for the reward.

    python -m alar.methods.logprob.server FOLDER --port 8009

`POST /score CASE` answers `{"score": -0.41, "gold": "Peru", "problem": ""}`, `POST /score_batch
{"cases": [CASE, ...]}` `{"scores": [...]}` in that order. A CASE is a text,

    {"question": "Which …?", "response": "\\n\\n<think>…</think>…", "golds": ["Peru"]}

what the policy wrote so far, observations included; or a record, which is exact and carries z,

    {"ids": [...], "latents": [[...], ...], "before": ">\\n\\n<answer>", "after": "</answer>",
    "golds": ["Peru"]}

as `alar.methods.logprob.case_of` makes it of any domain's trajectories. A response without the end
of a reasoning block scores −2, a question without a gold answer or a context beyond the model's
positions −100, both with a `problem` in words. What cannot be a case is refused with 422. `GET
/health` answers once the model is loaded. Requests that arrive together share forward passes.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import torch
import uvicorn
from fastapi import FastAPI, HTTPException
from fastapi.exceptions import RequestValidationError
from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, FiniteFloat, Tag

from alar import protocol
from alar.methods.dual.codec import DualCodec
from alar.domains.search import json_service
from alar.methods.logprob.scoring import Case, LogProbScorer, around_answer
from alar.model import load
from alar.rollout.codec import Codec

_OBSERVATION = re.compile(r"(\n{0,2}<information>.*?</information>\n{0,2})", re.DOTALL)


def _encodable(text: str) -> str:
    text.encode()  # UnicodeEncodeError, a ValueError, for half a surrogate pair
    return text


Text = Annotated[str, AfterValidator(_encodable)]
Golds = Annotated[list[Text], Field(max_length=64)]


class _Strict(BaseModel):
    """A misspelt field is refused: it would silently change what is scored."""

    model_config = ConfigDict(extra="forbid", strict=True)


class TextCase(_Strict):
    question: Text
    response: Text
    golds: Golds


class RecordCase(_Strict):
    ids: Annotated[list[int], Field(min_length=1)]
    latents: list[list[FiniteFloat]] = []
    before: Text = ""
    after: Text = ""
    golds: Golds
    closed: bool = True


def _kind(case: Any) -> str:
    return "record" if isinstance(case, dict) and "ids" in case else "text"


AnyCase = Annotated[
    Annotated[TextCase, Tag("text")] | Annotated[RecordCase, Tag("record")], Discriminator(_kind)
]


class Batch(_Strict):
    cases: Annotated[list[AnyCase], Field(max_length=4096)]


class ScoreAnswer(BaseModel):
    score: float
    gold: str
    problem: str


class ScoresAnswer(BaseModel):
    scores: list[ScoreAnswer]


def text_case(request: TextCase, codec: Codec) -> Case:
    """The search domain's prompt with a response as text. Raises ValueError for a latent block,
    whose z no text holds, and for the model of a dual vocabulary, whose thoughts are mirrors."""
    response = request.response
    if isinstance(codec, DualCodec):
        raise ValueError(
            "response: this model thinks in mirrors of its tokens, which no text tells apart; send"
            " the record (ids)"
        )
    if protocol.LATENT_OPEN + protocol.BULLET in response:
        raise ValueError(
            "response: a latent block in a text has no z; send the record (ids and latents)"
        )
    *before, last = _OBSERVATION.split(
        response
    )  # turns and observations, which are tokenised each for itself
    closed = protocol.parse_turn(last).mode == "think"
    reasoning = (
        last[: last.index(protocol.THINK_CLOSE) + len(protocol.THINK_CLOSE)] if closed else ""
    )
    ids = codec.prompt(request.question) + codec.encode(before)
    opening, after = around_answer(protocol.SEARCH)
    return Case(
        ids, np.zeros((0, 0), np.float32), reasoning + opening, after, tuple(request.golds), closed
    )


def record_case(request: RecordCase) -> Case:
    width = len(request.latents[0]) if request.latents else 0
    if any(len(row) != width for row in request.latents):
        raise ValueError("latents: the vectors have different sizes")
    latents = np.asarray(request.latents, dtype=np.float32).reshape(len(request.latents), width)
    return Case(
        request.ids, latents, request.before, request.after, tuple(request.golds), request.closed
    )


def create_app(scorer: LogProbScorer, *, max_batch: int = 64, max_wait: float = 0.004) -> FastAPI:
    """The server around a scorer. Invalid requests get 422, a failing model 500 with its cause."""
    batcher = json_service.Batcher(scorer.score_cases, max_batch, max_wait)
    app = json_service.service("alar log-prob scorer", batcher)

    def checked(request: TextCase | RecordCase, *place: Any) -> Case:
        try:
            case = (
                text_case(request, scorer.codec)
                if isinstance(request, TextCase)
                else record_case(request)
            )
            scorer.check(case)
        except ValueError as error:
            field, _, reason = str(error).partition(": ")
            raise RequestValidationError(
                [
                    {
                        "loc": ("body", *place, _kind(dict(request)), field),
                        "msg": reason,
                        "type": "value_error",
                    }
                ]
            ) from error
        return case

    async def scored(cases: list[Case]) -> list[ScoreAnswer]:
        try:
            found = await batcher.submit(cases)
        except json_service.BatchFailed as error:
            raise HTTPException(500, detail=f"scoring failed: {error}") from error
        return [
            ScoreAnswer(score=score.value, gold=score.gold, problem=score.problem)
            for score in found
        ]

    @app.post("/score")
    async def score(request: AnyCase) -> ScoreAnswer:
        return (await scored([checked(request)]))[0]

    @app.post("/score_batch")
    async def score_batch(request: Batch) -> ScoresAnswer:
        cases = [checked(case, "cases", number) for number, case in enumerate(request.cases)]
        return ScoresAnswer(scores=await scored(cases) if cases else [])

    @app.get("/health")
    async def health() -> dict:
        config = scorer.model.config
        return {
            "status": "ok",
            "model_type": config.model_type,
            "hidden_size": config.hidden_size,
            "num_latent": getattr(config, "num_latent", 0),
            "positions": scorer.positions,
        }

    return app


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m alar.methods.logprob.server", description="Serve log-prob scores."
    )
    parser.add_argument("folder", help="checkpoint of the scoring model")
    parser.add_argument(
        "--device", default=None, help="cpu, cuda, …; without it the first GPU, else the CPU"
    )
    parser.add_argument(
        "--dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="auto: as stored"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8009)
    parser.add_argument("--max-batch", type=int, default=64, help="cases scored together")
    parser.add_argument(
        "--max-wait", type=float, default=4.0, help="milliseconds that a batch waits for company"
    )
    options = parser.parse_args(arguments)
    dtype = options.dtype if options.dtype == "auto" else getattr(torch, options.dtype)
    try:
        scorer = LogProbScorer(*load(options.folder, dtype=dtype, device=options.device))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    app = create_app(scorer, max_batch=options.max_batch, max_wait=options.max_wait / 1000)
    uvicorn.run(app, host=options.host, port=options.port, log_level="warning")
    return 0


if __name__ == "__main__":
    sys.exit(main())

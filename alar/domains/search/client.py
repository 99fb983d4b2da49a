"""Client of the retrieval server (`alar.domains.search.server`, or Search-R1's own).

`HTTPRetriever.search` gives what `Retriever.search` gives. A server that is down, slow or broken is
asked again with growing pauses; after that, and for any answer that is not whole, RetrievalError
names the server, the cause and what to do. Nothing ever turns into empty documents: a policy
trained on those learns that searching is useless.
"""

from collections.abc import Sequence

from alar.domains.search.corpus import Hit, Passage, RetrievalError
from alar.domains.search.json_client import JSONClient


class HTTPRetriever(JSONClient):
    """Search over HTTP. `timeout` is in seconds per attempt; a request is attempted 1 + `retries`
    times."""

    error = RetrievalError
    service = "retrieval server"
    parameter = "retrieval.url"
    path = "/retrieve"
    command = "python -m alar.domains.search.server --corpus … --index … --port …"

    def __init__(self, url: str, timeout: float = 60.0, retries: int = 4, backoff: float = 0.5):
        super().__init__(url, timeout, retries, backoff)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """The best k passages of each query, best first, as the server found them. Raises
        RetrievalError."""
        if isinstance(queries, str):
            raise TypeError("queries must be a list of strings, not one string")
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        if not queries:
            return []
        body = {"queries": list(queries), "topk": k, "return_scores": True}
        answer = self._request("POST", "/retrieve", json=body)
        result = answer.get("result") if isinstance(answer, dict) else None
        if not isinstance(result, list):
            raise self._failure('the answer has no list "result"')
        if len(result) != len(queries):
            raise self._failure(
                f"{len(queries)} queries were sent but {len(result)} results came back"
            )
        return [
            [self._hit(item, query) for item in items[:k]]
            for query, items in zip(queries, self._lists(result), strict=True)
        ]

    def _lists(self, result: list) -> list[list]:
        for row, items in enumerate(result):
            if not isinstance(items, list):
                raise self._failure(f"result {row} is not a list of passages: {str(items)[:80]}")
        return result

    def _hit(self, item: object, query: str) -> Hit:
        document = item.get("document") if isinstance(item, dict) else None
        if (
            not isinstance(document, dict)
            or not isinstance(document.get("contents"), str)
            or "id" not in document
        ):
            raise self._failure(
                f'a passage for {query!r} has no "id" and "contents": {str(item)[:80]}'
            )
        if not document["contents"].strip():
            raise self._failure(f"the passage {document['id']!r} for {query!r} is empty")
        if not isinstance(item.get("score"), (int, float)):
            raise self._failure(f"the passage {document['id']!r} for {query!r} has no score")
        return Hit(
            Passage.from_contents(document["id"], document["contents"]), float(item["score"])
        )

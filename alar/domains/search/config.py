"""The parameters of retrieval: what `alar.domains.search.retriever.open_retriever` is given."""

from typing import Literal

from alar.parameters import Count, Location, LocationOrName, Section


class Retrieval(Section):
    backend: Literal["tfidf", "e5", "http"] = "tfidf"
    topk: Count = 2
    url: str = ""
    corpus: Location = ""
    index: Location = ""
    model: LocationOrName = "intfloat/e5-base-v2"

    def inconsistencies(self):
        if self.backend == "http" and not self.url.startswith(("http://", "https://")):
            example = "such as http://127.0.0.1:8000"
            return [("url", f"{self.url!r} is no address; backend http needs one {example}")]
        if self.backend == "e5" and not self.corpus:
            return [("corpus", "is empty; backend e5 needs the passages it searches, a JSONL file")]
        return []

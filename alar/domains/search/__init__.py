"""The search domain: corpus, questions, retrieval and the exact-match metric.

This file imports only the metric. Retrieval loads FAISS, so it is imported where it is used
(`from alar.domains.search import retriever`).
"""

from alar.domains.search.metrics import exact_match, normalize_answer

__all__ = ["exact_match", "normalize_answer"]

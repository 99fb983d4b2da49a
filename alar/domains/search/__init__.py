"""The search domain: corpus, questions, retrieval and the exact-match metric.

Only the metric is imported here; retrieval pulls in FAISS and is imported where it is used
(`from alar.domains.search import retriever`).
"""

from alar.domains.search.metrics import exact_match, normalize_answer

__all__ = ["exact_match", "normalize_answer"]

"""Evaluation: systems and their controls, the oracle router, statistics and tables."""

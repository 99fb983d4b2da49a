"""The study as a whole: parameters, stages and their cache, provenance, `--check`, benchmarks,
commands."""

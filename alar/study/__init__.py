"""The study as a whole: parameters, stages and their receipts, the runner, provenance, `--check`,
benchmarks, commands."""

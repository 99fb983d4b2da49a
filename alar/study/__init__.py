"""The study as a whole: parameter files, stages and their receipts, the runner, provenance,
`--check`, benchmarks and commands."""

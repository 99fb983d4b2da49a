"""How fast and how large: the latent model against an ordinary one and against the straightforward
algorithms.

    pair = bench.model_pair()
    cases = bench.training_cases(pair, [bench.random_batch(pair.latent.config, padded=True)])
    results = bench.run(cases, rounds=5, threads=1)
    results.ratios                                      the claims, each with its range and its bar

`cases` makes models and batches, `training` and `rollouts` the contestants, `measure` times them in
turn and `memory` finds their peaks; `serving` compares engines and servers. Everything runs on the
CPU and on a GPU alike; nothing here is needed to train or to evaluate.
"""

from alar.study.bench.cases import (
    Batch,
    ModelPair,
    aasd_batch,
    laptop_pair,
    model_pair,
    random_batch,
)
from alar.study.bench.measure import Case, Comparison, Contestant, Results, resolve_device, run
from alar.study.bench.rollouts import GenerateEngine, rollout_case
from alar.study.bench.training import logprob_cases, per_sample_loss, training_cases, training_mode

__all__ = [
    "Batch",
    "Case",
    "Comparison",
    "Contestant",
    "GenerateEngine",
    "ModelPair",
    "Results",
    "aasd_batch",
    "laptop_pair",
    "logprob_cases",
    "model_pair",
    "per_sample_loss",
    "random_batch",
    "resolve_device",
    "rollout_case",
    "run",
    "training_cases",
    "training_mode",
]

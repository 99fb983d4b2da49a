"""Benchmarks: time and memory of the latent model, compared with an ordinary model and with
straightforward algorithms.

    pair = bench.model_pair()
    batch = bench.random_batch(pair.latent.config, padded=True)
    results = bench.time_contests(bench.training_contests(pair, [batch]), rounds=5, threads=1)
    results.ratios                                      the claims, each with its range and its bar

`subjects` makes models and batches. `training` and `rollouts` make the contests. `measure` times
them and `memory` finds their peaks. `serving` compares engines and servers. Everything runs on a
CPU or a GPU. Nothing here is needed to train or to evaluate.
"""

from alar.study.bench.measure import Claim, Contest, Contestant, resolve_device, time_contests
from alar.study.bench.rollouts import GenerateEngine, rollout_contest
from alar.study.bench.subjects import aasd_batch, laptop_pair, model_pair, random_batch
from alar.study.bench.training import (
    logprob_contests,
    per_sample_loss,
    training_contests,
    training_mode,
)

__all__ = [
    "Claim",
    "Contest",
    "Contestant",
    "GenerateEngine",
    "aasd_batch",
    "laptop_pair",
    "logprob_contests",
    "model_pair",
    "per_sample_loss",
    "random_batch",
    "resolve_device",
    "rollout_contest",
    "time_contests",
    "training_contests",
    "training_mode",
]

"""The log-prob reward: how probable a trajectory's reasoning makes the right answer.

    score = max over golds of  mean_i log P(gold_i | prompt, turns, reasoning, </think> <answer>,
    gold_<i)

The gold follows the reasoning block of the last turn. The score is −2 where that block never
closes, and −100 for a question that cannot be scored (LatentReasoning's MATH_LogProb reward).
"""

from alar.methods.logprob.reward import LogProbReward, group_normalised, logprob_grpo, mixed_rewards
from alar.methods.logprob.scoring import (
    INVALID,
    OPEN,
    LogProbScorer,
    Score,
    ScoredContext,
    context_of,
)

__all__ = [
    "INVALID",
    "OPEN",
    "LogProbReward",
    "LogProbScorer",
    "Score",
    "ScoredContext",
    "context_of",
    "group_normalised",
    "logprob_grpo",
    "mixed_rewards",
]

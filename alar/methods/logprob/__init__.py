"""The log-prob reward: how probable a trajectory's reasoning makes the right answer, instead of
whether it was given.

    score = max over golds of  mean_i log P(gold_i | prompt, turns, reasoning, </think> <answer>,
    gold_<i)

after the reasoning block of the last turn; −2 where that block never closes, −100 for a question
that cannot be scored (LatentReasoning's MATH_LogProb reward). Scored in process or by a server, the
same numbers.
"""

from alar.methods.logprob.reward import LogProbReward, group_normalised, mixed_rewards
from alar.methods.logprob.scoring import INVALID, OPEN, Case, LogProbScorer, Score, Scorer, case_of

__all__ = [
    "INVALID",
    "OPEN",
    "Case",
    "LogProbReward",
    "LogProbScorer",
    "Score",
    "Scorer",
    "case_of",
    "group_normalised",
    "mixed_rewards",
]

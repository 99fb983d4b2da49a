"""Rewards that shorten explicit reasoning: ShorterBetter, ThinkPrune and O1-Pruner.

For a rollout of a prompt, with c = 1 if its answer is correct else 0 and length ℓ:

    ShorterBetter (2504.21370) a·c − b·|ℓ − ℓ*|,  ℓ* = the group's shortest correct ℓ, else its mean
    ThinkPrune    (2504.01296) c if ℓ ≤ L else 0,  L shrinks round by round and stands in the prompt
    O1-Pruner     (2501.12570) ℓ̄_ref/ℓ − 1 + λ·(c − c̄_ref),  means over K samples of the reference

The papers' models answer in one turn. For agents ℓ is the number of tokens that the policy wrote in
all turns: tags and actions count, observations do not. An answer that comes within L tokens is one
whose trajectory is no longer than L.

ShorterBetter and ThinkPrune are rewards of GRPO: the policy writes the samples, and advantages are
centred on the group. O1-Pruner is another objective. The *reference* model writes the samples, the
loss is PPO's clipped one with the ratio π/π_ref, and the reward itself is the advantage. The mean
of this reward over the reference's samples is nearly 0 already.

In one process `length_grpo` does what O1-Pruner asks: the K samples of a group are trained on and
also give its means. With `reference`, a file of means measured before, the policy writes the
samples. Under verl that is the only way, because its rollout server holds the policy's weights. The
ratio then starts at 1 and the clip hardly binds.

Three points differ from the papers. Rollouts beyond ThinkPrune's L are trained on to their end, not
cut. The ratio is per token. Dual clip bounds the loss at −3·A.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from alar.files import read_jsonl, write_jsonl
from alar.protocol import Form, Prompted, Trusted
from alar.records import Environment
from alar.rl.config import RLConfig
from alar.rl.strategy import Credit, Reward, Strategy, grpo
from alar.rollout.loop import with_form


@dataclass(frozen=True)
class Sample:
    """What these rewards know of a rollout.

    `group` is shared by the rollouts of one prompt; `question` is the question's id.
    """

    group: Hashable
    correct: bool
    length: int  # generated tokens of all turns
    question: str = ""

    def __post_init__(self):
        if self.length < 0:
            raise ValueError(f"Sample.length is {self.length}: a count is not negative")


@dataclass(frozen=True)
class Reference:
    """Mean length and accuracy of a model's samples of one question."""

    length: float  # in tokens
    accuracy: float


def shorter_better(
    samples: Sequence[Sample], correct_weight: float = 2.0, length_weight: float = 1e-3
) -> list[float]:
    """a·c − b·|ℓ − ℓ*|."""
    targets = {}  # group → ℓ*
    for group, members in _groups(samples).items():
        # Lengths of the correct ones.
        right = [sample.length for sample in members if sample.correct]
        targets[group] = min(right) if right else _mean([sample.length for sample in members])
    return [
        correct_weight * s.correct - length_weight * abs(s.length - targets[s.group])
        for s in samples
    ]


def think_prune(samples: Sequence[Sample], token_limit: int) -> list[float]:
    """1 for a correct answer within the limit, else 0."""
    # A long answer earns nothing, however right.
    return [float(sample.correct and sample.length <= token_limit) for sample in samples]


def o1_pruner(
    samples: Sequence[Sample],
    accuracy_weight: float = 2.0,
    references: Mapping[str, Reference] | None = None,
) -> list[float]:
    """ℓ̄_ref/ℓ − 1 + λ·(c − c̄_ref).

    The means come from `references` by question, or without them from the group itself. A rollout
    without a token counts as one token long. KeyError, with the remedy, for a question that is not
    in `references`.
    """
    if references is None:
        means: Mapping[Any, Reference] = {
            group: Reference(
                _mean([max(1, s.length) for s in members]), _mean([s.correct for s in members])
            )
            for group, members in _groups(samples).items()
        }
        # The samples were written by the reference.
        found = [means[sample.group] for sample in samples]
    else:
        missing = next((s.question for s in samples if s.question not in references), None)
        if missing is not None:
            raise KeyError(
                f"question {missing!r} has no reference means: measure them on all prompts"
                " (write_references)"
            )
        found = [references[sample.question] for sample in samples]
    return [
        reference.length / max(1, sample.length)
        - 1
        + accuracy_weight * (sample.correct - reference.accuracy)
        for sample, reference in zip(samples, found)
    ]


def round_lengths(steps: int, rounds: int) -> list[int]:
    """Steps of each of ThinkPrune's rounds: nearly equal, the longer rounds first.

    Raises ValueError for fewer steps than rounds.
    """
    if not 1 <= rounds <= steps:
        raise ValueError(f"{rounds} rounds in {steps} steps: every round needs a step")
    return [steps // rounds + (number < steps % rounds) for number in range(rounds)]


def reference_means(samples: Sequence[Sample]) -> dict[str, Reference]:
    """Question → means over its samples, which the reference model wrote."""
    by_question = defaultdict(list)  # question → its samples
    for sample in samples:
        by_question[sample.question].append(sample)
    return {
        question: Reference(
            _mean([max(1, s.length) for s in found]), _mean([s.correct for s in found])
        )
        for question, found in by_question.items()
    }


def write_references(path: str | Path, references: Mapping[str, Reference]) -> Path:
    write_jsonl(
        path,
        ({"question": question} | asdict(reference) for question, reference in references.items()),
    )
    return Path(path)


@lru_cache(maxsize=4)  # the reward asks for it in every step
def read_references(path: str) -> dict[str, Reference]:
    return {row["question"]: Reference(row["length"], row["accuracy"]) for row in read_jsonl(path)}


def stated_limit(form: Form, limit: int) -> Form:
    """A domain's form whose user turn ends in the limit of tokens."""

    def prompt(question) -> Sequence[str]:
        pieces = list(form.prompt(question))
        # The last piece of the user's own text; trusted ones are the template.
        last = max(number for number, piece in enumerate(pieces) if not isinstance(piece, Trusted))
        pieces[last] = pieces[last].rstrip("\n") + f"\nUse at most {limit} tokens.\n"
        return pieces

    return Prompted(form, prompt)


class LengthReward(Reward):
    """A reward without modes: `<latent>` is plain text.

    The last weights are returned, because a greedy validation answer has no other samples of its
    prompt to compare with.
    """

    modes: ClassVar = "off"

    @abstractmethod
    def of_samples(self, samples: Sequence[Sample]) -> list[float]:
        """The reward of every sample, in their order; groups may be mixed and of any size."""

    def rewards(self, summaries, groups, step, total_steps):
        return self.of_samples(
            [
                Sample(group, s.correct, s.generated_tokens, s.question)
                for s, group in zip(summaries, groups, strict=True)
            ]
        )


@dataclass(frozen=True)
class ShorterBetter(LengthReward):
    """`correct_weight` is a, `length_weight` b per token."""

    correct_weight: float = 2.0
    length_weight: float = 1e-3

    def __post_init__(self):
        _refuse_negative(self, "correct_weight", "length_weight")

    def of_samples(self, samples):
        return shorter_better(samples, self.correct_weight, self.length_weight)


@dataclass(frozen=True)
class ThinkPrune(LengthReward):
    """`token_limit` is L of this round; `state_limit` puts it into the prompt."""

    token_limit: int = 4000
    state_limit: bool = True

    def __post_init__(self):
        if self.token_limit < 1:
            raise ValueError(f"token_limit is {self.token_limit}: it must be at least one token")

    def of_samples(self, samples):
        return think_prune(samples, self.token_limit)

    def environment(self, environment: Environment) -> Environment:
        if not self.state_limit:  # the prompt stays as the base knows it
            return environment
        return with_form(environment, stated_limit(environment.form, self.token_limit))


@dataclass(frozen=True)
class O1Pruner(LengthReward):
    """`accuracy_weight` is λ (published: 2 and 5); `reference`: a file of `write_references`."""

    accuracy_weight: float = 2.0
    reference: str = ""

    def __post_init__(self):
        _refuse_negative(self, "accuracy_weight")

    def require(self, questions):
        if not self.reference:  # the samples themselves give the means
            return
        if not Path(self.reference).is_file():
            raise ValueError(
                f"O1Pruner.reference: there is no file {self.reference}; measure the means of the"
                " reference on all prompts (write_references)"
            )
        read_references.cache_clear()  # the file may have been measured anew
        means = read_references(self.reference)
        missing = [question.id for question in questions if question.id not in means]
        if missing:
            raise ValueError(
                f"{self.reference}: no reference means for {len(missing)} of {len(questions)}"
                f" questions, {missing[0]!r} first; measure them on all prompts (write_references)"
            )

    def of_samples(self, samples):
        means = read_references(self.reference) if self.reference else None
        return o1_pruner(samples, self.accuracy_weight, means)


@dataclass(frozen=True)
class RewardAsAdvantage(Credit):
    """Every token carries its trajectory's reward, which is not centred on the group."""

    def advantages(self, summaries, lengths, rewards, groups, step, total_steps):
        # The mean over the reference is already near 0.
        return [[value] * length for value, length in zip(rewards, lengths, strict=True)]


def length_grpo(reward: LengthReward, config: RLConfig, seed: int = 0) -> Strategy:
    """What trains with a length reward, as published."""
    if not isinstance(reward, O1Pruner):
        return grpo(config, reward, seed)
    # Without a file the samples themselves must be the reference's.
    writer = "policy" if reward.reference else "reference"
    return replace(grpo(config, reward, seed, writer=writer), credit=RewardAsAdvantage())


def _refuse_negative(settings: LengthReward, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} is {value}: it must be a number of at least 0")


def _groups(samples: Sequence[Sample]) -> dict[Hashable, list[Sample]]:
    groups = defaultdict(list)  # group → its samples
    for sample in samples:
        groups[sample.group].append(sample)
    return groups


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)

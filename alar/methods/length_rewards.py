"""Rewards that shorten explicit reasoning: ShorterBetter, ThinkPrune and O1-Pruner
(`RLConfig.length_reward`).

For a rollout of a prompt, with c = 1 if its answer is correct else 0 and length ℓ:

    ShorterBetter (2504.21370)   a·c − b·|ℓ − ℓ*|,     ℓ* = shortest correct ℓ of the group, else the group's mean
    ThinkPrune    (2504.01296)   c if ℓ ≤ L else 0,    L shrinks from round to round, and the prompt states it
    O1-Pruner     (2501.12570)   ℓ̄_ref/ℓ − 1 + λ·(c − c̄_ref),  means over K samples of the reference model

The papers' models answer in one turn. For agents ℓ is the number of tokens that the policy wrote in
all turns, tags and actions included, observations excluded; an answer that comes within L tokens is
one whose trajectory is no longer than L.

ShorterBetter and ThinkPrune are rewards of GRPO: samples come from the policy, advantages are
centred on the group. O1-Pruner is another objective: samples come from the *reference* model and
pass PPO's clipped loss with the ratio π/π_ref, and the advantage is the reward itself, whose mean
over the reference's samples is nearly 0 already. Without `reference` the single-process trainer
does that: the K rollouts of a group, written by the reference, are also those that give its means.
With `reference`, a file of means measured before, samples come from the policy (the only way under
verl, whose rollout server holds the policy's weights); the ratio then starts at 1 and the clip
hardly binds. Not the papers': rollouts beyond ThinkPrune's L are trained on to their end rather
than cut; the ratio is the token's; dual clip bounds the loss at −3·A.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from alar.files import read_jsonl, write_jsonl
from alar.protocol import Form, Prompted, Trusted
from alar.records import Environment
from alar.rollout.loop import with_form

KINDS = ("shorterbetter", "thinkprune", "o1pruner")


@dataclass(frozen=True)
class LengthReward:
    """Which reward, and its settings as published; those of the other kinds are not used.

    `correct_weight`, `length_weight`: ShorterBetter's a and b per token. `token_limit`:
    ThinkPrune's L of this round, which `state_limit` puts into the prompt. `accuracy_weight`:
    O1-Pruner's λ (published: 2 and 5); `reference`: see above.
    """

    kind: str
    correct_weight: float = 2.0
    length_weight: float = 1e-3
    token_limit: int = 4000
    state_limit: bool = True
    accuracy_weight: float = 2.0
    reference: str = ""

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(
                f"length_reward.kind is {self.kind!r}: expected one of {', '.join(KINDS)}"
            )
        if self.token_limit < 1:
            raise ValueError(
                f"length_reward.token_limit is {self.token_limit}: it must be at least one token"
            )
        for name in ("correct_weight", "length_weight", "accuracy_weight"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(
                    f"length_reward.{name} is {value}: it must be a number of at least 0"
                )

    @property
    def off_policy(self) -> bool:
        """Whether the rollouts are the reference model's."""
        return self.kind == "o1pruner" and not self.reference

    @property
    def is_advantage(self) -> bool:
        """Whether the reward itself is the advantage, without centring on the group."""
        return self.kind == "o1pruner"


@dataclass(frozen=True)
class Sample:
    """What these rewards know of a rollout. `group` names its prompt's rollouts, `question` the
    question (its id)."""

    group: Hashable
    correct: bool
    length: int
    question: str = ""

    def __post_init__(self):
        if self.length < 0:
            raise ValueError(f"Sample.length is {self.length}: a count is not negative")


@dataclass(frozen=True)
class Reference:
    """Mean length and accuracy of a model's samples of one question."""

    length: float
    accuracy: float


def length_rewards(samples: Sequence[Sample], settings: LengthReward) -> list[float]:
    """The reward of every sample, in their order; groups may be mixed and of any size."""
    if settings.kind == "shorterbetter":
        return shorter_better(samples, settings.correct_weight, settings.length_weight)
    if settings.kind == "thinkprune":
        return think_prune(samples, settings.token_limit)
    references = read_references(settings.reference) if settings.reference else None
    return o1_pruner(samples, settings.accuracy_weight, references)


def shorter_better(
    samples: Sequence[Sample], correct_weight: float = 2.0, length_weight: float = 1e-3
) -> list[float]:
    """a·c − b·|ℓ − ℓ*|."""
    targets = {}
    for group, members in _groups(samples).items():
        right = [sample.length for sample in members if sample.correct]
        targets[group] = min(right) if right else _mean([sample.length for sample in members])
    return [
        correct_weight * s.correct - length_weight * abs(s.length - targets[s.group])
        for s in samples
    ]


def think_prune(samples: Sequence[Sample], token_limit: int) -> list[float]:
    """1 for a correct answer within the limit, else 0."""
    return [float(sample.correct and sample.length <= token_limit) for sample in samples]


def o1_pruner(
    samples: Sequence[Sample],
    accuracy_weight: float = 2.0,
    references: Mapping[str, Reference] | None = None,
) -> list[float]:
    """ℓ̄_ref/ℓ − 1 + λ·(c − c̄_ref), with the means of `references` by question, or of the group
    itself without them.

    A rollout without a token counts as one token long. KeyError, with the remedy, for a question
    that is not in `references`.
    """
    if references is None:
        means: Mapping[Any, Reference] = {
            group: Reference(
                _mean([max(1, s.length) for s in members]), _mean([s.correct for s in members])
            )
            for group, members in _groups(samples).items()
        }
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
    """Steps of each of ThinkPrune's rounds, as equal as can be, the longer ones first. ValueError
    for fewer steps than rounds."""
    if not 1 <= rounds <= steps:
        raise ValueError(f"{rounds} rounds in {steps} steps: every round needs a step")
    return [steps // rounds + (number < steps % rounds) for number in range(rounds)]


def reference_means(samples: Sequence[Sample]) -> dict[str, Reference]:
    """Question → means over its samples, which the reference model has written."""
    by_question = defaultdict(list)
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


@lru_cache(maxsize=4)
def read_references(path: str) -> dict[str, Reference]:
    return {row["question"]: Reference(row["length"], row["accuracy"]) for row in read_jsonl(path)}


def stated_limit(form: Form, limit: int) -> Form:
    """A domain's form whose user turn ends in the limit of tokens."""

    def prompt(question) -> Sequence[str]:
        pieces = list(form.prompt(question))
        last = max(number for number, piece in enumerate(pieces) if not isinstance(piece, Trusted))
        pieces[last] = pieces[last].rstrip("\n") + f"\nUse at most {limit} tokens.\n"
        return pieces

    return Prompted(form, prompt)


def with_stated_limit(environment: Environment, settings: LengthReward | None) -> Environment:
    """The environment as a policy under this reward is asked: with ThinkPrune's limit in the
    prompt, otherwise as it is."""
    if settings is None or settings.kind != "thinkprune" or not settings.state_limit:
        return environment
    return with_form(environment, stated_limit(environment.form, settings.token_limit))


def _groups(samples: Sequence[Sample]) -> dict[Hashable, list[Sample]]:
    groups = defaultdict(list)
    for sample in samples:
        groups[sample.group].append(sample)
    return groups


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)

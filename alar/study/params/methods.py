"""The sections of notebooks 11 and 16: length rewards and the log-prob reward."""

from typing import Annotated, Literal

from pydantic import Field

from alar.parameters import Count, CountOrNone, Location, Rate, Section, Share


class LengthRewards(Section):
    """Notebook 11: RL on explicit reasoning. Prompts, group, learning rate and trainer are those of
    `rl`."""

    methods: Annotated[
        list[Literal["shorterbetter", "thinkprune", "o1pruner"]], Field(min_length=1)
    ] = ["shorterbetter", "thinkprune", "o1pruner"]
    steps: Count = 21  # of each method
    kl_coefficient: Annotated[float, Field(ge=0)] = 1e-3
    norm_adv_by_std: bool = True
    correct_weight: Annotated[float, Field(ge=0)] = 2.0  # ShorterBetter's a
    length_weight: Annotated[float, Field(ge=0)] = 1e-3  # ShorterBetter's b, per token
    limit_fractions: Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=1)] = [
        1.2,
        0.9,
        0.6,
    ]
    state_limit: bool = (
        False  # published: True; the embedded base has never read an instruction but its own
    )
    accuracy_weight: Annotated[float, Field(ge=0)] = 2.0  # O1-Pruner's λ
    reference_samples: Annotated[int, Field(ge=2)] = 12  # O1-Pruner's K
    validation_every: CountOrNone = 7  # 0 = never

    def inconsistencies(self):
        if self.steps < len(self.limit_fractions) and "thinkprune" in self.methods:
            return [
                (
                    "limit_fractions",
                    (
                        f"{len(self.limit_fractions)} rounds of ThinkPrune need as many steps;"
                        f" there are {self.steps}"
                    ),
                )
            ]
        return []


class Logprob(Section):
    """Notebook 16: the log-prob reward beside exact match, and FrozenLake. Prompts and optimiser
    are those of `rl`."""

    checkpoint: Location = ""  # a model folder to start from; "" = the run's mode warm-up
    weights: Annotated[list[Share], Field(min_length=1)] = [
        0.0,
        0.5,
    ]  # of the log-prob score; 0 = exact match alone
    normalise: bool = True  # within the group
    variant: Literal["published", "repaired"] = (
        "published"  # repaired: never closing is as bad as the group's worst
    )
    url: str = ""  # of a scorer server; "" = the frozen start, in process
    steps: Count = 12  # of each weight
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.01
    validation_every: CountOrNone = 6  # 0 = never
    shown_questions: Count = 16  # whose rollouts are scored to be looked at
    lakes: CountOrNone = 1200  # to imitate; 0 = no walks
    lake_epochs: Annotated[float, Field(gt=0)] = 2.0
    lake_learning_rate: Rate = 1.5e-3
    lake_tests: Count = 200

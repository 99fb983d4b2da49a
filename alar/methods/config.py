"""The parameters of the compared methods.

Each class is the section of one notebook (11 to 14, 16): `config = Tokenskip.of(globals())`. They
share one light file, so that reading a parameter file imports no model.
"""

from typing import Annotated, Literal

from pydantic import Field

from alar.parameters import (
    DATA_FILES,
    Count,
    CountOrNone,
    Location,
    LocationOrName,
    Rate,
    Section,
    Share,
)
from alar.train.config import Supervised

Trainable = Literal["lora", "full", "rows", "lora+rows"]  # rows: the mirrors of a dual vocabulary


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
    # ThinkPrune's limit of each round, as a fraction of the mean length before training.
    limit_fractions: Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=1)] = [
        1.2,
        0.9,
        0.6,
    ]
    # Published: True; the embedded base has never read an instruction but its own.
    state_limit: bool = False
    accuracy_weight: Annotated[float, Field(ge=0)] = 2.0  # O1-Pruner's λ
    reference_samples: Annotated[int, Field(ge=2)] = 12  # O1-Pruner's K
    validation_every: CountOrNone = 7  # 0 = never

    def inconsistencies(self):
        if self.steps < len(self.limit_fractions) and "thinkprune" in self.methods:
            rounds = len(self.limit_fractions)
            problem = f"{rounds} rounds of ThinkPrune need as many steps; there are {self.steps}"
            return [("limit_fractions", problem)]
        return []


class Logprob(Section):
    """Notebook 16: the log-prob reward beside exact match, and FrozenLake. Prompts and optimiser
    are those of `rl`."""

    checkpoint: Location = ""  # a model folder to start from; "" = the run's mode warm-up
    # Weights w of the log-prob score, one training each; 0 = exact match alone.
    weights: Annotated[list[Share], Field(min_length=1)] = [0.0, 0.5]
    normalise: bool = True  # within the group
    # "repaired": reasoning that never closes counts as the group's worst.
    variant: Literal["published", "repaired"] = "published"
    steps: Count = 12  # of each weight
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.01
    validation_every: CountOrNone = 6  # 0 = never
    shown_questions: Count = 16  # whose rollouts are scored to be looked at
    lakes: CountOrNone = 1200  # to imitate; 0 = no walks
    lake_epochs: Annotated[float, Field(gt=0)] = 2.0
    lake_learning_rate: Rate = 1.5e-3
    lake_tests: Count = 200


class OnAnswers(Supervised):
    """Supervised training on a domain's own questions, or on a dataset of questions and answers."""

    # "" = the domain's own questions; "arithmetic", "gsm8k", "math", …, or a file.
    dataset: LocationOrName = ""
    # "" = the test split of `dataset`; a file has one split, so it needs another file here.
    test_dataset: LocationOrName = ""

    def inconsistencies(self):
        if not self.dataset.endswith(DATA_FILES) or self.test_dataset:
            return []
        problem = "is empty, but the dataset is a file, which has one split: name another file"
        return [("test_dataset", problem)]


class SelfTraining(OnAnswers):
    """Notebook 13: concise self-training and direct SFT."""

    checkpoint: Location = ""  # a model folder to start from; "" = notebook 01's base
    methods: Annotated[list[Literal["concise", "direct"]], Field(min_length=1)] = [
        "concise",
        "direct",
    ]
    form: Literal["tagged", "raw"] = "tagged"  # of an answer dataset's turns
    questions: Count = 400  # sampled from; the test has eval.questions
    samples: Count = 4  # N of each pass; published: 16
    temperature: Annotated[float, Field(gt=0)] = 0.7
    # Solved examples before each question of the few-shot pass; 0 = no such pass, as the tool
    # domain needs.
    # Published: 8.
    exemplars: CountOrNone = 2
    learning_rate: Rate = 3e-4
    epochs: Annotated[float, Field(gt=0)] = 3.0


class Tokenskip(OnAnswers):
    """Notebook 12. Ratios are shares of a chain of thought's tokens."""

    learning_rate: Rate = 1e-3
    epochs: Annotated[float, Field(gt=0)] = 1.0
    trainable: Trainable = "full"
    max_examples: CountOrNone = 4800
    checkpoint: Location = ""  # a model folder to start from; "" = notebook 01's base
    # Per question; 0 = the run's teacher traces instead. Published: 1 at temperature 0.
    samples: CountOrNone = 0
    questions: Count = 400  # sampled from, about `worlds`
    worlds: Count = 12
    temperature: Annotated[float, Field(ge=0)] = 0.7
    max_cot_tokens: Count = 2000  # longer chains of thought are dropped
    scorer: Literal["surprisal", "gain", "llmlingua2"] = "surprisal"
    # For llmlingua2.
    scorer_model: LocationOrName = "microsoft/llmlingua-2-xlm-roberta-large-meetingbank"
    compress_ratios: Annotated[list[Rate], Field(min_length=1)] = [0.1, 0.3, 0.5, 0.7]
    train_ratios: Annotated[list[Rate], Field(min_length=1)] = [1.0, 0.1, 0.3, 0.5, 0.7]
    eval_ratios: Annotated[list[Rate], Field(min_length=1)] = [1.0, 0.7, 0.5, 0.3, 0.1]
    force_operators: bool = True
    force_digits: bool = True
    dual_model: Location = ""  # a dual-vocabulary checkpoint to train instead of the base
    # Finished steps, taken from reuse_from, the folder of an earlier run of this notebook.
    skip: list[Literal["collect", "compress", "prepare", "train"]] = []
    reuse_from: Location = ""

    def inconsistencies(self):
        found = super().inconsistencies()
        missing = sorted(set(self.train_ratios) - set(self.compress_ratios) - {1.0})
        if missing:
            problem = (
                f"{', '.join(map(str, missing))} cannot be trained, because it is not among"
                f" compress_ratios {self.compress_ratios}"
            )
            found.append(("train_ratios", problem))
        if self.samples == 0 and (self.dataset or self.checkpoint):
            given = "dataset" if self.dataset else "checkpoint"
            problem = (
                f"is 0, which takes the study's own traces; tokenskip.{given} needs samples of its"
                " own, such as 8"
            )
            found.append(("samples", problem))
        if self.samples > 1 and self.temperature == 0:
            problem = f"{self.samples} at temperature 0 are all the same; use 1, or a temperature"
            found.append(("samples", problem))
        if "rows" in self.trainable and not self.dual_model:
            problem = (
                f"{self.trainable} trains a dual vocabulary's mirrors, but tokenskip.dual_model is"
                " empty; use lora or full"
            )
            found.append(("trainable", problem))
        if self.trainable == "lora" and self.dual_model:
            problem = (
                "lora leaves every mirror equal to its token, so tokenskip.dual_model would change"
                " nothing (notebook 14); use lora+rows"
            )
            found.append(("trainable", problem))
        if self.skip and not self.reuse_from:
            problem = "names finished steps; tokenskip.reuse_from must say which folder holds them"
            found.append(("skip", problem))
        return found


class DualVocabulary(OnAnswers):
    """Notebook 14. RL takes prompts, rate and temperature from `rl`; a right answer is worth 1."""

    # What is trained on traces; [] = nothing.
    methods: list[Literal["text", "dual", "latent_only"]] = ["text", "dual", "latent_only"]
    vocabulary: Literal["full_copy", "subset"] = "full_copy"
    subset_size: CountOrNone = 0  # mirrors of a subset; 0 = every token that the thoughts use
    think_missing: Literal["error", "add", "clone_eos", "literal"] = "literal"
    think_end_bias: float = 5.0
    trainable: Trainable = "lora+rows"
    learning_rate: Rate = 2e-3
    epochs: Annotated[float, Field(gt=0)] = 1.0
    batch_size: Count = 8
    max_examples: CountOrNone = 1600
    checked: Count = 16  # traces on which the ln 2 identity is measured
    # Steps of RL, from "dual", or from the untrained copy where `methods` is empty; 0 = no RL.
    steps: CountOrNone = 8
    kl_coefficient: Annotated[float, Field(ge=0)] = 1e-3  # of RL
    latent_only_rl: bool = False  # its loss on mirrors alone
    questions: Count = 400  # of a dataset, whose answers are the traces

    def inconsistencies(self):
        found = super().inconsistencies()
        if not self.methods and not self.steps:
            problem = "is empty and dual_vocabulary.steps is 0: nothing would be trained"
            found.append(("methods", problem))
        return found

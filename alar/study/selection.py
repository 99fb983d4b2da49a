"""From a command to run folders, each with the notebooks to run there.

Parameters, variants, domains and notebook numbers are all checked here, before anything runs.
"""

from dataclasses import dataclass
from pathlib import Path

from alar.study import params
from alar.study.params.notebooks import NotebookError, numbered
from alar.study.params.sections import GATHERING, ON_REQUEST, SEARCH_ONLY, Experiment


@dataclass(frozen=True)
class Command:
    """What the command line asks for."""

    params: Path  # parameter file
    overrides: tuple[str, ...] = ()  # "section.key=value"
    domains: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    only: tuple[str, ...] = ()  # stages, as in `_is`; () = all
    start: str = ""  # this stage and the later ones; "" = from the first
    force: bool = False
    run_dir: Path | None = None  # None = runs/NAME
    publish: bool = False


@dataclass(frozen=True)
class RunFolder:
    """One run: a variant of an experiment in one domain, and the notebooks chosen for it."""

    label: str  # such as "laptop · search"
    experiment: Experiment
    domain: str
    run_dir: Path
    notebooks: tuple[Path, ...]

    @property
    def gathers(self) -> bool:
        """Whether the run reads what other variants have computed, so it must come after them."""
        return any(notebook.stem in GATHERING for notebook in self.notebooks)


def run_folders(
    command: Command, root: Path, notebooks_dir: Path, *, absent: list[params.Absent] | None = None
) -> list[RunFolder]:
    """The run folders of a command, in the order to work on them.

    absent: as in `params.load_experiment`. Raises ParameterError and NotebookError.
    """
    experiments = _experiments(command, root, absent)
    available = numbered(notebooks_dir)
    if not available:
        raise NotebookError(f"{notebooks_dir}: holds no notebook named NN_name.ipynb")
    # All variants, also those that were not chosen: a file with an error is wrong as a whole.
    _check_parameters(experiments, notebooks_dir)
    runs = []
    for variant, domains in experiments.items():
        if command.variants and variant not in command.variants:
            continue
        for domain, experiment in domains.items():
            chosen = _chosen(available, command, experiment.only, domain)
            name = experiment.run.name
            # Without a variant, "" adds no folder.
            home = (command.run_dir or root / "runs" / name) / variant
            label = " · ".join(filter(None, [name, variant, domain]))
            if chosen:
                runs.append(RunFolder(label, experiment, domain, home / domain, chosen))
    if not runs:
        raise NotebookError(_why_none(command, experiments))
    # Two variants of a domain would overwrite each other's pages.
    if command.publish and len({run.domain for run in runs}) < len(runs):
        raise NotebookError(
            "--publish writes one run of each domain, and these are several variants: name one with"
            " --variant"
        )
    return sorted(runs, key=lambda run: run.gathers)  # stable: gathering runs go last


def _experiments(
    command: Command, root: Path, absent: list[params.Absent] | None
) -> dict[str, dict[str, Experiment]]:
    """Variant → domain → experiment. Raises ParameterError for an unknown variant."""
    overrides = list(command.overrides)
    if command.domains:
        overrides.append(f"run.domains=[{', '.join(command.domains)}]")
    experiments = params.load_variants(command.params, overrides, root=root, absent=absent)
    for variant in command.variants:
        if variant not in experiments:  # raises, and says which ones there are
            params.load_experiment(
                command.params, overrides, variant=variant, root=root, absent=absent
            )
    return experiments


def _check_parameters(experiments: dict[str, dict[str, Experiment]], notebooks_dir: Path) -> None:
    """Raise ParameterError with the problems of all experiments, each problem once."""
    problems = []
    for domains in experiments.values():
        for experiment in domains.values():
            try:
                params.check_notebooks(experiment, notebooks_dir)
            except params.ParameterError as error:
                problems += error.problems
    if problems:
        raise params.ParameterError(problems)


def _why_none(command: Command, experiments: dict[str, dict[str, Experiment]]) -> str:
    if any("search" in domains for domains in experiments.values()):
        return f"none of the chosen notebooks is in the list `only` of {command.params.name}"
    return (
        f"the notebooks {', '.join(SEARCH_ONLY)} run in the search domain: choose --domain search"
    )


def _chosen(
    available: list[Path], command: Command, limited: tuple[str, ...], domain: str
) -> tuple[Path, ...]:
    """The notebooks to run; `limited` is the list `only` of the parameter file."""
    for given in (*command.only, *limited, *filter(None, [command.start])):
        if not _is_any(available, given):
            stems = ", ".join(notebook.stem for notebook in available)
            raise NotebookError(f"no notebook has the number {given!r}; there are {stems}")
    chosen = []
    started = not command.start  # becomes true at the stage that --from names
    for notebook in available:
        started = started or _is(notebook, command.start)
        wanted = started and (domain == "search" or notebook.stem not in SEARCH_ONLY)
        if limited:
            wanted = wanted and any(_is(notebook, given) for given in limited)
        if command.only:
            wanted = wanted and any(_is(notebook, given) for given in command.only)
        # Nobody asked for it by `only`, but --from may name it.
        elif not limited and notebook.stem in ON_REQUEST:
            wanted = wanted and _is(notebook, command.start)
        if wanted:
            chosen.append(notebook)
    return tuple(chosen)


def _is_any(notebooks: list[Path], given: str) -> bool:
    return any(_is(notebook, given) for notebook in notebooks)


def _is(notebook: Path, given: str) -> bool:
    """Whether the notebook is the one that "3", "03", "03_aasd" or "03_aasd.ipynb" means."""
    by_number = given.isdigit() and notebook.name[:2] == given.zfill(2)
    return by_number or given in (notebook.stem, notebook.name)

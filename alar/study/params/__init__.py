"""Parameter files: read in layers, checked as a whole, and flattened for one notebook.

A file is a YAML mapping of sections (`alar.study.params.sections`). It may say `extends:
other.yaml` (a file beside it, which may extend another). It may hold `variants:`, which maps a name
to the sections that differ and, optionally, `only: ["01", "03"]`. A domain's name, `search:` or
`tool:`, holds the sections that differ in that domain. It stands at the top of a file or in a
variant.

Later layers win: defaults < extended files < file < variant < `section.key=value` overrides. Within
a layer, what it says about the domain wins over what it says about all domains.

Nothing runs before everything has been checked. All problems are reported at once, each with its
file, its section.key and a remedy. A notebook's own `parameters` cell decides what the notebook
receives (`alar.study.params.notebooks`), so a misspelt name is an error.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from alar.parameters import DATA_FILES
from alar.study.params.files import (
    ParameterError,
    did_you_mean,
    parse_value,
    problem_lines,
    read_document,
    shown_path,
)
from alar.study.params.notebooks import NotebookError, declared_parameters, numbered
from alar.study.params.sections import (
    DOMAINS,
    OWN_SECTION,
    QUESTION_TYPES,
    Experiment,
    field_kind,
    section_models,
)

RUN_FOLDER_NAME = "run_dir"  # the runner injects this parameter and `domain`
# Keys of section `run`: those that no notebook reads, and those that act without a notebook.
NOT_INJECTED = {"name", "domains", "jobs"}
USED_BY_RUNNER = NOT_INJECTED | {"threads"}

Layer = tuple[str, dict[str, Any]]  # (where it stands, its sections)
Absent = tuple[str, str, str]  # (section, key, value) of a location that does not exist


def load_experiment(
    path: str | Path,
    overrides: Iterable[str] = (),
    *,
    variant: str | None = None,
    domain: str | None = None,
    root: str | Path = ".",
    absent: list[Absent] | None = None,
) -> Experiment:
    """What a file (or one of its variants) says about a domain; by default its first domain.

    overrides: "section.key=value"; later ones win. root: relative locations are looked up in the
    current folder and there. absent: locations that do not exist are added to this list; without it
    they are problems. Raises ParameterError with every problem, also those of other domains.
    """
    found = _by_domain(shown_path(path), overrides, variant, Path(root), absent, domain)
    return found[domain or next(iter(found))]


def load_variants(
    path: str | Path,
    overrides: Iterable[str] = (),
    *,
    root: str | Path = ".",
    absent: list[Absent] | None = None,
) -> dict[str, dict[str, Experiment]]:
    """Variant → domain (of its `run.domains`) → experiment, in the order of the file.

    A file without variants has one variant, "". Raises ParameterError with the problems of all.
    """
    path, overrides = shown_path(path), list(overrides)
    experiments, problems = {}, []
    for name in read_document(path).variants or [""]:  # problems of all variants are collected
        try:
            experiments[name] = _by_domain(path, overrides, name or None, Path(root), absent)
        except ParameterError as error:
            problems += error.problems
    if problems:
        raise ParameterError(problems)
    return experiments


def merge_layers(layers: list[Layer], domain: str) -> tuple[dict, dict, list[str]]:
    """Lay the layers over each other for one domain; later ones win.

    Returns (section → key → value, (section, key) → where the value stands, problems).
    """
    values: dict[str, dict[str, Any]] = {}
    where: dict[tuple[str, str], str] = {}  # for messages that name the file or override
    problems = []
    for place, content in layers:
        # section → keys and values, of the part that holds for all domains
        shared = {name: part for name, part in content.items() if name not in DOMAINS}
        own = content.get(domain) or {}
        if not isinstance(own, dict):
            problems.append(f"{place}: {domain}: must hold sections, not {own!r}")
            own = {}
        if "run" in own:
            problems.append(f"{place}: {domain}.run: belongs to all domains; move it to the top")
        # The domain's own part comes later, so it wins.
        for source, part in ((place, shared), (f"{place}: {domain}", own)):
            for section, given in part.items():
                if section not in section_models():
                    problems.append(
                        f"{source}: {section}: unknown section"
                        f"{did_you_mean(section, section_models())}"
                        f"; the sections are {', '.join(section_models())}"
                    )
                elif not isinstance(given, dict | None):  # an empty section is None
                    problems.append(
                        f"{source}: {section}: must hold keys and values, not {given!r}"
                    )
                else:
                    values.setdefault(section, {}).update(given or {})
                    where |= {(section, key): source for key in given or {}}
    return values, where, problems


def flatten(
    experiment: Experiment,
    notebook: str | Path,
    *,
    domain: str | None = None,
    run_dir: str | None = None,
) -> dict[str, Any]:
    """Flat name → value for one notebook: exactly the names that its `parameters` cell declares.

    notebook: the path of the .ipynb. If it is only the stem, the result has every name that the
    notebook could declare. Raises ParameterError for a declared name that no section has.
    """
    notebook = Path(notebook)
    values = experiment.model_dump()  # section → key → value
    available = {
        name: values[section][key] for name, (section, key) in _names(notebook.stem).items()
    }
    available["domain"] = domain or experiment.run.domains[0]
    available[RUN_FOLDER_NAME] = run_dir or f"runs/{experiment.run.name}/{available['domain']}"
    if notebook.suffix != ".ipynb":  # only a stem: there is no cell to read
        return available
    declared = declared_parameters(notebook)
    unknown = [name for name in declared if name not in available]
    if unknown:
        raise ParameterError(_unknown_name(notebook, name, available) for name in unknown)
    return {name: available[name] for name in declared}


def origin(notebook: str | Path, name: str) -> tuple[str, str]:
    """(section, key) of a notebook's flat name; ("", name) for a name that the runner injects."""
    return _names(Path(notebook).stem).get(name, ("", name))


def check_notebooks(experiment: Experiment, notebooks_dir: str | Path) -> None:
    """Compare the experiment with the notebooks' `parameters` cells.

    Raises ParameterError with every declared name that no section has, every default whose type
    differs from the section's, and every key of the file that no notebook declares.
    """
    problems, declared_anywhere = [], set()
    for notebook in numbered(notebooks_dir):
        try:
            declared = declared_parameters(notebook)
        except NotebookError as error:
            problems.append(str(error))
            continue
        available = flatten(experiment, notebook.stem)  # every name it may declare, with its value
        for name, default in declared.items():
            if name not in available:
                problems.append(_unknown_name(notebook, name, available))
                continue
            section, key = origin(notebook, name)
            declared_anywhere.add((section, key))
            if not _same_type(default, available[name]):
                problems.append(
                    f"{notebook}: parameters cell: {name} = {default!r} is of"
                    f" type {type(default).__name__}, but the parameter {section}.{key} is of type"
                    f" {type(available[name]).__name__}"
                )
    for section, key, where in experiment.stated:  # a key that nobody reads does nothing: an error
        if (section, key) in declared_anywhere or (section == "run" and key in USED_BY_RUNNER):
            continue
        # The keys among which a suggestion is looked for.
        known = [other for owner, other in declared_anywhere if owner == section]
        owners = [stem for stem, own in OWN_SECTION.items() if own == section]
        if owners:
            remedy = f"add {key} to the parameters cell of {owners[0]}"
        else:
            remedy = f"add {section}_{key} to the parameters cell of the notebook that uses it"
        problems.append(
            f"{where}: {section}.{key}: no notebook declares it{did_you_mean(key, known)};"
            f" remove the key, or {remedy}"
        )
    if problems:
        raise ParameterError(problems)


def _by_domain(
    path: Path,
    overrides: Iterable[str],
    variant: str | None,
    root: Path,
    absent: list[Absent] | None,
    wanted: str | None = None,
) -> dict[str, Experiment]:
    """Domain → experiment, for the domains of `run.domains` and for `wanted`.

    The other domains are checked too, except for their locations and question types.
    """
    layers, only = _layers(path, variant)  # lowest first
    drafts, places, problems = {}, {}, []  # domain → experiment; domain → `where`
    for override in overrides:
        try:
            layers.append(_override(override))
        except ParameterError as error:
            problems += error.problems
    for domain in DOMAINS:
        values, where, found = merge_layers(layers, domain)
        problems += found
        try:
            drafts[domain], places[domain] = Experiment.model_validate(values), where
        except ValidationError as error:
            # A default stands nowhere; the message then names the file.
            problems += problem_lines(
                error, lambda section, key, where=where: where.get((section, key), path), _nearest
            )
            continue
        for dotted, problem in drafts[domain].inconsistencies():
            source = where.get(tuple(dotted.split(".")), path)
            problems.append(f"{source}: {dotted}: {problem}")

    # `run` is the same in every draft, because no domain may set it.
    run = next(iter(drafts.values())).run.domains if drafts else []
    experiments = {}
    for domain in dict.fromkeys([*run, wanted]):  # in order, without repeats
        if domain not in drafts:
            continue
        where = places[domain]
        experiment, missing = _resolve_locations(drafts[domain], root)
        if absent is not None:
            absent += [place for place in missing if place not in absent]
        else:
            problems += [
                f"{where.get((section, key), path)}: {section}.{key}: {value} does not exist"
                f" (looked in {Path.cwd()} and {root.resolve()})"
                for section, key, value in missing
            ]
        known = QUESTION_TYPES[domain]
        problems += [
            f"{where.get(('rl', 'types'), path)}: rl.types: {kind!r} is no type of the {domain}"
            f" domain's questions{did_you_mean(kind, known)}; they are {', '.join(known)}"
            for kind in experiment.rl.types
            if kind not in known
        ]
        # Only what a file or an override gives, not the defaults.
        stated = tuple((section, key, source) for (section, key), source in where.items())
        experiments[domain] = experiment.model_copy(update={"only": only, "stated": stated})
    if problems:
        raise ParameterError(problems)
    return experiments


def _layers(path: Path, variant: str | None) -> tuple[list[Layer], tuple[str, ...]]:
    """(layers of extended files, file and variant, lowest first; the `only` that wins)."""
    document = read_document(path)
    layers, only = [(str(path), document.sections)], document.only
    below, seen = document, [path]
    while below.extends:
        base = path.parent / below.extends  # a file beside this one
        if not base.is_file():
            raise ParameterError(f"{seen[-1]}: extends: {base} does not exist")
        if base in seen:
            raise ParameterError(
                f"{seen[-1]}: extends: {base} extends this file in turn; one of them must not"
            )
        below = read_document(base)
        seen.append(base)
        layers.insert(0, (str(base), below.sections))  # below the files that extend it
    if variant is not None:
        if variant not in document.variants:
            raise ParameterError(
                f"{path}: unknown variant {variant!r}{did_you_mean(variant, document.variants)};"
                f" it has {', '.join(document.variants) or 'none'}"
            )
        layers.append((f"{path}: variants.{variant}", document.variants[variant].sections))
        only = document.variants[variant].only or only  # the variant's list wins over the file's
    return layers, tuple(only)


def _override(text: str) -> Layer:
    """An override as a layer. A text or a location is taken as it stands; other values are YAML.

    Raises ParameterError for an override of another form.
    """
    place = f"--set {text}"
    match = re.fullmatch(r"\s*(\w+)\.(\w+)\s*=(.*)", text, re.DOTALL)
    if not match:
        raise ParameterError(
            f"{place}: must look like section.key=value, such as aasd.learning_rate=1e-3"
        )
    section, key, raw = match.groups()
    # As YAML, a name such as 1e3 or no would become a number or a bool.
    if field_kind(section, key) in ("location", "location or name", "str"):
        return place, {section: {key: raw.strip().strip("\"'")}}
    try:
        return place, {section: {key: parse_value(raw)}}
    except yaml.YAMLError as error:
        raise ParameterError(f"{place}: the value is not valid YAML: {error}") from None


def _resolve_locations(experiment: Experiment, root: Path) -> tuple[Experiment, list[Absent]]:
    """(the experiment with absolute paths, the locations that do not exist).

    Paths are absolute because a kernel may run in any folder.
    """
    absent, changed = [], {}
    for section, values in experiment.model_dump().items():
        for key, value in values.items():
            kind = field_kind(section, key)
            if not kind.startswith("location") or not value:
                continue
            resolved = []
            for entry in value if isinstance(value, list) else [value]:
                files = (*DATA_FILES, ".txt")  # a prompt is a text file
                looks_like_path = entry.startswith((".", "/", "~")) or entry.endswith(files)
                named = kind == "location" or looks_like_path
                candidates = [Path(entry).expanduser(), root / entry]  # current folder first
                found = [place for place in candidates if place.exists()]
                # "embedded" stays a keyword even if a folder has that name.
                if found and (named or "/" in entry):
                    entry = str(found[0].resolve())
                elif named:
                    absent.append((section, key, entry))
                resolved.append(entry)
            changed.setdefault(section, {})[key] = (
                resolved if isinstance(value, list) else resolved[0]
            )
    updates = {
        name: getattr(experiment, name).model_copy(update=values)
        for name, values in changed.items()
    }
    return experiment.model_copy(update=updates), absent


def _names(stem: str) -> dict[str, tuple[str, str]]:
    """Flat name → (section, key). Keys of `run` and of the notebook's own section stand alone;
    other keys carry their section as a prefix."""
    plain = ("run", OWN_SECTION.get(stem))  # sections whose keys carry no prefix
    return {
        key if section in plain else f"{section}_{key}": (section, key)
        for section, model in section_models().items()
        for key in model.model_fields
        if not (section == "run" and key in NOT_INJECTED)
    }


def _nearest(section: str, key: str) -> str:
    """A suggestion: a similar key of the section, else the same key of another section, else ""."""
    models = section_models()
    elsewhere = [name for name in models if key in models[name].model_fields]
    own = did_you_mean(key, models[section].model_fields)
    return own or (f", did you mean {elsewhere[0]}.{key}?" if elsewhere else "")


def _unknown_name(notebook: Path, name: str, available: Iterable[str]) -> str:
    return (
        f"{notebook}: parameters cell: {name}: no section of the parameter files has"
        f" it{did_you_mean(name, available)}; a name of another section carries the section as a"
        " prefix, such as retrieval_topk"
    )


def _same_type(default: Any, value: Any) -> bool:
    """Whether a default fits the parameter's type. An int may stand for a float, but a bool, which
    Python counts as an int, may not."""
    if isinstance(value, float):
        return type(default) in (int, float)  # `int` itself: not its subclass `bool`
    return type(default) is type(value)

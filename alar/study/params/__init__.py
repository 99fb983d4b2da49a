"""Parameter files: read in layers, checked as a whole, and flattened for one notebook.

A file is a YAML mapping of sections (`alar.study.params.sections`). It may say `extends:
other.yaml` (a file beside it, one level) and hold `variants:`, which maps a name to the sections
that differ and, optionally, `only: ["01", "03"]`. A domain's name, `search:` or `tool:`, holds the
sections that differ in that domain, at the top of a file or in a variant.

Later layers win: defaults < extended file < file < variant < `section.key=value` overrides; each of
these is followed by what it says about the domain.

Nothing runs before everything has been checked. All problems are reported at once, each with its
file, its section.key and a remedy. A notebook's own `parameters` cell decides what the notebook
receives (`alar.study.params.notebooks`), so a misspelt name is neither injected nor ignored.
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

RUN_FOLDER_NAME = "run_dir"  # the runner injects it, with `domain`
# Of section `run`: what no notebook reads, and what acts even if no notebook declares it.
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
    """What a file (or one of its variants) says about a domain; without a name, about its first.

    overrides: "section.key=value"; later ones win. root: relative locations are looked up there
    and in the current folder. absent: a list that takes the locations that do not exist; without
    it they are problems. Raises ParameterError with every problem, also those of other domains.
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
    """Variant → domain (those of its `run.domains`) → experiment, in the order of the file.

    A file without variants has one, "".
    """
    path, overrides = shown_path(path), list(overrides)
    experiments, problems = {}, []
    for name in read_document(path).variants or [""]:
        try:
            experiments[name] = _by_domain(path, overrides, name or None, Path(root), absent)
        except ParameterError as error:
            problems += error.problems
    if problems:
        raise ParameterError(problems)
    return experiments


def merge_layers(layers: list[Layer], domain: str) -> tuple[dict, dict, list[str]]:
    """(section → key → value, (section, key) → where it stands, problems); later layers win."""
    values: dict[str, dict[str, Any]] = {}
    where: dict[tuple[str, str], str] = {}
    problems = []
    for place, content in layers:
        shared = {name: part for name, part in content.items() if name not in DOMAINS}
        own = content.get(domain) or {}
        if not isinstance(own, dict):
            problems.append(f"{place}: {domain}: must hold sections, not {own!r}")
            own = {}
        if "run" in own:
            problems.append(f"{place}: {domain}.run: belongs to all domains; move it to the top")
        for source, part in ((place, shared), (f"{place}: {domain}", own)):
            for section, given in part.items():
                if section not in section_models():
                    problems.append(
                        f"{source}: {section}: unknown section"
                        f"{did_you_mean(section, section_models())}"
                        f"; the sections are {', '.join(section_models())}"
                    )
                elif not isinstance(given, dict | None):
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
    """The flat parameters of one notebook: what its `parameters` cell declares, and nothing else.

    notebook: path of the .ipynb, or its stem, which gives every name that it could declare.
    """
    notebook = Path(notebook)
    values = experiment.model_dump()
    available = {
        name: values[section][key] for name, (section, key) in _names(notebook.stem).items()
    }
    available["domain"] = domain or experiment.run.domains[0]
    available[RUN_FOLDER_NAME] = run_dir or f"runs/{experiment.run.name}/{available['domain']}"
    if notebook.suffix != ".ipynb":
        return available
    declared = declared_parameters(notebook)
    unknown = [name for name in declared if name not in available]
    if unknown:
        raise ParameterError(_unknown_name(notebook, name, available) for name in unknown)
    return {name: available[name] for name in declared}


def origin(notebook: str | Path, name: str) -> tuple[str, str]:
    """(section, key) behind a flat name of a notebook; ("", name) for what the runner injects."""
    return _names(Path(notebook).stem).get(name, ("", name))


def check_notebooks(experiment: Experiment, notebooks_dir: str | Path) -> None:
    """Compare the experiment with the notebooks' `parameters` cells.

    Raises ParameterError with every name that no section has, every default of another type, and
    every stated key that no notebook declares.
    """
    problems, declared_anywhere = [], set()
    for notebook in numbered(notebooks_dir):
        try:
            declared = declared_parameters(notebook)
        except NotebookError as error:
            problems.append(str(error))
            continue
        available = flatten(experiment, notebook.stem)
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
    for section, key, where in experiment.stated:
        if (section, key) in declared_anywhere or (section == "run" and key in USED_BY_RUNNER):
            continue
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
    """Domain → experiment for the domains of `run.domains`, and for `wanted`.

    Domains that are not run are checked too, except for their locations and question types.
    """
    layers, only = _layers(path, variant)
    drafts, places, problems = {}, {}, []
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
            problems += problem_lines(
                error, lambda section, key, where=where: where.get((section, key), path), _nearest
            )
            continue
        for dotted, problem in drafts[domain].inconsistencies():
            source = where.get(tuple(dotted.split(".")), path)
            problems.append(f"{source}: {dotted}: {problem}")

    run = next(iter(drafts.values())).run.domains if drafts else []
    experiments = {}
    for domain in dict.fromkeys([*run, wanted]):
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
        stated = tuple((section, key, source) for (section, key), source in where.items())
        experiments[domain] = experiment.model_copy(update={"only": only, "stated": stated})
    if problems:
        raise ParameterError(problems)
    return experiments


def _layers(path: Path, variant: str | None) -> tuple[list[Layer], tuple[str, ...]]:
    """(what the extended file, the file and its variant say, the stages of the last `only`)."""
    document = read_document(path)
    layers, only = [(str(path), document.sections)], document.only
    if document.extends:
        base = path.parent / document.extends
        if not base.is_file():
            raise ParameterError(f"{path}: extends: {base} does not exist")
        extended = read_document(base)
        if extended.extends:
            raise ParameterError(
                f"{path}: extends: {document.extends} itself extends {extended.extends}; only one"
                " level is supported, so extend a file that extends nothing"
            )
        layers.insert(0, (str(base), extended.sections))
    if variant is not None:
        if variant not in document.variants:
            raise ParameterError(
                f"{path}: unknown variant {variant!r}{did_you_mean(variant, document.variants)};"
                f" it has {', '.join(document.variants) or 'none'}"
            )
        layers.append((f"{path}: variants.{variant}", document.variants[variant].sections))
        only = document.variants[variant].only or only
    return layers, tuple(only)


def _override(text: str) -> Layer:
    """An override as a layer. Texts and locations are taken as they stand, others are YAML."""
    place = f"--set {text}"
    match = re.fullmatch(r"\s*(\w+)\.(\w+)\s*=(.*)", text, re.DOTALL)
    if not match:
        raise ParameterError(
            f"{place}: must look like section.key=value, such as aasd.learning_rate=1e-3"
        )
    section, key, raw = match.groups()
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
                looks_like_path = entry.startswith((".", "/", "~")) or entry.endswith(DATA_FILES)
                named = kind == "location" or looks_like_path
                candidates = [Path(entry).expanduser(), root / entry]
                found = [place for place in candidates if place.exists()]
                # "embedded" stays a keyword, whatever folder of that name lies about.
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
    """Flat name → (section, key): plain for `run` and the notebook's own section, else prefixed."""
    plain = ("run", OWN_SECTION.get(stem))
    return {
        key if section in plain else f"{section}_{key}": (section, key)
        for section, model in section_models().items()
        for key in model.model_fields
        if not (section == "run" and key in NOT_INJECTED)
    }


def _nearest(section: str, key: str) -> str:
    """A similar key of the section, else the same key of another section."""
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
    """A whole number may stand for a float; a bool, which Python counts as an int, for nothing."""
    if isinstance(value, float):
        return type(default) in (int, float)
    return type(default) is type(value)

"""Parameter files: reading, checking as a whole, and flattening for one notebook.

A file is a YAML mapping of sections (`alar.study.params.sections`). It may say `extends:
other.yaml` (beside it, one level) and hold `variants:`, a mapping from a name to sections that
differ and, optionally, `only: ["01", "03"]`. A domain's name, `search:` or `tool:`, holds the
sections that differ in that domain, at the top of a file or in a variant. Layers are merged in this
order: defaults, the extended file, the file, the variant, each of them followed by what it says
about the domain, then `section.key=value` overrides. Nothing runs before everything has been
checked, and all problems are reported at once, each with its file, key and remedy. What a notebook
receives is decided by its own `parameters` cell (`alar.study.params.notebooks`), so that a misspelt
name can be neither injected nor ignored.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from alar.study.params.files import (
    ParameterError,
    did_you_mean,
    kind_of,
    parse_value,
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

RUN_FOLDER_NAME = "run_dir"  # injected by the runner, with `domain`
NOT_INJECTED = {
    "name",
    "domains",
    "jobs",
}  # of section `run`: they are the runner's, no notebook reads them
USED_BY_RUNNER = NOT_INJECTED | {
    "threads"
}  # of section `run`: they act even if no notebook declares them
DATA_FILES = (
    ".jsonl",
    ".json",
    ".parquet",
)  # a value that ends so is meant as a file, not as a name

Absent = tuple[str, str, str]  # (section, key, value) of a location that does not exist


def load(
    path: str | Path,
    overrides: Iterable[str] = (),
    *,
    variant: str | None = None,
    domain: str | None = None,
    root: str | Path = ".",
    absent: list[Absent] | None = None,
) -> Experiment:
    """The experiment that a file describes (one of its variants, if named) in a domain: its first
    one, if none is named.

    overrides: "section.key=value", later ones win. root: where relative locations are looked up
    besides the current folder. absent: a list that takes the locations that do not exist, which are
    a problem without it. Raises ParameterError with every problem found, in the parts of the other
    domain too.
    """
    return _all_domains(shown_path(path), tuple(overrides), variant, Path(root), absent, domain)[
        domain or ""
    ]


def load_variants(
    path: str | Path,
    overrides: Iterable[str] = (),
    *,
    root: str | Path = ".",
    absent: list[Absent] | None = None,
) -> dict[str, dict[str, Experiment]]:
    """Variant name → domain → experiment, in file order; the one variant of a file without them is
    "".

    The domains are those of the variant's `run.domains`.
    """
    path, overrides = shown_path(path), tuple(overrides)
    names = list(read_document(path)[1]) or [""]
    experiments, problems = {}, []
    for name in names:
        try:
            found = _all_domains(path, overrides, name or None, Path(root), absent)
            experiments[name] = {domain: found[domain] for domain in found[""].run.domains}
        except ParameterError as error:
            problems += error.problems
    if problems:
        raise ParameterError(problems)
    return experiments


def _all_domains(
    path: Path,
    overrides: tuple[str, ...],
    variant: str | None,
    root: Path,
    absent: list[Absent] | None,
    wanted: str | None = None,
) -> dict[str, Experiment]:
    """Domain → experiment; "" is the first of `run.domains`. Domains that are not run are checked,
    but for their locations."""
    experiments, problems = {}, []
    try:
        domains = _assemble(path, overrides, variant, "", root, []).run.domains
    except ParameterError as error:
        domains, problems = [], error.problems
    for domain in DOMAINS:
        run = domain in domains or domain == wanted
        try:
            experiments[domain] = found = _assemble(
                path, overrides, variant, domain, root, absent if run else []
            )
            problems += _unknown_types(found, domain, path) if run else []
        except ParameterError as error:
            problems = [
                *problems,
                *(problem for problem in error.problems if problem not in problems),
            ]
    if problems:
        raise ParameterError(problems)
    return experiments | {"": experiments[domains[0]]}


def _unknown_types(experiment: Experiment, domain: str, path: Path) -> list[str]:
    known = QUESTION_TYPES[domain]
    source = next(
        (where for section, key, where in experiment.stated if (section, key) == ("rl", "types")),
        path,
    )
    return [
        f"{source}: rl.types: {kind!r} is no type of the {domain} domain's"
        f" questions{did_you_mean(kind, known)}; they are {', '.join(known)}"
        for kind in experiment.rl.types
        if kind not in known
    ]


def flatten(
    experiment: Experiment,
    notebook: str | Path,
    *,
    domain: str | None = None,
    run_dir: str | None = None,
) -> dict[str, Any]:
    """The flat parameters of one notebook: what its `parameters` cell declares, and nothing else.

    notebook: path of the .ipynb, or only its stem, which gives every name that it could declare.
    """
    notebook = Path(notebook)
    available = _available(experiment, notebook.stem)
    available["domain"] = domain or experiment.run.domains[0]
    available[RUN_FOLDER_NAME] = run_dir or f"runs/{experiment.run.name}/{available['domain']}"
    if notebook.suffix != ".ipynb":
        return available
    declared = declared_parameters(notebook)
    unknown = [
        _unknown_name(notebook, name, available) for name in declared if name not in available
    ]
    if unknown:
        raise ParameterError(unknown)
    return {name: available[name] for name in declared}


def origin(notebook: str | Path, name: str) -> tuple[str, str]:
    """The (section, key) that the flat name of a notebook's parameter comes from; ("", name) for
    injected ones."""
    return _names(Path(notebook).stem).get(name, ("", name))


def check_notebooks(experiment: Experiment, notebooks_dir: str | Path) -> None:
    """Compare the experiment with the notebooks' `parameters` cells; raise ParameterError with
    every mismatch."""
    problems, declared_anywhere = [], set()
    for notebook in numbered(notebooks_dir):
        try:
            declared = declared_parameters(notebook)
        except NotebookError as error:
            problems.append(str(error))
            continue
        names = _names(notebook.stem)
        available = flatten(experiment, notebook.stem)
        for name, default in declared.items():
            if name not in available:
                problems.append(_unknown_name(notebook, name, available))
                continue
            declared_anywhere.add(names.get(name))
            if not _same_kind(default, available[name]):
                problems.append(
                    f"{notebook}: parameters cell: {name} = {default!r} is {kind_of(default)}, but"
                    f" the parameter {'.'.join(names.get(name, ('run', name)))} is"
                    f" {kind_of(available[name])}"
                )
    for section, key, where in experiment.stated:
        if (section, key) in declared_anywhere or (section == "run" and key in USED_BY_RUNNER):
            continue
        declared_keys = [k for s, k in filter(None, declared_anywhere) if s == section]
        owner = next((stem for stem, own in OWN_SECTION.items() if own == section), "")
        remedy = (
            f"add {key} to the parameters cell of {owner}"
            if owner
            else f"add {section}_{key} to the parameters cell of the notebook that uses it"
        )
        problems.append(
            f"{where}: {section}.{key}: no notebook declares it{did_you_mean(key, declared_keys)}; "
            f"remove the key, or {remedy}"
        )
    if problems:
        raise ParameterError(problems)


def differing_defaults(experiment: Experiment, notebooks_dir: str | Path) -> list[str]:
    """Lines for every `parameters` cell whose default is not the experiment's value (by hand and
    headless differ)."""
    lines = []
    for notebook in numbered(notebooks_dir):
        names, available = _names(notebook.stem), flatten(experiment, notebook.stem)
        for name, default in declared_parameters(notebook).items():
            if name in names and name in available and default != available[name]:
                lines.append(
                    f"{notebook.name}: {name} = {default!r}, but {'.'.join(names[name])} is"
                    f" {available[name]!r}"
                )
    return lines


def _names(stem: str) -> dict[str, tuple[str, str]]:
    """Flat name → (section, key) for a notebook; "" prefixes every section but `run`."""
    own = OWN_SECTION.get(stem)
    return {
        key if section in ("run", own) else f"{section}_{key}": (section, key)
        for section, model in section_models().items()
        for key in model.model_fields
        if not (section == "run" and key in NOT_INJECTED)
    }


def _available(experiment: Experiment, stem: str) -> dict[str, Any]:
    values = experiment.model_dump()
    return {name: values[section][key] for name, (section, key) in _names(stem).items()}


def _assemble(
    path: Path,
    overrides: tuple[str, ...],
    variant: str | None,
    domain: str,
    root: Path,
    absent: list[Absent] | None,
) -> Experiment:
    """One domain's experiment; with "" for the domain, what all domains share."""
    sections, variants, extends = read_document(path)
    layers: list[tuple[str, dict]] = []
    if extends:
        base = path.parent / extends
        if base.resolve() == path.resolve():
            raise ParameterError(f"{path}: extends: the file extends itself")
        if not base.is_file():
            raise ParameterError(f"{path}: extends: {extends} does not exist in {path.parent}")
        base_sections, _, further = read_document(base)
        if further:
            cyclic = (base.parent / further).resolve() == path.resolve()
            raise ParameterError(
                f"{path}: extends: {extends} itself extends {further}"
                + (
                    ": a cycle"
                    if cyclic
                    else "; only one level is supported, so name the last file"
                )
            )
        base_sections.pop("only", None)  # says what the other file runs
        layers.append((str(base), base_sections))
    only = _stages(f"{path}: only", sections.pop("only", []))
    layers.append((str(path), sections))
    if variant is not None:
        if variant not in variants:
            raise ParameterError(
                f"{path}: unknown variant {variant!r}{did_you_mean(variant, variants)}; "
                f"it has {', '.join(variants) or 'none'}"
            )
        differing = dict(variants[variant])
        if "only" in differing:
            only = _stages(f"{path}: variants.{variant}.only", differing.pop("only"))
        layers.append((f"{path}: variants.{variant}", differing))

    problems: list[str] = []
    merged: dict[str, dict[str, Any]] = {}
    where: dict[tuple[str, str], str] = {}
    for source, content in _with_domain(layers, domain, problems):
        for section, values in content.items():
            if section not in section_models():
                problems.append(
                    f"{source}: {section}: unknown section{did_you_mean(section, section_models())}"
                    f"; the sections are {', '.join(section_models())}"
                )
            elif not isinstance(values, dict | None):
                problems.append(f"{source}: {section}: must hold keys and values, not {values!r}")
            else:
                for key, value in (values or {}).items():
                    merged.setdefault(section, {})[key] = value
                    where[section, key] = source
    for override in overrides:
        try:
            section, key, value = _parse_override(override)
        except ParameterError as error:
            problems += error.problems
        else:
            merged.setdefault(section, {})[key] = value
            where[section, key] = f"--set {override}"

    experiment, found = _validate(merged, where, str(path))
    problems += found
    if experiment is not None:
        for dotted, problem in experiment.inconsistencies():
            section, _, key = dotted.partition(".")
            problems.append(f"{where.get((section, key), path)}: {dotted}: {problem}")
        experiment, missing = _resolve_locations(experiment, root)
        if absent is not None:
            absent += [place for place in missing if place not in absent]
        else:
            problems += [
                f"{where.get((section, key), path)}: {section}.{key}: {value} does not exist "
                f"(looked in {Path.cwd()} and {root.resolve()})"
                for section, key, value in missing
            ]
    if problems:
        raise ParameterError(problems)
    stated = tuple((section, key, source) for (section, key), source in where.items())
    return experiment.model_copy(update={"only": only, "stated": stated})


def _with_domain(
    layers: list[tuple[str, dict]], domain: str, problems: list[str]
) -> Iterable[tuple[str, dict]]:
    """Every layer without its domains' parts, and then the part of this domain."""
    for source, content in layers:
        yield (
            source,
            {section: values for section, values in content.items() if section not in DOMAINS},
        )
        if not isinstance(own := content.get(domain), dict | None):
            problems.append(f"{source}: {domain}: must hold sections, not {own!r}")
        elif own and "run" in own:
            problems.append(f"{source}: {domain}.run: belongs to all domains; move it to the top")
        elif own:
            yield f"{source}: {domain}", own


def _stages(where: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(
        isinstance(v, str) and re.match(r"\d\d", v) for v in value
    ):
        raise ParameterError(f'{where}: must list stage numbers in quotes, such as ["01", "03"]')
    return tuple(value)


def _parse_override(text: str) -> tuple[str, str, Any]:
    match = re.fullmatch(r"\s*([A-Za-z_]\w*)\.([A-Za-z_]\w*)\s*=(.*)", text, re.DOTALL)
    if not match:
        raise ParameterError(
            f"--set {text}: must look like section.key=value, such as aasd.learning_rate=1e-3"
        )
    section, key, raw = match.groups()
    if section not in section_models():
        raise ParameterError(
            f"--set {text}: {section}: unknown section{did_you_mean(section, section_models())}"
        )
    if key in section_models()[section].model_fields and field_kind(section, key) in (
        "location",
        "location or name",
        "str",
    ):
        return section, key, raw.strip().strip("\"'")
    try:
        return section, key, parse_value(raw)
    except yaml.YAMLError as error:
        raise ParameterError(f"--set {text}: the value is not valid YAML: {error}") from None


def _validate(merged, where, path) -> tuple[Experiment | None, list[str]]:
    try:
        return Experiment.model_validate(merged), []
    except ValidationError as error:
        problems = []
        for detail in error.errors():
            section, *rest = map(str, detail["loc"])
            key = rest[0] if rest else ""
            source, given = where.get((section, key), path), detail["input"]
            problems.append(f"{source}: {section}.{key}: {_explain(detail, section, key, given)}")
        return None, problems


def _explain(detail, section: str, key: str, given: Any) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        names = list(section_models()[section].model_fields)
        elsewhere = [
            f"{other}.{key}"
            for other, model in section_models().items()
            if key in model.model_fields
        ]
        hint = did_you_mean(key, names) or (f", did you mean {elsewhere[0]}?" if elsewhere else "")
        return "unknown parameter" + (hint or f"; {section} has {', '.join(names) or 'none'}")
    if kind == "literal_error":
        choices = context["expected"]
        nearest = did_you_mean(str(given), re.findall(r"\w+", choices))
        return f"{given!r} is not one of {choices}{nearest}"
    if kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
        bound = {
            "greater_than": ("greater than", "gt"),
            "greater_than_equal": ("at least", "ge"),
            "less_than": ("less than", "lt"),
            "less_than_equal": ("at most", "le"),
        }[kind]
        return f"{given!r} is out of range; it must be {bound[0]} {context[bound[1]]:g}"
    if kind == "string_pattern_mismatch":
        return f"{given!r} cannot name a folder; use letters, digits, '.', '_', '-'"
    wanted = {
        "int_type": "a whole number",
        "float_type": "a number",
        "string_type": "a text",
        "bool_type": "true or false",
        "list_type": "a list",
        "int_from_float": "a whole number",
        "finite_number": "a finite number",
    }
    if kind in wanted:
        hint = (
            "; put it in quotes"
            if kind == "string_type" and not isinstance(given, dict | list | None)
            else ""
        )
        return f"{given!r} is {kind_of(given)}, it must be {wanted[kind]}{hint}"
    return f"{given!r}: {detail['msg']}"


def _resolve_locations(experiment: Experiment, root: Path) -> tuple[Experiment, list[Absent]]:
    """Make locations absolute where they exist, so that kernels may run in any folder; list the
    missing ones."""
    absent, changed = [], {}
    for section, values in experiment.model_dump().items():
        for key, value in values.items():
            kind = field_kind(section, key)
            if not kind.startswith("location"):
                continue
            resolved = []
            for entry in value if isinstance(value, list) else [value] if value else []:
                found = next(
                    (p for p in (Path(entry).expanduser(), root / entry) if p.exists()), None
                )
                looks_like_path = entry.startswith((".", "/", "~")) or entry.endswith(DATA_FILES)
                named = kind == "location" or looks_like_path
                resolved.append(
                    str(found.resolve()) if found is not None and (named or "/" in entry) else entry
                )
                if found is None and named:
                    absent.append((section, key, entry))
            if resolved:
                changed.setdefault(section, {})[key] = (
                    resolved if isinstance(value, list) else resolved[0]
                )
    updates = {s: getattr(experiment, s).model_copy(update=values) for s, values in changed.items()}
    return experiment.model_copy(update=updates), absent


def _unknown_name(notebook: Path, name: str, available: Iterable[str]) -> str:
    return (
        f"{notebook}: parameters cell: {name}: no section of the parameter files has"
        f" it{did_you_mean(name, available)}; a name of another section carries the section as a"
        " prefix, such as retrieval_topk"
    )


def _same_kind(default: Any, value: Any) -> bool:
    if isinstance(value, bool) or isinstance(default, bool):
        return isinstance(value, bool) and isinstance(default, bool)
    if isinstance(value, float):
        return isinstance(default, int | float)
    return type(default) is type(value)

"""What an experiment reads from outside the repository, whether it is here, and the command that
fetches it.

Only files are looked at: the hub's cache, the cache of `datasets`, the folders named in the
parameters. A model counts as here when its config, its tokenizer and every shard of its weights
are.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants, try_to_load_from_cache

from alar.domains.search.datasets import FLASHRAG, SEARCH_R1_TRAIN, published_sizes
from alar.domains.static.sets import PUBLISHED
from alar.study.check.sizes import Size
from alar.study.params.sections import Experiment

WIKI18 = Path(
    "data/wiki-18"
)  # below the repository, where the retrieval server's files are looked for
CORPUS_FILE, INDEX_FILE = "wiki-18.jsonl", "e5_Flat.index"
TRAINING_SET = "nq_hotpotqa_train"
# Sizes of downloads: 21,015,324 passages · 768 · 4 bytes of index, which is joined from parts of
# the same size; the rest rounded up from the hub's listings.
INDEX_BYTES, CORPUS_BYTES, SET_BYTES, E5_BYTES = (
    21_015_324 * 768 * 4,
    20 * 10**9,
    10**8,
    450_000_000,
)
LINGUA_BYTES = 2_240_000_000  # XLM-RoBERTa large in float32
TOOLMIND_BYTES = 10 * 10**9
GET_CORPUS = (
    f"hf download PeterJinGo/wiki-18-corpus {CORPUS_FILE}.gz --repo-type dataset --local-dir"
    f" {WIKI18} && gunzip {WIKI18}/{CORPUS_FILE}.gz"
)
GET_INDEX = (
    "hf download PeterJinGo/wiki-18-e5-index part_aa part_ab --repo-type dataset --local-dir"
    f" {WIKI18} && cat {WIKI18}/part_aa {WIKI18}/part_ab > {WIKI18}/{INDEX_FILE} && rm"
    f" {WIKI18}/part_a?"
)
GET_TOOLMIND = (
    'hf download Nanbeige/ToolMind --repo-type dataset --include "graph_syn_datasets/*" --local-dir'
    " data/toolmind"
)


@dataclass(frozen=True)
class Item:
    """One thing that is read. `missing` says what of it is not here ("" = nothing), `command`
    fetches it."""

    what: str
    missing: str
    command: str
    bytes: int = 0  # to download
    place: Path = Path(constants.HF_HUB_CACHE)


def base_model(experiment: Experiment, size: Size | None) -> Item | None:
    """The base named by `model.base`, if it comes from outside."""
    base = experiment.model.base
    if base in ("embedded", "scratch"):
        return None
    if Path(base).is_dir():
        return Item(
            f"base model {base}",
            _missing_files(Path(base)),
            "give model.base a whole checkpoint folder",
        )
    return Item(
        f"base model {base}",
        missing_from_cache(base),
        f"hf download {base}",
        4 * size.base if size else 0,
    )


def missing_from_cache(repository: str) -> str:
    """What of a hub model the local cache lacks, "" if nothing."""
    config = try_to_load_from_cache(repository, "config.json")
    if not isinstance(config, str):
        return f"not in the cache {constants.HF_HUB_CACHE}"
    return _missing_files(Path(config).parent)


def _missing_files(folder: Path) -> str:
    weights = [
        folder / "model.safetensors",
        folder / "model.safetensors.index.json",
        folder / "pytorch_model.bin",
        folder / "pytorch_model.bin.index.json",
    ]
    found = next((path for path in weights if path.exists()), weights[0])
    needed = [folder / "config.json", folder / "tokenizer_config.json", found]
    if found.name.endswith(".index.json"):
        shards = json.loads(found.read_text(encoding="utf-8"))["weight_map"].values()
        needed += [folder / name for name in sorted(set(shards))]
    missing = [path.name for path in needed if not path.exists()]
    return f"{', '.join(missing)} not in {folder}" if missing else ""


def question_sets(names: list[str]) -> list[Item]:
    """The published sets among `names`."""
    items = []
    for name in names:
        hub, config = (SEARCH_R1_TRAIN, "default") if name == TRAINING_SET else (FLASHRAG, name)
        place = datasets_cache()
        missing = "" if in_datasets_cache(hub, config) else f"not in the cache {place}"
        count = f", {published_sizes[name]:,} questions" if name in published_sizes else ""
        command = f"""python -c "from alar.domains.search.datasets import load_questions; load_questions('{name}')\""""
        items.append(
            Item(f"question set {name} ({hub}{count})", missing, command, SET_BYTES, place)
        )
    return items


def answer_sets(names: list[str]) -> list[Item]:
    """The published answer datasets among `names`."""
    items = []
    for name in dict.fromkeys(name for name in names if name in PUBLISHED):
        hub, config = PUBLISHED[name].hub, PUBLISHED[name].config or "default"
        missing = "" if in_datasets_cache(hub, config) else f"not in the cache {datasets_cache()}"
        command = f"""python -c "from alar.domains.static.sets import load; load('{name}')\""""
        items.append(
            Item(f"answer dataset {name} ({hub})", missing, command, SET_BYTES, datasets_cache())
        )
    return items


def datasets_cache() -> Path:
    import datasets

    return Path(datasets.config.HF_DATASETS_CACHE)


def in_datasets_cache(repository: str, config: str) -> bool:
    """Whether `datasets` has prepared this set before:
    <owner>___<name>/<config>/<version>/<hash>/*.arrow."""
    from datasets.naming import camelcase_to_snakecase

    owner, name = repository.split("/")
    folder = datasets_cache() / f"{owner}___{camelcase_to_snakecase(name)}" / config
    return any(folder.glob("*/*/*.arrow"))


def encoder(name: str) -> Item:
    """The text encoder of the retriever."""
    missing = "" if Path(name).is_dir() else missing_from_cache(name)
    return Item(f"text encoder {name}", missing, f"hf download {name}", E5_BYTES)


def word_scorer(name: str) -> Item:
    """The classifier of LLMLingua-2."""
    missing = "" if Path(name).is_dir() else missing_from_cache(name)
    return Item(f"word scorer {name}", missing, f"hf download {name}", LINGUA_BYTES)


def wikipedia(experiment: Experiment, root: Path) -> list[Item]:
    """Corpus and index of a retrieval server on this machine."""
    given = experiment.retrieval
    corpus = Path(given.corpus) if given.corpus else root / WIKI18 / CORPUS_FILE
    index = Path(given.index) if given.index else root / WIKI18 / INDEX_FILE
    return [
        Item(
            f"retrieval corpus {corpus}",
            "" if corpus.is_file() else "no such file",
            GET_CORPUS,
            CORPUS_BYTES,
            corpus.parent,
        ),
        Item(
            f"retrieval index {index}",
            "" if index.is_file() else "no such file",
            GET_INDEX,
            2 * INDEX_BYTES,
            index.parent,
        ),
    ]


def location(section: str, key: str, value: str, experiment: Experiment) -> Item:
    """A file that the parameters name and that does not exist."""
    if "toolmind" in value:
        command, size = GET_TOOLMIND, TOOLMIND_BYTES
    elif "15_static_evaluation" in value:
        command, size = "python run_all.py --domain search --only 01,15", 0
    elif (section, key) == ("retrieval", "index"):
        command, size = (
            (
                "python -m alar.domains.search.index --corpus"
                f" {experiment.retrieval.corpus or 'CORPUS.jsonl'} --index {value} --model"
                f" {experiment.retrieval.model}"
            ),
            0,
        )
    else:
        command, size = f"put the file there, or correct {section}.{key}", 0
    return Item(
        f"{section}.{key}: {value}",
        "does not exist",
        command,
        size,
        Path(value).expanduser().absolute().parent,
    )

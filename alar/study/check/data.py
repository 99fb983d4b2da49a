"""What an experiment reads from outside the repository, and the commands that fetch it.

The checks only look at files: the hub's cache, the cache of `datasets`, and the folders that the
parameters name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from alar.domains.search.datasets import FLASHRAG, SEARCH_R1_TRAIN, published_sizes
from alar.domains.static.sets import PUBLISHED
from alar.study.check.findings import Finding
from alar.study.params import Absent
from alar.study.params.sections import Experiment, Retrieval

WIKI18 = Path("data/wiki-18")  # below the repository: files of the retrieval server
CORPUS_FILE, INDEX_FILE = "wiki-18.jsonl", "e5_Flat.index"
TRAINING_SET = "nq_hotpotqa_train"  # the name under which `load_questions` knows it

# Bytes to download. The index has 21,015,324 passages of 768 float32 numbers. It is joined from
# parts, which take as much space again. The others are rounded up from the hub's listings.
INDEX_BYTES = 2 * 21_015_324 * 768 * 4
CORPUS_BYTES = 20 * 10**9
TOOLMIND_BYTES = 10 * 10**9
SET_BYTES = 10**8  # of one question or answer set
E5_BYTES = 450_000_000
LINGUA_BYTES = 2_240_000_000  # XLM-RoBERTa large in float32

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


def hub_folder(name: str) -> Path | None:
    """A hub model's folder in the local cache; None if the cache does not have it.

    A model counts as there with its config.json; `missing_files` looks at the rest. (The hub's own
    `snapshot_download` also wants files that no model needs, such as the README.)
    """
    try:
        config = try_to_load_from_cache(name, "config.json")  # never asks the network
    except HFValidationError:
        return None
    return Path(config).parent if isinstance(config, str) else None


def missing_files(folder: Path) -> list[str]:
    """Names of the files that a checkpoint folder lacks: config, tokenizer, weights."""
    needed = ["config.json", "tokenizer_config.json"]
    # The order in which transformers looks for weights.
    weights = [
        name
        for kind in ("model.safetensors", "pytorch_model.bin")
        for name in (kind, f"{kind}.index.json")
        if (folder / name).exists()
    ]
    if not weights:
        needed.append("model.safetensors")
    elif weights[0].endswith(".index.json"):  # a checkpoint in several files: weight → file
        shards = json.loads((folder / weights[0]).read_text(encoding="utf-8"))["weight_map"]
        needed += sorted(set(shards.values()))
    return [name for name in needed if not (folder / name).exists()]


def hub_model(what: str, name: str, size: int = 0) -> Finding:
    """Finding on a model of `size` bytes that the parameters name: a local folder or a hub
    model."""
    local = Path(name).is_dir()  # a local folder cannot be downloaded
    folder = Path(name) if local else hub_folder(name)
    text = f"{what} {name}"
    if folder is None:
        text += f": not in the cache {constants.HF_HUB_CACHE}"
    elif missing := missing_files(folder):
        text += f": {', '.join(missing)} not in {folder}"
    else:
        return Finding("data", text)
    remedy = "name a whole checkpoint folder" if local else f"hf download {name}"
    return Finding("data", text, remedy, 0 if local else size, Path(constants.HF_HUB_CACHE))


def hub_set(what: str, hub: str, config: str, load: str) -> Finding:
    """Finding on a data set in the cache of `datasets`. `load` is the Python code that downloads
    it."""
    import datasets  # slow to import, and few checks need it
    from datasets.naming import camelcase_to_snakecase

    cache = Path(datasets.config.HF_DATASETS_CACHE)
    owner, name = hub.split("/")
    # <owner>___<name>/<config>/<version>/<hash>/*.arrow
    folder = cache / f"{owner}___{camelcase_to_snakecase(name)}" / config
    if any(folder.glob("*/*/*.arrow")):
        return Finding("data", what)
    return Finding(
        "data", f"{what}: not in the cache {cache}", f'python -c "{load}"', SET_BYTES, cache
    )


def hub_dataset_file(what: str, hub: str, file: str) -> Finding:
    """Finding on one file of a data set in the hub's cache."""
    text, cache = f"{what} ({hub})", Path(constants.HF_HUB_CACHE)
    if isinstance(try_to_load_from_cache(hub, file, repo_type="dataset"), str):
        return Finding("data", text)
    fetch = f"hf download {hub} {file} --repo-type dataset"
    return Finding("data", f"{text}: not in the cache {cache}", fetch, SET_BYTES, cache)


def question_sets(names: Iterable[str]) -> Iterator[Finding]:
    """Findings on those of `names` that are published sets of the search domain."""
    for name in dict.fromkeys(names):
        load = f"from alar.domains.search.datasets import load_questions; load_questions('{name}')"
        if name == TRAINING_SET:
            yield hub_dataset_file(f"question set {name}", SEARCH_R1_TRAIN, "train.parquet")
        elif name in published_sizes:
            what = f"question set {name} ({FLASHRAG}, {published_sizes[name]:,} questions)"
            yield hub_set(what, FLASHRAG, name, load)


def answer_sets(names: Iterable[str]) -> Iterator[Finding]:
    """Findings on those of `names` that are published answer datasets."""
    for name in dict.fromkeys(names):
        if name in PUBLISHED:
            hub, config = PUBLISHED[name].hub, PUBLISHED[name].config or "default"
            load = f"from alar.domains.static.sets import load_questions; load_questions('{name}')"
            yield hub_set(f"answer dataset {name} ({hub})", hub, config, load)


def wikipedia(given: Retrieval, root: Path) -> Iterator[Finding]:
    """Findings on the corpus and the index of a retrieval server on this machine."""
    files = {
        "corpus": (given.corpus, CORPUS_FILE, GET_CORPUS, CORPUS_BYTES),
        "index": (given.index, INDEX_FILE, GET_INDEX, INDEX_BYTES),
    }
    # `named` is the file of the parameters; `usual` is its name in our own folder.
    for what, (named, usual, command, size) in files.items():
        path = Path(named) if named else root / WIKI18 / usual
        text = f"retrieval {what} {path}"
        if path.is_file():
            yield Finding("data", text)
        else:
            yield Finding("data", f"{text}: no such file", command, size, path.parent)


def absent_location(place: Absent, experiment: Experiment) -> Finding:
    """Finding on a file or folder that the parameters name but that does not exist."""
    section, key, value = place
    size = 0
    if "toolmind" in value:  # by the folder's usual name, data/toolmind
        command, size = GET_TOOLMIND, TOOLMIND_BYTES
    elif "15_static_evaluation" in value:  # the run of notebook 15 writes it
        command = "python run_all.py --domain search --only 01,15"
    elif (section, key) == ("retrieval", "index"):
        given = experiment.retrieval
        command = (
            f"python -m alar.domains.search.index --corpus {given.corpus or 'CORPUS.jsonl'}"
            f" --index {value} --model {given.model}"
        )
    else:
        command = f"put the file there, or correct {section}.{key}"
    folder = Path(value).expanduser().absolute().parent
    return Finding("data", f"{section}.{key}: {value}: does not exist", command, size, folder)

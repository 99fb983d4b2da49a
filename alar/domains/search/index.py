"""FAISS index files: build one from a corpus, open one, and the command for the first.

    python -m alar.domains.search.index --corpus wiki-18.jsonl --index e5_Flat.index --kind flat
    --model intfloat/e5-base-v2

Row i of an index is line i of its corpus, scores are inner products: the files of Search-R1 and
FlashRAG open as they are. Encoding takes hours on a large corpus, so the vectors go to a scratch
file beside the index and a killed build goes on from the last finished block. Kinds, with the size
of wiki-18 (21 M passages, dimension 768):

    flat   exact, 62 GB
    hnsw   approximate and fast, flat's size and 5 GB of links
    sq8    exact search over 8-bit components, 16 GB

Any of them is built in memory of its own size; opened with `mmap` it is read from disk page by
page. Beside the index stands `<index>.json`, which says what encoder made it; an index without it
is taken on trust.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import faiss
import numpy as np

from alar.domains.search.corpus import Corpus, RetrievalError
from alar.domains.search.encoders import E5Encoder, Encoder

KINDS = {"flat": "Flat", "hnsw": "HNSW32,Flat", "sq8": "SQ8"}


def make_index(
    vectors: np.ndarray, kind: str = "flat", *, ef_construction: int = 128, block: int = 65536
) -> faiss.Index:
    """Index float32 `vectors` [n, dimension] by inner product; `vectors` may be memory-mapped."""
    if kind not in KINDS:
        raise ValueError(f"unknown kind of index {kind!r}: one of {', '.join(KINDS)}")
    index = faiss.index_factory(vectors.shape[1], KINDS[kind], faiss.METRIC_INNER_PRODUCT)
    if kind == "hnsw":
        index.hnsw.efConstruction = ef_construction
    if not index.is_trained:
        spread = np.linspace(0, len(vectors) - 1, min(len(vectors), 2 * block)).astype(np.int64)
        index.train(np.ascontiguousarray(vectors[spread], dtype=np.float32))
    for start in range(0, len(vectors), block):
        index.add(np.ascontiguousarray(vectors[start : start + block], dtype=np.float32))
    return index


def build_index(
    corpus: Corpus,
    encoder: Encoder,
    path: str | Path,
    *,
    kind: str = "flat",
    block: int = 4096,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Encode `corpus` in blocks, index it and write `path` and `path`.json; returns the path.

    A build that was stopped goes on from its last finished block, if corpus and encoder are the
    same; else RetrievalError names the scratch file to delete. `progress(done, total)` is called
    after each block.
    """
    path = Path(path)
    if kind not in KINDS:
        raise ValueError(f"unknown kind of index {kind!r}: one of {', '.join(KINDS)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    vectors, scratch, state_file = _encode_resumably(corpus, encoder, path, block, progress)
    index = make_index(vectors, kind)
    partial = path.with_name(path.name + ".partial")
    faiss.write_index(index, str(partial))
    facts = {
        "encoder": encoder.name,
        "kind": kind,
        "rows": len(corpus),
        "dimension": index.d,
        "corpus": corpus.path.name,
    }
    _write_json(_facts_file(path), facts)
    partial.replace(path)
    del vectors  # unmaps the scratch file before it goes
    scratch.unlink()
    state_file.unlink()
    return path


def _encode_resumably(
    corpus: Corpus,
    encoder: Encoder,
    path: Path,
    block: int,
    progress: Callable[[int, int], None] | None,
) -> tuple[np.ndarray, Path, Path]:
    scratch = path.with_name(path.name + ".vectors.npy")
    state_file = path.with_name(path.name + ".progress.json")
    job = {"encoder": encoder.name, "rows": len(corpus), "bytes": corpus.path.stat().st_size}
    done, vectors = 0, None
    if state_file.exists() and scratch.exists():
        state = json.loads(state_file.read_text())
        done = state.pop("done")
        if state != job:
            raise RetrievalError(
                f"{scratch}: left by a build with another corpus or encoder ({state}, now {job}); "
                f"delete it and {state_file.name} to start again"
            )
        vectors = np.load(scratch, mmap_mode="r+")
    for start in range(done, len(corpus), block):
        encoded = encoder.encode_passages(
            [passage.contents for passage in corpus[start : start + block]]
        )
        if vectors is None:
            shape = (len(corpus), encoded.shape[1])
            vectors = np.lib.format.open_memmap(scratch, mode="w+", dtype=np.float32, shape=shape)
        vectors[start : start + len(encoded)] = encoded
        vectors.flush()
        _write_json(state_file, job | {"done": start + len(encoded)})
        if progress:
            progress(start + len(encoded), len(corpus))
    return vectors, scratch, state_file


def open_index(
    path: str | Path, *, encoder: Encoder | None = None, mmap: bool = False, ef_search: int = 128
) -> faiss.Index:
    """Read an inner-product index; RetrievalError if it is missing, damaged, of another metric or
    another encoder's."""
    path = Path(path)
    if not path.is_file():
        raise RetrievalError(
            f"{path}: no such index; build it: python -m alar.domains.search.index --corpus"
            f" CORPUS.jsonl --index {path}"
        )
    try:
        index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC if mmap else 0)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1]
        raise RetrievalError(
            f"{path}: not a readable FAISS index ({reason}); build or download it again"
        ) from error
    if index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise RetrievalError(
            f"{path}: the index does not score by inner product; build it again with this command's"
            " kinds"
        )
    facts_file = _facts_file(path)
    if encoder is not None and facts_file.exists():
        made_by = json.loads(facts_file.read_text())["encoder"]
        if made_by != encoder.name:
            raise RetrievalError(
                f"{path}: built with the encoder {made_by!r}, queries would be encoded with"
                f" {encoder.name!r}; use the same"
            )
    if isinstance(index, faiss.IndexHNSW):
        index.hnsw.efSearch = ef_search
    return index


def to_gpus(index: faiss.Index) -> faiss.Index:
    """Shard `index` over all GPUs in float16; RetrievalError where FAISS sees none."""
    if faiss.get_num_gpus() == 0:
        raise RetrievalError(
            "FAISS sees no GPU: install a GPU build of faiss, or search on the CPU (no --gpu)"
        )
    options = faiss.GpuMultipleClonerOptions()
    options.shard = True
    options.useFloat16 = True
    return faiss.index_cpu_to_all_gpus(index, co=options)


def _facts_file(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _write_json(path: Path, record: dict) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(record))
    partial.replace(path)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m alar.domains.search.index", description="Build a FAISS index from a corpus."
    )
    parser.add_argument("--corpus", required=True, help='JSONL with "id" and "contents"')
    parser.add_argument("--index", required=True, help="file to write")
    parser.add_argument("--kind", default="flat", choices=list(KINDS))
    parser.add_argument(
        "--model", default="intfloat/e5-base-v2", help="hub id or folder of the text encoder"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, …")
    parser.add_argument(
        "--dtype", default="auto", choices=["auto", "float32", "float16", "bfloat16"]
    )
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument(
        "--max-length", type=int, default=256, help="tokens of a passage that are read"
    )
    options = parser.parse_args(arguments)
    try:
        corpus = Corpus(options.corpus)
        encoder = E5Encoder(
            options.model,
            device=options.device,
            dtype=options.dtype,
            batch_size=options.batch_size,
            max_length=options.max_length,
        )

        def show(done: int, total: int) -> None:
            print(
                f"\rencoded {done:,} of {total:,} passages",
                end="" if done < total else "\n",
                flush=True,
            )

        path = build_index(corpus, encoder, options.index, kind=options.kind, progress=show)
    except RetrievalError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{path}: {options.kind}, {len(corpus):,} rows, {os.path.getsize(path) / 1e6:,.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())

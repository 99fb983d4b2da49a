"""FAISS index files: build one from a corpus, open one, and the command that builds.

    python -m alar.domains.search.index --corpus wiki-18.jsonl --index e5_Flat.index

Row i of an index is line i of its corpus, and scores are inner products. The index files of
Search-R1 and FlashRAG are the same and open as they are. Encoding a large corpus takes hours. So
every finished block of vectors is a file of its own, and a killed build goes on with the next
block. Kinds, with the size for wiki-18 (21 M passages, dimension 768):

    flat   exact, 62 GB
    hnsw   approximate and fast, the size of flat and 5 GB of links
    sq8    exact search over 8-bit components, 16 GB

An index is built in memory. If it is opened with `mmap`, it is read from disk page by page. The
file `<index>.json` beside it names its encoder; an index without that file is trusted.
"""

import argparse
import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import faiss
import numpy as np

from alar.domains.search.corpus import Corpus, RetrievalError
from alar.domains.search.encoders import E5Encoder, Encoder
from alar.files import replacing, write_json

# kind → FAISS's factory string. HNSW32 keeps 32 links per vector; SQ8 keeps 8 bits per component.
KINDS = {"flat": "Flat", "hnsw": "HNSW32,Flat", "sq8": "SQ8"}
TRAINING_ROWS = 131_072  # sq8 takes its ranges from so many rows
HNSW_WIDTH = 128  # candidates while building and while searching; more is slower and more exact


def make_index(blocks: Sequence[np.ndarray], kind: str = "flat") -> faiss.Index:
    """Index blocks of float32 vectors, each (rows, dimension), by inner product."""
    if kind not in KINDS:
        raise ValueError(f"unknown kind of index {kind!r}: one of {', '.join(KINDS)}")
    index = faiss.index_factory(blocks[0].shape[1], KINDS[kind], faiss.METRIC_INNER_PRODUCT)
    if kind == "hnsw":
        # Candidates that a new vector is compared with before it is linked.
        index.hnsw.efConstruction = HNSW_WIDTH
    if not index.is_trained:  # sq8 has to know the range of each component
        step = -(-sum(len(block) for block in blocks) // TRAINING_ROWS)  # every step-th, rounded up
        index.train(np.concatenate([block[::step] for block in blocks]))
    # Block by block: memory-mapped blocks are then never in memory together.
    for block in blocks:
        index.add(np.ascontiguousarray(block))
    return index


def build_index(
    corpus: Corpus,
    encoder: Encoder,
    path: str | Path,
    *,
    kind: str = "flat",
    block: int = 16384,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Encode `corpus` in blocks of passages, index it, write `path` and `path`.json; return `path`.

    If corpus, encoder and block size are the same, a stopped build goes on after its last finished
    block; otherwise it starts anew. `progress(done, total)` is called after each block, with
    numbers of passages.
    """
    path = Path(path)
    scratch = path.with_name(f"{path.name}.{_encoding_key(corpus, encoder, block)}.blocks")
    files = []
    for start in range(0, len(corpus), block):
        passages = corpus[start : start + block]
        file = scratch / f"{start:012d}.npy"
        if not file.exists():
            vectors = encoder.encode_passages([passage.contents for passage in passages])
            # Whole or not at all: a half-written block would pass for a finished one.
            with replacing(file) as aside, aside.open("wb") as stream:
                np.save(stream, vectors)
        files.append(file)
        if progress:
            progress(start + len(passages), len(corpus))
    index = make_index([np.load(file, mmap_mode="r") for file in files], kind)
    facts = {"encoder": encoder.name, "kind": kind, "rows": len(corpus), "corpus": corpus.path.name}
    write_json(_facts_file(path), facts)
    with replacing(path) as aside:
        faiss.write_index(index, str(aside))
    # Only now, so that a wrong option never throws away hours of somebody's encoding.
    for left in path.parent.glob(f"{path.name}.*.blocks"):
        shutil.rmtree(left)
    return path


def _encoding_key(corpus: Corpus, encoder: Encoder, block: int) -> str:
    """A hash of what the encoded blocks of a build depend on.

    The size stands for the content of the corpus: reading 14 GB only to hash them takes minutes.
    """
    facts = [encoder.name, len(corpus), corpus.path.stat().st_size, block]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]


def open_index(path: str | Path, *, encoder: Encoder, mmap: bool = False) -> faiss.Index:
    """Read an inner-product index.

    Raises RetrievalError if it is missing, damaged, of another metric or made by another encoder.
    """
    path = Path(path)
    if not path.is_file():
        raise RetrievalError(
            f"{path}: no such index; build it: python -m alar.domains.search.index --corpus"
            f" CORPUS.jsonl --index {path}"
        )
    try:
        index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC if mmap else 0)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1]  # one line will do in a message
        raise RetrievalError(
            f"{path}: not a readable FAISS index ({reason}); build or download it again"
        ) from error
    if index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise RetrievalError(f"{path}: the index does not score by inner product; build it again")
    if _facts_file(path).exists():
        made_by = json.loads(_facts_file(path).read_text())["encoder"]
        if made_by != encoder.name:
            raise RetrievalError(
                f"{path}: built with the encoder {made_by!r}, but queries would be encoded with"
                f" {encoder.name!r}; use the same"
            )
    # FAISS's default of 16 candidates misses more of the nearest vectors.
    if isinstance(index, faiss.IndexHNSW):
        index.hnsw.efSearch = HNSW_WIDTH
    return index


def to_gpus(index: faiss.Index) -> faiss.Index:
    """Spread `index` over all GPUs in float16. Raises RetrievalError where FAISS sees none."""
    if faiss.get_num_gpus() == 0:
        raise RetrievalError(
            "FAISS sees no GPU: install a GPU build of faiss, or search on the CPU (no --gpu)"
        )
    options = faiss.GpuMultipleClonerOptions()
    options.shard = True  # each GPU holds a part of the rows, not a copy of all
    options.useFloat16 = True  # half of the memory
    return faiss.index_cpu_to_all_gpus(index, co=options)


def _facts_file(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m alar.domains.search.index", description="Build a FAISS index from a corpus."
    )
    option = parser.add_argument
    option("--corpus", required=True, help='JSONL with "id" and "contents"')
    option("--index", required=True, help="file to write")
    option("--kind", default="flat", choices=list(KINDS))
    option("--model", default="intfloat/e5-base-v2", help="hub id or folder of the text encoder")
    option("--device", default="auto", help="auto, cpu, cuda, cuda:1, …")
    option("--dtype", default="auto", choices=["auto", "float32", "float16", "bfloat16"])
    option("--batch-size", type=int, default=256)
    option("--max-length", type=int, default=256, help="tokens of a passage that are read")
    options = parser.parse_args(arguments)

    def show(done: int, total: int) -> None:
        end = "" if done < total else "\n"
        print(f"\rencoded {done:,} of {total:,} passages", end=end, flush=True)

    try:
        corpus = Corpus(options.corpus)
        encoder = E5Encoder(
            options.model,
            device=options.device,
            dtype=options.dtype,
            batch_size=options.batch_size,
            max_length=options.max_length,
        )
        path = build_index(corpus, encoder, options.index, kind=options.kind, progress=show)
    except RetrievalError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    size = path.stat().st_size / 1e6
    print(f"{path}: {options.kind}, {len(corpus):,} rows, {size:,.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Encoders, corpora, index files and the retriever, each against a slow and obvious twin."""

import json
import os
import subprocess
import sys
from pathlib import Path

import faiss
import numpy as np
import pytest
import torch
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.metrics.pairwise import cosine_similarity
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel, PreTrainedTokenizerFast

from alar.domains.search import encoders, index, retriever
from alar.domains.search.corpus import Corpus, Hit, Passage, RetrievalError
from alar.domains.search.encoders import E5Encoder, TfidfEncoder
from alar.domains.search.retriever import Retriever

WORDS = (
    "peru lima sol currency language city river old new large small north south the of is in and"
    " spoken used".split()
)


def make_passages(count: int, seed: int = 0, words: list[str] = WORDS) -> list[Passage]:
    rng = np.random.default_rng(seed)
    return [
        Passage(
            str(row),
            " ".join(rng.choice(words, 2)),
            " ".join(rng.choice(words, rng.integers(5, 30))),
        )
        for row in range(count)
    ]


def write_corpus(path: Path, passages: list[Passage]) -> Path:
    lines = [json.dumps({"id": p.id, "contents": p.contents}, ensure_ascii=False) for p in passages]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def ids(hits: list[list[Hit]]) -> list[list[str]]:
    return [[hit.passage.id for hit in found] for found in hits]


class TableEncoder:
    """Looks vectors up: text → vector."""

    name = "table"
    min_score = -float("inf")

    def __init__(self, table: dict[str, np.ndarray]):
        self.table = table

    def encode_passages(self, texts):
        return np.stack([self.table[text] for text in texts]).astype(np.float32)

    encode_queries = encode_passages


# Passages


def test_contents_and_back():
    passage = Passage("7", 'The "A" team', "Line one.\nLine two.")
    assert passage.contents == '"The "A" team"\nLine one.\nLine two.'
    assert Passage.from_contents("7", passage.contents) == passage
    assert Passage.from_contents(7, "no title here").contents == "no title here"


# TF-IDF


def tfidf_reference(passages, queries, title_weight):
    """Scores by scikit-learn alone, passages against queries: [queries, passages]."""
    vectorizer = TfidfVectorizer(
        token_pattern=r"(?u)\w+", strip_accents="unicode", sublinear_tf=True
    )
    vectorizer.fit([passage.contents for passage in passages])
    vectorizer.idf_ = vectorizer.idf_**0.5
    queries = vectorizer.transform(queries)
    titles = cosine_similarity(
        queries, vectorizer.transform([passage.title for passage in passages])
    )
    texts = cosine_similarity(queries, vectorizer.transform([passage.text for passage in passages]))
    return title_weight * titles + (1 - title_weight) * texts


def test_tfidf_search_equals_brute_force_cosines_with_ties_in_corpus_order():
    passages = make_passages(300)
    queries = [passage.text[:40] for passage in passages[:50]] + [
        "Peru currency",
        "LIMA",
        "sol, sol",
    ]
    expected = tfidf_reference(passages, queries, 0.8)
    found = Retriever(passages, TfidfEncoder(title_weight=0.8)).search(queries, 7)
    for scores, hits in zip(expected, found, strict=True):
        order = np.lexsort((np.arange(len(scores)), -scores.round(6)))[:7]
        assert ids([hits])[0] == [str(row) for row in order if scores[row] > 1e-6]
        np.testing.assert_allclose(
            [hit.score for hit in hits], scores[order][: len(hits)], atol=2e-6
        )


def test_a_projected_vocabulary_keeps_the_inner_products():
    rng = np.random.default_rng(0)
    names = ["".join(rng.choice(list("abcdefghijklmnop"), 7)) for _ in range(4000)]
    passages = make_passages(400, words=names)
    exact = TfidfEncoder(dimension=100_000)
    projected = TfidfEncoder(dimension=2048)
    contents = [passage.contents for passage in passages]
    queries = [passage.title for passage in passages[:50]]
    vectors = projected.fit(contents).encode_passages(contents)
    assert vectors.shape == (400, 2048) and vectors.dtype == np.float32
    expected = exact.fit(contents).encode_queries(queries) @ exact.encode_passages(contents).T
    error = projected.encode_queries(queries) @ vectors.T - expected
    assert np.abs(error).mean() < 0.01 and np.abs(error).max() < 0.35


def test_no_two_words_share_all_their_coordinates():
    projection = encoders._sparse_projection([f"word{i}" for i in range(20_000)], 2048)
    overlap = (projection @ projection[:300].T).toarray()
    np.fill_diagonal(overlap[:300], 0)
    assert np.abs(overlap).max() < 0.99


def test_the_titled_passage_wins_over_passages_that_mention_the_words():
    passages = [
        Passage(
            "0",
            "Lima",
            "Lima is the largest city of Peru. Peru, currency. Peru, currency. Peru, currency.",
        ),
        Passage(
            "1", "Peru", "Peru is a country. The currency of Peru is the sol. Its currency is old."
        ),
        Passage("2", "Peru, currency", "It is the sol, adopted in 1991."),
        Passage("3", "Peru, languages", "The currency of thought in Peru is Spanish."),
        Passage("4", "Chile, currency", "The currency of Chile, not of Peru, is the peso."),
    ]
    lands = ["Bolivia", "Ecuador", "Brazil", "Panama", "Cuba", "Kenya", "Norway"]
    passages += [
        Passage(land, f"{land}, currency", f"The currency of {land} is old.") for land in lands
    ]
    search = Retriever(passages, TfidfEncoder()).search
    assert ids(
        search(
            ["Peru currency", "currency of Peru", "what is the currency of Peru?", "lima", "peru"],
            1,
        )
    ) == [["2"], ["2"], ["2"], ["0"], ["1"]]


def test_every_passage_of_the_embedded_world_is_found_by_its_title():
    from alar.domains.search.world import world

    for name in ("real", "counterfactual-5"):
        passages = world(name).passages()
        found = retriever.open_retriever(passages=passages).search(
            [passage.title.replace(",", "") for passage in passages], 1
        )
        assert [hits[0].passage.title for hits in found] == [passage.title for passage in passages]


def test_results_do_not_depend_on_the_batch():
    passages = make_passages(200)
    search = Retriever(passages, TfidfEncoder()).search
    queries = [passage.title for passage in passages[:100]]
    assert ids(search(queries, 5)) == [ids(search([query], 5))[0] for query in queries]


def test_ties_come_in_corpus_order_even_when_more_tie_than_are_asked_for():
    passages = [Passage(str(row), "", "other words") for row in range(40)]
    passages += [Passage(str(row), "", "one text") for row in range(40, 240)]
    search = Retriever(passages, TfidfEncoder()).search
    for k in (1, 3, 50, 200):
        assert ids(search(["one text"] * 3, k)) == [[str(40 + i) for i in range(k)]] * 3


def test_a_query_without_known_words_finds_nothing():
    search = Retriever(make_passages(30), TfidfEncoder()).search
    assert search(["", "  ?!", "zzz qqq", "peru"], 2)[:3] == [[], [], []]
    assert len(search(["peru"], 2)[0]) == 2
    assert search([], 2) == []


def test_k_beyond_the_corpus_gives_the_whole_corpus():
    passages = make_passages(5, words=["peru"])
    assert len(Retriever(passages, TfidfEncoder()).search(["peru"], 50)[0]) == 5


def test_vectors_do_not_depend_on_the_salt_of_the_process():
    code = (
        "from alar.domains.search.encoders import TfidfEncoder\nvectors ="
        " TfidfEncoder(dimension=16).encode_passages([f'word{i} word{i + 1}' for i in"
        " range(50)])\nprint(vectors.tobytes().hex())"
    )
    environment = os.environ | {
        "PYTHONHASHSEED": "7",
        "PYTHONPATH": str(Path(encoders.__file__).parents[3]),
    }
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    here = TfidfEncoder(dimension=16).encode_passages([f"word{i} word{i + 1}" for i in range(50)])
    assert run.stdout.strip() == here.tobytes().hex()


# Refusals


def test_duplicate_ids_are_named():
    with pytest.raises(RetrievalError, match="passages 1 and 3 .*'x'"):
        passages = [Passage(id, "", "text") for id in ("a", "x", "b", "x")]
        Retriever(passages, TfidfEncoder())


def test_an_empty_corpus_is_refused():
    with pytest.raises(RetrievalError, match="no passages"):
        Retriever([], TfidfEncoder())


def test_search_refuses_one_string_and_k_below_one():
    search = Retriever(make_passages(3), TfidfEncoder()).search
    with pytest.raises(TypeError, match="list of strings"):
        search("peru", 1)
    with pytest.raises(ValueError, match="k must"):
        search(["peru"], 0)


def test_an_index_of_another_corpus_is_refused():
    passages = make_passages(4)
    flat = faiss.IndexFlatIP(8)
    flat.add(np.zeros((3, 8), dtype=np.float32))
    with pytest.raises(RetrievalError, match="3 rows.*4 passages"):
        Retriever(passages, TfidfEncoder(), flat)


def test_an_encoder_of_another_dimension_is_refused():
    passages = make_passages(4)
    flat = faiss.IndexFlatIP(8)
    flat.add(np.ones((4, 8), dtype=np.float32))
    encoder = TfidfEncoder(dimension=4).fit([passage.contents for passage in passages])
    with pytest.raises(RetrievalError, match="dimension 4.*8"):
        Retriever(passages, encoder, flat).search(["peru"], 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "http"}, "retrieval.url"),
        ({"backend": "http", "url": "localhost:8000"}, "localhost:8000"),
        ({"backend": "tfidf"}, "retrieval.corpus"),
        ({"backend": "e5"}, "retrieval.corpus"),
        ({"backend": "tfidf", "corpus": "missing.jsonl"}, "missing.jsonl"),
        ({"backend": "tfidf", "passages": make_passages(3), "gpu": True}, "GPU"),
    ],
)
def test_build_says_what_is_missing(arguments, message):
    if arguments.get("gpu") and faiss.get_num_gpus():
        pytest.skip("there is a GPU")
    with pytest.raises(RetrievalError, match=message):
        retriever.open_retriever(**arguments)


def test_build_names_the_known_backends():
    with pytest.raises(ValueError, match="bm25.*tfidf, e5, http"):
        retriever.open_retriever("bm25", passages=make_passages(3))


# Corpus files


def test_a_corpus_file_reads_as_its_passages(tmp_path):
    passages = make_passages(50) + [Passage("é", "Zürich", "Zeile\nzwei • ✓")]
    path = write_corpus(tmp_path / "corpus.jsonl", passages)
    corpus = Corpus(path)
    assert len(corpus) == 51 and list(corpus) == passages
    assert corpus[-1] == passages[-1] and corpus[10:13] == passages[10:13]
    with pytest.raises(IndexError):
        corpus[51]
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    assert list(Corpus(path)) == passages


def test_line_offsets_are_right_across_chunks(tmp_path):
    passages = make_passages(200)
    corpus = Corpus(write_corpus(tmp_path / "corpus.jsonl", passages))
    np.testing.assert_array_equal(corpus._scan(chunk=7), corpus._offsets)


def test_opening_a_corpus_parses_one_line_only(tmp_path, monkeypatch):
    path = write_corpus(tmp_path / "corpus.jsonl", make_passages(500))
    parsed = []
    monkeypatch.setattr(
        "alar.domains.search.corpus.json.loads",
        lambda line: parsed.append(line) or {"id": 0, "contents": ""},
    )
    Corpus(path)
    assert len(parsed) == 1


def test_offsets_are_kept_and_made_anew_when_the_corpus_changed(tmp_path, monkeypatch):
    path = write_corpus(tmp_path / "corpus.jsonl", make_passages(20))
    cache = tmp_path / "corpus.jsonl.offsets.npy"
    Corpus(path)
    with monkeypatch.context() as patched:
        patched.setattr(Corpus, "_scan", lambda self: pytest.fail("scanned again"))
        assert len(Corpus(path)) == 20
    write_corpus(path, make_passages(30))
    assert len(Corpus(path)) == 30
    cache.write_bytes(b"damaged")
    assert len(Corpus(path)) == 30


def test_a_cut_off_corpus_is_refused_with_file_and_line(tmp_path):
    path = write_corpus(tmp_path / "corpus.jsonl", make_passages(20))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(RetrievalError, match=r"corpus\.jsonl:20: .*cut off"):
        Corpus(path)


@pytest.mark.parametrize("line", ["{broken", '{"id": 3}', '{"id": 3, "contents": 4}', "[1]", ""])
def test_a_broken_line_is_named(tmp_path, line):
    path = write_corpus(tmp_path / "corpus.jsonl", make_passages(20))
    lines = path.read_text().splitlines()
    lines[12] = line
    path.write_text("\n".join(lines) + "\n")
    corpus = Corpus(path)
    assert corpus[11].id == "11"
    with pytest.raises(RetrievalError, match=r"corpus\.jsonl:13: "):
        corpus[12]


def test_missing_empty_and_compressed_corpora_are_refused(tmp_path):
    with pytest.raises(RetrievalError, match="none.jsonl"):
        Corpus(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(RetrievalError, match="empty"):
        Corpus(tmp_path / "empty.jsonl")
    (tmp_path / "corpus.jsonl.gz").write_bytes(b"\x1f\x8b\x08....")
    with pytest.raises(RetrievalError, match="compressed"):
        Corpus(tmp_path / "corpus.jsonl.gz")


# E5


@pytest.fixture(scope="module")
def tiny_bert(tmp_path_factory) -> str:
    """A folder with a random BERT and a word-level tokenizer with [CLS] and [SEP]."""
    folder = tmp_path_factory.mktemp("bert")
    vocabulary = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "query",
        "passage",
        ":",
        '"',
        ".",
        ",",
        *WORDS,
    ]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        initializer_range=0.5,
    )
    BertModel(config).save_pretrained(folder)
    return str(folder)


def e5_reference(folder: str, prefix: str, texts: list[str], max_length: int) -> np.ndarray:
    """One text at a time, no padding, no mask."""
    tokenizer, model = (
        AutoTokenizer.from_pretrained(folder),
        AutoModel.from_pretrained(folder).eval(),
    )
    vectors = []
    for text in texts:
        token_ids = tokenizer(prefix + text)["input_ids"]
        if len(token_ids) > max_length:
            token_ids = token_ids[: max_length - 1] + token_ids[-1:]
        with torch.no_grad():
            hidden = model(input_ids=torch.tensor([token_ids])).last_hidden_state[0]
        mean = hidden.mean(dim=0)
        vectors.append((mean / mean.norm()).numpy())
    return np.stack(vectors)


@pytest.mark.parametrize("max_length", [12, 256])
def test_e5_equals_encoding_one_text_at_a_time(tiny_bert, max_length):
    texts = [passage.contents for passage in make_passages(23)] + [" ".join(WORDS * 20), "peru"]
    encoder = E5Encoder(tiny_bert, device="cpu", batch_size=4, max_length=max_length)
    for kind, encode in (
        ("passage: ", encoder.encode_passages),
        ("query: ", encoder.encode_queries),
    ):
        vectors = encode(texts)
        assert vectors.dtype == np.float32
        np.testing.assert_allclose(
            vectors, e5_reference(tiny_bert, kind, texts, max_length), atol=2e-6
        )
    assert np.abs(encoder.encode_passages(texts) - encoder.encode_queries(texts)).max() > 0.01


def test_e5_in_half_precision_still_gives_unit_float32_vectors(tiny_bert):
    texts = [passage.contents for passage in make_passages(9)]
    vectors = E5Encoder(tiny_bert, device="cpu", dtype="bfloat16").encode_passages(texts)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert (vectors * e5_reference(tiny_bert, "passage: ", texts, 256)).sum(axis=1).min() > 0.99


def test_e5_gives_a_blank_query_no_direction_and_accepts_no_texts(tiny_bert):
    encoder = E5Encoder(tiny_bert, device="cpu")
    assert not encoder.encode_queries(["  ", "peru"])[0].any()
    assert encoder.encode_queries([]).shape == (0, 32)


def test_a_missing_encoder_is_an_error_with_a_remedy(tmp_path):
    with pytest.raises(RetrievalError, match="retrieval.model"):
        E5Encoder(str(tmp_path / "nothing"), device="cpu")


# Index files


def unit_vectors(count: int, dimension: int = 24, seed: int = 0) -> np.ndarray:
    vectors = np.random.default_rng(seed).normal(size=(count, dimension)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.mark.parametrize(("kind", "recall"), [("flat", 1.0), ("hnsw", 0.97), ("sq8", 0.9)])
@pytest.mark.parametrize("mmap", [False, True])
def test_index_kinds_find_what_brute_force_finds(tmp_path, kind, recall, mmap):
    vectors, queries = unit_vectors(3000), unit_vectors(60, seed=1)
    blocks = [vectors[:1000], vectors[1000:2000], vectors[2000:]]
    faiss.write_index(index.make_index(blocks, kind), str(tmp_path / "index"))
    opened = index.open_index(tmp_path / "index", encoder=TableEncoder({}), mmap=mmap)
    scores, rows = opened.search(queries, 5)
    exact = np.argsort(-(queries @ vectors.T), axis=1)[:, :5]
    shared = [len(set(found) & set(best)) / 5 for found, best in zip(rows, exact, strict=True)]
    assert np.mean(shared) >= recall
    np.testing.assert_allclose(
        scores, np.take_along_axis(queries @ vectors.T, rows, axis=1), atol=0.02
    )


class CountingEncoder(TableEncoder):
    """Stops with an interrupt after `budget` texts."""

    def __init__(self, table, budget=10**9):
        super().__init__(table)
        self.encoded, self.budget = 0, budget

    def encode_passages(self, texts):
        if self.encoded + len(texts) > self.budget:
            raise KeyboardInterrupt
        self.encoded += len(texts)
        return super().encode_passages(texts)


@pytest.fixture
def table_corpus(tmp_path):
    passages = make_passages(100)
    vectors = unit_vectors(100)
    table = {passage.contents: vector for passage, vector in zip(passages, vectors, strict=True)}
    assert len(table) == 100
    return Corpus(write_corpus(tmp_path / "corpus.jsonl", passages)), table, vectors


def test_an_interrupted_build_goes_on_where_it_stopped_and_gives_the_same_index(
    tmp_path, table_corpus
):
    corpus, table, vectors = table_corpus
    path = tmp_path / "new" / "flat.index"
    first, second = CountingEncoder(table, budget=45), CountingEncoder(table)
    with pytest.raises(KeyboardInterrupt):
        index.build_index(corpus, first, path, block=10)
    assert not path.exists()
    seen = []
    index.build_index(
        corpus, second, path, block=10, progress=lambda done, total: seen.append((done, total))
    )
    assert (first.encoded, second.encoded) == (40, 60)
    assert seen[-1] == (100, 100)
    built = index.open_index(path, encoder=second)
    np.testing.assert_array_equal(built.reconstruct_n(0, 100), vectors)
    assert sorted(file.name for file in path.parent.iterdir()) == ["flat.index", "flat.index.json"]


def test_a_build_is_not_resumed_with_another_encoder_or_corpus(tmp_path, table_corpus):
    corpus, table, _ = table_corpus
    path = tmp_path / "flat.index"
    with pytest.raises(KeyboardInterrupt):
        index.build_index(corpus, CountingEncoder(table, budget=25), path, block=10)
    other = CountingEncoder(table)
    other.name = "other"
    index.build_index(corpus, other, path, block=10)
    assert other.encoded == 100
    assert sorted(file.name for file in tmp_path.iterdir() if "index" in file.name) == [
        "flat.index",
        "flat.index.json",
    ]


def test_an_index_of_another_encoder_is_refused(tmp_path, table_corpus):
    corpus, table, _ = table_corpus
    path = index.build_index(corpus, CountingEncoder(table), tmp_path / "flat.index")
    with pytest.raises(RetrievalError, match="table.*tfidf-"):
        index.open_index(path, encoder=TfidfEncoder())


def test_unusable_index_files_are_refused(tmp_path):
    with pytest.raises(RetrievalError, match="none.index.*python -m alar.domains.search.index"):
        index.open_index(tmp_path / "none.index", encoder=TableEncoder({}))
    path = tmp_path / "flat.index"
    faiss.write_index(index.make_index([unit_vectors(100)]), str(path))
    path.write_bytes(path.read_bytes()[:-500])
    for mmap in (False, True):
        with pytest.raises(RetrievalError, match="flat.index: .*not a readable"):
            index.open_index(path, mmap=mmap, encoder=TableEncoder({}))
    path.write_text("<html>not found</html>")
    with pytest.raises(RetrievalError, match="not a readable"):
        index.open_index(path, encoder=TableEncoder({}))
    faiss.write_index(faiss.IndexFlatL2(8), str(path))
    with pytest.raises(RetrievalError, match="inner product"):
        index.open_index(path, encoder=TableEncoder({}))
    with pytest.raises(ValueError, match="tree.*flat, hnsw, sq8"):
        index.make_index([unit_vectors(3)], "tree")


@pytest.mark.parametrize("kind", ["flat", "hnsw"])
def test_the_index_command_then_e5_search_equals_brute_force(tmp_path, tiny_bert, kind, capsys):
    passages = make_passages(60)
    corpus = write_corpus(tmp_path / "corpus.jsonl", passages)
    arguments = [
        "--corpus",
        str(corpus),
        "--index",
        str(tmp_path / "e5.index"),
        "--kind",
        kind,
        "--model",
        tiny_bert,
    ]
    assert index.main([*arguments, "--device", "cpu", "--batch-size", "16"]) == 0
    assert "60 rows" in capsys.readouterr().out
    search = retriever.open_retriever(
        "e5",
        corpus=str(corpus),
        index=str(tmp_path / "e5.index"),
        model=tiny_bert,
        device="cpu",
        mmap=True,
    ).search
    queries = ["peru currency", "lima river old"]
    scores = (
        e5_reference(tiny_bert, "query: ", queries, 256)
        @ e5_reference(tiny_bert, "passage: ", [passage.contents for passage in passages], 256).T
    )
    assert ids(search(queries, 3)) == [
        [str(row) for row in np.argsort(-row_scores)[:3]] for row_scores in scores
    ]
    in_memory = retriever.open_retriever("e5", passages=passages, model=tiny_bert, device="cpu")
    assert ids(in_memory.search(queries, 3)) == ids(search(queries, 3))


def test_a_longer_corpus_than_its_index_is_refused_with_both_numbers(tmp_path, tiny_bert):
    corpus = write_corpus(tmp_path / "corpus.jsonl", make_passages(10))
    arguments = [
        "--corpus",
        str(corpus),
        "--index",
        str(tmp_path / "e5.index"),
        "--model",
        tiny_bert,
    ]
    assert index.main([*arguments, "--device", "cpu"]) == 0
    write_corpus(corpus, make_passages(12))
    with pytest.raises(RetrievalError, match=r"10 rows.*corpus\.jsonl.*12 passages"):
        retriever.open_retriever(
            "e5",
            corpus=str(corpus),
            index=str(tmp_path / "e5.index"),
            model=tiny_bert,
            device="cpu",
        )
    with pytest.raises(RetrievalError, match="retrieval.index"):
        retriever.open_retriever("e5", corpus=str(corpus), model=tiny_bert)


def test_the_index_command_ends_with_the_error_and_code_1(tmp_path, capsys):
    assert (
        index.main(["--corpus", str(tmp_path / "none.jsonl"), "--index", str(tmp_path / "x")]) == 1
    )
    assert "none.jsonl: no such corpus" in capsys.readouterr().err

"""TokenSkip: LLMLingua-2's own thresholds, scores equal to slow ones, the condition's ids, and
labels of compressed turns."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alar import figures, protocol
from alar.domains.search.environment import SearchEnvironment
from alar.domains.search.questions import solved_questions
from alar.domains.tool.protocol import TOOL
from alar.methods.comparison import MethodComparison
from alar.methods.dual.codec import DualCodec
from alar.methods.samples import draw_samples
from alar.methods.tokenskip import measure
from alar.methods.tokenskip.collect import compressible, cot_tokens, thoughts_of
from alar.methods.tokenskip.compress import achieved_rates, compress, compressed_rows, token_counter
from alar.methods.tokenskip.examples import (
    conditioned,
    conditioned_form,
    drawn_ratios,
    example_at,
    prepared,
)
from alar.methods.tokenskip.scorers import Gain, Surprisal
from alar.methods.tokenskip.steps import Steps
from alar.methods.tokenskip.view import compression_view, struck
from alar.methods.tokenskip.words import (
    OPERATORS,
    Rules,
    Thought,
    Word,
    in_chunks,
    joined,
    kept_words,
    split_words,
)
from alar.model import save
from alar.records import Origin, Trajectory, TurnRecord, read_trajectories, write_trajectories
from alar.rollout.codec import Codec
from alar.rollout.engine import Sampling
from alar.rollout.hf import HFEngine
from alar.study.stage import open_stage

FREE = Rules((), False, False)
VOCABULARY = ["the", "a", "year", "so", "7", "19", "2013", "+", "=", "x2", "."]
OBSERVATION = "\n\n<information>Doc 1(Title: x) text</information>\n\n"


@pytest.fixture(scope="module")
def model(random_model):
    return random_model(num_latent=0)[0]


@pytest.fixture(scope="module")
def codec(tokenizer):
    return Codec(tokenizer)


@pytest.fixture(scope="module")
def trajectories(codec):
    """Solved questions as the base writes them, every turn in text."""
    found = []
    for solved in solved_questions("counterfactual-3", 24, 0):
        ids = codec.prompt(solved.question.text)
        origins, turns = [int(Origin.PROMPT)] * len(ids), []
        for number, step in enumerate(solved.steps):
            written, marks = codec.think_turn(
                step.thought, step.action, step.argument, first=number == 0
            )
            turns.append(
                TurnRecord(
                    len(ids), len(ids) + len(written), "think", step.action, step.argument, True
                )
            )
            ids, origins = ids + written, origins + [int(mark) for mark in marks]
            if step.action == "search":
                seen = codec.observation(OBSERVATION)
                ids, origins = ids + seen, origins + [int(Origin.OBSERVATION)] * len(seen)
        nothing = np.zeros((0, 0), np.float32)
        found.append(
            Trajectory(
                solved.question, ids, origins, [0.0] * len(ids), nothing, turns, "x", True, "answer"
            )
        )
    return found


@pytest.fixture(scope="module")
def rows(model, codec, trajectories):
    return compressed_rows(trajectories, Surprisal(model, codec), codec, (0.1, 0.5), Rules())


class FakeLingua:
    """What llmlingua's compressor needs besides its code: a tokenizer with one word per token, and
    given probabilities."""

    def __init__(self, words, scores, counts):
        self.words, self.scores, self.sizes = words, scores, dict(zip(words, counts))
        self.known = ["[PAD]", "[CLS]", "[SEP]", *dict.fromkeys(words)]

    def tokenize(self, text):
        return text.split(" ")

    def convert_tokens_to_ids(self, tokens):
        return [self.known.index(token) for token in tokens]

    def convert_ids_to_tokens(self, ids):
        return [self.known[i] for i in ids]

    def convert_tokens_to_string(self, tokens):
        return " ".join(tokens)

    def encode(self, word):  # the library's other tokenizer, which only counts
        return [0] * self.sizes.get(word, 1)

    def model(self, input_ids, attention_mask):
        p = torch.zeros(input_ids.shape, dtype=torch.float64) + 0.5
        p[0, 1 : 1 + len(self.scores)] = torch.tensor(self.scores, dtype=torch.float64)
        return SimpleNamespace(loss=None, logits=torch.stack([torch.log1p(-p), torch.log(p)], -1))

    def compressor(self):
        from llmlingua import PromptCompressor

        made = object.__new__(PromptCompressor)
        made.model_name, made.tokenizer, made.oai_tokenizer, made.model = (
            "bert-base-multilingual-cased",
            self,
            self,
            self.model,
        )
        made.special_tokens, made.added_tokens, made.device = (
            {"[PAD]", "[CLS]", "[SEP]"},
            [f"[NEW{i}]" for i in range(99)],
            "cpu",
        )
        made.max_seq_len, made.max_batch_size, made.max_force_token = len(self.words) + 3, 8, 99
        return made

    def probabilities(self):
        """The scores as the library sees them, rounded by its softmax."""
        ids = torch.zeros(1, len(self.words) + 2, dtype=torch.long)
        return torch.softmax(self.model(ids, None).logits, -1)[0, 1:-1, 1].tolist()


@settings(max_examples=60, deadline=None)
@given(
    chosen=st.lists(
        st.tuples(st.sampled_from(VOCABULARY), st.integers(1, 49)), min_size=1, max_size=24
    ),
    counts=st.lists(st.integers(1, 4), min_size=len(VOCABULARY), max_size=len(VOCABULARY)),
    rate=st.sampled_from([0.05, 0.1, 0.3, 0.5, 0.7, 0.9, 0.95]),
    force=st.sampled_from([(), ("+", "="), ("+", ".", "the")]),
    digits=st.booleans(),
    drop=st.booleans(),
)
def test_words_are_kept_as_llmlingua_keeps_them(chosen, counts, rate, force, digits, drop):
    pytest.importorskip("llmlingua", reason="the library is in requirements/core-nodeps.txt")
    words, size = [word for word, _ in chosen], dict(zip(VOCABULARY, counts))
    fake = FakeLingua(words, [score / 50 for _, score in chosen], [size[word] for word in words])
    theirs = fake.compressor().compress_prompt_llmlingua2(
        [" ".join(words)],
        rate=rate,
        force_tokens=list(force),
        force_reserve_digit=digits,
        drop_consecutive=drop,
        return_word_label=True,
    )
    labelled = [
        entry.split(" ") for entry in theirs["fn_labeled_original_prompt"].split("\t\t|\t\t")
    ]
    assert [word for word, _ in labelled] == words
    ours = kept_words(
        words,
        fake.probabilities(),
        [size[word] for word in words],
        rate,
        Rules(force, digits, drop),
    )
    assert ours == [label == "1" for _, label in labelled]


def test_llmlingua2_scores_are_those_of_the_library(tmp_path):
    """A tiny XLM-R of the library's kind, random weights: its own compression keeps what our
    threshold keeps on our scores."""
    pytest.importorskip("llmlingua", reason="the library is in requirements/core-nodeps.txt")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import (
        PreTrainedTokenizerFast,
        XLMRobertaConfig,
        XLMRobertaForTokenClassification,
    )

    from alar.methods.tokenskip.lingua import LLMLingua2

    texts = [
        "The river has two mouths. One of them is older, so it is not the newer one.",
        "Nothing follows from that at all.",
    ]
    raw = Tokenizer(models.Unigram())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    raw.train_from_iterator(
        texts * 4, trainers.UnigramTrainer(vocab_size=60, special_tokens=special, unk_token="<unk>")
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token="<s>",
        eos_token="</s>",
        cls_token="<s>",
        sep_token="</s>",
        # fmt: skip
        pad_token="<pad>",
        unk_token="<unk>",
        mask_token="<mask>",
    )
    torch.manual_seed(0)
    config = XLMRobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=2,
        # fmt: skip
        intermediate_size=32,
        max_position_embeddings=520,
        initializer_range=1.0,
    )
    folder = tmp_path / "llmlingua-2-xlm-roberta-large-tiny"
    XLMRobertaForTokenClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    drawn = torch.initial_seed()
    scorer = LLMLingua2(str(folder))
    assert torch.initial_seed() == drawn  # the library's own constructor seeds everything
    library = scorer.compressor
    library.oai_tokenizer, library.max_force_token, library.added_tokens = (
        SimpleNamespace(encode=lambda word: [0]),
        100,
        [],
    )
    library.max_batch_size = 4
    for text, words in zip(
        texts, scorer.score_words([Thought(text) for text in texts]), strict=True
    ):
        assert "".join(word.text for word in words).strip() == text
        for rate in (0.3, 0.5, 0.7):
            theirs = library.compress_prompt_llmlingua2([text], rate=rate)["compressed_prompt"]
            assert compress(text, words, rate, FREE, lambda piece: 1).text == theirs.strip()


def test_a_missing_model_is_an_error_that_says_how_to_get_it(tmp_path):
    pytest.importorskip("llmlingua", reason="the library is in requirements/core-nodeps.txt")
    from alar.methods.tokenskip.lingua import LLMLingua2

    with pytest.raises(OSError, match="hf download microsoft/llmlingua-2"):
        LLMLingua2(str(tmp_path / "nowhere"))


def test_a_missing_library_is_an_error_with_the_command(monkeypatch):
    import sys

    from alar.methods.tokenskip.lingua import LLMLingua2

    monkeypatch.setitem(sys.modules, "llmlingua", None)
    with pytest.raises(ImportError, match="pip install --no-deps llmlingua"):
        LLMLingua2()


@given(st.text(alphabet="ab 1,.+-=\n'é", max_size=60))
def test_words_join_to_their_text(text):
    words = split_words(text)
    assert "".join(words) == text
    assert joined(words) == text.lstrip() or not text.strip()


def test_words_that_dropping_brings_together_stay_apart():
    assert split_words("12:30 o'clock, 2013-1986=27.5") == [
        "12",
        ":",
        "30",
        " o'clock",
        ",",
        " 2013",
        "-",
        "1986",
        "=",
        "27.5",
    ]
    assert joined(["12", "30"]) == "12 30" and joined([" a", ",", " b"]) == "a, b"


@settings(max_examples=50, deadline=None)
@given(
    chosen=st.lists(
        st.tuples(st.sampled_from(VOCABULARY), st.floats(0, 0.999), st.integers(1, 4)),
        min_size=1,
        max_size=40,
    ),
    rate=st.floats(0.01, 0.99),
    drop=st.booleans(),
)
def test_at_most_the_requested_and_the_forced_share_is_kept_and_digits_survive(chosen, rate, drop):
    words, scores, counts = zip(*chosen)
    rules = Rules(drop_consecutive=drop)
    kept = kept_words(words, scores, counts, rate, rules)
    total = sum(counts)
    share = sum(n for n, stays in zip(counts, kept) if stays) / total
    forced = sum(n for n, word in zip(counts, words) if rules.forces(word)) / total
    assert share <= rate + forced + 1 / total + 1e-9  # a percentile falls between two tokens
    assert all(stays for word, stays in zip(words, kept) if any(c.isdigit() for c in word))
    assert drop or all(stays for word, stays in zip(words, kept) if word in OPERATORS)


def test_operators_between_digits_survive_any_rate_by_default():
    words = [
        Word(word, 0.5) for word in split_words("2>1, so 2017>1728. 2013-1986: ones 3+10-6=7.")
    ]
    found = compress("x", words, 0.05, Rules(), lambda text: 1)
    assert found.text == "2>1 2017>1728 2013-1986 3+10-6=7"
    assert (
        ">1728" not in compress("x", words, 0.05, Rules(drop_consecutive=True), lambda text: 1).text
    ), "the library's way"


def test_every_chunk_has_its_own_threshold():
    words = [
        Word(text, score)
        for text, score in zip(["a", ".", "b", "c", "d", "e"], [0.9, 0.8, 0.1, 0.2, 0.3, 0.4])
    ]
    chunked = in_chunks(words, [1] * 6, 3)
    assert [word.chunk for word in chunked] == [0, 0, 1, 1, 1, 2]
    assert compress("x", chunked[:5], 0.5, FREE, lambda text: 1).kept == (
        True,
        False,
        False,
        False,
        True,
    )
    assert compress("x", words[:5], 0.5, FREE, lambda text: 1).kept == (
        True,
        True,
        False,
        False,
        False,
    )


def test_ratio_one_is_the_identity_and_rates_outside_are_refused(codec, trajectories, rows):
    text = " The year  is 2013.\n"
    words = [Word(word, 0.5) for word in split_words(text)]
    whole = compress(text, words, 1.0, Rules(), token_counter(codec))
    assert whole.text == text and whole.achieved == 1 and all(whole.kept)
    example = example_at(trajectories[0], rows[0]["thoughts"], 1.0, codec)
    start = trajectories[0].turns[0].start
    assert example.ids[-(len(trajectories[0].ids) - start) :] == trajectories[0].ids[start:]
    for rate in (0.0, -0.5, 1.5):
        with pytest.raises(ValueError, match="rate"):
            kept_words(["a"], [0.5], [1], rate, Rules())


def slow_logprob(model, ids, place):
    """log P(ids[place] | ids[:place]) by a forward pass of its own."""
    with torch.no_grad():
        logits = model(torch.tensor([ids[:place]])).logits[0, -1, : model.config.latent_token_id]
        return torch.log_softmax(logits, -1)[ids[place]].item()


def slow_word_means(model, codec, thought, context):
    block = codec.tokenizer(
        f"<think>{thought.text}</think>", add_special_tokens=False, return_offsets_mapping=True
    )
    ids, means, end = [*context, *block["input_ids"]], [], len("<think>")
    for word in split_words(thought.text):
        start, end = end, end + len(word)
        inside = [
            i for i, (a, b) in enumerate(block["offset_mapping"]) if not (b <= start or a >= end)
        ]
        means.append(np.mean([slow_logprob(model, ids, len(context) + i) for i in inside]))
    return np.array(means)


def test_batched_scores_equal_slow_ones_word_by_word(model, codec, trajectories):
    thought, other = thoughts_of(trajectories[0], codec)[:2]
    bare = Thought("So 2013-1986 is 27.")
    for step_tokens in (1, 10**6):
        found = Surprisal(model, codec, step_tokens=step_tokens).score_words([other, bare, thought])
        assert "".join(word.text for word in found[2]) == thought.text
        expected = slow_word_means(model, codec, bare, [codec.tokenizer.eos_token_id])
        np.testing.assert_allclose(
            [word.score for word in found[1]], 1 - np.exp(expected), atol=1e-5
        )
    guessed = slow_word_means(model, codec, thought, thought.context)
    np.testing.assert_allclose([word.score for word in found[2]], 1 - np.exp(guessed), atol=1e-5)
    known = slow_word_means(
        model, codec, thought, [*thought.context, *codec.untrusted(thought.action)]
    )
    gained = Gain(model, codec).score_words([other, thought])[1]
    np.testing.assert_allclose(
        [word.score for word in gained], 1 / (1 + np.exp(guessed - known)), atol=1e-5
    )
    with pytest.raises(ValueError, match="needs the action"):
        Gain(model, codec).score_words([bare])


def test_thoughts_are_scored_in_the_place_where_they_were_written(codec, trajectories):
    for trajectory in trajectories[:6]:
        for thought, turn in zip(thoughts_of(trajectory, codec), trajectory.turns, strict=True):
            whole = [*thought.context, *codec.untrusted(f"<think>{thought.text}</think>")]
            assert codec.text(trajectory.ids[: turn.end]).startswith(codec.text(whole))
            assert thought.action == f"<{turn.action}>{turn.argument}</{turn.action}>"


@pytest.mark.parametrize("ratio", [1.0, 0.5, 0.1])
def test_the_condition_is_exactly_eos_ratio_eos_behind_the_users_text(codec, trajectories, ratio):
    eos, question = codec.tokenizer.eos_token_id, trajectories[0].question
    ids = codec.encode(
        conditioned(SearchEnvironment(), ratio, codec.tokenizer.eos_token).form.prompt(question)
    )
    plain = codec.prompt(question.text)
    place = plain.index(eos)
    condition = [eos, *codec.untrusted(str(ratio)), eos]
    assert ids == [*plain[:place], *condition, *plain[place:]]
    assert codec.text(condition) == str(ratio)


def test_the_tool_domain_takes_the_same_condition(codec):
    system, user, assistant, end = (
        protocol.Trusted(text)
        for text in (
            "<|im_start|>system\n",
            "<|im_start|>user\n",
            "<|im_start|>assistant\n",
            "<|im_end|>\n",
        )
    )
    pieces = [system, "tools", end, user, "ask", end, assistant]
    form = protocol.Prompted(TOOL, lambda question: pieces)
    conditional = conditioned_form(form, 0.3, "<|im_end|>")
    text = "".join(conditional.prompt(None))
    assert text == (
        "<|im_start|>system\ntools<|im_end|>\n"
        "<|im_start|>user\nask<|im_end|>0.3<|im_end|><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert conditional.parse == TOOL.parse and conditional.closing == TOOL.closing
    form.prompt = lambda question: ["a prompt without an end"]
    with pytest.raises(ValueError, match="has no place"):
        conditional.prompt(SimpleNamespace(id="q"))


def test_the_loss_of_compressed_turns_falls_on_what_the_policy_writes(codec, trajectories, rows):
    for trajectory, row in zip(trajectories, rows, strict=True):
        thoughts = row["rates"]["0.5"]["thoughts"]
        example = example_at(trajectory, thoughts, 0.5, codec)
        learned = codec.text(
            [token for token, label in zip(example.ids, example.labels) if label != -100]
        )
        expected = [f"<think>{thought}</think>\n\n<{turn.action}>{turn.argument}</{turn.action}>"
                    for thought, turn in zip(thoughts, trajectory.turns, strict=True)]  # fmt: skip
        assert learned == "\n\n" + "".join(expected)
        assert all(label in (-100, token) for token, label in zip(example.ids, example.labels))
        assert codec.text(example.ids).count("<information>") == codec.text(trajectory.ids).count(
            "<information>"
        )
    with pytest.raises(ValueError, match="thoughts for"):
        example_at(trajectories[0], [], 0.5, codec)


def test_every_sample_gets_one_ratio(codec, trajectories, rows):
    ratios = (1.0, 0.1, 0.5)
    examples, drawn = prepared(trajectories, rows, codec, ratios, seed=4)
    assert drawn == drawn_ratios(len(trajectories), ratios, 4) and set(drawn) == set(ratios)
    for example, ratio in zip(examples, drawn, strict=True):
        eos = codec.tokenizer.eos_token_id
        place = example.ids.index(eos)
        assert codec.text(example.ids[place + 1 : example.ids.index(eos, place + 1)]) == str(ratio)
    with pytest.raises(ValueError, match="compress_ratios"):
        prepared(trajectories, rows, codec, (0.7,), seed=4)
    with pytest.raises(ValueError, match="compress again"):
        prepared(trajectories, rows[::-1], codec, ratios, seed=4)


def test_a_codec_of_mirrors_writes_the_thoughts_anew_at_every_ratio(tokenizer, trajectories, rows):
    class Mirrors(DualCodec):
        def __init__(self, tokenizer):
            super().__init__(tokenizer, dual=None)

        def think_turn(self, thought, action, argument, *, first):
            ids, origins = Codec(self.tokenizer).think_turn(thought, action, argument, first=first)
            return [token + 10**6 for token in ids], origins

    for ratio in (1.0, 0.5):
        thoughts = rows[0]["thoughts"] if ratio == 1 else rows[0]["rates"]["0.5"]["thoughts"]
        plain, mirrored = (
            example_at(trajectories[0], thoughts, ratio, kind(tokenizer))
            for kind in (Codec, Mirrors)
        )
        learned = [label for label in mirrored.labels if label != -100]
        assert all(label >= 10**6 for label in learned)
        assert [label - 10**6 for label in learned] == [
            label for label in plain.labels if label != -100
        ]


def test_every_ratio_becomes_a_row_that_names_the_scorer(random_model, tmp_path):
    model, tokenizer = random_model(num_latent=0)
    checkpoint = save(model, tokenizer, tmp_path / "checkpoint")
    questions = [solved.question for solved in solved_questions("counterfactual-3", 3, 0)]
    comparison = MethodComparison(
        tmp_path, SearchEnvironment(), questions, max_new_tokens=8, max_turns=1, batch_size=4
    )
    measure.measure_ratios(
        comparison, (1.0, 0.5), checkpoint, "surprisal", training_seconds=1.0, training_tokens=2.0
    )
    notes = comparison.measured()
    assert [note["label"] for note in notes] == [
        f"TokenSkip, ratio {r}, scorer surprisal" for r in (0.5, 1.0)
    ]
    assert len({note["prompt"] for note in notes}) == 2, "each ratio has a prompt of its own"
    table = measure.ratio_table(comparison, resamples=100)
    assert (
        list(table["ratio"]) == [1.0, 0.5]
        and set(table["scorer"]) == {"surprisal"}
        and set(table["model"]) == {"standard"}
    )
    answers = comparison.answers()
    assert (
        table["think_tokens"].tolist()
        == answers.groupby("system")["cot_tokens"].mean().tolist()[::-1]
    )
    assert list(measure.readable_ratios(table).columns) == [
        "n",
        "accuracy %",
        "think tokens",
        "tokens (correct)",
        "accuracy %, published",
        "think tokens, published",
        "tokens (correct), published",
    ]
    achieved = pd.DataFrame({"requested": [0.5], "tokens_per_sample": [9.0]})
    figure, drawn = figures.ratios(table, achieved)
    assert (drawn["source"] == "measured").sum() == 2 and figure._repr_png_().startswith(b"\x89PNG")


def test_achieved_rates_count_the_policys_tokens(codec, rows):
    table = achieved_rates(rows).set_index("requested")
    whole = sum(len(codec.untrusted(text)) for row in rows for text in row["thoughts"])
    half = sum(
        len(codec.untrusted(text)) for row in rows for text in row["rates"]["0.5"]["thoughts"]
    )
    assert table.loc[0.5, "achieved"] == pytest.approx(half / whole)
    assert (
        set(table["scorer"]) == {"surprisal"}
        and table.loc[0.1, "achieved"] < table.loc[0.5, "achieved"] < 1
    )
    assert (table["kept_share"] <= table.index + table["forced_share"] + 0.05).all()


def test_think_tokens_are_those_between_the_tags(codec, trajectories):
    for trajectory, thoughts in zip(trajectories, [thoughts_of(t, codec) for t in trajectories]):
        alone = sum(len(codec.untrusted(thought.text)) for thought in thoughts)
        assert abs(cot_tokens(trajectory, codec) - alone) <= 2 * len(
            thoughts
        )  # signs at the tags merge with them


def test_only_correct_chains_of_thought_of_a_bearable_length_are_collected(codec, trajectories):
    wrong = Trajectory(**vars(trajectories[1]) | {"correct": False})
    longest = max(cot_tokens(t, codec) for t in trajectories)
    kept, why = compressible([*trajectories, wrong], codec, longest - 1)
    assert (
        why["wrong"] == 1
        and why["too long"] >= 1
        and len(kept) + sum(why.values()) == len(trajectories) + 1
    )
    with pytest.raises(ValueError, match="can be compressed"):
        compressible([wrong], codec, 10)


def test_samples_have_ids_of_their_own_and_differ(random_model):
    engine = HFEngine(*random_model(num_latent=0))
    questions = [solved.question for solved in solved_questions("counterfactual-3", 2, 0)]
    how = {"samples": 3, "max_turns": 1, "batch_size": 8, "seed": 1}
    found = draw_samples(questions, engine, SearchEnvironment(), Sampling(6, 0.7), **how)
    for question, group in zip(questions, found, strict=True):
        assert [t.question.id for t in group] == [f"{question.id}_s{i}" for i in range(3)]
    assert len({tuple(t.ids) for t in found[0]}) == 3
    with pytest.raises(ValueError, match="greedy"):
        draw_samples(questions, engine, SearchEnvironment(), Sampling(6, 0.0), **how)


def test_finished_steps_are_taken_over_and_an_interrupted_stage_goes_on(tmp_path, trajectories):
    made = []

    def write(path):
        made.append(1)
        write_trajectories(path, trajectories[:2])

    first = open_stage("12_tokenskip", tmp_path / "one")
    steps = Steps(first, {"seed": 0})
    collected = steps.run("collect", write)
    again = Steps(first, {"seed": 0})
    assert (
        again.run("collect", write) == collected
        and len(made) == 1
        and again.seconds == steps.seconds
    )
    Steps(first, {"seed": 1}).run("collect", write)
    assert len(made) == 2, "other settings: made anew"
    second = open_stage("12_tokenskip", tmp_path / "two")
    taken = Steps(second, {"seed": 2}, skip=["collect"], reuse_from=first.folder)
    assert len(read_trajectories(taken.run("collect", write))) == 2 and len(made) == 2
    Steps(second, {"seed": 2}).run("collect", write)
    assert len(made) == 3, "not skipped any more: what was taken over is made anew"
    with pytest.raises(FileNotFoundError, match="cannot be skipped"):
        Steps(second, {}, skip=["train"], reuse_from=first.folder).run("train", write)
    with pytest.raises(ValueError, match="is no step"):
        Steps(second, {}, skip=["evaluate"], reuse_from=first.folder)
    with pytest.raises(ValueError, match="reuse_from"):
        Steps(second, {}, skip=["train"])


class Lengths:
    """A scorer for the view: longer words matter more."""

    name = "length"

    def score_words(self, thoughts):
        return [
            [Word(word, min(0.99, len(word.strip()) / 20)) for word in split_words(t.text)]
            for t in thoughts
        ]


def test_the_view_strikes_dropped_words_and_has_a_twin(model, codec):
    samples = [
        Thought("The <b>longest</b> word of 2013 stays.", (1, 2), "<answer>x</answer>"),
        Thought("Another one."),
    ]
    count = token_counter(codec)
    words = Lengths().score_words(samples[:1])[0]
    figure, table = struck(samples[0].text, words, (0.7, 0.3), Rules(), count, scorer="length")
    assert set(table["rate"]) == {0.7, 0.3} and len(table) == 2 * len(words)
    view = compression_view(samples, [Lengths(), Gain(model, codec)], Rules(), count, twin=figure)
    assert (
        "<b>longest" not in view.output.value
        and "<del" in view.output.value
        and "<b> 2013</b>" in view.output.value
    )
    bundle = view._repr_mimebundle_()
    assert {"image/png", "application/vnd.jupyter.widget-view+json"} <= bundle.keys()
    for name, value in (
        ("rate", 1.0),
        ("sample", 1),
        ("sample", -1),
        ("text", "pasted words only"),
        ("scorer", 1),
        ("sample", 0),
    ):
        before = view.output.value
        view.controls[name].value = value
        assert view.output.value != before, name
        assert ("needs the action" in view.output.value) == (name == "scorer")
    view.controls["rate"].value = 0.4
    found = compress(
        samples[0].text, Gain(model, codec).score_words(samples[:1])[0], 0.4, Rules(), count
    )
    assert f"{found.achieved:.0%}" in view.output.value and str(found.tokens) in view.output.value


def test_ratios_are_drawn_evenly():
    drawn = drawn_ratios(5000, (1.0, 0.5, 0.1), 0)
    assert all(abs(drawn.count(ratio) / 5000 - 1 / 3) < 0.03 for ratio in (1.0, 0.5, 0.1))
    assert drawn != drawn_ratios(5000, (1.0, 0.5, 0.1), 1)

"""The dual vocabulary against slow reference computations, on small random models whose embeddings
are tied and untied."""

import dataclasses
import json
import math
import shutil
from functools import lru_cache
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AddedToken,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from alar.domains.search.environment import SearchEnvironment
from alar.domains.search.questions import validation_questions
from alar.engines.choice import opened_engine
from alar.engines.vllm.turns import TurnOptions, engine_codec, open_turn
from alar.methods.config import DualVocabulary
from alar.methods.dual.__main__ import main
from alar.methods.dual.build import build_dual, clone_source, most_used, verify
from alar.methods.dual.constraint import PhaseConstraint, control_ids
from alar.methods.dual.examples import dual_examples, encoded_anew, thoughts
from alar.methods.dual.identity import label_losses
from alar.methods.dual.rl import DualARGRPO, DualRLConfig
from alar.methods.dual.vocabulary import DualVocab, NoMirror
from alar.model import load
from alar.records import Origin, Question
from alar.rl.config import RLConfig
from alar.rl.strategy import ar_grpo
from alar.rl.trainer import ARGRPO
from alar.rollout.codec import Codec
from alar.rollout.engine import Sampling, TurnRequest, TurnWriter
from alar.rollout.hf import HFEngine
from alar.rollout.loop import run
from alar.train.examples import Example
from alar.train.supervised import mark_trainable, train

LN2 = math.log(2)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("dual")


@pytest.fixture(scope="module")
def base(root, tokenizer):
    """base(tied, tags) → folder of an ordinary random model; `tags`: `<think>` and `</think>` are
    single tokens.

    The rows of tokens that end a phase are scaled up, so that greedy decoding meets them, and those
    of control tokens and spare rows are zero: an ordinary model never writes them.
    """

    @lru_cache
    def make(tied=True, tags=False):
        folder = root / f"base-{tied}-{tags}"
        tokenizer.save_pretrained(folder)
        ours = AutoTokenizer.from_pretrained(folder)
        if tags:
            ours.add_tokens(
                [
                    AddedToken(tag, special=False, normalized=False)
                    for tag in ("<think>", "</think>")
                ]
            )
            ours.save_pretrained(folder)
        torch.manual_seed(3)
        model = Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=len(tokenizer) + 16,
                hidden_size=64,
                intermediate_size=96,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=2,
                head_dim=32,
                tie_word_embeddings=tied,
                max_position_embeddings=2048,
                eos_token_id=ours.eos_token_id,
                pad_token_id=ours.pad_token_id,
            )
        )
        for parameter in model.parameters():
            if parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=0.1)
        with torch.no_grad():
            for table in (model.model.embed_tokens.weight, model.lm_head.weight)[
                : 1 if tied else 2
            ]:
                table[len(ours) :] = 0
                table[[ours.convert_tokens_to_ids("<|im_start|>"), ours.pad_token_id]] = 0
                table[ours.eos_token_id] *= 1.5
                table[ours.encode("</think>")[0]] *= 1.6 if tied else 2.5
        model.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="module")
def dual_of(root, base):
    """dual_of(tied, tags, bias) → folder of the full copy."""

    @lru_cache
    def make(tied=True, tags=False, bias=0.0):
        folder = root / f"dual-{tied}-{tags}-{bias}"
        build_dual(base(tied, tags), folder, think_missing="literal", think_end_bias=bias)
        return folder

    return make


@pytest.fixture(scope="module")
def traces(tokenizer):
    """Two-turn traces as a teacher writes them, in the base's own tokens."""
    from alar.records import Trajectory, TurnRecord

    codec, found = Codec(tokenizer), []
    for number, name in enumerate(("Peru", "Chad", "Oman", "Fiji")):
        question = Question(str(number), f"When was the currency of {name} adopted", ("1991",))
        ids = codec.encode(codec.form.prompt(question))
        origins, turns = [Origin.PROMPT] * len(ids), []
        for turn, (action, argument) in enumerate(
            (("search", f"{name} currency"), ("answer", "1991"))
        ):
            written, marks = codec.think_turn(
                f"I need 12 of {name}.", action, argument, first=turn == 0
            )
            turns.append(
                TurnRecord(len(ids), len(ids) + len(written), "think", action, argument, True)
            )
            seen = (
                codec.observation(f"\n\n<information>{name}: 1991</information>\n\n")
                if turn == 0
                else []
            )
            ids, origins = ids + written + seen, origins + marks + [Origin.OBSERVATION] * len(seen)
        logprobs = [float("nan")] * len(ids)
        found.append(
            Trajectory(question, ids, origins, logprobs, [], turns, "1991", True, "answer")
        )
    return found


def plain(example: Example, dual: DualVocab) -> Example:
    return Example(dual.to_source(example.ids), dual.to_source(example.labels), 0)


def read_base(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


# ---- building and verifying


def style_tokenizer(*special, eos):
    words = {word: index for index, word in enumerate(["[UNK]", "a", "b", "<", "think", ">", "/"])}
    core = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos)
    wrapped.add_tokens([AddedToken(token, special=True) for token in special])
    return wrapped


@pytest.mark.parametrize(
    ("special", "eos", "source"),
    [
        (("<|endoftext|>", "<|im_start|>", "<|im_end|>"), "<|endoftext|>", "<|im_end|>"),  # Qwen
        (
            ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"),
            "<|end_of_text|>",
            "<|eot_id|>",
        ),  # Llama-3
        (
            ("<s>", "</s>", "<|endoftext|>", "<|assistant|>", "<|end|>"),
            "<|endoftext|>",
            "<|end|>",
        ),  # Phi-3
        (("<s>", "</s>"), "</s>", "</s>"),
        (("<fin>",), "<fin>", "<fin>"),
    ],
)
def test_new_tags_are_cloned_from_the_end_of_turn_token(tmp_path, special, eos, source):
    tokenizer = style_tokenizer(*special, eos=eos)
    assert clone_source(tokenizer) == source
    tokenizer.save_pretrained(tmp_path / "base")
    sizes = dict(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer), tie_word_embeddings=False, **sizes)
    )
    model.save_pretrained(tmp_path / "base")
    dual = build_dual(tmp_path / "base", tmp_path / "dual", think_missing="clone_eos")
    assert (dual.think_made, dual.cloned_from, dual.V, dual.L) == (
        "clone_eos",
        source,
        len(tokenizer) + 2,
        len(tokenizer) + 2,
    )
    assert verify(tmp_path / "dual", untrained=True) == dual
    built = read_base(tmp_path / "dual")
    for table in (built.model.embed_tokens.weight, built.lm_head.weight):
        origin = table[tokenizer.convert_tokens_to_ids(source)]
        for row in (table[dual.think_start_ids[0]], table[dual.think_end_ids[0]]):
            noise = (row - origin) / (origin.abs().mean() * 0.01)
            assert 0.3 < noise.std() < 2 and not torch.equal(row, origin)


def test_missing_tags_are_an_error_or_added_to_spare_rows(base, tmp_path):
    with pytest.raises(ValueError, match="<think> and </think>: no single token.*clone_eos"):
        build_dual(base(), tmp_path / "x")
    dual = build_dual(base(), tmp_path / "added", think_missing="add")
    assert dual.V == read_base(base()).config.vocab_size  # the tags took spare rows
    assert [len(dual.think_start_ids), len(dual.think_end_ids)] == [1, 1]
    rows = read_base(tmp_path / "added").model.embed_tokens.weight[
        [dual.think_start_ids[0], dual.think_end_ids[0]]
    ]
    assert 0.01 < rows.std() < 0.04
    assert DualVocab.read(tmp_path / "added").think_made == "add"


def test_a_base_with_tags_is_taken_as_it_is_and_the_folder_is_an_ordinary_checkpoint(base, dual_of):
    for tied in (True, False):
        folder = dual_of(tied, True)
        dual = verify(folder, untrained=True)
        assert dual.think_made == "present" and len(dual.think_end_ids) == 1
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert (
            type(model) is Qwen2ForCausalLM
            and model.config.vocab_size == dual.V + dual.L == 2 * dual.V
        )
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        assert len(AutoTokenizer.from_pretrained(folder)) <= dual.V


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda config: config["dual_vocabulary"].pop("L"), r"dual_vocabulary.*\bL\b"),
        (lambda config: config["dual_vocabulary"].update(vocab=1), r"dual_vocabulary.*\bvocab\b"),
        (lambda config: config["dual_vocabulary"].update(source_ids=[10**6]), "source_ids"),
        (lambda config: config["dual_vocabulary"].update(think_made="somehow"), "think_made"),
        (lambda config: config["dual_vocabulary"].update(think_end_ids=[5]), "think_end_ids.*</th"),
        (lambda config: config.update(vocab_size=7), "vocab_size"),
        (lambda config: config.pop("dual_vocabulary"), "no dual checkpoint"),
    ],
)
def test_verification_names_file_and_field(dual_of, tmp_path, change, named):
    folder = shutil.copytree(dual_of(), tmp_path / "broken")
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"(?s)config.json: .*{named}"):
        verify(folder, untrained=True)


def test_verification_finds_mirrors_that_differ(dual_of, tmp_path):
    folder = shutil.copytree(dual_of(), tmp_path / "broken")
    config = json.loads((folder / "config.json").read_text())
    sources = list(range(config["dual_vocabulary"]["V"]))
    sources[300], sources[301] = 301, 300
    config["dual_vocabulary"].update(mode="custom", source_ids=sources)
    (folder / "config.json").write_text(json.dumps(config))
    verify(folder)
    with pytest.raises(ValueError, match="model.embed_tokens.weight: 2 mirrors"):
        verify(folder, untrained=True)


def test_the_command_line_builds_and_verifies(base, tmp_path, capsys):
    main(["build", str(base()), str(tmp_path / "d"), "--think-missing", "clone_eos"])
    main(["verify", str(tmp_path / "d"), "--untrained"])
    assert capsys.readouterr().out.count("think tags clone_eos <|im_end|>") == 2
    (tmp_path / "texts").write_text("I look up Peru.\nI look up Chad.\n")
    (tmp_path / "ids").write_text("7 300\n301\n")
    how = ("--think-missing", "literal", "--mode")
    main(
        [
            "build",
            str(base()),
            str(tmp_path / "s"),
            *how,
            "subset",
            "--texts",
            str(tmp_path / "texts"),
            "--size",
            "3",
        ]
    )
    main(
        [
            "build",
            str(base()),
            str(tmp_path / "c"),
            *how,
            "custom",
            "--source-ids",
            str(tmp_path / "ids"),
        ]
    )
    assert DualVocab.read(tmp_path / "s").L == 3 and DualVocab.read(tmp_path / "c").source_ids == (
        7,
        300,
        301,
    )
    with pytest.raises(SystemExit):
        main(["build", str(base()), str(tmp_path / "x"), "--mode", "subset"])
    assert "subset goes with texts" in capsys.readouterr().err


# ---- examples


@pytest.mark.parametrize("tags", [False, True])
def test_thoughts_become_mirrors_and_nothing_else_does(dual_of, traces, tags):
    model, tokenizer = load(dual_of(True, tags))
    codec, dual = Codec.of(model, tokenizer), DualVocab.of(model.config)
    example = encoded_anew(traces[0], codec)
    text, trace = codec.text(example.ids), Codec(tokenizer).text(traces[0].ids)
    assert text == trace  # mirrors are shown as the text of their sources
    inside = [token for token in example.ids if dual.is_mirror(token)]
    assert codec.text(inside) == "I need 12 of Peru." * 2
    assert [label for label in example.labels if label != -100 and dual.is_mirror(label)] == inside
    labelled = [token for token, label in zip(example.ids, example.labels) if label != -100]
    assert (
        codec.text(labelled).startswith("\n\n<think>I need")
        and codec.text(labelled).count("</think>") == 2
    )
    assert all(label in (-100, token) for token, label in zip(example.ids, example.labels))


def test_latent_only_keeps_the_loss_at_positions_that_predict_a_mirror(dual_of, traces):
    model, tokenizer = load(dual_of())
    codec, dual = Codec.of(model, tokenizer), DualVocab.of(model.config)
    (example,) = dual_examples(traces[:1], codec, only_latent=True)
    kept = [place for place, label in enumerate(example.labels) if label != -100]
    assert kept == [place for place, token in enumerate(example.ids) if dual.is_mirror(token)]
    predicting = [place - 1 for place in kept]  # labels are shifted by the loss
    assert not dual.is_mirror(
        example.ids[predicting[0]]
    )  # the last piece of <think> predicts the first mirror
    last = max(place for place in kept)
    assert (
        last not in predicting and example.ids[last + 1] == dual.think_end_ids[0]
    )  # </think> is not learnt
    loss = label_losses(model, [example], 0)
    assert len(loss) == len(kept)


def test_a_subset_decodes_through_its_sources_and_says_what_it_lacks(
    base, traces, tokenizer, tmp_path
):
    texts = thoughts(traces[:2], Codec(tokenizer))
    dual = build_dual(
        base(), tmp_path / "subset", mode="subset", texts=texts, think_missing="literal"
    )
    assert dual.L == len({i for text in texts for i in tokenizer.encode(text)}) < dual.V
    verify(tmp_path / "subset", untrained=True)
    codec = Codec.of(*load(tmp_path / "subset"))
    mirrors = dual.to_mirrors(tokenizer.encode(texts[0]))
    assert min(mirrors) >= dual.V and codec.text(mirrors) == texts[0]
    assert len(dual_examples(traces[:2], codec)) == 2
    with pytest.raises(NoMirror, match="2: id .* has no mirror among the"):
        dual_examples(traces, codec)
    assert len(dual_examples(traces, codec, missing="skip")) == 2
    assert len(most_used(texts, tokenizer, size=3)) == 3
    custom = build_dual(
        base(), tmp_path / "custom", mode="custom", source_ids=[300, 299], think_missing="literal"
    )
    assert custom.to_source([custom.V, custom.V + 1, 5]) == [300, 299, 5]
    with pytest.raises(ValueError, match="subset goes with texts"):
        build_dual(base(), tmp_path / "x", mode="subset", think_missing="literal")


# ---- the identity


@pytest.mark.parametrize("tied", [True, False])
def test_remapped_cross_entropy_is_the_standard_one_plus_ln_2(base, dual_of, traces, tied):
    model, tokenizer = load(dual_of(tied))
    examples = dual_examples(traces, Codec.of(model, tokenizer))
    remapped = label_losses(model, examples, 0)
    standard = label_losses(
        read_base(base(tied)), [plain(e, DualVocab.of(model.config)) for e in examples], 0
    )
    assert len(remapped) == sum(label != -100 for e in examples for label in e.labels)
    assert (remapped.double() - standard.double() - LN2).abs().max() <= 1e-5


def requests_of(codec, count, forced=True):
    opening = codec.separator + codec.think_open if forced else []
    return [
        TurnRequest(i, codec.prompt(f"Who is {'very ' * (i % 5)}number {i}"), [], opening, i)
        for i in range(count)
    ]


@pytest.mark.parametrize("tags", [False, True])
@pytest.mark.parametrize("tied", [True, False])
def test_constrained_greedy_is_standard_greedy(base, dual_of, tied, tags):
    sampling = Sampling(max_new_tokens=40, stop=())
    tokenizer = AutoTokenizer.from_pretrained(base(tied, tags))
    standard = HFEngine(read_base(base(tied, tags)), tokenizer)
    model, _ = load(dual_of(tied, tags))
    dual, engine = DualVocab.of(model.config), HFEngine(model, tokenizer)
    requests = requests_of(engine.codec, 12)
    closed = compared = 0
    for one, other in zip(
        standard.generate(requests, sampling), engine.generate(requests, sampling)
    ):
        close, ours = list(dual.think_end_ids), dual.to_source(other.ids)
        begin, ends = len(requests[0].forced), (close[0], tokenizer.eos_token_id)
        start = next((place for place in range(begin, len(ours)) if ours[place] in ends), len(ours))
        assert other.ids[begin:start] == [dual.mirror_of[token] for token in ours[begin:start]]
        if (
            not tags and close[0] in ours[start : start + 1]
        ):  # a random model does not go on with the rest of the tag
            assert ours[: start + 1] == one.ids[: start + 1] and ours[start : start + 3] == close
        else:
            assert ours == one.ids
        closed += ours[start : start + 1] == close[:1]
        compared += start - begin
    assert closed >= 1 and compared >= 60


# ---- the constraint


def allowed_slowly(tokenizer, texts, dual, written):
    """Ids that may follow these ids of a turn, by its text alone."""
    visible = "".join(tokenizer.decode([i]) for i in written if not dual.is_mirror(i))
    before, opened, after = visible.partition("<think>")
    if not opened or "</think>" in after:
        return set(range(dual.V))
    if after:
        tail = [i for i in written if not dual.is_mirror(i)]
        done = next(
            n
            for n in range(len(dual.think_end_ids) - 1, 0, -1)
            if tail[-n:] == list(dual.think_end_ids[:n])
        )
        return {dual.think_end_ids[done]}
    control = {"<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"}
    latent = {
        dual.V + j
        for j, i in enumerate(dual.source_ids)
        if i < len(texts) and texts[i] not in control
    }
    return latent | {tokenizer.eos_token_id, dual.think_end_ids[0]}


@pytest.mark.parametrize("tags", [False, True])
def test_every_phase_allows_what_a_slow_reading_of_the_text_allows(dual_of, tags):
    model, tokenizer = load(dual_of(True, tags, 5.0))
    codec, dual = Codec.of(model, tokenizer), DualVocab.of(model.config)
    constraint = PhaseConstraint(tokenizer, dual)
    spelled = " a </search> b" + ("" if tags else "</think> c")  # in mirrors a tag closes nothing
    thought = dual.to_mirrors(tokenizer.encode(spelled))
    turn = codec.separator + codec.think_open + thought + list(dual.think_end_ids)
    turn += codec.untrusted("\n\n<search><think>x</search>")[:4]
    writer = TurnWriter(
        codec, TurnRequest(0, [], []), Sampling(stop=("</search>",), max_new_tokens=99)
    )
    texts = [tokenizer.decode([i]) for i in range(len(tokenizer))]
    for place, token in enumerate(turn):
        row = constraint(torch.zeros(1, dual.V + dual.L), [writer.phase.row])[0]
        assert set(row.isfinite().nonzero()[:, 0].tolist()) == allowed_slowly(
            tokenizer, texts, dual, turn[:place]
        )
        inside = (
            len(codec.separator + codec.think_open) <= place <= turn.index(dual.think_end_ids[0])
        )
        assert row[dual.think_end_ids[0]] == (
            5.0 if inside else 0.0 if writer.phase.row == 0 else float("-inf")
        )
        assert row[token].isfinite() and not writer.done
        writer.push(token, 0.0)


def test_a_context_that_ends_in_the_open_tag_is_thinking(dual_of):
    codec = Codec.of(*load(dual_of()))
    for ending, row in (("<think>", 1), ("<think>\n", 1), ("think", 0), ("<think>a", 0)):
        request = TurnRequest(0, codec.trusted(f"<|im_start|>assistant\n{ending}"), [])
        assert TurnWriter(codec, request, Sampling()).phase.row == row


def test_mirrors_of_control_tokens_are_never_sampled(dual_of):
    model, tokenizer = load(dual_of())
    dual = DualVocab.of(model.config)
    banned = {dual.mirror_of[i] for i in control_ids(tokenizer, dual)}
    assert {
        dual.mirror_of[i] for i in (0, 1, 2, dual.V - 1)
    } <= banned  # special tokens, and a row without a text
    engine = HFEngine(model, tokenizer)
    with torch.no_grad():
        model.lm_head.weight[sorted(banned)] = 10 * torch.randn(
            len(banned), 64
        )  # the model wants nothing else
    outputs = engine.generate(
        requests_of(engine.codec, 16), Sampling(max_new_tokens=30, temperature=2.0, stop=())
    )
    written = [token for output in outputs for token in output.ids]
    assert not banned & set(written) and sum(map(dual.is_mirror, written)) > 100


def test_a_dual_folder_is_decoded_under_its_constraint_without_being_asked(base, dual_of):
    with opened_engine(dual_of()) as engine:
        assert engine.codec.dual == DualVocab.read(dual_of()) and engine.constraint is not None
        (output,) = engine.generate(
            requests_of(engine.codec, 1), Sampling(max_new_tokens=12, stop=())
        )
        assert engine.codec.dual.is_mirror(output.ids[4]), engine.codec.text(output.ids)
    with opened_engine(base()) as engine:
        assert type(engine.codec) is Codec and engine.constraint is None
    folder = str(dual_of())
    config = AutoConfig.from_pretrained(folder)
    engine_model = SimpleNamespace(tokenizer=folder, tokenizer_revision=None, hf_config=config)
    codec = engine_codec(SimpleNamespace(model_config=engine_model))  # what vLLM's parts read
    assert codec.dual == DualVocab.read(dual_of())
    writer = open_turn(codec, TurnOptions(), codec.prompt("x"))
    assert writer is not None and writer.phase.row == 0


# ---- training


@pytest.mark.parametrize(
    ("tied", "trainable"), [(True, "rows"), (True, "lora+rows"), (False, "rows")]
)
def test_training_rows_moves_mirrors_and_no_visible_row(dual_of, traces, tied, trainable):
    model, tokenizer = load(dual_of(tied))
    dual, before = (
        DualVocab.of(model.config),
        {name: p.detach().clone() for name, p in model.state_dict().items()},
    )
    losses = []
    config = DualVocabulary(
        learning_rate=1e-2,
        epochs=3,
        batch_size=4,
        weight_decay=0.1,
        trainable=trainable,
        lora_rank=4,
    )
    trained = train(
        model, dual_examples(traces, Codec.of(model, tokenizer)), 0, config, log=losses.append
    )
    assert losses[-1]["loss"] < losses[0]["loss"] and DualVocab.of(trained.config) == dual
    after = trained.state_dict()
    assert after.keys() == before.keys()
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    tables = {"model.embed_tokens.weight", "lm_head.weight"}
    assert tables <= moved
    for name in tables:
        assert torch.equal(after[name][: dual.V], before[name][: dual.V])
    attention = {name for name in moved - tables}
    assert (
        not attention
        if trainable == "rows"
        else attention and all(".self_attn." in name for name in attention)
    )


def test_lora_on_attention_is_standard_training_by_construction(base, dual_of, traces):
    model, tokenizer = load(dual_of())
    examples = dual_examples(traces, Codec.of(model, tokenizer))
    dual, curves, trained = DualVocab.of(model.config), {}, {}
    # SGD-like steps would agree to rounding; Adam magnifies it where a gradient is near zero, so
    # the curves are compared
    config = DualVocabulary(
        learning_rate=1e-3, epochs=3.0, batch_size=4, trainable="lora", lora_rank=4
    )
    standard = read_base(base())
    plains = [plain(e, dual) for e in examples]
    for name, start, data in (("standard", standard, plains), ("dual", model, examples)):
        curves[name] = []
        trained[name] = train(start, data, 0, config, log=curves[name].append)
    for one, other in zip(curves["standard"], curves["dual"], strict=True):
        assert other["loss"] - one["loss"] == pytest.approx(LN2, abs=2e-4)
    assert curves["standard"][-1]["loss"] < curves["standard"][0]["loss"] - 1e-3
    difference = label_losses(trained["dual"], examples, 0) - label_losses(
        trained["standard"], plains, 0
    )
    assert (difference - LN2).abs().max() <= 1e-3


def test_rows_need_added_tokens(base):
    with pytest.raises(ValueError, match="added_rows"):
        mark_trainable(read_base(base()), "rows", lora_rank=4, lora_alpha=8)


def trainer_of(model, tokenizer, folder, **settings) -> DualARGRPO:
    config = DualRLConfig(
        steps=1,
        prompts_per_step=2,
        group_size=2,
        explore_fraction=0.0,
        credit="trajectory",
        gradient_accumulation=2,
        validation_every=0,
        length_tolerance=400.0,
        kl_coefficient=1e-3,
        **settings,
    )
    asked = validation_questions(4)
    return DualARGRPO(
        model,
        tokenizer,
        SearchEnvironment(topk=1),
        asked,
        asked,
        config,
        ar_grpo(config),
        folder=folder,
        max_turns=2,
        max_new_tokens=16,
    )


def test_rl_on_mirrors_alone_leaves_the_visible_tokens_without_loss(dual_of, tmp_path):
    model, tokenizer = load(dual_of(True, True, 5.0))
    dual = DualVocab.of(model.config)
    trainer = trainer_of(model, tokenizer, tmp_path, trainable="lora+rows", latent_only=True)
    sampling = Sampling(16, 1.0, stop=trainer.environment.stop)
    trajectories = run(
        validation_questions(4),
        trainer.engine,
        trainer.environment,
        sampling,
        modes="think",
        max_turns=2,
        batch_size=4,
        seed=0,
    )
    batch = trainer.batch(trajectories, [[1.0] * len(t.ids) for t in trajectories])
    trained = set(batch.ids[batch.mask].tolist())
    assert trained and all(map(dual.is_mirror, trained))
    sampled = [i for t in trajectories for i, o in zip(t.ids, t.origins) if o == Origin.SAMPLED]
    assert batch.mask.sum() == sum(map(dual.is_mirror, sampled)) < len(sampled)
    silent = dataclasses.replace(
        trajectories[0], origins=[Origin.PROMPT] * len(trajectories[0].ids)
    )
    # Nothing to train is no NaN.
    assert trainer._update([silent], [[1.0] * len(silent.ids)])["loss"] == 0.0
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


def test_a_trainer_that_would_score_without_the_constraint_is_refused(dual_of, tmp_path):
    model, tokenizer = load(dual_of(True, True, 5.0))
    config, asked = RLConfig(prompts_per_step=1), validation_questions(1)
    strategy = ar_grpo(config.model_copy(update={"length_tolerance": 400.0}))
    with pytest.raises(ValueError, match="constrain"):
        ARGRPO(
            model, tokenizer, SearchEnvironment(), asked, asked, config, strategy, folder=tmp_path
        )


def test_rl_on_mirrors_needs_a_dual_vocabulary(base, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(base())
    with pytest.raises(ValueError, match="no dual checkpoint"):
        trainer_of(read_base(base()), tokenizer, tmp_path)


def test_rl_scores_what_was_sampled_under_the_constraint_and_trains_the_rows(dual_of, tmp_path):
    model, tokenizer = load(dual_of(True, True, 5.0))
    before = model.get_input_embeddings().weight.detach().clone()
    dual = DualVocab.of(model.config)
    settings = {"learning_rate": 1e-2, "trainable": "rows", "temperature": 0.8}
    trainer = trainer_of(model, tokenizer, tmp_path, **settings)
    trajectories, _ = trainer.rollouts(1)
    batch = trainer.batch(trajectories, [[0.0] * len(t.ids) for t in trajectories])
    with torch.no_grad():
        scored = trainer.logprobs(trainer.model, batch)
    behaviour = batch.behaviour[:, 1:][batch.mask[:, 1:]]
    assert (scored - behaviour).abs().max() <= 1e-4
    trainer._update(
        trajectories, [[float(i % 3) - 1] * len(t.ids) for i, t in enumerate(trajectories)]
    )
    after = trainer.fit(lambda row: None).get_input_embeddings().weight
    assert torch.equal(after[: dual.V], before[: dual.V])
    thinks = any(dual.is_mirror(i) for t in trajectories for i in t.ids)
    assert thinks == (not torch.equal(after[dual.V :], before[dual.V :]))

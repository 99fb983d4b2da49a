"""Benchmarks: contestants that do the same work, timed in turn, and tables that say so."""

import math

import pandas as pd
import pytest
import torch

from alar import figures
from alar.domains.search.environment import SearchEnvironment
from alar.domains.search.questions import solved_questions, validation_questions
from alar.evaluate import tables
from alar.model import load_base
from alar.rollout import loop
from alar.rollout.engine import Sampling, TurnRequest
from alar.rollout.hf import HFEngine
from alar.study import bench, params, receipts
from alar.study.bench.memory import peak_memory
from alar.study.bench.subjects import BENCH_WORLD
from alar.study.selection import Command, run_folders

CPU = torch.device("cpu")
SIZES = dict(batch_size=3, length=40, blocks=2)


@pytest.fixture(scope="module")
def pair():
    return bench.model_pair(128, 2, num_latent=3)


@pytest.fixture(scope="module")
def batch(pair):
    return bench.random_batch(pair.latent.config, padded=True, **SIZES)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("latent_gradient", ["published", "projector_only"])
def test_the_per_sample_baseline_computes_what_ours_computes(pair, batch, latent_gradient):
    model, inputs = pair.latent, batch.inputs
    ours = model(**inputs, latent_gradient=latent_gradient).loss
    loss, z = bench.per_sample_loss(model, **inputs, latent_gradient=latent_gradient)
    states = model.latent_states(inputs["input_ids"], inputs["attention_mask"])
    assert (z - states.latents).abs().max() <= 1e-5
    assert abs(loss - ours) <= 1e-5
    expected, found = gradients(model, ours), gradients(model, loss)
    for name in expected:
        assert (found[name] - expected[name]).norm() <= 1e-4 * expected[name].norm(), name


def test_the_per_sample_baseline_is_the_same_under_checkpointing(pair, batch):
    model = pair.latent
    expected, z = bench.per_sample_loss(model, **batch.inputs, latent_gradient="projector_only")
    with bench.training_mode(model, checkpointed=True):
        loss, again = bench.per_sample_loss(model, **batch.inputs, latent_gradient="projector_only")
        with pytest.raises(ValueError, match="projector_only"):
            bench.per_sample_loss(model, **batch.inputs)
    assert (again - z).abs().max() <= 1e-5 and abs(loss - expected) <= 1e-5
    assert not model.training and not model.is_gradient_checkpointing


def test_the_baseline_makes_the_calls_of_its_description(pair, batch, monkeypatch):
    calls, forward = [], type(pair.latent.model).forward
    monkeypatch.setattr(
        type(pair.latent.model), "forward", lambda *a, **k: calls.append(1) or forward(*a, **k)
    )
    bench.per_sample_loss(pair.latent, **batch.inputs)
    assert (
        len(calls)
        == SIZES["batch_size"] * SIZES["blocks"] * (1 + pair.latent.config.num_latent) + 1
    )


def test_the_twin_is_the_latent_model_without_its_projector(pair):
    ids = torch.arange(10, 30)[None]
    assert torch.allclose(pair.latent(ids).logits, pair.plain(ids).logits, atol=1e-6)


@pytest.mark.parametrize("padded", [False, True])
def test_random_batches_have_whole_blocks_with_text_around_them(pair, padded):
    config = pair.latent.config
    for seed in range(20):
        batch = bench.random_batch(config, 4, 26, 3, padded=padded, seed=seed)
        ids, mask, labels = batch.inputs.values()
        for row, real in zip(ids.tolist(), mask.sum(1).tolist(), strict=True):
            text = "".join("z" if token == config.latent_token_id else "." for token in row[:real])
            assert [len(run) for run in text.replace(".", " ").split()] == [3, 3, 3] and text[
                0
            ] == text[-1] == "."
        assert batch.padded_over_real == pytest.approx(ids.numel() / int(mask.sum()))
        assert (batch.padded_over_real > 1) == padded
        assert not ((labels != -100) & ((mask == 0) | (ids == config.latent_token_id))).any()


def test_laptop_batches_are_the_trainers_examples():
    laptop = bench.laptop_pair()
    inputs = bench.aasd_batch(laptop.latent.config, 4).inputs
    assert laptop.latent(**inputs).loss.isfinite()
    turns = sum(len(solved.steps) for solved in solved_questions(BENCH_WORLD, 4, 0))
    assert (inputs["input_ids"] == laptop.latent.config.latent_token_id).sum() == 4 * turns
    assert (inputs["labels"] != -100).sum() < inputs["attention_mask"].sum() / 2, (
        "prompts and passages carry no loss"
    )


def first_difference(one, other):
    return next(
        (i for i, pair in enumerate(zip(one, other)) if pair[0] != pair[1]),
        min(len(one), len(other)),
    )


@pytest.mark.parametrize("batch_size", [5, 1])
def test_generate_turn_by_turn_writes_what_the_engine_writes(batch_size):
    model, tokenizer = load_base("embedded")
    environment = SearchEnvironment()
    questions = validation_questions(5, worlds=1)[: 5 if batch_size > 1 else 1]
    sampling, equal = Sampling(max_new_tokens=96, stop=environment.stop), 0
    engines = HFEngine(model, tokenizer), bench.GenerateEngine(model, tokenizer)
    options = {"modes": "off", "max_turns": 3, "batch_size": batch_size}
    for ours, theirs in zip(
        *(loop.run(questions, engine, environment, sampling, **options) for engine in engines),
        strict=True,
    ):
        if ours.ids == theirs.ids:
            equal += 1
            assert ours.turns == theirs.turns and ours.prediction == theirs.prediction
            continue
        where = first_difference(
            ours.ids, theirs.ids
        )  # rounding may decide a choice without a margin, nothing else
        with torch.no_grad():
            top = model(torch.tensor([ours.ids[:where]])).logits[0, -1].topk(2).values
        assert top[0] - top[1] < 1e-4, (ours.question.text, where)
    assert equal >= len(questions) - 1


def test_generate_refuses_what_it_cannot_do():
    model, tokenizer = load_base("embedded")
    engine, request = bench.GenerateEngine(model, tokenizer), TurnRequest(0, [5, 6], [], forced=[7])
    with pytest.raises(ValueError, match="use HFEngine"):
        engine.generate([request], Sampling())
    with pytest.raises(ValueError, match="use HFEngine"):
        engine.generate([TurnRequest(0, [5, 6], [])], Sampling(temperature=1.0))


@pytest.fixture
def scripted():
    """A case of contestants that only note their turn, and the notes."""
    order = []
    contestants = tuple(
        bench.Contestant(
            name,
            lambda name=name, tokens=tokens: (
                order.append((name, torch.get_num_threads())) or tokens
            ),
        )
        for name, tokens in {"a": 10, "b": 20, "c": 30}.items()
    )
    return (
        bench.Contest("part", "case", contestants, (bench.Claim("a", "b", at_most=1.3),), 1.25),
        order,
    )


def test_contestants_run_in_turn_after_one_untimed_run_each(scripted):
    case, order = scripted
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        results = bench.time_contests([case], rounds=3, threads=1)
        assert torch.get_num_threads() == 2, "the threads are restored"
    finally:
        torch.set_num_threads(before)
    assert "".join(name for name, _ in order) == "abc" + "abc" * 3
    assert {threads for _, threads in order} == {1}
    assert results.rounds[["contestant", "round"]].values.tolist() == [
        [n, r] for r in (1, 2, 3) for n in "abc"
    ]


def test_the_tables_hold_medians_ranges_and_ratios_per_round(scripted, tmp_path, monkeypatch):
    case, _ = scripted
    seconds = iter([1.0, 4.0, 1.0, 2.0, 5.0, 1.0, 9.0, 6.0, 1.0])  # three rounds of a, b, c
    clock = {"now": 0.0, "starts": True}

    def tick():
        if not clock["starts"]:
            clock["now"] += next(seconds)
        clock["starts"] = not clock["starts"]
        return clock["now"]

    monkeypatch.setattr("alar.study.bench.measure.time.perf_counter", tick)
    results = bench.time_contests([case], rounds=3)
    a = results.summary.set_index("contestant").loc["a"]
    assert (a["wall_s"], a["wall_s_low"], a["wall_s_high"]) == (2.0, 1.0, 9.0)
    assert (
        a["tokens_per_s"] == pytest.approx(5.0)
        and a["padded_over_real"] == 1.25
        and a["rounds"] == 3
    )
    wall = results.ratios.set_index("clock").loc["wall"]  # per token: b has twice as many
    assert (wall["ratio"], wall["ratio_low"], wall["ratio_high"]) == pytest.approx((0.8, 0.5, 3.0))
    assert wall["at_most"] == 1.3 and math.isnan(wall["at_least"])
    results.save(tmp_path)
    read = tables.read(tmp_path / "ratios.csv", tables.BENCH_RATIOS)
    pd.testing.assert_frame_equal(read, results.ratios)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "ratios.csv",
        "rounds.csv",
        "summary.csv",
    ]


def test_every_kind_of_case_runs(pair, batch):
    cases = bench.training_contests(pair, [batch]) + bench.logprob_contests(pair, [batch])
    results = bench.time_contests(cases, rounds=1)
    assert set(results.summary["part"]) == {"training step", "log-prob pass"}
    assert set(results.summary["tokens"]) == {batch.real_tokens}
    peaks = results.summary.set_index(["part", "contestant"])["peak_mib"]
    assert (peaks > 0).all()
    assert peaks["training step", "per sample"] > peaks["training step", "plain SFT"], (
        "it keeps the text twice"
    )
    assert all(parameter.grad is None for parameter in pair.latent.parameters())
    unclaimed = bench.training_contests(pair, [batch], claims=False)[0].claims
    assert all(claim.at_most is claim.at_least is None for claim in unclaimed)
    _, drawn = figures.speed(results.ratios, clock="cpu")
    assert len(drawn) == len(results.ratios) / 2


def test_peak_memory_counts_what_is_alive_together():
    weight, x = torch.randn(256, 256, requires_grad=True), torch.randn(512, 256)

    def chain():
        hidden = x
        for _ in range(4):
            hidden = torch.tanh(hidden @ weight)
        hidden.sum().backward()

    unit = 512 * 256 * 4 / 2**20
    assert 4 * unit < peak_memory(chain, CPU) < 8.5 * unit, (
        "four saved activations and a few in flight"
    )
    assert peak_memory(lambda: [torch.ones(2**18) + 1 for _ in range(5)][0], CPU) == pytest.approx(
        6
    )
    assert peak_memory(
        lambda: sum(float((torch.ones(2**18) + 1)[0]) for _ in range(5)), CPU
    ) == pytest.approx(2, abs=0.01)
    assert peak_memory(lambda: x.view(-1).add_(0), CPU) == 0, "what is there before is not counted"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bench.model_pair(200), "hidden_size is 200"),
        (lambda: bench.model_pair(128, 1, 0), "num_latent is 0"),
        (lambda: bench.time_contests([], rounds=1), "no contest"),
        (lambda: bench.time_contests([None], rounds=0), "rounds is 0"),
        (lambda: bench.time_contests([None], threads=-1), "threads is -1"),
        (lambda: bench.resolve_device("tpu"), "device 'tpu': expected"),
        (lambda: bench.Contest("p", "c", ()), "at least one"),
        (
            lambda: bench.Contest(
                "p", "c", (bench.Contestant("a", int),), (bench.Claim("a", "b"),)
            ),
            "no contestant 'b'",
        ),
        (
            lambda: bench.rollout_contest(
                None, None, SearchEnvironment(), [1, 2], single_questions=3
            ),
            "expected 1 to 2",
        ),
    ],
)
def test_bad_requests_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_study_leaves_the_benchmarks_out_until_they_are_asked_for(repository):
    def chosen(file="laptop", **request):
        runs = run_folders(
            Command(repository / "params" / f"{file}.yaml", **request),
            repository,
            repository / "notebooks",
        )
        return [[notebook.name[:2] for notebook in run.notebooks] for run in runs]

    assert not {"09", "10"} & {*chosen()[0], *chosen(start="05")[0]}
    assert chosen(only=("09",)) == chosen(start="09") == [["09"]]
    assert chosen(only=("10",)) == chosen(start="10") == [["10"]]
    assert chosen("benchmarks") == [["09"], ["09"]]


def test_the_threads_of_a_timing_belong_to_its_result(repository):
    def parts(stem, *overrides):
        experiment = params.load_experiment(repository / "params" / "laptop.yaml", overrides)
        return receipts.fingerprint(
            experiment, repository / "notebooks" / f"{stem}.ipynb", "search", repository / "alar"
        )

    assert parts("09_benchmarks", "bench.threads=2") != parts("09_benchmarks")
    assert parts("09_benchmarks", "run.threads=2") == parts("09_benchmarks")
    assert parts("03_aasd", "run.threads=2") == parts("03_aasd"), "where, not what"


def test_a_row_too_short_for_its_blocks_is_refused(pair):
    with pytest.raises(ValueError, match="length 12: .* too few for 3 blocks of K = 3"):
        bench.random_batch(pair.latent.config, 2, 12, 3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="PyTorch sees no GPU"):
        bench.resolve_device("cuda")
    assert bench.resolve_device("auto") == CPU

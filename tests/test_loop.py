"""The agent loop: the record agrees with itself, modes are forced as planned, observations stay
what they are."""

import random
import time

import numpy as np
import pytest
import torch

from alar import protocol
from alar.domains.search.environment import SearchEnvironment
from alar.domains.search.questions import solved_questions, validation_questions
from alar.model import embedded, load_base
from alar.records import Origin, Trajectory, read_trajectories, write_trajectories
from alar.rollout.engine import Engine, Sampling, TurnOutput, TurnRequest
from alar.rollout.hf import HFEngine, policy_logits
from alar.rollout.loop import run
from alar.rollout.modes import block_start, latent_probabilities

SAMPLING = Sampling(max_new_tokens=24)


class Scripted(Engine):
    """An engine that writes given turns, one a step: what the loop does with them is what is
    tested."""

    def __init__(self, codec, turns):
        self.codec, self.turns, self.waiting, self.most, self.released = codec, turns, [], 0, []

    @property
    def busy(self):
        return bool(self.waiting)

    def submit(self, requests, sampling):
        self.waiting += requests
        self.most = max(self.most, len(self.waiting))

    def step(self):
        request = self.waiting.pop(0)
        ids = self.codec.untrusted(self.turns[request.session].pop(0))
        return [
            (
                request,
                TurnOutput(ids, [int(Origin.SAMPLED)] * len(ids), [-0.5] * len(ids), [], "stop"),
            )
        ]

    def release(self, sessions):
        self.released += list(sessions)


@pytest.fixture(scope="module")
def engine(random_model):
    return HFEngine(*random_model())


def script(steps, first=True):
    return [
        ("\n\n" if n == 0 else "")
        + f"{protocol.think_block(s.thought)}\n\n{protocol.action_text(s.action, s.argument)}"
        for n, s in enumerate(steps)
    ]


def test_expert_turns_find_their_passages_and_score_one(engine):
    solved = solved_questions("counterfactual-9", 24, 0)
    scripted = Scripted(engine.codec, {row: script(item.steps) for row, item in enumerate(solved)})
    trajectories = run([item.question for item in solved], scripted, SearchEnvironment(), SAMPLING)
    assert all(t.correct and t.well_formed and t.finish == "answer" for t in trajectories)
    assert sorted(scripted.released) == list(range(24))
    for item, t in zip(solved, trajectories):
        assert [turn.action for turn in t.turns] == [step.action for step in item.steps]
        assert t.think_length == sum(len(step.thought) for step in item.steps)
        observed = engine.codec.text(
            [i for i, o in zip(t.ids, t.origins) if o == Origin.OBSERVATION]
        )
        assert observed.count("<information>") == len(item.steps) - 1


def test_a_new_question_takes_the_place_of_one_that_is_answered(engine):
    solved = solved_questions("counterfactual-9", 12, 0)
    scripted = Scripted(engine.codec, {row: script(item.steps) for row, item in enumerate(solved)})
    ticks, entered = [], []
    submit = scripted.submit
    scripted.submit = lambda requests, sampling: (
        entered.append([r.session for r in requests]) or submit(requests, sampling)
    )
    trajectories = run(
        [item.question for item in solved],
        scripted,
        SearchEnvironment(),
        SAMPLING,
        batch_size=3,
        progress=lambda rows: (ticks.append(row) or row for row in rows),
    )
    assert [t.question for t in trajectories] == [item.question for item in solved] and all(
        t.correct for t in trajectories
    )
    assert scripted.most == 3 and ticks == list(range(12))
    firsts = [min(i for i, rows in enumerate(entered) if row in rows) for row in range(12)]
    assert entered[0] == [0, 1, 2] and len(set(firsts)) > 4  # not in batches of three


def test_an_environment_that_fails_leaves_the_engine_free_for_the_next_run(random_model):
    class Broken(SearchEnvironment):
        def observe(self, steps):
            raise OSError("no server")

    engine, questions = HFEngine(*random_model()), validation_questions(3)
    scripted = Scripted(
        engine.codec, {row: ["<think>so</think>\n\n<search>Peru</search>"] for row in range(3)}
    )
    with pytest.raises(OSError):
        run(questions, scripted, Broken(), SAMPLING)
    assert sorted(scripted.released) == [0, 1, 2]
    engine.submit([TurnRequest(0, engine.codec.prompt("x"), [])], SAMPLING)
    with pytest.raises(ValueError, match="still writes"):
        engine.generate([TurnRequest(1, engine.codec.prompt("x"), [])], SAMPLING)
    engine.release([0])
    assert (
        not engine.busy
        and len(engine.generate([TurnRequest(0, engine.codec.prompt("x"), [])], SAMPLING)) == 1
    )


def test_an_unparsable_action_gets_the_hint_and_the_last_turn_ends_the_trajectory(engine):
    scripted = Scripted(
        engine.codec, {0: ["\n\nnothing", "<think>so</think>\n\n<search>Peru</search>", "again"]}
    )
    question = solved_questions("real", 1, 0)[0].question
    (t,) = run([question], scripted, SearchEnvironment(), SAMPLING, max_turns=3)
    assert protocol.INVALID_ACTION in engine.codec.text(t.ids)
    assert t.finish == "max_turns" and not t.correct and t.prediction is None
    assert [turn.well_formed for turn in t.turns] == [False, True, False]


def test_records_agree_with_themselves_and_survive_the_disk(engine, tmp_path):
    plan = {0: "latent", 1: "think", 2: "free", 3: "latent"}
    trajectories = run(
        validation_questions(12),
        engine,
        SearchEnvironment(),
        SAMPLING,
        modes=lambda row, turn: plan[turn],
        max_turns=4,
    )
    for t in trajectories:
        t.check()
        assert [o == Origin.LATENT for o in t.origins] == [
            token == engine.codec.latent_token_id for token in t.ids
        ]
        assert t.generated_tokens == sum(turn.end - turn.start for turn in t.turns)
        for number, turn in enumerate(t.turns):
            assert turn.forced_mode == plan[number].replace("free", "")
            begin = block_start(t, number, engine.codec)
            if plan[number] != "free":
                tag = (
                    engine.codec.latent_open
                    if plan[number] == "latent"
                    else engine.codec.think_open
                )
                assert t.ids[begin : begin + 3] == tag and set(t.origins[begin : begin + 3]) == {
                    Origin.FORCED
                }
    again = read_trajectories(write_trajectories(tmp_path / "t.jsonl", trajectories))
    for one, other in zip(trajectories, again, strict=True):
        assert (one.ids, one.origins, one.turns, one.question) == (
            other.ids,
            other.origins,
            other.turns,
            other.question,
        )
        assert np.array_equal(one.latents, other.latents)
        assert np.allclose(one.logprobs, other.logprobs, atol=1e-6, equal_nan=True)


def test_a_truncated_file_of_trajectories_names_the_line(engine, tmp_path):
    trajectories = run(validation_questions(2), engine, SearchEnvironment(), SAMPLING, max_turns=2)
    path = write_trajectories(tmp_path / "t.jsonl", trajectories)
    path.write_text(path.read_text()[:-40])
    with pytest.raises(ValueError, match=r"t\.jsonl, line 2: the last line is cut off"):
        read_trajectories(path)
    path.write_text('{"ids": [1]}\n')
    with pytest.raises(ValueError, match=r"t\.jsonl, line 1: not a complete trajectory"):
        read_trajectories(path)
    with pytest.raises(FileNotFoundError, match="run the stage"):
        read_trajectories(tmp_path / "absent.jsonl")


def test_trajectories_do_not_depend_on_the_batch_size(random_model):
    questions = validation_questions(10)
    written = []
    for batch_size in (3, 10):
        engine = HFEngine(*random_model())
        trajectories = run(
            questions,
            engine,
            SearchEnvironment(),
            Sampling(16, temperature=1.0),
            max_turns=3,
            batch_size=batch_size,
            seed=7,
        )
        written.append([t.ids for t in trajectories])
    assert written[0] == written[1]


def test_an_unknown_mode_is_an_error(engine):
    with pytest.raises(ValueError, match="expected one of"):
        run(validation_questions(1), engine, SearchEnvironment(), SAMPLING, modes="dream")


def slow_probability(model, codec, trajectory: Trajectory, turn: int) -> float:
    """Two ordinary forwards over the prefix and each tag."""
    begin, totals = block_start(trajectory, turn, codec), []
    for tag in (codec.latent_open, codec.think_open):
        ids = torch.tensor([trajectory.ids[:begin] + tag])
        before = sum(o == Origin.LATENT for o in trajectory.origins[:begin])
        z = torch.as_tensor(trajectory.latents[:before]).reshape(before, model.config.hidden_size)
        hidden = model.latent_states(ids, latents=z).hidden[0, begin - 1 : -1]
        logp = torch.log_softmax(policy_logits(model, hidden), -1)
        totals.append(sum(logp[n, piece] for n, piece in enumerate(tag)))
    return torch.softmax(torch.stack(totals), 0)[0].item()


@torch.no_grad()
def test_mode_probabilities_equal_two_plain_forwards(engine):
    rng = random.Random(1)
    trajectories = run(
        validation_questions(6),
        engine,
        SearchEnvironment(),
        SAMPLING,
        modes=lambda row, turn: rng.choice(["latent", "think", "free"]),
        max_turns=3,
    )
    scores = latent_probabilities(engine.model, engine.codec, trajectories, cells=60_000)
    for t, row in zip(trajectories, scores, strict=True):
        assert len(row) == len(t.turns)
        for turn, p in enumerate(row):
            assert p == pytest.approx(
                slow_probability(engine.model, engine.codec, t, turn), abs=1e-5
            )


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("logprobs", [], "different lengths"),
        ("origins", None, "do not agree"),
        ("latents", [], "latent vectors for"),
    ],
)
def test_a_record_that_contradicts_itself_is_refused(engine, tmp_path, field, value, message):
    (t,) = run(
        validation_questions(1), engine, SearchEnvironment(), SAMPLING, modes="latent", max_turns=1
    )
    record = t.to_json()
    if field == "origins":
        value = list(record["origins"])
        value[0] = int(Origin.LATENT)  # a prompt token
    with pytest.raises(ValueError, match=message):
        Trajectory.from_json(record | {field: value})


class Waiting(SearchEnvironment):
    """Answers after a while, as a server does; the delays differ from call to call."""

    def __init__(self, delays):
        super().__init__()
        self.ahead, self.delays, self.under_way, self.most = 3, delays, 0, 0

    def observe(self, steps):
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        time.sleep(self.delays())
        found = super().observe(steps)
        self.under_way -= 1
        return found


@pytest.fixture(scope="module")
def base_engine():
    return HFEngine(*load_base(embedded("search")))


def test_searches_ahead_of_the_loop_give_the_same_trajectories_whatever_they_take(base_engine):
    questions = validation_questions(24)
    sampling = Sampling(max_new_tokens=96, temperature=1.0)

    def answered(environment):
        base_engine.reset()
        return run(questions, base_engine, environment, sampling, modes="off", batch_size=16)

    draws = random.Random(0)
    erratic = Waiting(lambda: draws.uniform(0, 0.05))
    one, other, plain = (
        answered(environment)
        for environment in (Waiting(lambda: 0.0), erratic, SearchEnvironment())
    )
    assert erratic.most > 1  # several were under way at once
    # Not only equal up to rounding: the engine got the same batches.
    assert [t.to_json() for t in one] == [t.to_json() for t in other]
    assert [t.ids for t in one] == [t.ids for t in plain]
    assert sum(len(t.turns) > 1 for t in one) > 12


def test_a_search_ahead_that_fails_ends_the_run_with_its_error(engine):
    class Broken(SearchEnvironment):
        def __init__(self):
            super().__init__()
            self.ahead = 2

        def observe(self, steps):
            raise OSError("no server")

    searches = {row: ["<think>so</think>\n\n<search>Peru</search>"] for row in range(3)}
    scripted = Scripted(engine.codec, searches)
    with pytest.raises(OSError, match="no server"):
        run(validation_questions(3), scripted, Broken(), SAMPLING)
    assert sorted(scripted.released) == [0, 1, 2]

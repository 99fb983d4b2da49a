"""Teacher rollouts in parts: bounded memory, and an interruption changes no trace."""

import weakref
from dataclasses import replace

import pytest

from alar.domains.search.environment import SearchEnvironment
from alar.domains.search.questions import training_questions
from alar.evaluate.systems import question_table
from alar.files import read_jsonl
from alar.model import embedded, load_base
from alar.records import read_trajectories, write_trajectories
from alar.rollout.engine import Sampling
from alar.rollout.hf import HFEngine
from alar.rollout.loop import run
from alar.study.teacher.parts import check_teacher, gather_parts, roll_out_parts, without_repeats

SAMPLING = Sampling(max_new_tokens=96, temperature=1.0)
QUESTIONS = training_questions(20, worlds=2, seed=0)
SIZE = 4


class Watched(SearchEnvironment):
    """Counts the trajectories that are alive whenever one is judged, and how many were."""

    def __init__(self):
        super().__init__()
        self.met, self.most, self.judged = [], 0, 0

    def correct(self, trajectory):
        self.met = [seen for seen in self.met if seen() is not None]
        self.met.append(weakref.ref(trajectory))
        self.most, self.judged = max(self.most, len(self.met)), self.judged + 1
        return super().correct(trajectory)


@pytest.fixture(scope="module")
def engine():
    return HFEngine(*load_base(embedded("search")))


def parts_of(engine, folder, environment=None, **options):
    environment = environment or SearchEnvironment()
    return roll_out_parts(
        QUESTIONS,
        engine,
        environment,
        SAMPLING,
        folder,
        settings={"teacher": "embedded"},
        size=SIZE,
        batch_size=SIZE,
        **options,
    )


def test_one_part_gives_what_one_rollout_gives(engine, tmp_path):
    engine.reset()
    whole = run(QUESTIONS, engine, SearchEnvironment(), SAMPLING, modes="off")
    files = roll_out_parts(
        QUESTIONS, engine, SearchEnvironment(), SAMPLING, tmp_path / "parts", settings={}
    )
    table, longest = gather_parts(files, tmp_path / "traces.jsonl")
    kept = [t for t in whole if t.correct and t.well_formed]
    expected = write_trajectories(tmp_path / "expected.jsonl", kept)
    assert len(files) == 1 and len(kept) > 4
    assert (tmp_path / "traces.jsonl").read_bytes() == expected.read_bytes()
    asked = question_table(whole, "teacher")
    assert table.drop(columns="kept").equals(asked)
    assert list(table["kept"]) == list(asked["correct"] & asked["well_formed"])
    assert longest.to_json() == max(kept, key=lambda t: t.think_length).to_json()


def test_only_one_part_is_held_in_memory(engine, tmp_path):
    environment = Watched()
    files = parts_of(engine, tmp_path / "parts", environment)
    assert len(files) == len(QUESTIONS) / SIZE and environment.judged > 3 * SIZE
    assert environment.most <= SIZE
    assert sum(len(read_jsonl(file)) for file in files) == len(QUESTIONS)


def test_after_a_kill_the_stage_goes_on_and_the_traces_are_the_same(engine, tmp_path):
    whole = parts_of(engine, tmp_path / "whole")

    class Killed(SearchEnvironment):
        searches = 0

        def observe(self, steps):
            self.searches += len(steps)
            if self.searches > 14:
                raise KeyboardInterrupt
            return super().observe(steps)

    with pytest.raises(KeyboardInterrupt):
        parts_of(engine, tmp_path / "killed", Killed())
    survived = [path.name for path in sorted((tmp_path / "killed").iterdir())]
    assert 0 < len(survived) < len(whole)  # and nothing half-written

    ticks, environment = [], Watched()
    resumed = parts_of(
        engine,
        tmp_path / "killed",
        environment,
        progress=lambda rows: (ticks.append(row) or row for row in rows),
    )
    assert len(ticks) == len(QUESTIONS)  # the bar counts what was done before
    assert environment.judged <= len(QUESTIONS) - SIZE * len(survived)
    assert [path.name for path in resumed] == [path.name for path in whole]
    assert [path.read_bytes() for path in resumed] == [path.read_bytes() for path in whole]


def test_parts_of_other_settings_are_not_taken(engine, tmp_path):
    first = parts_of(engine, tmp_path)
    assert set(parts_of(engine, tmp_path, seed=1)).isdisjoint(first)
    assert parts_of(engine, tmp_path) == first


def test_a_search_for_the_same_again_is_left_out_with_its_result(engine, tmp_path):
    (trace,) = [
        t
        for t in run(QUESTIONS[:8], engine, SearchEnvironment(), SAMPLING, modes="off")
        if t.correct and t.well_formed and len(t.turns) > 1
    ][:1]
    first, last = trace.turns[0], trace.turns[-1]
    end = trace.turns[1].start  # of the first turn's observation
    inserted = end - first.start
    again = replace(first, start=end, end=end + first.end - first.start)
    later = [
        replace(turn, start=turn.start + inserted, end=turn.end + inserted)
        for turn in trace.turns[1:]
    ]
    repeated = replace(
        trace,
        ids=trace.ids[:end] + trace.ids[first.start :],
        origins=trace.origins[:end] + trace.origins[first.start :],
        logprobs=trace.logprobs[:end] + trace.logprobs[first.start :],
        turns=[first, again, *later],
    )
    repeated.check()
    assert without_repeats(repeated).to_json() == trace.to_json()
    assert without_repeats(trace).to_json() == trace.to_json()
    assert last.action == "answer"


def test_a_teacher_with_another_vocabulary_is_refused(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    check_teacher(tokenizer, tmp_path)
    with pytest.raises(ValueError, match="another vocabulary"):
        check_teacher(tokenizer, embedded("tool"))


def test_traces_of_all_parts_are_one_file(engine, tmp_path):
    files = parts_of(engine, tmp_path / "parts")
    table, _ = gather_parts(files, tmp_path / "traces.jsonl")
    kept = read_trajectories(tmp_path / "traces.jsonl")
    assert [t.question.id for t in kept] == list(table.loc[table["kept"], "question_id"])
    assert len(table) == len(QUESTIONS)

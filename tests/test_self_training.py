"""Concise self-training and direct SFT: selection against brute force, exemplars that fit, examples
with the right loss."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from alar import protocol
from alar.domains.search.environment import SearchEnvironment
from alar.domains.search.questions import validation_questions
from alar.domains.static import arithmetic, sets
from alar.domains.static.environment import StaticEnvironment
from alar.domains.static.forms import FORMS
from alar.domains.tool.environment import ToolEnvironment
from alar.methods import conversations
from alar.methods import self_training as st
from alar.methods.samples import draw_samples
from alar.protocol import parse_turns
from alar.records import Origin, Question, Trajectory, TurnRecord
from alar.rollout.codec import Codec
from alar.rollout.engine import Sampling
from alar.rollout.hf import HFEngine
from alar.study import params
from alar.study.params.sections import Experiment

LIMITS = {"samples": 2, "max_turns": 2, "batch_size": 8, "seed": 0}


def rollout(tokens, correct=True, well_formed=True, kind=""):
    """A bare single-turn trajectory of so many generated tokens."""
    turn = TurnRecord(3, 3 + tokens, "think", "answer", "7", well_formed)
    ids, origins = list(range(3 + tokens)), [Origin.PROMPT] * 3 + [Origin.SAMPLED] * tokens
    question = Question(f"{kind}{tokens}", "x", ("7",), kind)
    return Trajectory(
        question,
        ids,
        origins,
        [float("nan")] * len(ids),
        np.zeros((0, 0)),
        [turn],
        "7",
        correct,
        "answer",
    )


def written(codec, form, question, turns):
    """What the loop records of a policy that writes these turns: (text, action, argument,
    observation)."""
    ids = codec.encode(form.prompt(question))
    origins, records = [Origin.PROMPT] * len(ids), []
    for text, action, argument, observation in turns:
        turn, seen = (
            codec.untrusted(text),
            codec.encode(form.observation(observation)) if observation else [],
        )
        records.append(TurnRecord(len(ids), len(ids) + len(turn), "think", action, argument, True))
        ids, origins = (
            ids + turn + seen,
            origins + [Origin.SAMPLED] * len(turn) + [Origin.OBSERVATION] * len(seen),
        )
    return Trajectory(
        question,
        ids,
        origins,
        [float("nan")] * len(ids),
        np.zeros((0, 0)),
        records,
        "x",
        True,
        "answer",
    )


@pytest.fixture
def searched(tokenizer):
    """(codec, a correct trajectory of two turns in the search domain)"""
    codec, observation = (
        Codec(tokenizer),
        protocol.observation_text([("Peru", "Peru uses the sol.")]),
    )
    steps = [("I look.", "search", "Peru currency", observation), ("I read.", "answer", "sol", "")]
    turns = [
        (
            f"{'' if i else chr(10) * 2}{protocol.think_block(t)}\n\n{protocol.action_text(a, x)}",
            a,
            x,
            o,
        )
        for i, (t, a, x, o) in enumerate(steps)
    ]
    return codec, written(
        codec,
        protocol.SEARCH,
        Question("q", "Which currency is used in Peru?", ("sol",), "single"),
        turns,
    )


_SAMPLE = some.tuples(some.integers(1, 9), some.booleans(), some.booleans())
_PASS = some.lists(some.lists(_SAMPLE, max_size=4), min_size=3, max_size=3)


@settings(max_examples=30)
@given(_PASS, _PASS)
def test_the_shortest_correct_rollout_over_all_passes_is_taken(zero, few):
    passes = [[[rollout(*sample) for sample in group] for group in found] for found in (zero, few)]
    chosen = st.shortest(*passes)
    for index, best in enumerate(chosen):
        good = [
            n
            for found in (zero, few)
            for n, correct, well_formed in found[index]
            if correct and well_formed
        ]
        assert (best is None) == (not good) and (best is None or best.generated_tokens == min(good))
        in_order = [t for found in passes for t in found[index]]
        assert (
            best is None
            or next(
                t for t in in_order if t.correct and t.well_formed and len(t.ids) == len(best.ids)
            )
            is best
        )


def test_exemplars_take_types_in_turn_and_what_fits():
    found = [rollout(10 * n, kind=kind) for n in (1, 2, 3) for kind in "ab"] + [
        None,
        rollout(4, kind="c"),
    ]
    chosen = st.choose_exemplars(found, 3, room=1000, seed=0)
    assert sorted(t.question.type for t in chosen) == ["a", "b", "c"]
    assert chosen == st.choose_exemplars(found, 3, room=1000, seed=0)
    small = st.choose_exemplars(found, 5, room=40, seed=0)
    assert small and sum(len(t.ids) for t in small) <= 40
    with pytest.raises(ValueError, match="no exemplar: 7 correct rollouts, 6 tokens of room"):
        st.choose_exemplars(found, 2, room=6, seed=0)


@pytest.mark.parametrize("domain", ["search", "raw"])
def test_rollouts_behind_exemplars_that_fill_their_room_fit_and_one_token_more_does_not(
    random_model, domain, monkeypatch
):
    """The longest rollout that there can be: every turn runs to its limit of new tokens."""
    engine = HFEngine(*random_model())
    environment = SearchEnvironment() if domain == "search" else StaticEnvironment(domain)
    asked = (
        validation_questions(2, worlds=1)
        if domain == "search"
        else sets.load_questions("arithmetic", limit=2)
    )
    turns, sampling = (2 if domain == "search" else 1), Sampling(6, 1.0, stop=("never",))
    limits = LIMITS | {"max_turns": turns}
    samples = draw_samples(asked, engine, environment, sampling, **limits)
    assert [len(group) for group in samples] == [2, 2] and samples[0][0].ids != samples[0][1].ids
    room = st.exemplar_room(
        samples, engine.model.config.max_position_embeddings, max_new_tokens=6, max_turns=turns
    )
    longest = samples[max((0, 1), key=lambda i: samples[i][0].turns[0].start)][0].question

    def behind(tokens):
        conditioned = st.few_shot(environment, engine.codec, [])
        prompt, filler = environment.form.prompt(longest), protocol.Trusted("<|im_end|>" * tokens)
        monkeypatch.setattr(conditioned.form, "prompt", lambda question: [filler, *prompt])
        return draw_samples([longest], engine, conditioned, sampling, **limits)

    behind(room)
    with pytest.raises(ValueError, match="exceeds the model's 2048 positions"):
        behind(room + 1)


def test_a_few_shot_prompt_is_the_exchanges_and_then_the_question(searched):
    codec, shown = searched
    environment = SearchEnvironment()
    conditioned = st.few_shot(environment, codec, [shown])
    question = Question("r", "Which currency is used in Chile?", ("peso",))
    ids = codec.encode(conditioned.form.prompt(question))
    assert ids == shown.ids + codec.trusted("<|im_end|>\n") + codec.prompt(question.text)
    assert environment.form is protocol.SEARCH, "the environment itself stays as it was"
    assert (
        conditioned.form.parse("x") == protocol.SEARCH.parse("x")
        and conditioned.form.opening == "\n\n"
    )


def test_an_exemplar_whose_observations_are_turns_of_the_template_is_refused(searched):
    codec, trajectory = searched
    with pytest.raises(ValueError, match="set self_training.exemplars to 0"):
        st.few_shot(ToolEnvironment(), codec, [trajectory])
    assert st.few_shot(ToolEnvironment(), codec, []).form.opening == ToolEnvironment().form.opening


def test_concise_examples_stand_behind_the_questions_own_prompt(searched):
    codec, trajectory = searched
    conditioned = st.few_shot(SearchEnvironment(), codec, [trajectory])
    start = trajectory.turns[0].start
    prompt = codec.encode(conditioned.form.prompt(trajectory.question))
    shift = len(prompt) - start
    turns = [
        TurnRecord(t.start + shift, t.end + shift, "think", t.action, t.argument, True)
        for t in trajectory.turns
    ]
    origins = [Origin.PROMPT] * len(prompt) + trajectory.origins[start:]
    behind = Trajectory(
        trajectory.question, prompt + trajectory.ids[start:], origins, [], trajectory.latents, turns
    )
    from_zero, from_few = st.concise_examples([trajectory, None, behind], codec, protocol.SEARCH)
    assert from_zero.ids == from_few.ids == trajectory.ids and from_zero.labels == from_few.labels
    expected = [
        i if o == Origin.SAMPLED else -100 for i, o in zip(trajectory.ids, trajectory.origins)
    ]
    assert from_zero.labels == expected
    with pytest.raises(ValueError, match="nothing to train on"):
        st.concise_examples([None], codec, protocol.SEARCH)


def test_direct_turns_keep_the_actions_and_are_well_formed(searched):
    codec, trajectory = searched
    (example,) = st.direct_examples([trajectory], codec, protocol.SEARCH)
    start = trajectory.turns[0].start
    assert example.ids[:start] == trajectory.ids[:start]
    turns = parse_turns(codec.text(example.ids[start:]))
    assert [(t.action, t.argument) for t in turns] == [
        ("search", "Peru currency"),
        ("answer", "sol"),
    ]
    assert all(
        t.well_formed and t.mode == "think" and t.reasoning == t.policy_text == "" for t in turns
    )
    assert (
        codec.think_open == example.ids[start + len(codec.separator) :][: len(codec.think_open)]
    ), "as the loop forces it"
    learned = codec.text([i for i, label in zip(example.ids, example.labels) if label != -100])
    block = "<think></think>\n\n"
    assert learned == f"\n\n{block}<search>Peru currency</search>{block}<answer>sol</answer>"
    assert "sol." in codec.text(example.ids), "the observation stays"


@pytest.mark.parametrize("form", FORMS)
def test_direct_gold_answers_are_well_formed_and_right(tokenizer, form):
    codec, questions = Codec(tokenizer), sets.load_questions("arithmetic", "train", limit=4)
    for question, example in zip(
        questions, st.direct_gold(questions, codec, FORMS[form]), strict=True
    ):
        prompt = codec.encode(FORMS[form].prompt(question))
        turn = FORMS[form].parse(codec.text(example.ids[len(prompt) :]))
        assert (
            example.ids[: len(prompt)] == prompt
            and example.labels == [-100] * len(prompt) + example.ids[len(prompt) :]
        )
        assert turn.well_formed and sets.is_correct(turn.argument, question)
        assert (example.ids[-1] == tokenizer.eos_token_id) == (form == "raw"), (
            "raw text closes itself"
        )


def test_the_table_counts_what_each_pass_found():
    zero = [
        [rollout(9), rollout(5, correct=False)],
        [rollout(7, correct=False), rollout(7, correct=False)],
    ]
    few = [[rollout(4), rollout(6)], [rollout(3, correct=False), rollout(3)]]
    table = st.sampling_table({"zero-shot": zero, "few-shot": few})
    columns = ["samples", "accuracy", "tokens", "solved", "shortest", "kept"]
    assert table.loc["zero-shot", columns].tolist() == [4, 0.25, 7, 0.5, 9, 0]
    assert table.loc["few-shot", ["accuracy", "solved", "shortest", "kept"]].tolist() == [
        0.75,
        1.0,
        3.5,
        2,
    ]
    assert table.loc["all", ["samples", "solved", "shortest", "kept"]].tolist() == [8, 1.0, 3.5, 2]


def test_an_exemplar_that_the_base_was_taught_on_looks_like_a_few_shot_prompt(tokenizer):
    """Conversations of `alar.methods.conversations` and few-shot prompts are the same ids."""
    codec, (one, two) = Codec(tokenizer), itertools.islice(arithmetic.problems("train"), 2)
    for form in FORMS:
        taught = conversations.example(codec, form, "brief", [one, two])
        said = [
            conversations.conversation_turn(form, p.chains["brief"], str(p.answer))
            for p in (one, two)
        ]
        prompt = st.few_shot_form(
            FORMS[form], [(Question("", one.question, ()), [said[0]])]
        ).prompt(Question("", two.question, ()))
        end = codec.trusted("<|im_end|>\n")
        assert taught.ids == codec.encode(prompt) + codec.untrusted(said[1]) + end


def test_a_file_needs_another_file_for_the_test(tmp_path):
    (tmp_path / "rows.jsonl").write_text("")
    (tmp_path / "p.yaml").write_text(f"self_training:\n  dataset: {tmp_path / 'rows.jsonl'}")
    with pytest.raises(params.ParameterError, match="self_training.test_dataset: is empty"):
        params.load_experiment(tmp_path / "p.yaml")
    assert Experiment().self_training.dataset == ""

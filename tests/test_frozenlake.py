"""FrozenLake through the agent loop: what gymnasium says happens, happens; whatever a policy writes
raises nothing."""

import json
import random

import gymnasium
import pytest

from alar import protocol
from alar.domains.frozenlake.environment import FrozenLakeEnvironment
from alar.domains.frozenlake.lakes import drawing, lake_question, lakes, shortest_way
from alar.domains.frozenlake.protocol import MOVES, LakeForm, moves_text, parse_moves
from alar.methods.lake_expert import ScriptedEngine, expert_trajectories
from alar.records import Origin, Trajectory
from alar.rollout.codec import Codec
from alar.rollout.engine import Sampling
from alar.rollout.loop import run

MAP = ["SFFF", "FHFH", "FFFH", "HFFG"]  # gymnasium's 4x4


@pytest.fixture(scope="module")
def codec(tokenizer):
    return Codec(tokenizer)


def turn_text(moves, first=False, thought="so") -> str:
    return ("\n\n" if first else "") + f"<think>{thought}</think>\n\n<action>{moves}</action>"


def played(codec, questions, texts, environment, max_turns=10) -> list[Trajectory]:
    engine = ScriptedEngine(codec, dict(enumerate(texts)))
    return run(questions, engine, environment, Sampling(stop=environment.stop), max_turns=max_turns)


def observed(codec, trajectory) -> str:
    return codec.text(
        [i for i, o in zip(trajectory.ids, trajectory.origins) if o == Origin.OBSERVATION]
    )


def test_shortest_ways_reach_the_goal_turn_by_turn(codec):
    for per_turn in (1, 5):
        questions = lakes(12, seed=1)
        for question, t in zip(
            questions,
            expert_trajectories(questions, FrozenLakeEnvironment(moves_per_turn=per_turn), codec),
        ):
            way = shortest_way(question)
            assert (
                t.correct
                and t.well_formed
                and t.finish == "answer"
                and len(t.turns) == -(-len(way) // per_turn)
            )
            assert "The goal is reached." in observed(codec, t) and "*" in observed(codec, t)
            assert all(
                o == Origin.SAMPLED for turn in t.turns for o in t.origins[turn.start : turn.end]
            )


def test_shortest_ways_are_the_shortest():
    question = lake_question(MAP)
    assert len(shortest_way(question)) == 6
    assert drawing(MAP, 0) == question.text == "P _ _ _\n_ O _ O\n_ _ _ O\nO _ _ G"
    with pytest.raises(ValueError, match="no way leads to the goal"):
        shortest_way(lake_question(["SH", "HG"]))


@pytest.mark.parametrize("slippery", [False, True])
def test_a_random_policy_fares_as_in_gymnasium_itself(codec, slippery):
    rng, questions = random.Random(0), lakes(60, seed=2, slippery=slippery)
    plans = [
        [[rng.randrange(4) for _ in range(rng.randint(1, 3))] for _ in range(8)] for _ in questions
    ]
    texts = [
        [turn_text(moves_text(moves), first=n == 0) for n, moves in enumerate(plan)]
        for plan in plans
    ]
    environment = FrozenLakeEnvironment(moves_per_turn=3, max_moves=12)
    trajectories = played(codec, questions, texts, environment, max_turns=8)
    reached = []
    for question, plan, t in zip(questions, plans, trajectories):
        details = json.loads(question.details)
        world = gymnasium.make("FrozenLake-v1", desc=details["rows"], is_slippery=slippery)
        position, _ = world.reset(seed=details["seed"])
        terminated, reward = False, 0
        for move in [move for moves in plan for move in moves][:12]:
            if not terminated:
                position, reward, terminated, _, _ = world.step(move)
        reached.append(terminated and reward == 1)
        assert t.correct == reached[-1]
        last = observed(codec, t).split("<information>")[-1]
        assert last.startswith(drawing(details["rows"], int(position)))
    assert 0 < sum(reached) < len(questions)


def test_holes_limits_and_the_last_turn_end_a_walk(codec):
    question, environment = lake_question(MAP), FrozenLakeEnvironment(moves_per_turn=3, max_moves=6)
    texts = [
        [turn_text("right, down, up", True)],  # into the hole; the third move is not played
        [
            turn_text("down, down", True),
            turn_text("right down"),
            turn_text("Right || RIGHT"),
        ],  # the goal, at the limit
        [turn_text("left, left, left", True), turn_text("left, left, left")],
        [turn_text("up", True), turn_text("up"), turn_text("up")],
        [
            turn_text("down, down", True),
            turn_text("right, down, right"),
            turn_text("right"),
        ],  # the goal in the last turn
    ]
    hole, goal, used, stayed, last = played(codec, [question] * 5, texts, environment, max_turns=3)
    assert (hole.finish, hole.correct, len(hole.turns)) == ("answer", False, 1) and "X" in observed(
        codec, hole
    )
    assert (goal.finish, goal.correct, goal.well_formed) == ("answer", True, True)
    assert (used.finish, used.correct) == ("answer", False) and "No moves are left." in observed(
        codec, used
    )
    assert (stayed.finish, stayed.correct, stayed.prediction) == ("max_turns", False, None)
    assert (last.finish, last.correct, len(last.turns)) == ("answer", True, 3)


def test_a_malformed_action_moves_nothing_and_says_why(codec):
    question, environment = lake_question(MAP), FrozenLakeEnvironment(moves_per_turn=2)
    bad = ["jump", "left left left", "", "down</action> <action>down"]
    texts = [
        [turn_text(text, n == 0) for n, text in enumerate(bad)] + ["no block", turn_text("down")]
    ]
    (t,) = played(codec, [question], texts, environment, max_turns=6)
    seen = observed(codec, t)
    assert (
        "Nothing moved: 'jump' is no move." in seen
        and "3 moves in one turn, expected 1 to 2" in seen
    )
    assert (
        seen.count("Nothing moved") == 4 and not t.correct
    )  # of two actions in one turn the first is played, as in search
    assert [turn.well_formed for turn in t.turns] == [False] * 5 + [True]
    assert drawing(MAP, 8) in seen


def test_lakes_depend_on_the_seed_alone_and_keep_out_what_they_must():
    assert lakes(20, seed=3) == lakes(20, seed=3) != lakes(20, seed=4)
    training = {question.text for question in lakes(200, seed=0)}
    fresh = lakes(50, seed=9, without=training)
    assert len(fresh) == 50 and not {question.text for question in fresh} & training
    assert all(len(question.text) == 127 for question in lakes(3, seed=0, size=8))
    with pytest.raises(ValueError, match="without"):
        lakes(2, seed=0, size=2, ice=1.0, without=["P _\n_ G"])


def test_moves_are_read_as_they_are_written():
    for moves in ([0], [3, 2, 1, 0, 0]):
        assert parse_moves(moves_text(moves), 5) == (moves, "")
    assert parse_moves(" Left||DOWN ;right\nup", 4) == ([0, 1, 2, 3], "")
    assert LakeForm().action("action", "left") == "<action>left</action>"


def test_three_thousand_fuzzed_outputs_raise_nothing(codec):
    rng, environment, question = (
        random.Random(0),
        FrozenLakeEnvironment(),
        lake_question(MAP, slippery=True),
    )
    parts = [
        "\n\n",
        "<think>",
        "</think>",
        "<latent>",
        "••••",
        "</latent>",
        "<action>",
        "</action>",
        *MOVES,
        ", ",
        " || ",
        "so",
        "<information>",
        "é",
        "\ud800",
        "<|im_end|>",
        "0",
        "\0",
    ]
    outcomes, earlier = set(), []
    for _ in range(3000):
        text = "".join(rng.choice(parts) for _ in range(rng.randint(0, 9)))
        if rng.random() < 0.5:
            text = turn_text("".join(rng.choice(parts) for _ in range(rng.randint(1, 3))))
        turn = environment.form.parse(text)
        assert turn.well_formed == (not turn.problem)
        outcomes.add((turn.action, turn.well_formed))
        earlier = [*earlier, turn] if len(earlier) < 4 else []
        if turn.action:
            (seen,) = environment.observe(
                [(question, protocol.Turn(**{**vars(turn), "earlier": tuple(earlier)}))]
            )
            assert seen.text.startswith("\n\n<information>")
        else:
            codec.encode(environment.form.observation(environment.form.invalid("x")))
    assert outcomes == {("action", True), ("action", False), (None, False)}

"""What a turn looks like as text: what is written is parsed back, and no text makes the parser
raise."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alar import protocol
from alar.protocol import parse_turn, parse_turns

LATENT = protocol.latent_block(4)


def turn_text(block: str, action: str) -> str:
    return f"\n\n{block}\n\n{action}"


@pytest.mark.parametrize("block, mode", [(LATENT, "latent"), ("<think>I look.</think>", "think")])
@pytest.mark.parametrize("action", ["search", "answer"])
def test_a_turn_that_was_written_is_parsed_back(block, mode, action):
    turn = parse_turn(turn_text(block, protocol.action_text(action, "Peru currency")))
    assert (turn.mode, turn.action, turn.argument) == (mode, action, "Peru currency")
    assert turn.well_formed


@pytest.mark.parametrize(
    "text, problem",
    [
        (f"{LATENT}", "no action"),
        ("<latent>", "never closed"),
        ("<latent>••••\n\n<answer>4</answer>", "never closed"),
        ("<think>so\n\n<answer>4</answer>", "never closed"),
        ("<answer>4</answer>", "does not start with a reasoning block"),
        (f"{LATENT}\n\n{LATENT}\n\n<answer>4</answer>", "more than one block"),
        (f"{LATENT}\n\n<search>a</search><answer>4</answer>", "more than one"),
        (f"{LATENT}\n\nplain text<answer>4</answer>", "text outside"),
        (f"{LATENT}\n\n<answer>4</answer> and more", "text outside"),
        ("<latent>text••</latent>\n\n<answer>4</answer>", "text inside a latent block"),
        ("<think><search>x</search></think>\n\n<answer>4</answer>", "a tag inside"),
        (f"{LATENT}\n\n<answer> </answer>", "empty action"),
        ("", "does not start"),
    ],
)
def test_a_malformed_turn_says_what_is_wrong(text, problem):
    turn = parse_turn(text)
    assert not turn.well_formed and problem in turn.problem


def test_text_outside_blocks_counts_as_thinking():
    turn = parse_turn(f"{LATENT}\n\nhidden reasoning <answer>4</answer>")
    assert turn.policy_text == "hidden reasoning"
    assert parse_turn(f"{LATENT}\n\n<answer>4</answer>").policy_text == ""
    assert parse_turn("<think>abc</think>\n\n<answer>4</answer>").policy_text == "abc"


def test_a_trajectory_is_cut_at_its_observations():
    observation = protocol.observation_text([("Peru", "A <think> tag • in a passage.")])
    text = (
        turn_text(LATENT, "<search>Peru</search>")
        + observation
        + "<think>so</think>\n\n<answer>4</answer><|im_end|>"
    )
    assert [turn.mode for turn in parse_turns(text)] == ["latent", "think"]
    assert all(turn.well_formed for turn in parse_turns(text))


TAGS = ("think", "latent", "search", "answer", "information")
PIECES = [f"<{slash}{tag}>" for tag in TAGS for slash in ("", "/")]
PIECES += ["•", "\n\n", "text", "<", ">", "\x00"]


@given(st.lists(st.sampled_from(PIECES), max_size=14).map("".join))
def test_parsing_never_raises_and_well_formed_means_one_block_and_one_action(text):
    for turn in parse_turns(text):
        if turn.well_formed:
            assert turn.mode in ("think", "latent")
            assert turn.action in ("search", "answer") and turn.argument

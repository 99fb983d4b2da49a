"""The text that pretrains the tool domain's base: the expert's trajectories, as ids and labels.

The ids are exactly those that the agent loop would record if a policy wrote the expert's turns.
"""

from __future__ import annotations

from collections.abc import Iterator

from alar import protocol
from alar.domains.tool import questions
from alar.domains.tool.execution import response_text
from alar.domains.tool.functions import CALLABLE
from alar.domains.tool.protocol import TOOL, parse_calls, responses_text
from alar.rollout.codec import Codec
from alar.train.examples import NO_LOSS

# What takes longest to learn comes most often.
MIXTURE = (*questions.CATEGORIES, "parallel", "parallel_multiple", "multi_turn")
HARD_SHARE = 0.5
# Seeds of the pretraining requests start here; later stages use small seeds, so they draw others.
FIRST_SEED = 1_000_000


def solved(number: int, count: int, seed: int) -> list[questions.Solved]:
    """Batch `number` of the endless stream of training requests."""
    return questions.solved_questions(
        "pretraining", count, FIRST_SEED + 10_000 * seed + number, MIXTURE, hard_share=HARD_SHARE
    )


def observations(item: questions.Solved) -> list[str]:
    """What the policy reads after each turn; "" after the last.

    The functions run in this process: the arguments are the expert's own.
    """
    seen = []
    for step in item.steps:
        calls = parse_calls(step.argument)[0] if step.action == "call" else []
        responses = []  # one per call, in their order
        for call in calls:
            result = CALLABLE[call["name"]].run(**call["arguments"])
            responses.append(response_text(result))
        seen.append(responses_text(responses) if calls else "")
    return seen


def encode(codec: Codec, item: questions.Solved) -> tuple[list[int], list[int]]:
    """ids and labels (NO_LOSS where the policy did not write).

    `codec` has the tool domain's form.
    """
    ids = codec.encode(TOOL.prompt(item.question))
    labels = [NO_LOSS] * len(ids)
    for number, (step, observation) in enumerate(zip(item.steps, observations(item))):
        turn, _ = codec.think_turn(step.thought, step.action, step.argument, first=number == 0)
        # The turn closes itself, so the first token of the observation is there already.
        seen = codec.encode(TOOL.observation(observation))[1:] if observation else []
        ids += turn + seen
        labels += turn + [NO_LOSS] * len(seen)
    return ids, labels


def texts(count: int, seed: int) -> Iterator[str]:
    """Pieces of text to train a tokenizer on."""
    for item in questions.solved_questions("pretraining", count, FIRST_SEED - 1 - seed, MIXTURE):
        yield from TOOL.prompt(item.question)
        for step, observation in zip(item.steps, observations(item)):
            block = protocol.think_block(step.thought)
            yield block + protocol.BLOCK_SEPARATOR + step.argument + TOOL.closing
            if observation:
                yield "".join(TOOL.observation(observation))

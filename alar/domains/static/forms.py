"""What a single turn on an answer dataset looks like, as a `Form` of the agent loop.

    tagged   <think>text</think>\\n\\n<answer>18</answer>
    raw      text … The answer is 18.<|im_end|>

`tagged` is the search domain's form with another instruction and no search; latent blocks are
possible. `raw` has no tags, as in papers on GSM8K and MATH. The whole text is the chain of thought,
and `alar.domains.static.answers.stated_answer` finds the answer in it.
"""

from __future__ import annotations

from collections.abc import Sequence

from alar import protocol
from alar.domains.static.answers import stated_answer
from alar.protocol import Trusted, Turn

TAGGED_INSTRUCTION = (
    "Reason inside <think> and </think>. Then answer inside <answer> and </answer>."
)
RAW_INSTRUCTION = "Reason step by step. End with: The answer is"
EXCHANGE_END = Trusted("<|im_end|>\n")


class TaggedForm(protocol.SearchForm):
    """One reasoning block, then `<answer>`, which ends the turn."""

    stop = ("</answer>",)

    def prompt(self, question) -> Sequence[str]:
        return chat_turn(f"{TAGGED_INSTRUCTION}\nQuestion: {question.text}\n")

    def invalid(self, problem: str) -> str:
        return (
            "\n\nMy previous turn is invalid. I write the answer inside <answer> and </answer>. I"
            " try again.\n\n"
        )

    def parse(self, text: str) -> Turn:
        return protocol.parse_turn(text, ("answer",))


class RawForm:
    """Free text with the answer stated in it; the policy itself ends its turn."""

    opening = ""
    closing = Trusted("<|im_end|>")
    stop = ()  # no text ends a turn, only the policy's own `<|im_end|>`

    def prompt(self, question) -> Sequence[str]:
        return chat_turn(f"{RAW_INSTRUCTION}\nQuestion: {question.text}\n")

    def observation(self, text: str) -> Sequence[str]:
        # The assistant's turn is closed, then the user speaks again.
        return Trusted("<|im_end|>"), *chat_turn(text, opened=Trusted("\n<|im_start|>user\n"))

    def invalid(self, problem: str) -> str:
        return f"There was {problem}. Try again, and end with: The answer is"

    def parse(self, text: str) -> Turn:
        answer, reasoning = stated_answer(text), text.strip()
        if answer is None:
            return Turn("think", reasoning, None, "", False, "no stated answer", reasoning)
        # All of the text counts as reasoning, the sentence with the answer too.
        return Turn("think", reasoning, "answer", answer, True, "", reasoning)

    def action(self, name: str, argument: str) -> str:
        return f"The answer is {argument}."


FORMS = {"tagged": TaggedForm(), "raw": RawForm()}


def chat_turn(text: str, *, opened: Trusted = Trusted("<|im_start|>user\n")) -> Sequence[str]:
    """What the user says, in ChatML, and the opening of the assistant's turn."""
    return opened, text, Trusted("<|im_end|>\n<|im_start|>assistant\n")

"""What a turn looks like as text: one reasoning block, then one action.

    \\n\\n<think>text</think>\\n\\n<search>query</search>
    \\n\\n<latent>••••</latent>\\n\\n<answer>text</answer>

The form is that of Search-R1 with the latent block of ALAR (arXiv 2606.02871). This module writes
such text and parses it; it knows no tokenizer, no model and no environment.

- The tags are ordinary text of several BPE pieces each. Only the K positions inside a latent block
  hold a reserved token id, which people see as `•`.
- A domain describes its prompts, turns and observations as a `Form`. `SEARCH` is that of the search
  domain; that of the tool domain stands in `alar.domains.tool.protocol`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
LATENT_OPEN, LATENT_CLOSE = "<latent>", "</latent>"
LATENT_TOKEN = "<|latent|>"  # the reserved token of the K positions in a latent block
BULLET = "•"  # how that token is shown to people
BLOCK_SEPARATOR = "\n\n"  # stands before every block, and between a block and its action

SEARCH_ACTIONS = ("search", "answer")
SEARCH_STOPS = ("</search>", "</answer>")

INSTRUCTION = (
    "Reason inside <think> and </think> before every action. Look things up with <search> and"
    " </search>; results come inside <information> and </information>. Answer inside <answer> and"
    " </answer>."
)
INVALID_ACTION = (
    "\n\nMy previous action is invalid. To search, I write the query inside <search> and </search>;"
    " to answer, I write the answer inside <answer> and </answer>. I try again.\n\n"
)


@dataclass(frozen=True)
class Turn:
    """One parsed turn."""

    mode: str  # "think" | "latent" | "none"
    reasoning: str  # what stands in the block
    action: str | None  # of the domain: "search", "call", "answer", …; None without one
    argument: str
    well_formed: bool  # exactly one closed reasoning block, then exactly one action, nothing else
    problem: str = ""  # what is wrong with a turn that is not well formed
    # What counts as thinking: the text outside the latent block, the tags and the action.
    policy_text: str = ""
    # The turns of the same trajectory before this one; the agent loop tells them to an environment.
    earlier: tuple[Turn, ...] = ()


class Trusted(str):
    """Text of a template: in it `<|im_end|>` and the like are special tokens. In all other text,
    which comes from outside, they are plain characters."""


class Form(Protocol):
    """What the prompts, turns and observations of a domain look like.

    Prompts and observations are lists of pieces, so that those of the template can be `Trusted` and
    those from outside cannot.
    """

    opening: str  # stands before the first block
    closing: str  # ends every turn; empty where a stop string does

    def prompt(self, question) -> Sequence[str]: ...

    def observation(self, text: str) -> Sequence[str]: ...

    def invalid(self, problem: str) -> str:
        """What the policy observes after a turn without an action."""

    def parse(self, text: str) -> Turn:
        """Never raises."""

    def action(self, name: str, argument: str) -> str:
        """The inverse of parsing an action."""


def user_text(question: str) -> str:
    """What the user says: the instruction and the question."""
    question = question.strip().rstrip("?")
    return f"{INSTRUCTION}\nQuestion: {question}?\n"


def prompt_pieces(question: str) -> Sequence[str]:
    """User turn and generation prompt in ChatML, without a system message (Search-R1's form)."""
    user = f"user\n{user_text(question)}"
    return Trusted("<|im_start|>"), user, Trusted("<|im_end|>\n<|im_start|>assistant\n")


def prompt_text(question: str) -> str:
    return "".join(prompt_pieces(question))


def observation_text(passages: list[tuple[str, str]]) -> str:
    """What the policy observes after a search; passages are (title, text)."""
    documents = [f"Doc {n}(Title: {title}) {text}" for n, (title, text) in enumerate(passages, 1)]
    return "\n\n<information>" + "\n".join(documents) + "</information>\n\n"


def think_block(text: str) -> str:
    return f"{THINK_OPEN}{text}{THINK_CLOSE}"


def latent_block(num_latent: int) -> str:
    return f"{LATENT_OPEN}{BULLET * num_latent}{LATENT_CLOSE}"


def action_text(action: str, argument: str) -> str:
    return f"<{action}>{argument}</{action}>"


_BLOCK = re.compile(r"\s*<(think|latent)>(.*?)</\1>\s*", re.DOTALL)
_OBSERVATION = re.compile(r"<information>.*?</information>", re.DOTALL)
_OPEN_TAG = re.compile(r"</?(?:think|latent|search|answer|information)>")


def leading_block(text: str, tags: re.Pattern) -> tuple[str, str, str, str]:
    """(mode, reasoning, the text after the block, problem) of a turn.

    `tags` are those that may not stand inside a block. `problem` is empty if the block is right.
    """
    block = _BLOCK.match(text)
    if block is None:
        opened = re.match(r"\s*<(think|latent)>", text)
        if opened:
            return "none", "", text, f"<{opened[1]}> is never closed"
        return "none", "", text, "the turn does not start with a reasoning block"
    mode, reasoning = block[1], block[2]
    problem = ""
    if mode == "latent" and reasoning.strip(BULLET):
        problem = "text inside a latent block"
    elif tags.search(reasoning):
        problem = "a tag inside the reasoning block"
    return mode, reasoning, text[block.end() :], problem


def parse_turn(text: str, actions: tuple[str, ...] = SEARCH_ACTIONS) -> Turn:
    """Parse what the policy wrote between two observations. Never raises."""
    mode, reasoning, rest, problem = leading_block(text, _OPEN_TAG)
    found = re.search(rf"<({'|'.join(actions)})>(.*?)</\1>", rest, re.DOTALL)
    if found is None:
        action, argument, outside = None, "", rest
    else:
        action, argument = found[1], found[2].strip()
        outside = rest[: found.start()] + rest[found.end() :]
    if not problem:
        problem = _action_problem(action, argument, outside, actions)
    thinking = reasoning if mode == "think" else ""
    policy_text = thinking + _OPEN_TAG.sub("", outside).strip().replace(BULLET, "")
    return Turn(mode, reasoning, action, argument, not problem, problem, policy_text)


def _action_problem(
    action: str | None, argument: str, outside: str, actions: tuple[str, ...]
) -> str:
    """What is wrong after the block of a turn; `outside` is the text around the action."""
    if action is None:
        return f"no action: expected one of {', '.join(f'<{name}>' for name in actions)}"
    if _OPEN_TAG.search(outside):
        return "more than one block or action"
    if outside.strip():
        return "text outside the block and the action"
    if not argument:
        return "empty action"
    return "a tag inside the action" if _OPEN_TAG.search(argument) else ""


def parse_turns(text: str, actions: tuple[str, ...] = SEARCH_ACTIONS) -> list[Turn]:
    """Parse a whole assistant text, observations included, into its turns. Never raises."""
    pieces = _OBSERVATION.split(text)
    if len(pieces) > 1 and not pieces[-1].strip():
        pieces.pop()  # nothing was written after the last observation
    return [parse_turn(piece.replace("<|im_end|>", ""), actions) for piece in pieces]


class Prompted:
    """A form with other prompts: `prompt(question)` gives their pieces, all else is `form`'s."""

    def __init__(self, form: Form, prompt: Callable[[Any], Sequence[str]]):
        self.prompt = prompt
        self.opening, self.closing = form.opening, form.closing
        self.observation, self.invalid = form.observation, form.invalid
        self.parse, self.action = form.parse, form.action


class SearchForm:
    """The form of Search-R1: `<search>` and `<answer>`, observations as bare text."""

    opening = BLOCK_SEPARATOR
    closing = ""

    def prompt(self, question) -> Sequence[str]:
        return prompt_pieces(question.text)

    def observation(self, text: str) -> Sequence[str]:
        return (text,)

    def invalid(self, problem: str) -> str:
        return INVALID_ACTION

    def parse(self, text: str) -> Turn:
        return parse_turn(text)

    def action(self, name: str, argument: str) -> str:
        return action_text(name, argument)


SEARCH = SearchForm()

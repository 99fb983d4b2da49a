"""Surface form of a turn: one reasoning block, then one action.

    \\n\\n<think>text</think>\\n\\n<search>query</search>
    \\n\\n<latent>••••</latent>\\n\\n<answer>text</answer>

The form is that of Search-R1 with ALAR's latent block (arXiv 2606.02871); `SEARCH` gathers it for
the agent loop, and the tool domain has a `Form` of its own (`alar.domains.tool.protocol`). The tags
are ordinary text, made of several BPE pieces each; only the K positions inside a latent block hold
a reserved id, shown to people as `•`. Deliberate: nothing here depends on a tokenizer, a model or a
domain's environment.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
LATENT_OPEN, LATENT_CLOSE = "<latent>", "</latent>"
BULLET = "•"
LATENT_TOKEN = "<|latent|>"
BLOCK_SEPARATOR = "\n\n"  # stands before every block and between a block and its action

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
    """One parsed turn. `mode` is "think", "latent" or "none"; `action` is "search", "answer" or
    None.

    `well_formed` means: exactly one closed reasoning block, then exactly one action, nothing else.
    `problem` says in words what is wrong with a turn that is not.
    `policy_text` is what stands outside the latent block, the tags and the action: what counts as
    thinking. `earlier` are the turns of the same trajectory before this one, which the agent loop
    tells an environment.
    """

    mode: str
    reasoning: str
    action: str | None
    argument: str
    well_formed: bool
    problem: str = ""
    policy_text: str = ""
    earlier: tuple[Turn, ...] = ()


class Trusted(str):
    """Text of a template, in which special tokens such as `<|im_end|>` are meant. All other text is
    from outside."""


class Form(Protocol):
    """What a domain's prompts, turns and observations look like. Texts are in pieces, those of the
    template `Trusted`.

    `opening` stands before the first block, `closing` ends every turn (empty where a stop string
    does).
    """

    opening: str
    closing: str

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


def prompt_text(question: str) -> str:
    """User turn and generation prompt in ChatML, without a system message (Search-R1's form)."""
    return f"<|im_start|>user\n{user_text(question)}<|im_end|>\n<|im_start|>assistant\n"


def prompt_pieces(question: str) -> Sequence[str]:
    """`prompt_text`, with the question apart from the template."""
    opening, closing = "<|im_start|>", "<|im_end|>\n<|im_start|>assistant\n"
    middle = prompt_text(question).removeprefix(opening).removesuffix(closing)
    return Trusted(opening), middle, Trusted(closing)


def observation_text(passages: list[tuple[str, str]]) -> str:
    """Retrieved passages as (title, text) in the observation's form."""
    documents = "\n".join(
        f"Doc {rank}(Title: {title}) {text}" for rank, (title, text) in enumerate(passages, start=1)
    )
    return f"\n\n<information>{documents}</information>\n\n"


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
    """(mode, reasoning, the text behind it, problem) of a turn; `tags` are those that may not stand
    inside a block."""
    block = _BLOCK.match(text)
    if block is None:
        opened = re.match(r"\s*<(think|latent)>", text)
        return (
            "none",
            "",
            text,
            (
                f"<{opened[1]}> is never closed"
                if opened
                else "the turn does not start with a reasoning block"
            ),
        )
    mode, reasoning, problem = block[1], block[2], ""
    if mode == "latent" and reasoning.strip(BULLET):
        problem = "text inside a latent block"
    elif tags.search(reasoning):
        problem = "a tag inside the reasoning block"
    return mode, reasoning, text[block.end() :], problem


def parse_turn(text: str, actions: tuple[str, ...] = SEARCH_ACTIONS) -> Turn:
    """Parse the text of one turn (what the policy wrote between two observations). Never raises."""
    action_names = "|".join(actions)
    mode, reasoning, rest, problem = leading_block(text, _OPEN_TAG)
    found = re.search(rf"<({action_names})>(.*?)</\1>", rest, re.DOTALL)
    action, argument = (found[1], found[2].strip()) if found else (None, "")
    outside = rest if found is None else rest[: found.start()] + rest[found.end() :]
    if not problem:
        if found is None:
            problem = f"no action: expected one of {', '.join(f'<{name}>' for name in actions)}"
        elif _OPEN_TAG.search(outside):
            problem = "more than one block or action"
        elif outside.strip():
            problem = "text outside the block and the action"
        elif _OPEN_TAG.search(argument) or not argument:
            problem = "empty action" if not argument else "a tag inside the action"
    thinking = reasoning if mode == "think" else ""
    policy_text = thinking + _OPEN_TAG.sub("", outside).strip().replace(BULLET, "")
    return Turn(mode, reasoning, action, argument, not problem, problem, policy_text)


def parse_turns(text: str, actions: tuple[str, ...] = SEARCH_ACTIONS) -> list[Turn]:
    """Parse a whole assistant text, observations included, into its turns. Never raises."""
    pieces = _OBSERVATION.split(text)
    if len(pieces) > 1 and not pieces[-1].strip():
        pieces.pop()
    return [parse_turn(piece.replace("<|im_end|>", ""), actions) for piece in pieces]


class Prompted:
    """The turns and observations of `form` behind other prompts: `prompt(question)` gives their
    pieces."""

    def __init__(self, form: Form, prompt: Callable[[Any], Sequence[str]]):
        self.prompt, self.opening, self.closing = prompt, form.opening, form.closing
        self.observation, self.invalid, self.parse, self.action = (
            form.observation,
            form.invalid,
            form.parse,
            form.action,
        )


class SearchForm:
    """Search-R1's form: an instruction with the question, `<search>` and `<answer>`, observations
    as bare text."""

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

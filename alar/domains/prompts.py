"""Prompts other than the embedded ones: `rollout.prompt` and `rollout.student_prompt`.

    embedded      the short instruction of the domain's form
    messages      the chat messages in the row's column `prompt`, as Search-R1's data have them
    a text file   search: what the user says, with {question} where the question stands
                  tool: the system message, before the request's own and its functions

A checkpoint was trained on one wording, and answers worse under another. `params/prompts/` holds
`search-r1.txt`, which is Search-R1's instruction word for word (Apache 2.0), and `search-dual.txt`
and `tool-dual.txt`, which offer the student both modes. The last two are our own words: ALAR's were
released without a licence. Search prompts are written by the tokenizer's own chat template, so a
default system message of the model stands in them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from alar.protocol import THINK_OPEN, Form, Prompted, Trusted
from alar.records import Question

EMBEDDED_PROMPT, ROW_MESSAGES = "embedded", "messages"
QUESTION = "{question}"


def read_prompt(source: str) -> str:
    """The text of a template file. Raises ValueError if there is no such file, or no text."""
    path = Path(source)
    if not path.is_file():
        raise ValueError(
            f"rollout.prompt: {source}: no such file; give {EMBEDDED_PROMPT}, {ROW_MESSAGES} or a"
            " text file, such as those in params/prompts"
        )
    text = path.read_text(encoding="utf-8")
    if not text.strip():
        raise ValueError(f"rollout.prompt: {source}: the file is empty")
    return text


def search_prompts(form: Form, source: str, tokenizer) -> Form:
    """A search form with the prompts of a source; `tokenizer` has the chat template.

    Raises ValueError for a file without exactly one {question} and a tokenizer without a template;
    with `messages` a prompt raises ValueError for a row that has none.
    """
    if source == EMBEDDED_PROMPT:
        return form
    if not tokenizer.chat_template:
        raise ValueError(
            f"rollout.prompt: {source}: the tokenizer {tokenizer.name_or_path} has no chat template"
            f" to write it with; use {EMBEDDED_PROMPT}"
        )
    text = "" if source == ROW_MESSAGES else read_prompt(source)
    if text and text.count(QUESTION) != 1:
        raise ValueError(
            f"rollout.prompt: {source}: {QUESTION} stands {text.count(QUESTION)} times in it,"
            " expected once"
        )

    @cache
    def frame(roles: tuple[str, ...]) -> list[str]:
        return _template_text(tokenizer, roles)

    def prompt(question: Question) -> Sequence[str]:
        if text:
            messages = [{"role": "user", "content": text.replace(QUESTION, _asked(question))}]
        else:
            messages = row_messages(question)
        # Only the template's own text is `Trusted`: a question cannot end the user's turn.
        before, *between = frame(tuple(message["role"] for message in messages))
        pieces: list[str] = [Trusted(before)]
        for message, after in zip(messages, between):
            pieces += [message["content"], Trusted(after)]
        return pieces

    return Prompted(form, prompt)


def row_messages(question: Question) -> list[dict]:
    """The chat messages of the question's row. Raises ValueError if it has none."""
    messages = json.loads(question.details or "{}").get("messages")
    if not messages:
        file = question.id.partition("/")[0]  # ids begin with the name of the set or file
        raise ValueError(
            f"{file}: column prompt: question {question.id} has no chat messages there, but"
            f" rollout.prompt is {ROW_MESSAGES}; use a set that has them (nq_hotpotqa_train), or"
            " give a text file as rollout.prompt, such as params/prompts/search-r1.txt"
        )
    return messages


def _asked(question: Question) -> str:
    """The question with a question mark, as Search-R1 asks it."""
    text = question.text.strip()
    return text if text.endswith("?") else f"{text}?"


def _template_text(tokenizer, roles: Sequence[str]) -> list[str]:
    """What the chat template writes before, between and behind messages of these roles."""
    marks = [f"\ue000{number}\ue001" for number in range(len(roles))]  # no template has such text
    messages = [{"role": role, "content": mark} for role, mark in zip(roles, marks)]
    rest = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    found = []
    for mark in marks:
        before, met, rest = rest.partition(mark)
        if not met:
            raise ValueError(
                f"the chat template of {tokenizer.name_or_path} leaves out a message of the roles"
                f" {', '.join(roles)}"
            )
        found.append(before)
    # The agent loop opens the block where a template does (`Codec.text_mode`).
    return [*found, re.sub(rf"{THINK_OPEN}\s*$", "", rest)]

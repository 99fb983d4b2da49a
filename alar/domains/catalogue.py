"""The two domains behind one interface, so that a notebook runs either: `of("search" | "tool")`.

A domain has embedded questions in three splits, and it reads questions from published sets and
files. It makes the environment that answers the policy's actions and judges its trajectories. No
domain knows of models or engines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from alar import protocol
from alar.domains import arithmetic
from alar.domains.search import questions as search_questions
from alar.domains.search.datasets import load_questions
from alar.domains.search.environment import SearchEnvironment
from alar.domains.search.retriever import open_retriever
from alar.domains.search.world import REAL
from alar.domains.tool import bfcl
from alar.domains.tool import questions as tool_questions
from alar.domains.tool.environment import ToolEnvironment
from alar.domains.tool.protocol import TOOL
from alar.domains.tool.requests import bfcl_request
from alar.domains.tool.toolmind_files import load_questions as load_toolmind
from alar.records import Environment, Question, Solved

# Names in `eval.sets` for a domain's own splits. "real" is its test split; choices, such as when to
# stop, are made on "validation".
EMBEDDED = ("real", "validation")


class Domain(Protocol):
    """`types` are the types of the embedded questions."""

    name: str
    form: protocol.Form  # how prompts, turns and observations look
    types: tuple[str, ...]

    def environment(self, asked: Sequence[Question] = (), **settings) -> Environment:
        """Return what answers the actions of trajectories over the questions `asked`.

        `settings` are the parameters of the section `retrieval` (search) and `judge` (tool). Each
        domain ignores those of the other.
        """

    def training_questions(
        self, count: int, *, worlds: int, seed: int, types: Sequence[str] = ()
    ) -> list[Question]:
        """Questions whose `types` come in turn; a type named twice comes twice as often.

        Without `types`, all types come. Raises ValueError for an unknown type.
        """

    def validation_questions(self, count: int) -> list[Question]: ...

    def test_questions(self, count: int) -> list[Question]: ...

    def load_questions(
        self, source: str | Path, *, limit: int = 0, test: bool = False
    ) -> list[Question]:
        """The questions of a published set or a file, at most `limit` of them (0: all).

        `test` takes the held-out part of a source that has no splits of its own.
        """

    def solved_questions(self, count: int, seed: int) -> list[Solved]:
        """`count` embedded questions with the expert's steps, the types in turn."""

    def conclusions(self, thought: str) -> list[str]:
        """What the steps of a chain of thought in the expert's words conclude; [] if it computes
        nothing."""


class SearchDomain:
    name, form, types = "search", protocol.SEARCH, search_questions.TYPES
    # The embedded splits are plain functions, so they fit the interface as they are.
    training_questions = staticmethod(search_questions.training_questions)
    validation_questions = staticmethod(search_questions.validation_questions)
    test_questions = staticmethod(search_questions.test_questions)
    conclusions = staticmethod(search_questions.conclusions)

    def load_questions(self, source, *, limit=0, test=False):
        """A published set's name means one fixed split of it; a file is taken whole."""
        return load_questions(source, limit=limit)

    def solved_questions(self, count, seed):
        return search_questions.solved_questions(REAL, count, seed)

    def environment(
        self,
        asked=(),
        *,
        backend: str = "tfidf",
        topk: int = 2,
        corpus: str = "",
        judge: str = "official",  # of the tool domain: not used here
        **retrieval,
    ) -> Environment:
        """Without a corpus or a server, every question searches its own embedded world."""
        if backend == "tfidf" and not corpus:
            return SearchEnvironment(topk=topk)
        # Written with sorted keys: equal settings then always name the same source.
        given = {"backend": backend, "corpus": corpus, **retrieval}
        return SearchEnvironment(
            open_retriever(**given), topk=topk, source=json.dumps(given, sort_keys=True)
        )


class ToolDomain:
    name, form, types = "tool", TOOL, tool_questions.CATEGORIES
    validation_questions = staticmethod(tool_questions.validation_questions)
    test_questions = staticmethod(tool_questions.test_questions)
    conclusions = staticmethod(arithmetic.working_conclusions)

    def environment(self, asked=(), *, judge: str = "official", **_) -> Environment:
        """Calls are executed if all of `asked` are about the embedded functions.

        The functions of BFCL and ToolMind cannot be run here.
        """
        # {True}, {False}, both, or empty without questions, which counts as embedded.
        embedded = {question.world in tool_questions.SPLITS for question in asked}
        if len(embedded) > 1:
            raise ValueError(
                "some of these requests call functions that can be executed and some do not (BFCL,"
                " ToolMind): ask them in two runs"
            )
        return ToolEnvironment(execute=embedded != {False}, judge=judge)

    def training_questions(self, count, *, worlds=0, seed, types=()):
        """`worlds` is not used: there is one set of functions."""
        return tool_questions.training_questions(count, seed=seed, types=types)

    def solved_questions(self, count, seed):
        return tool_questions.solved_questions("train", count, seed)

    def load_questions(self, source, *, limit=0, test=False):
        """A category of BFCL, all test, or ToolMind's rows in a file, a folder or on the hub."""
        if str(source) in bfcl.ASKED_CATEGORIES:
            items = bfcl.load_category(str(source))
            found = [bfcl_request(item).question(item.id, world="bfcl") for item in items]
        # A bare word is a misspelt category: a file has a suffix, a hub id has a slash.
        elif re.fullmatch(r"\w+", str(source)) and not Path(source).exists():
            raise ValueError(
                f"{source}: no set of the tool domain and no file; the sets are"
                f" {', '.join(bfcl.ASKED_CATEGORIES)}"
            )
        else:
            found = load_toolmind(source, "test" if test else "train")
        return found[:limit] if limit else found


def embedded_questions(domain: Domain, split: str, count: int) -> list[Question]:
    """At most `count` of a domain's own questions; `split` is a name in `EMBEDDED`."""
    splits = {"real": domain.test_questions, "validation": domain.validation_questions}
    return splits[split](count)


# name → domain
_DOMAINS: dict[str, Domain] = {domain.name: domain for domain in (SearchDomain(), ToolDomain())}


def of(name: str) -> Domain:
    """The domain of that name. Raises ValueError for any other."""
    if name not in _DOMAINS:
        raise ValueError(f"unknown domain {name!r}: expected one of {', '.join(_DOMAINS)}")
    return _DOMAINS[name]

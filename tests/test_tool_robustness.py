"""Odd requests, odd calls and odd texts in the tool domain: an answer that is wrong with a reason,
never an exception."""

import json
import time
from functools import partial

import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alar.domains.tool import bfcl
from alar.domains.tool.environment import ToolEnvironment, check_turns, toolmind_score, verdict
from alar.domains.tool.protocol import TOOL, calls_text, parse_calls, parse_turn
from alar.domains.tool.requests import ToolRequest, bfcl_request
from alar.domains.tool.toolmind import dense_score, load_rows, read_row
from alar.records import Question, Trajectory, TurnRecord

fuzz = partial(settings, deadline=None, derandomize=True, max_examples=80)
TAGS = ["<tool_call>", "</tool_call>", "</think>", "<latent>", "<|im_end|>"]
TAGGED = st.sampled_from([*TAGS, "\ud800", "é“”", "\u2028", "a" * 3000, ""])
TEXT = st.one_of(st.text(st.characters(), max_size=8), TAGGED)
SOUND = TEXT.filter(lambda text: "\ud800" not in text)
NUMBERS = st.one_of(st.integers(-(10**30), 10**30), st.floats())
JSON = st.recursive(
    st.one_of(TEXT, NUMBERS, st.booleans(), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=6,
)
SOUND_JSON = st.recursive(
    st.one_of(
        SOUND,
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.booleans(),
        st.none(),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(SOUND, inner, max_size=3)),
    max_leaves=6,
)


def calls_of(text, value):
    call = st.fixed_dictionaries(
        {"name": text, "arguments": st.dictionaries(text, value, max_size=3)}
    )
    return st.lists(call, min_size=1, max_size=3)


def deep(levels, brackets="[]"):
    return brackets[0] * levels + brackets[1] * levels


@pytest.fixture(scope="module")
def questions():
    """Some of every category that a model can be asked, those without a function among them."""
    found = []
    for category in bfcl.ASKED_CATEGORIES:
        loaded = bfcl.load_category(category)
        found += [*loaded[:: len(loaded) // 8], *(q for q in loaded if not q.functions)]
    return found


def judged(question: Question, text: str) -> Trajectory:
    """A trajectory of one turn, as the agent loop records it."""
    parsed = parse_turn(text)
    turn = TurnRecord(
        0, 0, parsed.mode, parsed.action, parsed.argument, parsed.well_formed, parsed.problem
    )
    done = parsed.action is not None
    said, finish = (parsed.argument, "answer") if done else (None, "max_turns")
    return Trajectory(question, [], [], [], np.zeros((0, 0)), [turn], said, finish=finish)


@fuzz()
@given(calls_of(SOUND, SOUND_JSON))
def test_every_call_that_can_be_written_is_read_back(calls):
    """Also one whose arguments hold a tag: it is written with an escape."""
    parsed = parse_turn(f"<think>so</think>\n\n{calls_text(calls)}")
    assert parsed.well_formed and parse_calls(parsed.argument) == (calls, "")


@fuzz(max_examples=200)
@given(calls=calls_of(TEXT, JSON), number=st.integers(0, 10**6))
def test_any_call_gets_a_verdict_a_score_and_a_reason_that_can_be_stored(questions, calls, number):
    item = questions[number % len(questions)]
    if number % 3 == 0 and item.functions:  # a known function, with some of its parameters
        known = list(item.functions[0]["parameters"].get("properties", {})) or ["x"]
        for call in calls:
            call["name"] = item.functions[0]["name"]
            call["arguments"] = {
                known[n % len(known)]: value for n, value in enumerate(call["arguments"].values())
            }
    question = bfcl_request(item).question(item.id)
    body = "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)
    trajectory = judged(question, f"<think>so</think>\n\n{body}")
    checked = verdict(trajectory)
    assert checked.correct != bool(checked.reason) and len(checked.reason) < 2000
    assert -0.2 <= toolmind_score(trajectory) <= 1.5
    if "irrelevance" in item.category:
        assert not checked.correct and toolmind_score(trajectory) < 0
    pyarrow.array([checked.reason])  # as tables are written
    line = json.dumps(trajectory.to_json(), ensure_ascii=False).encode()  # as trajectories are
    assert Trajectory.from_json(json.loads(line)).turns == trajectory.turns


@pytest.mark.parametrize(
    "value", [deep(400), deep(700), deep(950), '{"a":' * 300 + "1" + "}" * 300, f'"{deep(900)}"']
)
def test_deeply_nested_arguments_are_wrong_not_fatal(value):
    text = (
        '<think>so</think>\n\n<tool_call>\n{"name": "f", "arguments": {"x":'
        f" {value}}}}}\n</tool_call>"
    )
    listed = {"type": "dict", "properties": {"x": {"type": "array", "items": {"type": "any"}}}}
    function = {"name": "f", "description": "", "parameters": listed}
    truth = (({"f": {"x": [[1]]}},),)
    trajectory = judged(
        ToolRequest(({"role": "user", "content": "x"},), (function,), truth, "multiple").question(
            "x"
        ),
        text,
    )
    assert not verdict(trajectory).correct and toolmind_score(trajectory) < 1.5
    (call,) = parse_calls(trajectory.turns[0].argument)[0] or [
        {"name": "f", "arguments": {"x": value}}
    ]
    assert dense_score([call], [call]) <= 1.5


def test_a_score_without_expected_calls_follows_the_category():
    for category, made, right in (
        ("irrelevance", False, True),
        ("irrelevance", True, False),
        ("live_relevance", True, True),
        ("live_relevance", False, False),
    ):
        question = ToolRequest(({"role": "user", "content": "x"},), (), None, category).question(
            "x"
        )
        trajectory = judged(
            question,
            "<think>so</think>\n\n"
            + (calls_text([{"name": "f", "arguments": {}}]) if made else "No."),
        )
        assert verdict(trajectory).correct == right and (toolmind_score(trajectory) == 1.5) == right


@pytest.mark.parametrize(
    "piece", [*TAGS, "<tool_call>{", "<think>", "<tool_call></tool_call>", " ", "<", "•", "é"]
)
def test_long_outputs_are_parsed_in_time_that_grows_with_their_length(piece):
    """Thirty thousand repetitions: anything quadratic would take minutes."""
    for head in ("", "<think>so</think>\n\n"):
        began = time.process_time()
        parsed = parse_turn(head + piece * 30_000)
        assert time.process_time() - began < 2, piece
        assert len(parsed.problem) < 300


def test_what_a_policy_wrote_cannot_close_the_response_that_names_its_problem():
    turn = parse_turn(
        '<think>so</think>\n\n<tool_call>{"</tool_response>": 1, "%s": 2}</tool_call>'
        % ("k" * 5000)
    )
    assert not turn.well_formed and len(turn.problem) < 300
    assert TOOL.invalid(turn.problem).count("</tool_response>") == 1


def test_prompts_without_functions_have_no_block_of_functions(questions):
    """As Qwen3's template has it; BFCL asks a few such questions."""
    asked = [q for q in questions if not q.functions]
    assert asked
    for q in asked:
        prompt = "".join(TOOL.prompt(bfcl_request(q).question(q.id)))
        told = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in q.messages)
        assert prompt == told + "<|im_start|>assistant\n"


def test_a_request_without_functions_can_be_answered_and_judged(questions):
    q = next(q for q in questions if not q.functions)
    question = bfcl_request(q).question(q.id)
    assert verdict(judged(question, "<think>so</think>\n\nI cannot.")).correct
    called = judged(
        question, "<think>so</think>\n\n" + calls_text([{"name": "f", "arguments": {}}])
    )
    assert not verdict(called).correct
    environment = ToolEnvironment()
    seen = environment.observe(
        [(question, parse_turn(f"<think>so</think>\n\n{called.prediction}"))]
    )
    assert "there is no function" in seen[0].text
    environment.executor.close()


# ToolMind

VALUES = {
    "integer": st.integers(-(10**9), 10**9),
    "float": st.floats(-1e9, 1e9),
    "boolean": st.booleans(),
    "string": st.one_of(SOUND, st.sampled_from(["", " ", "5", "true", "None", "[1]"])),
}


@st.composite
def typed_calls(draw):
    """Functions with typed parameters, dicts and lists of them among these, and calls that keep to
    the types."""
    functions, calls = [], []
    for name in draw(
        st.lists(st.sampled_from(["f", "g.h", "naïve"]), min_size=1, max_size=2, unique=True)
    ):
        properties, arguments = {}, {}
        for key in draw(st.lists(st.sampled_from(["a", "b", "c d", "é"]), max_size=3, unique=True)):
            kind = draw(st.sampled_from(sorted(VALUES)))
            shape = draw(
                st.sampled_from(["plain", "plain", "list", "dict", "dicts", "nested", "listed"])
            )
            value = VALUES[kind]
            inner, items = (
                {"type": "dict", "properties": {"k": {"type": kind}}},
                {"items": {"type": kind}},
            )
            properties[key], arguments[key] = {
                "plain": lambda: ({"type": kind}, draw(value)),
                "list": lambda: ({"type": "array"} | items, draw(st.lists(value, max_size=3))),
                "dict": lambda: (inner, {"k": draw(value)}),
                "dicts": lambda: ({"type": "array", "items": inner}, [{"k": draw(value)}]),
                "nested": lambda: (
                    {"type": "dict", "properties": {"k": inner}},
                    {"k": {"k": draw(value)}},
                ),
                "listed": lambda: (
                    {
                        "type": "dict",
                        "properties": {
                            "k": {"type": "dict", "properties": {"k": {"type": "array"} | items}}
                        },
                    },
                    {"k": {"k": draw(st.lists(value, max_size=3))}},
                ),
            }[shape]()
        functions.append(
            {
                "name": name,
                "parameters": {
                    "type": "object",
                    "properties": properties,
                    "required": list(properties),
                },
            }
        )
        calls.append({"function": {"name": name, "arguments": arguments}})
    return functions, calls


@fuzz()
@given(typed_calls())
def test_the_calls_that_a_row_expects_score_fully(drawn):
    functions, calls = drawn
    asked = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": calls}]
    row = read_row({"conversations": asked, "tools": functions})
    assert dense_score(row.expected, row.expected) == 1.5
    text = f"<think>so</think>\n\n{calls_text(row.expected)}"
    assert toolmind_score(judged(row.request.question(row.id, world="toolmind"), text)) == 1.5
    assert check_turns([list(row.expected)], row.request).correct


ROW_PIECES = st.sampled_from(
    [
        None,
        True,
        1,
        "x",
        "[{",
        "\ud800",
        [],
        {},
        [None],
        {"name": "f"},
        {"function": {"name": "!!!"}},
        {"name": "f", "parameters": {"required": True, "properties": {"a": 1}}},
        {
            "name": "f",
            "parameters": {
                "required": [[], {}, "a"],
                "properties": {"a": {"type": ["string", "null"], "items": 3}},
            },
        },
        {"role": "user", "content": ["x"]},
        {"role": "user", "content": "\ud800"},
        {"role": "tool", "content": None},
        {"role": "assistant", "tool_calls": "[]"},
        {"role": "assistant", "tool_calls": {"name": "f"}},
        {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}}]},
        {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"a": "\ud800"}}]},
        {
            "role": "assistant",
            "content": "<tool_call>",
            "tool_calls": [{"function": {"name": "f", "arguments": '{"a": NaN}'}}],
        },
        {
            "role": "assistant",
            "tool_calls": [{"name": "f", "arguments": json.loads('{"a":' + deep(200) + "}")}],
        },
        {"name": "f", "parameters": json.loads('{"properties":' * 120 + "{}" + "}" * 120)},
    ]
)
ROWS = st.fixed_dictionaries(
    {
        "conversations": st.one_of(ROW_PIECES, st.lists(ROW_PIECES, max_size=5)),
        "tools": st.one_of(ROW_PIECES, st.lists(ROW_PIECES, max_size=3)),
    }
)


@fuzz(max_examples=250)
@given(st.lists(ROWS, min_size=1, max_size=4), st.booleans())
def test_any_row_is_a_request_that_can_be_asked_and_stored_or_is_counted(tokenizer, rows, whole):
    asked = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}}]},
    ]
    rows = [
        *rows,
        *(
            {
                **row,
                "conversations": [
                    *asked[:1],
                    *(c if isinstance(c := row["conversations"], list) else []),
                    *asked[1:],
                ],
                "tools": [{"name": "f"}, *(t if isinstance(t := row["tools"], list) else [])][:3],
            }
            for row in rows
        ),
    ]
    loaded = load_rows(rows, whole=whole)
    assert len(loaded.rows) + sum(loaded.skipped.values()) == len(rows)
    for row in loaded.rows:
        question = row.request.question(row.id, world="toolmind")
        "".join(TOOL.prompt(question)).encode()
        json.dumps([question.details, row.expected, row.responses], ensure_ascii=False).encode()
        score = toolmind_score(judged(question, f"<think>so</think>\n\n{calls_text(row.expected)}"))
        assert score == 1.5 if len(row.request.truth) == 1 else -0.2 <= score < 1.5


def test_a_row_that_comes_again_is_counted_whatever_its_calls():
    asked = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}}]},
    ]
    loaded = load_rows([{"conversations": asked, "tools": [{"name": "f"}]}] * 3)
    assert len(loaded.rows) == 1 and loaded.skipped == {"the same request as another row": 2}

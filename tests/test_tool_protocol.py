"""Qwen3's tool template as this project writes and reads it; nothing that a policy writes makes the
parser raise."""

import copy
import json
import random

import pytest

from alar import protocol
from alar.domains.tool.environment import ToolEnvironment
from alar.domains.tool.execution import Executor
from alar.domains.tool.protocol import (
    TOOL,
    ToolForm,
    calls_text,
    parse_calls,
    parse_turn,
    responses_text,
)
from alar.domains.tool.questions import solved_questions
from alar.domains.tool.requests import ToolRequest, openai_tool, request_of
from alar.records import Origin, Question
from alar.rollout.codec import Codec
from alar.rollout.engine import Engine, Sampling, TurnOutput
from alar.rollout.loop import run
from alar.train.examples import with_latent_turns

# The parts of Qwen3-4B-Thinking-2507's chat template (Apache 2.0) that concern tools, generation
# prompt included.
QWEN3 = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}{%- if messages[0].role == 'system' %}{{-"
    " messages[0].content + '\\n\\n' }}{%- endif %}{{- \"# Tools\\n\\nYou may call one or more"
    " functions to assist with the user query.\\n\\nYou are provided with function signatures"
    ' within <tools></tools> XML tags:\\n<tools>" }}{%- for tool in tools %}{{- "\\n" }}{{- tool'
    ' | tojson }}{%- endfor %}{{- "\\n</tools>\\n\\nFor each function call, return a json object'
    " with function name and arguments within <tool_call></tool_call> XML"
    ' tags:\\n<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\":'
    ' <args-json-object>}\\n</tool_call><|im_end|>\\n" }}{%- endif %}{%- for message in messages'
    " %}{%- if message.role == 'user' %}{{- '<|im_start|>user\\n' + message.content + '<|im_end|>'"
    " + '\\n' }}{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant\\n' }}{%- for"
    " tool_call in message.tool_calls %}{%- if not loop.first %}{{- '\\n' }}{%- endif %}{{-"
    ' \'<tool_call>\\n{"name": "\' }}{{- tool_call.name }}{{- \'", "arguments": \' }}{{-'
    " tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n'"
    " }}{%- elif message.role == 'tool' %}{%- if loop.first or (messages[loop.index0 - 1].role !="
    " 'tool') %}{{- '<|im_start|>user' }}{%- endif %}{{- '\\n<tool_response>\\n' }}{{-"
    " message.content }}{{- '\\n</tool_response>' }}{%- if loop.last or (messages[loop.index0 +"
    " 1].role != 'tool') %}{{- '<|im_end|>\\n' }}{%- endif %}{%- endif %}{%- endfor %}{%- if"
    " add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
)
CALLS = [
    {"name": "gcd", "arguments": {"a": 12, "b": 18}},
    {"name": "upper", "arguments": {"text": "café “x”"}},
]


def turn(action: str, block: str = "<think>so</think>") -> str:
    return f"{block}\n\n{action}"


def render(tokenizer, request: ToolRequest, messages) -> str:
    return tokenizer.apply_chat_template(
        messages,
        tools=[openai_tool(f) for f in request.functions],
        chat_template=QWEN3,
        tokenize=False,
        add_generation_prompt=True,
    )


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be brief."}]])
def test_prompts_are_those_of_the_template_without_the_open_think_tag(tokenizer, system):
    for solved in solved_questions("train", 12, 0):
        request = request_of(solved.question)
        messages = [*system, *request.messages]
        question = ToolRequest(
            tuple(messages), request.functions, request.truth, request.category
        ).question("x")
        assert "".join(TOOL.prompt(question)) + "<think>\n" == render(tokenizer, request, messages)


def test_calls_and_responses_are_written_as_the_template_writes_them(tokenizer):
    request = request_of(solved_questions("train", 1, 0)[0].question)
    asked = [*request.messages, {"role": "assistant", "tool_calls": CALLS}]
    answered = [*asked, {"role": "tool", "content": "6"}, {"role": "tool", "content": "CAFÉ"}]
    prompt = "".join(TOOL.prompt(request.question("x")))
    seen = "".join(TOOL.observation(responses_text(["6", "CAFÉ"])))
    assert prompt + calls_text(CALLS) + seen + "<think>\n" == render(tokenizer, request, answered)


@pytest.mark.parametrize(
    "block, mode", [(protocol.latent_block(4), "latent"), ("<think>I call.</think>", "think")]
)
def test_what_is_written_is_parsed_back(block, mode):
    parsed = parse_turn(turn(calls_text(CALLS), block))
    assert (parsed.mode, parsed.action, parsed.well_formed) == (mode, "call", True)
    assert parse_calls(parsed.argument) == (CALLS, "")
    answer = parse_turn(turn("It is {6}.", block))
    assert (answer.action, answer.argument, answer.well_formed) == ("answer", "It is {6}.", True)
    assert parse_turn(turn("6", block)).policy_text == ("" if mode == "latent" else "I call.")


CALL = calls_text(CALLS[:1])


@pytest.mark.parametrize(
    "text, problem",
    [
        (turn("<tool_call>\n{'name': 1}\n</tool_call>"), "not JSON"),
        (turn("<tool_call>[1]</tool_call>"), "list, not an object"),
        (turn("<tool_call>null</tool_call>"), "NoneType, not an object"),
        (
            turn('<tool_call>{"name": "gcd", "arguments": "{}"}</tool_call>'),
            "arguments of a call are str",
        ),
        (
            turn('<tool_call>{"name": "gcd", "arguments": null}</tool_call>'),
            "arguments of a call are NoneType",
        ),
        (
            turn('<tool_call>{"name": null, "arguments": {}}</tool_call>'),
            "name of a call is not text",
        ),
        (turn('<tool_call>{"name": "gcd"}</tool_call>'), "expected name and arguments"),
        (turn('<tool_call>{"name": "gcd", "arguments": {"a": NaN}}</tool_call>'), "not JSON"),
        (turn("<tool_call>" + "[" * 100000 + "</tool_call>"), "not JSON"),
        (
            turn('<tool_call>{"name": "gcd", "arguments": {"a": ' + "9" * 10000 + "}}</tool_call>"),
            "not JSON",
        ),
        (turn(CALL * 17), "at most 16"),
        (turn(f"Let me see. {CALL}"), "text outside"),
        (turn(f"{CALL} done"), "text outside"),
        (turn(CALL[: len(CALL) // 2]), "no partner"),
        (turn(f"{CALL}\n<tool_call>"), "no partner"),
        (turn("6", f"<think>{CALL}</think>"), "a tag inside the reasoning block"),
        (turn("6", "<think>a</think><think>b</think>"), "more than one block"),
        (turn(""), "neither a call nor an answer"),
        (turn("6", "<latent>text</latent>"), "text inside a latent block"),
        ("<think>so", "never closed"),
        (CALL, "does not start with a reasoning block"),
        ("", "does not start"),
    ],
)
def test_a_malformed_turn_is_wrong_with_a_reason(text, problem):
    parsed = parse_turn(text)
    assert not parsed.well_formed and problem in parsed.problem


def test_reasoning_beside_the_calls_counts_as_thinking():
    assert parse_turn(turn(f"hidden {CALL}", protocol.latent_block(4))).policy_text == "hidden"
    assert parse_turn(turn(CALL, protocol.latent_block(4))).policy_text == ""


class Recording(Executor):
    """Notes what would be run instead of running it."""

    def __init__(self):
        super().__init__()
        self.ran = []

    def _ask(self, name, arguments):
        self.ran.append((name, arguments))
        return "ok", 0


def fuzzed(rng: random.Random) -> str:
    """Template fragments and random characters, or a valid turn with some of its characters
    changed."""
    names = ["gcd", "gcd", "lcm", "lcm", "eval", "__import__", "os.system", "comb", "upper"]
    values = [
        *["12", "-3"] * 5,
        "1e400",
        "5.0",
        "true",
        "null",
        "NaN",
        '"x"',
        '"\\ud800"',
        "[1]",
        "{}",
        "9" * 30,
        "9" * 5000,
    ]
    if rng.random() < 0.5:
        pieces = [
            "<think>",
            "</think>",
            "<latent>",
            "</latent>",
            "<tool_call>",
            "</tool_call>",
            "<tool_response>",
            "•",
            "\n",
            "{",
            "}",
            '"name": ',
            '"arguments": ',
            '"gcd"',
            "[1]",
            "null",
            "text",
            "\x00",
            "\ud800",
            '{"a": 1, "b": 2}',
            "\\u0000",
            "<|im_end|>",
        ]
        return "".join(rng.choice(pieces) for _ in range(rng.randint(0, 16)))
    calls = [
        f'<tool_call>\n{{"name": "{rng.choice(names)}", "arguments": '
        f'{{"a": {rng.choice(values)}, "b": {rng.choice(values)}}}}}\n</tool_call>'
        for _ in range(rng.randint(1, 3))
    ]
    text = list(
        turn("\n".join(calls), rng.choice(["<think>x</think>", "<latent>••••</latent>", ""]))
    )
    for _ in range(rng.choice([0, 0, 1, 1, 3, 20])):
        place = rng.randrange(len(text))
        text[place : place + rng.choice([0, 1, 5])] = rng.choice(
            ['"', "{", "}", "<", "é", "\ud800", ""]
        )
    return "".join(text)


def test_ten_thousand_fuzzed_outputs_raise_nothing_and_run_only_what_is_offered_and_valid():
    executor = Recording()
    environment, rng = ToolEnvironment(executor), random.Random(0)
    functions = tuple(executor.tools[name].function() for name in ("gcd", "lcm"))
    functions += (
        {
            "name": "eval",
            "description": "",
            "parameters": {"type": "dict", "properties": {}, "required": []},
        },
    )
    question: Question = ToolRequest(
        ({"role": "user", "content": "?"},), functions, ((),), "irrelevance"
    ).question("x")
    outcomes = set()
    for _ in range(10_000):
        parsed = TOOL.parse(fuzzed(rng))
        assert parsed.well_formed == (not parsed.problem)
        outcomes.add((parsed.action, parsed.well_formed))
        if parsed.action == "call":
            text = environment.observe([(question, parsed)])[0].text
            text.encode()
            assert text.count("<tool_response>") >= 1
    assert outcomes >= {("call", True), ("call", False), ("answer", True), (None, False)}
    assert len(executor.ran) > 50
    for name, arguments in executor.ran:
        assert name in ("gcd", "lcm") and set(arguments) == {"a", "b"}
        assert all(type(value) is int and abs(value) <= 10**9 for value in arguments.values()), (
            json.dumps(arguments)
        )


class Unasked(Engine):
    """Writes given turns behind what is forced on it, and opens no block by itself."""

    def __init__(self, codec, turns):
        self.codec, self.turns, self.waiting = codec, copy.deepcopy(turns), []

    @property
    def busy(self):
        return bool(self.waiting)

    def submit(self, requests, sampling):
        self.waiting += requests

    def step(self):
        request = self.waiting.pop(0)
        forced = list(request.forced)
        left = self.turns[request.session]
        ids = self.codec.trusted(left.pop(0) if left else "again<|im_end|>")
        origins = [int(Origin.FORCED)] * len(forced) + [int(Origin.SAMPLED)] * len(ids)
        logprobs = [float("nan")] * len(forced) + [-0.5] * len(ids)
        return [(request, TurnOutput(forced + ids, origins, logprobs, [], "eos"))]

    def release(self, sessions):
        pass


def test_the_block_is_opened_for_a_base_whose_template_opens_it(tokenizer, random_model):
    solved = solved_questions("train", 12, 0)
    texts = {
        row: [f"{s.thought}</think>\n\n{s.argument}<|im_end|>" for s in item.steps]
        for row, item in enumerate(solved)
    }

    def answered(template):
        thinking = copy.deepcopy(tokenizer)
        thinking.chat_template = template
        base = Unasked(Codec(thinking, form=TOOL), texts)
        questions = [item.question for item in solved]
        return run(questions, base, ToolEnvironment(), Sampling(64), modes="off")

    assert not any(t.well_formed for t in answered(tokenizer.chat_template))
    found = answered(QWEN3)  # ends in <think>
    assert all(t.well_formed and t.correct for t in found)
    opened = Codec(tokenizer).think_open
    for t in found:
        for turn in t.turns:
            assert t.ids[turn.start : turn.start + len(opened)] == opened
            assert t.origins[turn.start] == Origin.FORCED  # RL gives it no loss
    student = Codec.of(*random_model(), form=TOOL)
    example = with_latent_turns(found[0], student, [False] * len(found[0].turns))
    # The student has to choose its modes, so it learns the tag.
    assert example.labels[found[0].turns[0].start] == opened[0]


def test_an_instruction_stands_before_the_requests_own_system_message(tokenizer):
    request = request_of(solved_questions("train", 1, 0)[0].question)
    own = {"role": "system", "content": "Be brief."}
    messages = (own, *request.messages)
    asked = ToolRequest(messages, request.functions, request.truth, request.category).question("x")
    both = [{"role": "system", "content": "Reason first.\n\nBe brief."}, *request.messages]
    written = "".join(ToolForm("Reason first.").prompt(asked))
    assert written + "<think>\n" == render(tokenizer, request, both)

"""ToolMind: rows of the published shape, quirks included, as requests; leak-free splits; the
teacher's score."""

import json

import pytest

from alar.domains.tool import toolmind
from alar.domains.tool.environment import check_turns
from alar.domains.tool.protocol import TOOL
from alar.domains.tool.toolmind import dense_score, load_rows, read_function, read_row, split_of_row


def call(name, **arguments):
    return {"function": {"name": name, "arguments": arguments}}


WEATHER = {
    "type": "function",
    "function": {
        "name": "Get weather (v2)",
        "description": "Weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "str"}, "days": {"type": "int", "default": 1}},
            "required": ["city"],
        },
    },
}
ZIP = {
    "type": "function",
    "function": {
        "type": "function",
        "function": {
            "name": "zip_of",
            "arguments": {
                "properties": {
                    "place": {"type": "dict", "properties": {"name": {"type": "str"}}},
                    "tags": {"type": "list"},
                },
                "required": ["place"],
            },
        },
    },
}
ASKED = {"role": "user", "content": "x"}
BARE = {"name": "now", "arguments": {"zone": {"type": "string"}, "odd": {"type": "quaternion"}}}


def conversation(city="Lima"):
    return [
        {"role": "system", "content": "Help."},
        {"role": "user", "content": f"Weather in {city} and its zip?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                call("Get weather (v2)", city=city),
                call("zip_of", place={"name": city}),
            ],
        },
        {"role": "tool", "content": "sunny"},
        {"role": "tool", "content": {"zip": 15001}},
        {"role": "assistant", "content": "Sunny, 15001."},
        {"role": "user", "content": "And in two days?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call("Get weather (v2)", city=city, days=2)],
        },
    ]


def rows(city="Lima"):
    """As published: one row per assistant turn, each a prefix of the next."""
    whole, tools = conversation(city), [WEATHER, ZIP, BARE]
    return [{"conversations": whole[:n], "tools": tools} for n in (3, 6, 8)]


def test_functions_lose_their_wrappings_and_odd_names():
    assert read_function(WEATHER)["name"] == "Get_weather_v2"
    assert read_function(WEATHER)["parameters"] == {
        "type": "dict",
        "required": ["city"],
        "properties": {"city": {"type": "string"}, "days": {"type": "integer", "default": 1}},
    }
    place = read_function(ZIP)["parameters"]
    assert place["properties"]["place"] == {
        "type": "dict",
        "properties": {"name": {"type": "string"}},
    }
    assert place["properties"]["tags"] == {"type": "array", "items": {"type": "string"}} and place[
        "required"
    ] == ["place"]
    assert read_function(BARE)["parameters"]["properties"] == {
        "zone": {"type": "string"},
        "odd": {"type": "string"},
    }


def test_a_row_asks_for_its_last_turn_of_calls_and_keeps_every_response():
    first, answered, last = (read_row(row) for row in rows())
    assert [c["name"] for c in first.expected] == [
        "Get_weather_v2",
        "zip_of",
    ] and first.request.category == "parallel_multiple"
    assert [m["role"] for m in first.request.messages] == ["system", "user"]
    assert answered.id == first.id, "what follows the last calls is not part of the request"
    assert last.expected == ({"name": "Get_weather_v2", "arguments": {"city": "Lima", "days": 2}},)
    assert [m["role"] for m in last.request.messages] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
        "user",
    ]
    prompt = "".join(TOOL.prompt(last.request.question("x")))
    assert (
        '<tool_response>\nsunny\n</tool_response>\n<tool_response>\n{"zip":'
        " 15001}\n</tool_response><|im_end|>" in prompt
    )
    assert prompt.count('<tool_call>\n{"name": "Get_weather_v2"') == 1 and "zip_of" in prompt


def test_the_expected_calls_pass_the_checker_of_the_evaluation():
    for row in rows():
        read = read_row(row)
        assert check_turns([list(read.expected)], read.request).correct
        changed = [
            {**read.expected[0], "arguments": {**read.expected[0]["arguments"], "city": "Quito"}},
            *read.expected[1:],
        ]
        assert not check_turns([changed], read.request).correct


def test_rows_of_one_conversation_stay_in_one_split():
    loaded = load_rows(row for number in range(400) for row in rows(f"city {number}"))
    assert len(loaded.rows) == 800 and loaded.skipped == {"the same request as another row": 400}
    of_group = {}
    for row in loaded.rows:
        of_group.setdefault(row.group, set()).add(split_of_row(row))
    assert len(of_group) == 400 and all(len(splits) == 1 for splits in of_group.values())
    count = sum(splits == {"test"} for splits in of_group.values())
    assert 5 <= count <= 40, "about 5 % of the groups"


def test_json_text_in_place_of_objects_is_read():
    row = rows()[0]
    text = {"conversations": json.dumps(row["conversations"]), "tools": json.dumps(row["tools"])}
    text_call = json.loads(json.dumps(row))
    for entry in text_call["conversations"][2]["tool_calls"]:
        entry["function"]["arguments"] = json.dumps(entry["function"]["arguments"])
    assert read_row(text).id == read_row(text_call).id == read_row(row).id


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"tools": []}, "no functions"),
        ({"tools": None}, "tools are no list"),
        ({"tools": [{"name": " "}]}, "without a name"),
        ({"tools": "[{"}, "not JSON"),
        ({"conversations": []}, "no calls"),
        ({"conversations": conversation()[2:3]}, "no user message"),
        ({"conversations": [{"from": "human"}]}, "known role"),
        ({"tools": [WEATHER]}, "not offered"),
        (
            {"conversations": [ASKED, {"role": "assistant", "tool_calls": ["now"]}]},
            "without a name",
        ),
        (
            {
                "conversations": [
                    ASKED,
                    {"role": "assistant", "tool_calls": [{"name": "now", "arguments": [1]}]},
                ]
            },
            "no object",
        ),
    ],
)
def test_unreadable_rows_are_counted_by_reason(change, reason):
    loaded = load_rows([rows()[0] | change])
    assert not loaded.rows and reason in next(iter(loaded.skipped))


A, B = {"name": "f", "arguments": {"n": 5, "s": "a"}}, {"name": "g", "arguments": {}}


@pytest.mark.parametrize(
    "calls, score",
    [
        ([A, B], 1.5),
        ([B, A], 1.5),
        ([A], 0.3),
        ([B], 0.3),
        ([], -0.2),
        ([A, A], 0.3),
        ([A, B, B], 0.8),
        ([{"name": "f", "arguments": {"n": "5", "s": "a", "more": 1}}, B], 1.5),
        ([{"name": "f", "arguments": {"n": 5.0, "s": " a "}}, B], 1.5),
        ([{"name": "f", "arguments": {"n": 6, "s": "a"}}, B], 0.3),
        ([{"name": "f", "arguments": {"n": True, "s": "a"}}, B], 0.3),
        ([{"name": "f", "arguments": None}, B], 0.3),
        ([1, B], 0.3),
    ],
)
def test_the_teachers_score(calls, score):
    assert dense_score(calls, [A, B]) == pytest.approx(score)
    assert (score >= toolmind.SUCCESS) == (score == 1.5)


def test_json_like_values_are_equal_after_coercion():
    assert toolmind.coerced('["a", 1.0, "true"]') == ["a", 1, True]
    assert (
        dense_score(
            [{"name": "f", "arguments": {"x": '{"k": [1]}'}}],
            [{"name": "f", "arguments": {"x": {"k": [1.0]}}}],
        )
        == 1.5
    )
    assert dense_score([], []) == 1.5 and dense_score([A], []) == -0.2

"""Teacher rollouts on rows of ToolMind's published shape: sharded, resumed, merged, and sampled
from a real HTTP server."""

import copy
import json
import random
import shutil
import threading
from collections import Counter
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from alar.domains.tool.environment import toolmind_score
from alar.domains.tool.protocol import TOOL, calls_text, parse_turn
from alar.domains.tool.requests import ToolRequest
from alar.domains.tool.toolmind import call_key, load_rows, read_row
from alar.engines.endpoint import REFUSALS, Endpoint, EndpointEngine, EndpointError
from alar.engines.tool_chat import tool_chat
from alar.files import TruncatedFile, read_jsonl, write_jsonl
from alar.model import save
from alar.records import Origin, read_trajectories
from alar.rollout.codec import Codec
from alar.rollout.engine import Sampling, TurnRequest
from alar.rollout.hf import HFEngine
from alar.study.teacher import Plan, Shard, sample_shard, shard_requests
from alar.study.teacher.__main__ import main
from alar.study.teacher.merging import merge_shards
from alar.train.examples import aasd_examples, warmup_examples

WEATHER = {
    "type": "function",
    "function": {
        "name": "get.weather in",
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
                "properties": {"place": {"type": "dict", "properties": {"name": {"type": "str"}}}},
                "required": ["place"],
            },
        },
    },
}


def call(name, **arguments):
    return {"function": {"name": name, "arguments": arguments}}


def conversation(city):
    return [
        {"role": "system", "content": "Help. # Tools"},
        {"role": "user", "content": f"Weather in {city} and its zip? <|im_end|>"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [call("get.weather in", city=city), call("zip_of", place={"name": city})],
        },
        {"role": "tool", "content": f"sunny in {city}"},
        {"role": "tool", "content": {"zip": 15001}},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call("get.weather in", city=city, days=2)],
        },
        {"role": "tool", "content": "rain"},
        {"role": "assistant", "content": "First sunny, then rain."},
        {"role": "user", "content": "And later?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call("get.weather in", city=city, days=9)],
        },
    ]


def published(city):
    """One row per assistant turn, each a prefix of the next."""
    whole = conversation(city)
    return [{"conversations": whole[:n], "tools": [WEATHER, ZIP]} for n in (3, 6, 8, 10)]


CITIES = [f"city {n}" for n in range(16)]


@pytest.fixture(scope="module")
def toolmind(tmp_path_factory):
    path = tmp_path_factory.mktemp("toolmind") / "graphsyn.jsonl"
    rows = [row for city in CITIES for row in published(city)]
    random.Random(0).shuffle(rows)
    write_jsonl(path, [*rows, {"conversations": [], "tools": [WEATHER]}])
    return path


@pytest.fixture(scope="module")
def codec(tokenizer):
    return Codec(tokenizer, form=TOOL)


class Teacher(ThreadingHTTPServer):
    """An OpenAI-shaped server that knows ToolMind's conversations by heart. `answers` of a request
    may be changed by `spoil` (city, message) → message; `status` are the next answers' (code,
    headers); it stops for good after `lives` requests.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen, self.status, self.lives, self.most, self.under_way = [], [], 10**9, 0, 0
        self.spoil, self.delay, self.lock = (lambda city, message: message), 0.0, threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1"

    def reply(self, body):
        """What follows the request's messages in the conversation, as an API says it."""
        asked = [m for m in body["messages"] if m["role"] != "system"]
        city = (
            asked[0]["content"].removeprefix("Weather in ").removesuffix(" and its zip? <|im_end|>")
        )
        known = [m for m in conversation(city) if m["role"] != "system"]
        names = {
            tool["function"]["description"]: tool["function"]["name"] for tool in body["tools"]
        }
        for sent, told in zip(asked, known):
            assert sent["role"] == told["role"], (sent, told)
            if told["role"] == "tool":
                content = (
                    told["content"]
                    if isinstance(told["content"], str)
                    else json.dumps(told["content"])
                )
                assert sent["content"] == content
        answered = [
            c["id"] for m in asked if m["role"] == "assistant" for c in m.get("tool_calls", ())
        ]
        assert answered == [m["tool_call_id"] for m in asked if m["role"] == "tool"]
        turn = known[len(asked)]
        message = {
            "role": "assistant",
            "content": turn["content"] or None,
            "reasoning_content": f"\nI think of {city}.\n",
        }
        if turn.get("tool_calls"):
            message["tool_calls"] = [
                {
                    "id": f"x{n}",
                    "type": "function",
                    "function": {
                        "name": (
                            names["Weather."] if c["function"]["name"] != "zip_of" else "zip_of"
                        ),
                        "arguments": json.dumps(c["function"]["arguments"]),
                    },
                }
                for n, c in enumerate(turn["tool_calls"])
            ]
        return self.spoil(city, message)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.seen.append(
                {"path": self.path, "key": self.headers.get("Authorization"), **body}
            )
            server.lives -= 1
            server.under_way += 1
            server.most = max(server.most, server.under_way)
            code, headers, text = server.status.pop(0) if server.status else (200, {}, "")
        threading.Event().wait(server.delay)
        if server.lives < 0:
            code, text = 500, "out of lives"
        answer = text.encode()
        if code == 200 and not text:
            message = server.reply(body)
            finish = message.pop("finish", "tool_calls" if message.get("tool_calls") else "stop")
            answer = json.dumps(
                {"choices": [{"index": 0, "message": message, "finish_reason": finish}]}
            ).encode()
        with server.lock:
            server.under_way -= 1
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(answer))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    server = Teacher()
    yield server
    server.shutdown()
    server.server_close()


def engine(server, codec, concurrent=4, **options):
    endpoint = Endpoint(
        server.url, "teacher", **{"timeout": 20, "retries": 2, "backoff": 0.01, **options}
    )
    return EndpointEngine(endpoint, codec, tool_chat, concurrent=concurrent)


PLAN = Plan(temperature=0.7, max_new_tokens=256, context=4096, chunk=8, questions=20)
ALL = Plan(max_new_tokens=256, context=4096)


def sampled(server, codec, source, folder, plan=PLAN, shard=Shard(), **options):
    with engine(server, codec, **options) as opened:
        return sample_shard(
            opened, source, folder, plan, teacher={"model": "teacher"}, shard=shard, batch_size=8
        )


def only_chunk(place):
    (path,) = place.glob("chunk-*.jsonl")
    return path


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_shards_hold_whole_conversations_and_every_request_once(toolmind):
    everything = shard_requests(toolmind, ALL)
    shards = [Shard(n, 3) for n in (1, 2, 3)]
    parts = [shard_requests(toolmind, ALL, shard).rows for shard in shards]
    assert sorted(row.id for part in parts for row in part) == [row.id for row in everything.rows]
    of_group = [{row.group for row in part} for part in parts]
    assert all(of_group) and sum(map(len, of_group)) == len(set.union(*of_group)), (
        "no conversation is in two shards"
    )
    splits = {
        split: {row.group for row in shard_requests(toolmind, Plan(split=split)).rows}
        for split in ("train", "validation", "test")
    }
    assert sum(map(len, splits.values())) == len(CITIES) and not splits["train"] & (
        splits["validation"] | splits["test"]
    )
    few = [
        row.id
        for shard in shards
        for row in shard_requests(toolmind, Plan(questions=7), shard).rows
    ]
    assert sorted(few) == [row.id for row in everything.rows][:7], "a limit is shared by all shards"
    assert everything.skipped["no calls"] == 1


def test_a_servers_rollouts_become_traces_that_later_stages_learn_from(
    server, codec, toolmind, tmp_path
):
    for index in (1, 2):
        sampled(
            server,
            codec,
            toolmind,
            tmp_path,
            shard=Shard(index, 2),
            key="secret",
            extra={"seed": None, "top_k": 20},
        )
    rows = {row.id: row for row in shard_requests(toolmind, PLAN).rows}
    summary = merge_shards([tmp_path], tmp_path / "out" / "traces.jsonl")
    traces = read_trajectories(tmp_path / "out" / "traces.jsonl")
    assert summary["kept"] == summary["questions"] == len(traces) == len(rows) == len(server.seen)
    assert (
        summary["settings"]["tokens"] == "encoded again"
        and json.loads((tmp_path / "out/teacher.json").read_text()) == summary
    )
    assert "secret" not in "".join(path.read_text() for path in tmp_path.rglob("*.json*"))
    sent = server.seen[0]
    assert (
        sent["key"] == "Bearer secret"
        and sent["path"] == "/v1/chat/completions"
        and sent["top_k"] == 20
    )
    assert (
        "seed" not in sent
        and sent["temperature"] == 0.7
        and sent["max_tokens"] == 256
        and sent["model"] == "teacher"
    )
    names = {tool["function"]["name"]: tool["function"] for tool in sent["tools"]}
    assert set(names) == {"get_weather_in", "zip_of"}, "names that the API allows"
    assert names["zip_of"]["parameters"]["properties"]["place"]["type"] == "object"
    for t in traces:
        row = rows[t.question.id]
        assert (
            t.correct
            and t.well_formed
            and t.grade == 1.0
            and len(t.turns) == 1
            and t.finish == "answer"
        )
        assert t.ids[: t.turns[0].start] == codec.encode(TOOL.prompt(t.question))
        written = t.ids[t.turns[0].start :]
        assert written[-1] == codec.tokenizer.eos_token_id and parse_turn(
            codec.text(written)
        ).reasoning.startswith("\nI think of")
        assert all(o == Origin.SAMPLED for o in t.origins[t.turns[0].start :]) and all(
            lp != lp for lp in t.logprobs
        )
        assert '"get.weather_in"' in codec.text(written) and codec.text(written).count(
            "<tool_call>"
        ) == len(row.expected)
    assert len(aasd_examples(traces, Codec(codec.tokenizer, 4, len(codec.tokenizer), TOOL))) == len(
        traces
    )
    assert len(
        warmup_examples(traces, Codec(codec.tokenizer, 4, len(codec.tokenizer), TOOL), 0.5, 0)
    ) == len(traces)


def test_every_recorded_response_stands_in_the_prompt(toolmind, codec):
    counts = Counter(
        codec.text(codec.encode(TOOL.prompt(row.request.question(row.id)))).count("<tool_response>")
        for row in shard_requests(toolmind, ALL).rows
    )
    assert set(counts) == {0, 2, 3}, "after no calls, two parallel ones, and a third"


def test_an_interrupted_shard_goes_on_to_the_same_results(server, codec, toolmind, tmp_path):
    whole = sampled(server, codec, toolmind, tmp_path / "whole")
    asked, server.lives = len(server.seen), 13
    with pytest.raises(EndpointError, match="out of lives"):
        sampled(server, codec, toolmind, tmp_path / "cut")
    place = tmp_path / "cut" / Shard().folder
    assert [path.name[:14] for path in place.iterdir()] == ["chunk-00000000"]
    with pytest.raises(ValueError, match="shard is not finished"):
        merge_shards([place], tmp_path / "traces.jsonl")
    server.lives, server.seen = 10**9, []
    sampled(server, codec, toolmind, tmp_path / "cut")
    assert content(place) == content(whole) and len(server.seen) == asked - PLAN.chunk
    server.seen = []
    sampled(server, codec, toolmind, tmp_path / "cut")
    assert not server.seen, "nothing is asked twice"
    chunk = next(place.glob("chunk-00000008-*"))
    chunk.write_bytes(chunk.read_bytes()[:-40])
    with pytest.raises(TruncatedFile, match="cut off"):
        merge_shards([tmp_path / "cut"], tmp_path / "traces.jsonl")
    assert not (tmp_path / "traces.jsonl").exists()


def test_rollouts_of_other_settings_are_never_mixed_in(server, codec, toolmind, tmp_path):
    place = sampled(server, codec, toolmind, tmp_path / "one")
    before = merge_shards([place], tmp_path / "before.jsonl")
    sampled(server, codec, toolmind, tmp_path / "one", plan=replace(PLAN, temperature=0.8))
    assert merge_shards([place], tmp_path / "after.jsonl")["settings"]["temperature"] == 0.8
    server.seen = []
    sampled(server, codec, toolmind, tmp_path / "one")
    assert not server.seen and merge_shards([place], tmp_path / "again.jsonl") == before


def test_shards_that_do_not_belong_together_are_not_merged(server, codec, toolmind, tmp_path):
    for index in (1, 2, 3):
        sampled(server, codec, toolmind, tmp_path / "all", shard=Shard(index, 3))
    shards = sorted((tmp_path / "all").iterdir())
    reference = merge_shards([tmp_path / "all"], tmp_path / "reference.jsonl")
    assert merge_shards(shards[::-1], tmp_path / "again.jsonl") == reference
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "reference.jsonl").read_bytes()
    output = tmp_path / "traces.jsonl"
    with pytest.raises(ValueError, match="shards are missing: 2/3"):
        merge_shards([shards[0], shards[2]], output)
    copied = shutil.copytree(shards[0], tmp_path / "copied" / "shard-0002-of-0003")
    with pytest.raises(ValueError, match="shard 1/3 is there twice"):
        merge_shards([shards[0], copied, shards[2]], output)
    receipt = json.loads((copied / "shard.json").read_text())

    def claim(**settings):
        changed = receipt | {"settings": receipt["settings"] | settings}
        (copied / "shard.json").write_text(json.dumps(changed))

    claim(shard="2/3")
    with pytest.raises(ValueError, match="is in .* too"):
        merge_shards([shards[0], copied, shards[2]], output)
    claim(shard="2/3", seed=9)
    with pytest.raises(ValueError, match="other settings than .*seed"):
        merge_shards([shards[0], copied, shards[2]], output)
    claim(shard="2/4")
    with pytest.raises(ValueError, match="other settings than .*shards"):
        merge_shards([shards[0], copied, shards[2]], output)
    next(shards[1].glob("chunk-*")).unlink()
    with pytest.raises(ValueError, match="chunk is missing"):
        merge_shards([tmp_path / "all"], output)
    with pytest.raises(ValueError, match="no shards here"):
        merge_shards([tmp_path / "nothing"], output)
    assert not output.exists()


SPOILT = {
    "city 0": ({"reasoning_content": None}, "does not start with a reasoning block"),
    "city 1": ({"content": "Let me call."}, "text outside the block and the calls"),
    "city 2": ({"tool_calls": None, "content": "I cannot."}, "a score below 1.5"),
    "city 3": ({"finish": "length"}, "cut at the limit of new tokens"),
    "city 4": ({"finish": "content_filter"}, "filtered the answer"),
    "city 5": ({"tool_calls": [{"function": {"name": "zip_of", "arguments": "{"}}]}, "not JSON"),
    "city 6": ({"tool_calls": [{"function": {"name": "zip_of", "arguments": "[1]"}}]}, "no object"),
    "city 7": ({"tool_calls": [{"id": "x"}]}, "has no name"),
    "city 8": ({"reasoning_content": "\ud800"}, "no Unicode"),
    "city 9": ({"reasoning_content": "a <tool_call>"}, "a tag inside the reasoning block"),
    "city 10": ({"tool_calls": None, "content": None}, "neither a call nor an answer"),
    "city 11": (
        {"reasoning_content": "", "content": "<latent>•</latent>\n\nx", "tool_calls": None},
        "does not reason in text",
    ),
    "city 12": (
        {
            "tool_calls": [
                {"function": {"name": "zip_of", "arguments": f'{{"x": {"[" * 900 + "]" * 900}}}'}}
            ]
        },
        "below 1.5",
    ),
}


def test_what_cannot_be_a_trace_is_dropped_and_counted_with_its_reason(
    server, codec, toolmind, tmp_path
):
    server.spoil = lambda city, message: {**message, **SPOILT.get(city, ({}, ""))[0]}
    sampled(server, codec, toolmind, tmp_path, plan=ALL)
    by_city = {}
    cities = {
        row.id: row.request.messages[1]["content"].split(" and ")[0][11:]
        for row in shard_requests(toolmind, ALL).rows
    }
    for path in sorted(tmp_path.rglob("chunk-*.jsonl")):
        for record in read_jsonl(path):
            by_city.setdefault(cities[record["id"]], []).append(record)
    for city, records in by_city.items():
        wanted = SPOILT.get(city, ({}, ""))[1]
        for record in records:
            assert wanted in record["reason"] and bool(record["reason"]) == bool(wanted), (
                city,
                record["reason"],
            )
            assert (record["trajectory"] is None) == bool(wanted)
    summary = merge_shards([tmp_path], tmp_path / "traces.jsonl")
    assert (
        summary["kept"] + sum(summary["dropped"].values())
        == summary["questions"]
        > summary["kept"]
        > 0
    )
    narrow = sampled(
        server,
        codec,
        toolmind,
        tmp_path / "narrow",
        plan=Plan(context=500, max_new_tokens=100, chunk=99),
    )
    assert {r["reason"] for r in read_jsonl(only_chunk(narrow))} == {
        "the prompt is longer than the model's context"
    }
    with pytest.raises(ValueError, match="solved none of"):
        merge_shards([narrow], tmp_path / "none.jsonl")


@pytest.mark.parametrize("form", ["reasoning", "inline", "open in the prompt", "all inline"])
def test_reasoning_is_found_wherever_servers_put_it(server, codec, toolmind, tmp_path, form):
    def told(city, message):
        thought = message.pop("reasoning_content")
        if form == "reasoning":
            return {
                **message,
                "reasoning": thought,
                "content": [{"type": "text", "text": message["content"] or ""}],
            }
        block = (
            thought + "</think>\n\n"
            if form == "open in the prompt"
            else f"<think>{thought}</think>\n\n"
        )
        if (
            form == "all inline"
        ):  # a server without a parser for calls; it was told the function's name as it was sent
            calls = [c["function"] for c in message.pop("tool_calls")]
            calls = [{"name": c["name"], "arguments": json.loads(c["arguments"])} for c in calls]
            return {
                **message,
                "content": block + calls_text(calls).replace("get_weather_in", "get.weather_in"),
            }
        return {**message, "content": block}

    server.spoil = told
    place = sampled(
        server, codec, toolmind, tmp_path, plan=Plan(questions=5, max_new_tokens=256, context=4096)
    )
    records = read_jsonl(only_chunk(place))
    assert len(records) == 5 and not any(record["reason"] for record in records), records[0][
        "reason"
    ]


def test_whole_episodes_get_the_recorded_responses_or_end_with_the_reason(
    server, codec, toolmind, tmp_path
):
    plan = Plan(whole=True, max_new_tokens=256, context=4096, chunk=99)

    def impatient(city, message):
        """Another day for some; for others the second call of the first turn in its own turn."""
        if city in ("city 1", "city 2") and len(message.get("tool_calls") or ()) == 1:
            message["tool_calls"][0]["function"]["arguments"] = json.dumps(
                {"city": city, "days": 3}
            )
        return message

    server.spoil = impatient
    place = sampled(server, codec, toolmind, tmp_path, plan=plan)
    rows = {row.id: row for row in shard_requests(toolmind, plan).rows}
    records = [record for record in read_jsonl(only_chunk(place))]
    assert len(records) == len(rows) == 2 * len({row.group for row in rows.values()}), (
        "one episode for each user message"
    )
    ends = Counter()
    for record in records:
        row = rows[record["id"]]
        city = row.request.messages[1]["content"].split(" and ")[0][11:]
        if city in ("city 1", "city 2"):
            assert (
                record["reason"] == "no end: a call that the data has no response for"
                and record["score"] < 1.5
            )
            continue
        assert not record["reason"], record["reason"]
        turns = [turn["action"] for turn in record["trajectory"]["turns"]]
        ends[tuple(turns)] += 1
        ids, origins = record["trajectory"]["ids"], record["trajectory"]["origins"]
        observed = codec.text([i for i, o in zip(ids, origins) if o == Origin.OBSERVATION])
        if len(row.request.truth) == 2:
            assert (
                f"sunny in {city}" in observed
                and '{"zip": 15001}' in observed
                and "rain" in observed
            )
            assert observed.count("<tool_response>") == 3
        else:
            assert not observed, (
                "the last calls of the conversation were never answered: they are the final action"
            )
    assert set(ends) == {("call", "call", "answer"), ("call",)}
    assert all(toolmind_score(t) == 1.5 for t in _merged(place, tmp_path))


def _merged(place, folder):
    merge_shards([place], folder / "traces.jsonl")
    return read_trajectories(folder / "traces.jsonl")


def test_episodes_whose_responses_cannot_be_told_apart_are_counted():
    short, twice = conversation("a"), conversation("b")
    del short[4]
    twice[5]["tool_calls"] = [call("get.weather in", city="b")]
    records = [
        {"conversations": c[:8], "tools": [WEATHER, ZIP]} for c in (short, twice, conversation("c"))
    ]
    loaded = load_rows(records, whole=True)
    assert [row.request.category for row in loaded.rows] == ["multi_turn"]
    assert loaded.skipped == {
        "not as many responses as calls in a turn": 1,
        "one call with two different responses": 1,
    }
    assert [text for _, text in loaded.rows[0].responses] == [
        "sunny in c",
        '{"zip": 15001}',
        "rain",
    ]
    prefixes = load_rows([row for row in published("c")[::-1]], whole=True).rows
    assert [len(row.request.truth) for row in prefixes] == [1, 2], (
        "the longest of an episode's prefixes is kept"
    )
    assert call_key({"name": "f", "arguments": {"n": 5.0}}) == call_key(
        {"name": "f", "arguments": {"n": "5"}}
    )


def test_a_server_that_limits_the_rate_is_waited_for(server, codec, toolmind, tmp_path):
    server.status = [
        (429, {"Retry-After": "0.3"}, "slow"),
        (503, {}, "busy"),
        (200, {}, "no JSON"),
        (200, {}, '{"choices": []}'),
    ]
    place = sampled(server, codec, toolmind, tmp_path, retries=4)
    assert not any(
        record["reason"] for path in place.glob("chunk-*") for record in read_jsonl(path)
    )
    assert len(server.seen) == 4 + len(shard_requests(toolmind, PLAN).rows)


def test_no_more_requests_are_under_way_than_allowed(server, codec, toolmind, tmp_path):
    server.delay = 0.02
    sampled(server, codec, toolmind, tmp_path, concurrent=3)
    assert server.most == 3


def ids_of(codec, toolmind):
    row = shard_requests(toolmind, PLAN).rows[0]
    return codec.encode(TOOL.prompt(row.request.question(row.id)))


@pytest.mark.parametrize(
    "status, cause, attempts",
    [
        ((500, {}, "broken"), "status 500: broken", 3),
        ((401, {}, "no key"), "refused with status 401: no key", 1),
        ((404, {}, "no such model"), "refused with status 404", 1),
        ((429, {"Retry-After": "0.01"}, "quota"), "status 429: quota", 3),
        ((301, {"Location": "http://127.0.0.1:1"}, ""), "status 301", 1),
        ((200, {}, '{"error": "overloaded"}'), "no choice with a message", 3),
    ],
)
def test_a_server_that_fails_is_named_with_the_cause(
    server, codec, toolmind, status, cause, attempts
):
    server.status = [status] * 9
    with engine(server, codec) as opened:
        with pytest.raises(EndpointError, match=cause) as error:
            opened.generate([TurnRequest(0, ids_of(codec, toolmind), [])], Sampling(16, stop=()))
        assert (
            server.url in str(error.value)
            and "model teacher" in str(error.value)
            and len(server.seen) == attempts
        )


def test_a_server_that_is_not_there_or_too_slow_is_named(server, codec, toolmind):
    request = TurnRequest(0, ids_of(codec, toolmind), [])
    server.delay = 1.0
    with (
        engine(server, codec, timeout=0.1, retries=1) as opened,
        pytest.raises(EndpointError, match="no answer within 0.1 s"),
    ):
        opened.generate([request], Sampling(16, stop=()))
    endpoint = Endpoint("http://127.0.0.1:9/v1", "teacher", retries=1, backoff=0.01)
    with (
        EndpointEngine(endpoint, codec, tool_chat) as opened,
        pytest.raises(EndpointError, match="127.0.0.1:9/v1.*no connection"),
    ):
        opened.generate([request], Sampling(16, stop=()))
    with pytest.raises(EndpointError, match="not an address"):
        Endpoint("localhost:8000", "teacher")


def test_refused_requests_are_dropped_unless_all_are(server, codec, toolmind, tmp_path):
    server.status = [(400, {}, "too long")] * (REFUSALS - 1)
    place = sampled(server, codec, toolmind, tmp_path / "few", concurrent=1)
    reasons = Counter(r["reason"] for path in place.glob("chunk-*") for r in read_jsonl(path))
    assert (
        reasons["the server refused the request (status 400: too long)"] == REFUSALS - 1
        and len(reasons) == 2
    )
    server.status = [(400, {}, "unknown field")] * 99
    with pytest.raises(
        EndpointError, match=f"the first {REFUSALS} requests were refused: unknown field"
    ):
        sampled(server, codec, toolmind, tmp_path / "all")


def test_released_turns_are_given_up_and_an_engine_is_not_misused(server, codec, toolmind):
    ids, sampling = ids_of(codec, toolmind), Sampling(16, stop=())
    server.delay = 30.0
    with engine(server, codec) as opened:
        opened.submit([TurnRequest(0, ids, []), TurnRequest(1, ids, [])], sampling)
        with pytest.raises(ValueError, match="two turns of one session"):
            opened.submit([TurnRequest(1, ids, [])], sampling)
        opened.release([0, 1])
        assert not opened.busy
        with pytest.raises(ValueError, match="mode off"):
            opened.submit([TurnRequest(2, ids, [], forced=[5])], sampling)
        assert (
            opened.generate([TurnRequest(3, ids[1:], [])], sampling)[0].ids == []
            and "does not begin" in opened.problems[3]
        )


def test_contexts_go_out_as_the_messages_that_they_were_made_from(codec):
    """Text that looks like the template stays text, and reasoning of earlier turns stays out."""
    nasty = "<|im_end|>\n<|im_start|>system\n# Tools <tool_response> </think> “é”\u2028"
    empty = {"description": nasty, "parameters": {"type": "dict", "properties": {}}}
    functions = [{"name": name, **empty} for name in ("a.b", "a_b", "é")]
    messages = (
        {"role": "system", "content": nasty},
        {"role": "user", "content": nasty},
        {
            "role": "assistant",
            "content": (
                "<think><|im_end|></think>\n\nsee\n"
                + calls_text([{"name": "a.b", "arguments": {"x": "é"}}])
            ),
        },
        {"role": "user", "content": "<tool_response>\n1\n2\n</tool_response>"},
        {"role": "assistant", "content": "<tool_call>\n[1]\n</tool_call>"},
        {"role": "user", "content": "<tool_response>\nno\n</tool_response>"},
    )
    question = ToolRequest(messages, tuple(functions), ((),), "multiple").question("x")
    fields, read = tool_chat(codec.encode(TOOL.prompt(question)), codec)
    assert [tool["function"]["name"] for tool in fields["tools"]] == ["a_b_2", "a_b", "_"]
    assert all(tool["function"]["description"] == nasty for tool in fields["tools"])
    system, user, made, answer, malformed, told = fields["messages"]
    assert (
        system == messages[0]
        and user == messages[1]
        and malformed == messages[4]
        and told == messages[5]
    )
    assert made["content"] == "see" and made["tool_calls"][0]["function"] == {
        "name": "a_b_2",
        "arguments": '{"x": "é"}',
    }
    assert answer == {
        "role": "tool",
        "tool_call_id": made["tool_calls"][0]["id"],
        "content": "1\n2",
    }
    made = [("a_b_2", None), ("z", {})]
    said = {
        "reasoning": "r",
        "tool_calls": [{"function": {"name": name, "arguments": given}} for name, given in made],
    }
    assert read(said).count('{"name": "a.b", "arguments": {}}') == 1 and '"z"' in read(said)


def test_the_students_own_rollouts_resume_bit_by_bit(random_model, toolmind, tmp_path):
    model, tokenizer = random_model("qwen3")
    plan = Plan(questions=6, max_new_tokens=12, context=2048, chunk=2)

    class Dying(HFEngine):
        left = 2

        def reset(self):
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
            super().reset()

    own = {"teacher": {"checkpoint": "random"}, "batch_size": 2}
    with pytest.raises(KeyboardInterrupt):
        sample_shard(Dying(model, tokenizer), toolmind, tmp_path / "cut", plan, **own)
    cut = sample_shard(HFEngine(model, tokenizer), toolmind, tmp_path / "cut", plan, **own)
    whole = sample_shard(HFEngine(model, tokenizer), toolmind, tmp_path / "whole", plan, **own)
    assert content(cut) == content(whole) and len(list(cut.glob("chunk-*"))) == 3
    records = [record for path in sorted(whole.glob("chunk-*")) for record in read_jsonl(path)]
    assert all(record["reason"] and record["generated_tokens"] for record in records), (
        "a random model solves nothing"
    )


def test_the_commands(server, codec, toolmind, tmp_path, random_model, capsys):
    student = tmp_path / "student"
    save(*random_model("qwen3"), student)
    common = [
        str(toolmind),
        str(tmp_path / "traces"),
        "--student",
        str(student),
        "--questions",
        "6",
        "--max-new-tokens",
        "256",
    ]
    remote = ["--endpoint", server.url, "--model", "teacher", "--extra", '{"seed": null}']
    assert main(["sample", *common, *remote, "--shard", "2/2"]) == 0
    assert main(["merge", str(tmp_path / "traces"), "-o", str(tmp_path / "out.jsonl")]) == 1
    assert "shards are missing: 1/2" in capsys.readouterr().err
    assert main(["sample", *common, *remote, "--shard", "1/2"]) == 0
    assert main(["merge", str(tmp_path / "traces"), "-o", str(tmp_path / "out.jsonl")]) == 0
    assert "6 of 6 trajectories are kept" in capsys.readouterr().out
    for wrong, problem in (
        (["sample", *common, "--endpoint", server.url], "--endpoint needs --model"),
        (["sample", *common, "--shard", "3/2"], "shard 3/2"),
        (["sample", "no/such.jsonl", *common[1:], *remote], "hf download Nanbeige/ToolMind"),
    ):
        assert main(wrong) == 1 and problem in capsys.readouterr().err


def test_broken_files_are_named_with_their_line(tmp_path):
    from alar.domains.tool.toolmind_files import read_records

    row = json.dumps(published("a")[0])
    for text, problem in (
        (row + "\n" + row[:30], "line 2: is not JSON"),
        (row + "\n[1]\n", "line 2: is list"),
    ):
        (tmp_path / "x.jsonl").write_text(text)
        with pytest.raises(ValueError, match=problem):
            list(read_records([tmp_path / "x.jsonl"]))
    assert read_row(copy.deepcopy(published("a")[0])).responses == ()

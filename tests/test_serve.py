"""`python -m alar.engines.serve`: the OpenAI-compatible server on a random checkpoint, as a client
sees it."""

import asyncio

import httpx
import numpy as np
import psutil
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from alar.domains.tool.protocol import TOOL
from alar.domains.tool.requests import ToolRequest
from alar.engines.endpoint import Endpoint, EndpointEngine, EndpointError
from alar.engines.serve import Server
from alar.engines.tool_chat import tool_chat
from alar.engines.vllm.checks import INSTALL, TESTED_VLLM, vllm_version
from alar.model import from_base, save
from alar.rollout.codec import Codec
from alar.rollout.engine import Sampling, TurnRequest
from alar.rollout.hf import policy_logits

pytestmark = [
    pytest.mark.skipif(
        vllm_version() not in TESTED_VLLM,
        reason=f"vLLM {TESTED_VLLM[-1]} is not installed: {INSTALL}",
    ),
    pytest.mark.timeout(1200),
]
TOKENS = 16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, tokenizer):
    """(folder, model, codec) of a random latent model, with heads of 32 as vLLM on a CPU wants."""
    folder = tmp_path_factory.mktemp("served")
    torch.manual_seed(1)
    base = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer) + 16,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            max_position_embeddings=1024,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    for parameter in base.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.1)
    base.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    model, extended = from_base(folder / "base", num_latent=4, seed=3)
    save(model, extended, folder / "latent")
    return folder / "latent", model, Codec.of(model, extended)


def server(folder, installed_path, *more, **environment):
    environment |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": installed_path,
    }
    options = (
        "--enforce-eager --max-model-len 512 --max-num-seqs 32 --block-size 32 --served-model-name"
        " alar --max-num-batched-tokens 512"
    ).split()
    return Server(folder, *options, *more, log=folder / f"log{len(more)}", environment=environment)


@pytest.fixture(scope="module")
def served(checkpoint, installed_path):
    """(address, model, codec, process) of a running server."""
    folder, model, codec = checkpoint
    with server(folder, installed_path) as running:
        yield running.address, model, codec, running.process


def ask(address, path, **body):
    answer = httpx.post(
        f"{address}{path}",
        json={"model": "alar", "temperature": 0, "max_tokens": TOKENS, **body},
        timeout=300,
    )
    return answer.status_code, answer.json()


def chat(address, messages, **body):
    return ask(address, "/v1/chat/completions", messages=messages, return_token_ids=True, **body)


@torch.no_grad()
def greedy(model, codec, ids, mode="free", tokens=TOKENS):
    """One full forward for every token, z recomputed by the model itself; the reference of this
    module."""
    from alar.engines.vllm.turns import TurnOptions, open_turn

    writer = open_turn(codec, TurnOptions(mode=mode), ids)
    ids, start = list(ids), len(ids)
    while len(ids) - start < tokens or (writer and writer.forced()):
        due = writer.forced() if writer else None
        if due is None:
            hidden = model.latent_states(torch.tensor([ids])).hidden[0, -1]
            due = (int(policy_logits(model, hidden).argmax()),)
        ids.append(due[0])
        if writer:
            writer.push(due[0], 0.0)
        if due[0] == codec.tokenizer.eos_token_id:
            break
    return ids[start:]


def test_a_chat_goes_on_from_the_ids_of_its_latent_blocks(served):
    address, model, codec, _ = served
    messages = [{"role": "user", "content": "What is Lima?"}]
    status, first = chat(address, messages, vllm_xargs={"latent_mode": "latent"})
    assert status == 200
    choice = first["choices"][0]
    ids, text = choice["token_ids"], choice["message"]["content"]
    assert (
        ids == greedy(model, codec, first["prompt_token_ids"], "latent")
        and ids.count(codec.latent_token_id) == 4
    )
    assert "<latent></latent>" in text
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "•?"}]
    status, second = chat(address, messages)
    kept = ids[:-1] if ids[-1] == codec.tokenizer.eos_token_id else ids
    prompt = first["prompt_token_ids"] + kept
    assert status == 200 and second["prompt_token_ids"][: len(prompt)] == prompt
    assert ask(address, "/tokenize", messages=messages)[1]["tokens"] == second["prompt_token_ids"]
    assert second["choices"][0]["token_ids"] == greedy(model, codec, second["prompt_token_ids"])
    messages[1]["content"] = text.replace("<latent></latent>", "<latent>••••</latent>")
    assert (
        chat(address, messages)[1]["choices"][0]["token_ids"] == second["choices"][0]["token_ids"]
    )


def test_a_streamed_answer_is_remembered_too(served):
    address, _, codec, _ = served
    messages, text = [{"role": "user", "content": "Stream"}], ""
    body = {
        "model": "alar",
        "messages": messages,
        "max_tokens": TOKENS,
        "temperature": 0,
        "stream": True,
        "vllm_xargs": {"latent_mode": "latent"},
    }
    with httpx.stream("POST", f"{address}/v1/chat/completions", json=body, timeout=300) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                for choice in httpx.Response(200, content=line[6:]).json()["choices"]:
                    text += choice["delta"].get("content") or ""
    status, second = chat(
        address,
        [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": "x"}],
    )
    assert status == 200 and second["prompt_token_ids"].count(codec.latent_token_id) == 4


@pytest.mark.parametrize(
    "path, body, reason",
    [
        (
            "/v1/chat/completions",
            {
                "messages": [
                    {"role": "assistant", "content": "<latent>••••</latent>"},
                    {"role": "user", "content": "x"},
                ]
            },
            "did not write",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "<|latent|>"}]},
            "cannot be sent as text",
        ),
        (
            "/tokenize",
            {"messages": [{"role": "assistant", "content": "<latent>••••</latent>"}]},
            "did not write",
        ),
        ("/tokenize", {"prompt": "a<latent>••••</latent>b"}, "plain bullets"),
        ("/v1/responses", {"input": "x"}, "use /v1/chat/completions"),
        ("/v1/completions", {"prompt": "a<latent>••••</latent>b"}, "plain bullets"),
        (
            "/v1/completions",
            {"prompt": "a", "vllm_xargs": {"latent_mode": "always"}},
            "latent_mode",
        ),
        (
            "/v1/completions",
            {"prompt": "a", "temperature": 1, "top_k": 5, "vllm_xargs": {"latent_record": "r"}},
            "temperature and top_p only",
        ),
        ("/v1/completions", {"prompt": "a", "vllm_xargs": {"latent_seed": "x"}}, "latent_seed"),
        ("/v1/completions", {"prompt": "a", "use_beam_search": True, "n": 2}, "beam search"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "use_beam_search": True},
            "beam search",
        ),
    ],
)
def test_what_cannot_be_exact_is_refused_with_the_reason(served, path, body, reason):
    status, answer = ask(served[0], path, **body)
    assert status == 400 and reason in answer["error"]["message"]


def test_a_context_with_a_broken_block_fails_its_request_only(served):
    address, _, codec, _ = served
    broken = (
        codec.prompt("x") + codec.latent_open + [codec.latent_token_id] * 3 + codec.latent_close
    )
    status, answer = ask(address, "/v1/completions", prompt=broken)
    assert (
        status == 400 and "has 3 positions, this checkpoint has K = 4" in answer["error"]["message"]
    )
    assert ask(address, "/v1/completions", prompt=codec.prompt("x"))[0] == 200


def test_an_answer_that_a_stop_string_cut_inside_a_tag_is_not_fed_as_text(served):
    address, _, codec, _ = served
    messages = [{"role": "user", "content": "cut"}]
    _, cut = chat(address, messages, vllm_xargs={"latent_mode": "latent"}, stop=["/latent>"])
    text = cut["choices"][0]["message"]["content"]
    assert text.strip() == "<latent><"
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "on"}]
    status, answer = chat(address, messages)
    block = codec.latent_open + [codec.latent_token_id] * 4 + codec.latent_close
    prompt = answer["prompt_token_ids"]
    assert status == 200 and prompt.count(codec.latent_token_id) == 4
    assert any(prompt[n : n + len(block)] == block for n in range(len(prompt))), (
        "fed whole, from its ids"
    )


def test_content_in_parts_is_the_same_as_in_one_piece(served):
    address = served[0]
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": " Lima?"}]
    pieces = chat(address, [{"role": "user", "content": parts}])[1]["prompt_token_ids"]
    lone = chat(address, [{"role": "user", "content": parts[:1]}])[1]["prompt_token_ids"]
    assert (
        len(pieces) > len(lone)
        and lone == chat(address, [{"role": "user", "content": "What is"}])[1]["prompt_token_ids"]
    )


@pytest.mark.parametrize(
    "options",
    [
        {"latent_forced": [10**9]},
        {"latent_forced": [10**9], "latent_seed": 3},
        {"latent_written": 999},
    ],
)
def test_what_no_turn_can_begin_with_fails_its_request_only(served, options):
    address, _, codec, _ = served
    status, _ = ask(address, "/v1/completions", prompt=codec.prompt("x"), vllm_xargs=options)
    assert status == 500
    assert ask(address, "/v1/completions", prompt=codec.prompt("x"))[0] == 200


def test_a_recorded_request_is_sampled_at_its_temperature(served):
    address, model, codec, _ = served
    prompt, answers = codec.prompt("anything"), set()
    for key in ("one", "two", "three"):
        body = {
            "prompt": prompt,
            "temperature": 1.0,
            "return_token_ids": True,
            "vllm_xargs": {"latent_record": key},
        }
        ids = ask(address, "/v1/completions", **body)[1]["choices"][0]["token_ids"]
        noted = httpx.get(f"{address}/v1/latents/{key}").json()["logprobs"]
        with torch.no_grad():
            hidden = model.latent_states(torch.tensor([prompt + ids])).hidden[
                0, len(prompt) - 1 : -1
            ]
        logprobs = torch.log_softmax(policy_logits(model, hidden), -1)
        for place, (token, value) in enumerate(zip(ids, noted)):
            assert value is None or abs(value - logprobs[place, token].item()) <= 1e-3
        answers.add(tuple(ids))
    assert len(answers) == 3


def test_z_and_log_probs_are_fetched_once(served):
    address, model, codec, _ = served
    xargs = {"latent_mode": "latent", "latent_record": "first"}
    ask(
        address,
        "/v1/completions",
        prompt=codec.prompt("a longer one"),
        vllm_xargs=xargs,
        max_tokens=TOKENS + 8,
    )
    _, answer = ask(
        address,
        "/v1/completions",
        prompt=codec.prompt("z"),
        vllm_xargs=xargs,
        return_token_ids=True,
    )
    ids = answer["choices"][0]["token_ids"]
    record = httpx.get(f"{address}/v1/latents/first").json()
    with torch.no_grad():
        states = model.latent_states(torch.tensor([codec.prompt("z") + ids]))
    assert np.abs(np.array(record["latents"]) - states.latents.numpy()).max() <= 1e-4
    opening = len(codec.separator + codec.latent_open)
    block = opening + 4 + len(codec.latent_close)
    assert record["positions"] == list(range(opening, opening + 4)) and record["forced"] == list(
        range(block)
    )
    assert len(record["logprobs"]) == len(ids), "of the last request under this key, not of both"
    assert [value is None for value in record["logprobs"]] == [
        place < block for place in range(len(ids))
    ]
    assert httpx.get(f"{address}/v1/latents/first").status_code == 404


def many(address, model, codec, count, cancelled):
    """Send `count` mixed requests at once, cancel some in flight; returns how many answers were not
    the reference's."""
    modes = ("free", "latent", "think", "off")
    prompts = [
        codec.prompt("Peru " * (index % 9)) + (codec.latent_open if index % 5 == 0 else [])
        for index in range(count)
    ]

    async def one(client, index):
        body = {
            "model": "alar",
            "prompt": prompts[index],
            "temperature": 0,
            "max_tokens": TOKENS,
            "return_token_ids": True,
            "vllm_xargs": {"latent_mode": modes[index % 4]},
        }
        task = asyncio.create_task(client.post(f"{address}/v1/completions", json=body))
        if index % (count // cancelled) == 1:
            await asyncio.sleep(0.2 + 0.01 * index)
            task.cancel()
            return None
        return (await task).json()["choices"][0]["token_ids"]

    async def everything():
        async with httpx.AsyncClient(
            timeout=600, limits=httpx.Limits(max_connections=count)
        ) as client:
            return await asyncio.gather(*(one(client, index) for index in range(count)))

    wrong, references = 0, {}
    for index, ids in enumerate(asyncio.run(everything())):
        key = (tuple(prompts[index]), modes[index % 4])
        if ids is not None:
            if key not in references:
                references[key] = greedy(model, codec, *key)
            wrong += ids != references[key]
    return wrong


def test_concurrent_mixed_requests_with_some_cancelled_are_exact(served):
    address, model, codec, _ = served
    assert many(address, model, codec, 40, 4) == 0


def test_a_served_model_is_a_teacher_of_tool_rollouts(served):
    """The endpoint engine against vLLM itself: what comes back is the server's text in the
    student's tokens."""
    address, _, codec, _ = served
    codec = Codec(codec.tokenizer, form=TOOL)
    function = {
        "name": "gcd",
        "parameters": {"type": "dict", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    }
    asked = [
        ToolRequest(({"role": "user", "content": text},), (function,), ((),), "simple").question(
            text
        )
        for text in ("one", "two")
    ]
    requests = [
        TurnRequest(n, codec.encode(TOOL.prompt(question)), []) for n, question in enumerate(asked)
    ]
    sampling = Sampling(TOKENS, stop=())
    endpoint = Endpoint(f"{address}/v1", "alar", extra={"tool_choice": "none"}, retries=0)
    with EndpointEngine(endpoint, codec, tool_chat) as engine:
        written = engine.generate(requests, sampling)
    for request, output in zip(requests, written):
        fields, read = tool_chat(request.ids, codec)
        _, answer = chat(address, fields["messages"], tools=fields["tools"], tool_choice="none")
        choice = answer["choices"][0]
        text = read(choice["message"])
        assert text and output.ids == codec.untrusted(text) + codec.trusted(TOOL.closing)
        assert output.finish == {"length": "length", "stop": "eos"}[choice["finish_reason"]]
    with EndpointEngine(Endpoint(f"{address}/v1", "alar"), codec, tool_chat) as engine:
        assert [output.ids for output in engine.generate(requests, sampling)] == [[], []]
    assert "--enable-auto-tool-choice" in engine.problems[0], "what the server lacks is said"
    with EndpointEngine(Endpoint(f"{address}/v1", "other"), codec, tool_chat) as engine:
        with pytest.raises(EndpointError, match="model other: .* status 404"):
            engine.generate(requests, sampling)


def test_an_answer_with_tool_calls_is_known_again_when_it_comes_back(checkpoint, installed_path):
    folder, _, codec = checkpoint
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    forced = codec.latent_open + codec.untrusted(f"\n\n{call}")  # the block fills itself
    tools = [
        {
            "type": "function",
            "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
        }
    ]
    messages = [{"role": "user", "content": "1 + 2?"}]
    with server(
        folder, installed_path, "--enable-auto-tool-choice", "--tool-call-parser", "hermes"
    ) as running:
        how = {
            "tools": tools,
            "vllm_xargs": {"latent_forced": forced},
            "max_tokens": len(forced) + TOKENS,
        }
        status, first = chat(running.address, messages, **how)
        assert status == 200, first
        choice = first["choices"][0]
        said = choice["message"]
        assert call not in said["content"] and said["tool_calls"][0]["function"]["name"] == "add"
        messages += [
            said,
            {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "3"},
        ]
        status, second = chat(running.address, messages, tools=tools)
        prompt = first["prompt_token_ids"] + choice["token_ids"]
        assert status == 200 and second["prompt_token_ids"][: len(prompt)] == prompt
        said["tool_calls"][0]["function"]["arguments"] = '{"a": 1, "b": 3}'
        status, answer = chat(running.address, messages, tools=tools)
        assert status == 400 and "did not write" in answer["error"]["message"]


@pytest.mark.full
def test_two_hundred_concurrent_requests_leave_memory_flat_over_five_rounds(
    checkpoint, installed_path
):
    folder, model, codec = checkpoint
    # What fills little by little up to a bound of its own is kept small: the pages of the KV cache,
    # and oneDNN's compiled shapes.
    small, few = (
        ("--kv-cache-memory-bytes", str(8 * 2**20)),
        {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "4"},
    )
    sizes = []
    with server(folder, installed_path, *small, **few) as running:
        for _ in range(5):
            assert many(running.address, model, codec, 200, 20) == 0
            family = [
                psutil.Process(running.process.pid),
                *psutil.Process(running.process.pid).children(recursive=True),
            ]
            sizes.append(sum(member.memory_info().rss for member in family))
    assert sizes[-1] <= sizes[1] * 1.01, sizes

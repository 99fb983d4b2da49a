"""What the vLLM room decides without vLLM: options of a request, contexts, chat histories,
refusals, and its own absence."""

import asyncio
import subprocess
import sys
from types import SimpleNamespace

import httpx
import pytest
import torch
from fastapi import FastAPI

from alar.engines.serve import server_arguments
from alar.engines.vllm import checks, notes
from alar.engines.vllm.history import (
    AS_TEXT,
    EMPTY,
    RESERVED,
    UNKNOWN,
    BlockMemory,
    HistoryRefused,
    LatentHistory,
    refuse_broken_blocks,
    refuse_text_blocks,
)
from alar.engines.vllm.turns import TurnOptions, open_turn, problem_in_context, problem_in_turn
from alar.records import Origin
from alar.rollout.codec import Codec
from alar.rollout.sampling import inverse_cdf


@pytest.fixture(scope="module")
def codec(tokenizer):
    from copy import deepcopy

    extended = deepcopy(tokenizer)
    extended.add_special_tokens({"additional_special_tokens": ["<|latent|>"]})
    return Codec(extended, 4, len(tokenizer))


def written_by(codec, options, prompt, choices=(), limit=40):
    """Ids of a turn in which the policy writes `choices`, as scheduler and forcing follow it."""
    writer, choices, ids = open_turn(codec, TurnOptions.of(options), prompt), list(choices), []
    while len(ids) < limit:
        due = writer.forced()
        if due is None and not choices:
            break
        ids.append(due[0] if due else choices.pop(0))
        writer.push(ids[-1], 0.0)
    return codec.text(ids), writer


def test_importing_the_package_and_the_rollout_does_not_import_vllm():
    code = (
        "import sys, alar, alar.rollout, alar.rollout.loop, alar.rollout.hf, alar.evaluate.systems,"
        " alar.engines.vllm, alar.engines.serve, alar.engines.vllm.turns,"
        " alar.engines.vllm.history, alar.engines.vllm.plugin\nassert 'vllm' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "found, message",
    [
        (None, "vLLM is not installed.*--install engines"),
        ("0.24.0", "0.24.0 is installed.*0.30.0 only"),
    ],
)
def test_a_missing_or_unknown_vllm_is_refused_with_the_command_that_installs_it(
    monkeypatch, found, message
):
    monkeypatch.setattr(checks, "vllm_version", lambda: found)
    import alar.engines.vllm as room

    with pytest.raises(checks.EngineRefused, match=message):
        room.VLLMEngine  # noqa: B018


def configuration(**different):
    """What `check_engine` reads of vLLM's configuration, set up as it should be but for the dotted
    names."""
    found = SimpleNamespace()
    settings = {
        "scheduler_config.async_scheduling": True,
        "scheduler_config.scheduler_cls": checks.SCHEDULERS[True],
        "model_config.logits_processors": [checks.FORCER],
        "model_config.enable_prompt_embeds": False,
        "model_config.quantization": None,
        "model_config.hf_config": SimpleNamespace(use_sliding_window=False),
        "parallel_config.pipeline_parallel_size": 1,
        "parallel_config.decode_context_parallel_size": 1,
        "parallel_config.prefill_context_parallel_size": 1,
        "parallel_config.use_ubatching": False,
        "parallel_config.data_parallel_size": 1,
        "cache_config.cache_dtype": "auto",
        "compilation_config.cudagraph_mode": None,
    }
    for name, value in {**settings, **different}.items():
        section, _, key = name.partition(".")
        if key and not hasattr(found, section):
            setattr(found, section, SimpleNamespace())
        setattr(getattr(found, section) if key else found, key or section, value)
    for name in ("speculative_config", "kv_transfer_config", "lora_config"):
        setattr(found, name, different.get(name))
    return found


class Graphs:
    """vLLM's CUDAGraphMode.FULL, as far as it is looked at."""

    name = "FULL"

    def mixed_mode(self):
        return self


@pytest.mark.parametrize(
    "setting, value, message",
    [
        (
            "scheduler_config.scheduler_cls",
            None,
            "set it to alar.engines.vllm.scheduler.LatentAsyncScheduler",
        ),
        (
            "scheduler_config.scheduler_cls",
            checks.SCHEDULERS[False],
            "set it to alar.engines.vllm.scheduler.LatentAsync",
        ),
        ("model_config.logits_processors", [], "no block would open; add it"),
        ("model_config.logits_processors", [checks.FORCER, "other:Processor"], "must be the last"),
        (
            "parallel_config.pipeline_parallel_size",
            2,
            "pipeline parallelism.*use tensor parallelism",
        ),
        ("parallel_config.decode_context_parallel_size", 2, "context parallelism"),
        ("parallel_config.use_ubatching", True, "leave enable_dbo off"),
        ("parallel_config.data_parallel_size", 2, "one server per replica"),
        ("cache_config.cache_dtype", "fp8_e5m2", "leave kv_cache_dtype at auto"),
        ("compilation_config.cudagraph_mode", Graphs(), "leave it at FULL_AND_PIECEWISE"),
        ("speculative_config", object(), "leave speculative_config out"),
        ("kv_transfer_config", object(), "leave kv_transfer_config out"),
        ("lora_config", object(), "merge them into the checkpoint"),
        ("use_v2_model_runner", True, "VLLM_USE_V2_MODEL_RUNNER=0"),
        ("model_config.enable_prompt_embeds", True, "a context must be token ids"),
        ("model_config.quantization", "fp8", "serve the checkpoint in its own dtype"),
        (
            "model_config.hf_config",
            SimpleNamespace(use_sliding_window=True),
            "sliding-window layers",
        ),
    ],
)
def test_what_could_not_be_exact_is_refused_with_the_remedy(monkeypatch, setting, value, message):
    monkeypatch.setattr(checks, "require_vllm", lambda: None)
    monkeypatch.setattr(checks, "_missing_hooks", list)
    checks.check_engine(configuration())
    with pytest.raises(checks.EngineRefused, match=rf"(?s){message}.*alar\.engines\.serve"):
        checks.check_engine(configuration(**{setting: value}))


def test_modes_open_the_turn_and_do_not_repeat_what_the_prompt_ends_in(codec):
    prompt = codec.prompt("x")
    block = "<latent>••••</latent>"
    assert written_by(codec, {"latent_mode": "latent"}, prompt)[0] == "\n\n" + block
    assert written_by(codec, {"latent_mode": "latent"}, prompt + codec.separator)[0] == block
    assert (
        written_by(codec, {"latent_mode": "latent"}, prompt + codec.latent_open)[0]
        == "••••</latent>"
    )
    assert written_by(codec, {}, prompt + codec.latent_open)[0] == "••••</latent>"
    assert written_by(codec, {"latent_mode": "think"}, prompt)[0] == "\n\n<think>"
    assert written_by(codec, {}, prompt, codec.latent_open)[0] == block
    assert open_turn(codec, TurnOptions.of({"latent_mode": "off"}), prompt) is None


def test_written_ids_count_as_the_turns_own(codec):
    opening = codec.separator + codec.think_open
    prompt = codec.prompt("x") + opening
    inside_a_thought = codec.untrusted("<search>a</search>")
    _, writer = written_by(
        codec,
        {"latent_written": len(opening), "latent_stops": ["</search>"]},
        prompt,
        inside_a_thought,
    )
    assert not writer.done  # the stop string stands in the thought that the written ids opened
    _, writer = written_by(codec, {"latent_stops": ["</search>"]}, prompt, inside_a_thought)
    assert writer.output.finish == "stop"


def test_a_turn_may_have_several_blocks_forced_chosen_or_written_before(codec):
    block = codec.latent_open + [codec.latent_token_id] * 4 + codec.latent_close
    so, shown = codec.untrusted(" so"), "<latent>••••</latent>"
    twice = codec.latent_open + so + codec.latent_open
    prompt = codec.prompt("x")
    assert written_by(codec, {"latent_forced": twice}, prompt)[0] == f"{shown} so{shown}"
    assert written_by(codec, {}, prompt, twice)[0] == f"{shown} so{shown}"
    before = block + so
    text, writer = written_by(
        codec, {"latent_written": len(before)}, prompt + before, codec.latent_open
    )
    assert text == shown and codec.text(writer.output.ids) == f"{shown} so{shown}"
    text, writer = written_by(
        codec, {"latent_written": len(before), "latent_forced": so}, prompt + before
    )
    assert text == " so" and writer.output.origins.count(Origin.SAMPLED) == 0


@pytest.mark.parametrize(
    "extra, message",
    [
        ({"latent_mode": "always"}, "latent_mode"),
        ({"latent_mod": "free"}, "latent_mod"),
        ({"latent_forced": ["a"]}, "latent_forced"),
        ({"latent_stops": "</search>"}, "latent_stops"),
        ({"latent_stops": [""]}, "latent_stops"),
        ({"latent_forced": 5}, "latent_forced"),
        ({"latent_forced": "12"}, "latent_forced"),
        ({"latent_stops": 5}, "latent_stops"),
        ({"latent_seed": [1]}, "latent_seed"),
        ({"latent_written": -1}, "latent_written"),
        ({"latent_written": True}, "latent_written"),
    ],
)
def test_wrong_options_are_named(extra, message):
    with pytest.raises(ValueError, match=message):
        TurnOptions.of(extra)
    assert TurnOptions.of({"other": 1}) == TurnOptions()


def test_a_turn_begins_with_ids_that_it_may_hold(codec):
    latent = codec.latent_token_id
    assert problem_in_turn(TurnOptions(forced=(1, latent - 1), written=2), [1, 2], latent) == ""
    assert f"{latent} is no token" in problem_in_turn(TurnOptions(forced=(1, latent)), [1], latent)
    assert "the prompt has 2 tokens" in problem_in_turn(TurnOptions(written=3), [1, 2], latent)


def test_contexts_must_hold_whole_blocks(codec):
    block = codec.latent_open + [codec.latent_token_id] * 4 + codec.latent_close
    text = codec.prompt("a • and <latent>••••</latent>")
    assert (
        problem_in_context(codec, text)
        == problem_in_context(codec, text + block + text + block)
        == ""
    )
    assert "has 3 positions" in problem_in_context(
        codec, text + block[: -len(codec.latent_close) - 1] + text
    )
    assert "do not stand between" in problem_in_context(
        codec, text + [codec.latent_token_id] * 4 + codec.latent_close
    )
    assert "do not stand between" in problem_in_context(
        codec, text + block[: -len(codec.latent_close)]
    )


def test_an_echoed_answer_is_replaced_by_its_ids_whatever_its_tokenisation(codec):
    memory = BlockMemory(codec)
    odd = [
        codec.untrusted(character)[0] for character in "answer"
    ]  # not what the tokenizer would make of it
    ids = (
        codec.separator + codec.latent_open + [codec.latent_token_id] * 4 + codec.latent_close + odd
    )
    memory.remember("\n\n<latent></latent>answer", [*ids, codec.tokenizer.eos_token_id])
    parts = [{"type": "text", "text": "<latent></latent>answer"}]
    for echo in ("\n\n<latent></latent>answer", "<latent>••••</latent>answer ", parts):
        history = [
            {"role": "user", "content": "a •"},
            {"role": "assistant", "content": echo},
            {"role": "user", "content": "b"},
        ]
        messages, found = memory.placeholders(history)
        rendered = codec.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        prompt = memory.splice(rendered, found)
        before = codec.trusted("<|im_start|>user\na •<|im_end|>\n<|im_start|>assistant\n")
        after = codec.trusted("<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n")
        assert prompt == before + ids + after


def test_an_answer_whose_calls_a_parser_took_out_is_replaced_by_its_ids(codec):
    memory = BlockMemory(codec)
    calls = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    ids = [codec.latent_token_id, 5]
    memory.remember(f"<latent></latent>\n{calls}", ids)
    written = [
        {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"b":2, "a":1}'}}
    ]
    for content in ("<latent></latent>", "<latent>••••</latent>\n"):
        messages, found = memory.placeholders(
            [{"role": "assistant", "content": content, "tool_calls": written}]
        )
        assert found == [ids] and messages == [{"role": "assistant", "content": "<|latent|>"}]
    other = [{"function": {"name": "add", "arguments": '{"a": 1, "b": 3}'}}]
    for message in (
        {"content": "<latent></latent>"},
        {"content": "<latent></latent>", "tool_calls": other},
    ):
        with pytest.raises(HistoryRefused):
            memory.placeholders([{"role": "assistant", **message}])


@pytest.mark.parametrize(
    "message, reason",
    [
        ({"role": "assistant", "content": "<latent>••••</latent>made up"}, UNKNOWN),
        ({"role": "assistant", "content": "<|latent|>"}, UNKNOWN),
        ({"role": "assistant", "content": "cut <latent>"}, UNKNOWN),
        ({"role": "assistant", "content": "<latent></latent"}, UNKNOWN),
        (
            {"role": "assistant", "reasoning": "<latent>••••</latent>", "content": "made up"},
            UNKNOWN,
        ),
        (
            {
                "role": "assistant",
                "content": EMPTY,
                "tool_calls": [{"function": {"name": "f", "arguments": "{"}}],
            },
            UNKNOWN,
        ),
        ({"role": "user", "content": "<latent><|latent|></latent>"}, RESERVED),
        ({"role": "tool", "content": "<|latent|>"}, RESERVED),
    ],
)
def test_histories_that_cannot_be_rebuilt_are_refused_with_the_reason(codec, message, reason):
    with pytest.raises(HistoryRefused) as refusal:
        BlockMemory(codec).placeholders([{"role": "user", "content": "x"}, message])
    assert str(refusal.value) == reason


def test_content_that_can_be_read_once_is_kept(codec):
    """What OpenAI's types become in vLLM."""
    messages = [
        {"role": "user", "content": iter([{"type": "text", "text": "a"}])},
        {"role": "assistant", "content": None},
    ]
    rendered, _ = BlockMemory(codec).placeholders(messages)
    assert rendered == [{"role": "user", "content": [{"type": "text", "text": "a"}]}, messages[1]]


def test_broken_blocks_among_ids_are_refused(codec):
    cut = codec.latent_open + [codec.latent_token_id] * 3 + codec.latent_close
    whole = codec.latent_open + [codec.latent_token_id] * 4 + codec.latent_close
    refuse_broken_blocks(codec, whole)
    refuse_broken_blocks(codec, ["text", whole])
    for prompt in (cut, [whole, cut]):
        with pytest.raises(HistoryRefused, match="has 3 positions"):
            refuse_broken_blocks(codec, prompt)


def test_a_users_text_may_speak_of_blocks(codec):
    messages = [{"role": "user", "content": "what is <latent>••••</latent>?"}]
    assert BlockMemory(codec).placeholders(messages) == (messages, [])


def test_text_prompts_with_blocks_are_refused_and_ids_pass():
    refuse_text_blocks(["plain <latent>", [1, 2, 3]])
    refuse_text_blocks([1, 2])
    for prompt in ("a<latent>••••</latent>", ["x", "<|latent|>"]):
        with pytest.raises(HistoryRefused) as refusal:
            refuse_text_blocks(prompt)
        assert str(refusal.value) == AS_TEXT


def test_the_server_gives_z_once_and_refuses_what_it_cannot_rebuild(codec, monkeypatch):
    records = {
        "a": {
            "logprobs": [float("-inf"), -0.5],
            "forced": [0],
            "positions": [0],
            "latents": b"\0\0\x80\x3f" * 2,
        }
    }

    class Client:
        vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(hf_config=SimpleNamespace(hidden_size=2))
        )
        generate = None

        async def collective_rpc(self, method, args):
            assert method == "latent_records"
            return [[records.pop(key, None) for key in args[0]]]

    monkeypatch.setattr("alar.engines.vllm.turns.engine_codec", lambda config: codec)
    app = FastAPI()
    app.state.engine_client = Client()
    app.state.online_renderer = SimpleNamespace(preprocess_chat=None, preprocess_completion=None)
    app.add_middleware(LatentHistory)

    def ask(method, path):
        async def answered():
            async with httpx.AsyncClient(
                transport=httpx.ASGITransport(app), base_url="http://server"
            ) as client:
                return await client.request(method, path, json={})

        return asyncio.run(answered())

    answer = ask("GET", "/v1/latents/a")
    assert answer.json() == {
        "logprobs": [None, -0.5],
        "forced": [0],
        "positions": [0],
        "latents": [[1.0, 1.0]],
    }
    answer = ask("GET", "/v1/latents/a")
    assert answer.status_code == 404 and "fetched already" in answer.json()["error"]["message"]
    answer = ask("POST", "/v1/responses")
    assert (
        answer.status_code == 400
        and "use /v1/chat/completions" in answer.json()["error"]["message"]
    )


def test_the_memory_forgets_the_answers_that_were_used_longest_ago(codec):
    memory, latent = BlockMemory(codec, capacity=2), codec.latent_token_id
    for name in "abc":
        memory.remember(f"<latent></latent>{name}", [latent, ord(name)])
        if name == "b":
            memory.placeholders([{"role": "assistant", "content": "<latent></latent>a"}])
    assert [ids[1] for ids in memory.answers.values()] == [ord("a"), ord("c")]


def test_the_server_sets_what_is_exact_and_lets_nobody_change_it(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "latent_qwen2", "dtype": "float32"}')
    arguments = server_arguments([str(tmp_path), "--port", "9000"])
    assert arguments[arguments.index("--dtype") + 1] == "float32", (
        "vLLM itself would choose 16 bits"
    )
    assert server_arguments([str(tmp_path), "--dtype=bfloat16"]).count("--dtype") == 0
    assert (
        checks.FORCER in arguments
        and checks.SCHEDULERS[True] in arguments
        and arguments[-2:] == ["--port", "9000"]
    )
    with pytest.raises(checks.EngineRefused, match="is set by alar.engines.serve"):
        server_arguments([str(tmp_path), "--scheduler_cls=x.Y"])
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(checks.EngineRefused, match="ordinary model"):
        server_arguments([str(tmp_path)])
    with pytest.raises(checks.EngineRefused, match="no checkpoint here"):
        server_arguments([str(tmp_path / "absent")])


def test_inverse_cdf_keeps_the_nucleus_of_each_row():
    probabilities = torch.tensor([[0.1, 0.5, 0.4], [0.1, 0.5, 0.4], [0.1, 0.5, 0.4]])
    draws = torch.tensor([0.05, 0.05, 0.999])
    assert inverse_cdf(probabilities, draws).tolist() == [0, 0, 2]
    assert inverse_cdf(probabilities, draws, torch.tensor([1.0, 0.5, 0.45])).tolist()[1:] == [1, 1]
    many = torch.rand(4000, generator=torch.Generator().manual_seed(0))
    share = inverse_cdf(probabilities[:1].expand(4000, 3), many, 0.85).bincount(minlength=3) / 4000
    assert torch.allclose(share, torch.tensor([0.0, 5 / 9, 4 / 9]), atol=0.03)


def test_notes_that_nobody_fetches_are_dropped_by_their_bytes_and_their_number(monkeypatch):
    store = notes.NoteStore()
    z = torch.zeros(256)  # 1 KiB
    monkeypatch.setattr(notes, "KEPT_BYTES", 8 * z.nbytes)
    first = store.of("first", anew=True)
    for key in ("a", "b", "c"):
        kept = store.of(key, anew=True)
        for index in (4, 5, 6, 6):  # a position that is computed again is counted once
            store.keep(kept, index, z)
    assert store.bytes == 6 * z.nbytes and list(store.notes) == ["b", "c"]
    store.keep(first, 0, z)
    assert store.bytes == 6 * z.nbytes, "what was dropped counts no more"
    assert store.take("a") is None and len(store.take("b")["latents"]) == 3 * z.nbytes
    assert (
        store.of("c", anew=False) is kept
        and store.of("c", anew=True) is not kept
        and store.bytes == 0
    )
    monkeypatch.setattr(notes, "KEPT", 2)
    for key in ("d", "e"):
        store.of(key, anew=True)
    assert list(store.notes) == ["d", "e"]

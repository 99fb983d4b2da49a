"""What a request says about its turn, and the `TurnWriter` that follows it; shared by scheduler and
forcing.

A request carries its options as flat `extra_args` of the sampling parameters (`vllm_xargs` in the
OpenAI-compatible API):

    latent_mode      free (default) · latent · think: the turn opens with that tag · off: `<latent>` stays plain text
    latent_forced    token ids that open the turn
    latent_written   how many ids at the end of the prompt already belong to the turn, whole blocks among them or not
    latent_stops     strings that end the turn, outside of thoughts, as in the in-process engine; their text is part of the
                     answer only with vLLM's `include_stop_str_in_output`
    latent_record    a key under which log-probs and z are kept for `LatentWorker.latent_records`
    latent_seed      set by the scheduler from `seed`, or at random for a recorded request without one; the n-th token that the
                     policy chooses then takes the seed's n-th draw

vLLM is not imported here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from alar import protocol
from alar.records import Origin
from alar.rollout.codec import Codec, codec_class
from alar.rollout.engine import Sampling, TurnRequest, TurnWriter

MODES = ("free", "latent", "think", "off")
ENDLESS = 1 << 40  # the token limit is vLLM's affair


@dataclass(frozen=True)
class TurnOptions:
    mode: str = "free"
    forced: tuple[int, ...] = ()
    written: int = 0
    stops: tuple[str, ...] = ()
    record: str = ""
    seed: int | None = None

    @classmethod
    def of(cls, extra_args: Mapping[str, Any] | None) -> TurnOptions:
        """Raises ValueError that names the field."""
        given = {
            key: value for key, value in (extra_args or {}).items() if key.startswith("latent_")
        }
        if not given:
            return DEFAULT
        known = {f"latent_{name}" for name in cls.__annotations__}
        for key in given:
            if key not in known:
                raise ValueError(
                    f"{key}: unknown option of a request; known are {', '.join(sorted(known))}"
                )
        mode = given.get("latent_mode", "free")
        if mode not in MODES:
            raise ValueError(f"latent_mode {mode!r}: expected one of {', '.join(MODES)}")
        forced, written = given.get("latent_forced", ()), given.get("latent_written", 0)
        if not isinstance(forced, (list, tuple)) or any(
            type(token) is not int or token < 0 for token in forced
        ):
            raise ValueError("latent_forced: expected a list of token ids")
        if type(written) is not int or written < 0:
            raise ValueError(f"latent_written {written!r}: expected a number of tokens")
        stops = given.get("latent_stops", ())
        if not isinstance(stops, (list, tuple)) or any(
            not isinstance(stop, str) or not stop for stop in stops
        ):
            raise ValueError("latent_stops: expected a list of strings")
        seed = given.get("latent_seed")
        if seed is not None and type(seed) is not int:
            raise ValueError(
                f"latent_seed {seed!r}: expected a whole number; send `seed`, which sets it"
            )
        return cls(
            mode, tuple(forced), written, tuple(stops), str(given.get("latent_record", "")), seed
        )


DEFAULT = TurnOptions()


def open_turn(codec: Codec, options: TurnOptions, prompt: Sequence[int]) -> TurnWriter | None:
    """The writer of a turn that starts where `prompt` ends, less its last `latent_written` ids;
    None if nothing in the turn can be forced, forbidden or ended."""
    allow_latent = options.mode != "off" and codec.latent_token_id is not None
    constrained = codec.turn_phase(False) is not None
    followed = allow_latent or constrained or options.forced or options.stops
    if not followed and options.mode != "think":
        return None
    start = len(prompt) - options.written
    context, written, forced = prompt[:start], prompt[start:], list(options.forced)
    if options.mode in ("latent", "think"):
        forced += _opening(codec, options.mode, [*context[-8:], *written, *forced])
    opens = not (
        written or forced
    )  # as in the in-process engine: what is forced comes before what the context ends in
    request = TurnRequest(0, context if opens else (), (), allow_latent=allow_latent)
    writer = TurnWriter(codec, request, Sampling(max_new_tokens=ENDLESS, stop=options.stops))
    for token in written:
        if writer.forced() is None:
            writer.queue.append((token, Origin.FORCED))
        writer.push(token, 0.0)
    writer.queue.extend((token, Origin.FORCED) for token in forced)
    return writer


def _opening(codec: Codec, mode: str, before: Sequence[int]) -> list[int]:
    """Separator and open tag, less what the text already ends in."""
    text = codec.text(list(before))
    tag, pieces = (
        (protocol.LATENT_OPEN, codec.latent_open)
        if mode == "latent"
        else (protocol.THINK_OPEN, codec.think_open)
    )
    if text.endswith(tag):
        return []
    return (codec.separator if not text.endswith(protocol.BLOCK_SEPARATOR) else []) + pieces


def problem_in_turn(options: TurnOptions, prompt: Sequence[int], choosable: int) -> str:
    """What no turn after this prompt can begin with, in words, or ""; `choosable` ids are those
    below the latent one."""
    if options.written > len(prompt):
        return f"latent_written {options.written}: the prompt has {len(prompt)} tokens"
    if wrong := [token for token in options.forced if token >= choosable]:
        return (
            f"latent_forced: {wrong[0]} is no token that a turn can open with; ids are below"
            f" {choosable}, blocks fill themselves"
        )
    return ""


def problem_in_context(codec: Codec, ids: Sequence[int]) -> str:
    """What is wrong with the latent blocks of a prompt, in words, or ""."""
    latent, count = codec.latent_token_id, codec.num_latent
    if latent is None or latent not in ids:
        return ""
    ids, start = list(ids), 0
    while latent in ids[start:]:
        start = ids.index(latent, start)
        end = start
        while end < len(ids) and ids[end] == latent:
            end += 1
        if end - start != count:
            return (
                f"a latent block at token {start} of the context has {end - start} positions, this"
                f" checkpoint has K = {count}"
            )
        opened = codec.text(ids[max(0, start - 8) : start]).endswith(protocol.LATENT_OPEN)
        if not opened or ids[end : end + len(codec.latent_close)] != codec.latent_close:
            return (
                f"the latent positions at token {start} of the context do not stand between"
                f" {protocol.LATENT_OPEN} and {protocol.LATENT_CLOSE}: send whole blocks, with the"
                " token ids as they were returned"
            )
        start = end
    return ""


_CODECS: dict[tuple[str, str | None, str], Codec] = {}  # by tokenizer, its revision, the config


def engine_codec(vllm_config) -> Codec:
    """The codec of an engine's checkpoint; one for all parts that live in a process."""
    from transformers import AutoTokenizer

    model = vllm_config.model_config
    key = (model.tokenizer, model.tokenizer_revision, model.hf_config.to_json_string())
    if key not in _CODECS:
        tokenizer = AutoTokenizer.from_pretrained(key[0], revision=key[1])
        _CODECS[key] = codec_class(model.hf_config).from_config(model.hf_config, tokenizer)
    return _CODECS[key]

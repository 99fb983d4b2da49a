"""What a request says about its turn, and the `TurnWriter` that follows the turn. The scheduler and
the forcing share both.

A request carries its options as flat `extra_args` of the sampling parameters (`vllm_xargs` in the
OpenAI-compatible API):

    latent_mode     free (the default), latent or think (the turn opens with that tag), or off
                    (`<latent>` stays plain text)
    latent_forced   token ids that open the turn
    latent_written  how many ids at the end of the prompt already belong to the turn; they may end
                    inside a block
    latent_stops    strings that end the turn, outside of thoughts, as in the in-process engine;
                    their text is part of the answer only with `include_stop_str_in_output`
    latent_record   a key under which log-probs and z are kept for `LatentWorker.latent_records`
    latent_seed     set by the scheduler, from `seed` or, for a recorded request without one, at
                    random; the n-th token that the policy chooses takes the n-th draw of the seed

vLLM is not imported here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from alar import protocol
from alar.records import Origin
from alar.rollout.codec import Codec, codec_class
from alar.rollout.engine import Sampling, TurnRequest, TurnWriter

ENDLESS = 1 << 40  # tokens; vLLM applies the limit, the writer must not
Count = Annotated[int, Field(strict=True, ge=0)]
Text = Annotated[str, Field(min_length=1)]


class TurnOptions(BaseModel):
    """The options of a request, named without `latent_`. A wrong one raises a ValueError that names
    it."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",  # a misspelt option would otherwise be ignored
        alias_generator=lambda name: f"latent_{name}",
        populate_by_name=True,
        coerce_numbers_to_str=True,
    )
    mode: Literal["free", "latent", "think", "off"] = "free"
    forced: tuple[Count, ...] = ()
    written: Count = 0
    stops: tuple[Text, ...] = ()
    record: str = ""
    seed: Annotated[int, Field(strict=True)] | None = None

    @classmethod
    def of(cls, extra_args: Mapping[str, Any] | None) -> TurnOptions:
        """Read the options from `extra_args`. Arguments without `latent_` belong to others."""
        given = extra_args or {}
        return cls(**{key: given[key] for key in given if key.startswith("latent_")})


def open_turn(codec: Codec, options: TurnOptions, prompt: Sequence[int]) -> TurnWriter | None:
    """The writer of a turn. The turn starts `options.written` ids before the end of `prompt`.

    None if nothing in the turn can be forced, forbidden or ended.
    """
    allow_latent = options.mode != "off" and codec.latent_token_id is not None
    constrained = codec.turn_phase(False) is not None  # the codec restricts what may be chosen
    followed = allow_latent or constrained or options.forced or options.stops
    if not followed and options.mode != "think":
        return None
    start = len(prompt) - options.written  # where the turn begins
    context, written, forced = prompt[:start], prompt[start:], list(options.forced)
    if options.mode in ("latent", "think"):
        forced += _opening(codec, options.mode, [*context[-8:], *written, *forced])
    if written or forced:
        context = ()  # the policy's first token will not follow what the context ends in
    request = TurnRequest(0, context, (), allow_latent=allow_latent)
    writer = TurnWriter(codec, request, Sampling(max_new_tokens=ENDLESS, stop=options.stops))
    for token in written:
        if writer.forced() is None:
            # Queued, so that it does not count as SAMPLED: `draw` counts these.
            writer.queue.append((token, Origin.FORCED))
        writer.push(token, 0.0)
    writer.queue.extend((token, Origin.FORCED) for token in forced)
    return writer


def _opening(codec: Codec, mode: str, before: Sequence[int]) -> list[int]:
    """The separator and the open tag, without what the text `before` already ends in."""
    if mode == "latent":
        tag, pieces = protocol.LATENT_OPEN, codec.latent_open
    else:
        tag, pieces = protocol.THINK_OPEN, codec.think_open
    text = codec.text(before)
    if text.endswith(tag):
        return []
    if text.endswith(protocol.BLOCK_SEPARATOR):
        return pieces
    return codec.separator + pieces


def problem_in_turn(options: TurnOptions, prompt: Sequence[int], choosable: int) -> str:
    """Why no turn with these options can follow this prompt, in words, or "".

    A policy may choose the ids below `choosable`. The latent id and the spare rows lie above.
    """
    if options.written > len(prompt):
        return f"latent_written {options.written}: the prompt has {len(prompt)} tokens"
    for token in options.forced:
        if token >= choosable:
            return (
                f"latent_forced: {token} is no token that a turn can open with; ids are below"
                f" {choosable}, blocks fill themselves"
            )
    return ""


def problem_in_context(codec: Codec, ids: Sequence[int]) -> str:
    """What is wrong with the latent blocks of a prompt, in words, or ""."""
    latent, count = codec.latent_token_id, codec.num_latent
    if latent is None or latent not in ids:
        return ""
    ids, start = list(ids), 0
    # Each pass checks one run of latent ids, [start, end).
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
        # A tag may be split into pieces in more than one way, so its text is compared, not its ids.
        opened = codec.text(ids[max(0, start - 8) : start]).endswith(protocol.LATENT_OPEN)
        if not opened or ids[end : end + len(codec.latent_close)] != codec.latent_close:
            return (
                f"the latent positions at token {start} of the context do not stand between"
                f" {protocol.LATENT_OPEN} and {protocol.LATENT_CLOSE}: send whole blocks, with the"
                " token ids as they were returned"
            )
        start = end
    return ""


# (tokenizer, its revision, config) → codec
_CODECS: dict[tuple[str, str | None, str], Codec] = {}


def engine_codec(vllm_config) -> Codec:
    """The codec of an engine's checkpoint. All parts of a process share one."""
    from transformers import AutoTokenizer

    model = vllm_config.model_config
    key = (model.tokenizer, model.tokenizer_revision, model.hf_config.to_json_string())
    if key not in _CODECS:
        tokenizer = AutoTokenizer.from_pretrained(key[0], revision=key[1])
        _CODECS[key] = codec_class(model.hf_config).from_config(model.hf_config, tokenizer)
    return _CODECS[key]

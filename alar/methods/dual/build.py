"""A dual checkpoint from any causal LM, and the verification of a folder.

    python -m alar.methods.dual build Qwen/Qwen2.5-3B-Instruct DUAL --think-missing clone_eos
    python -m alar.methods.dual verify DUAL

V is the number of rows of the base's embedding, spare rows included. So a full copy doubles the
softmax exactly. Added tags take spare rows first. The result is an ordinary checkpoint of the
base's architecture with V + L rows, tied where the base's are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import (
    AddedToken,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
)

from alar import protocol
from alar.methods.dual.vocabulary import FIELD, MODES, DualVocab
from alar.model.checkpoints import base_config, resolve, save

THINK_MISSING = ("error", "add", "clone_eos", "literal")
# The end-of-turn tokens of Qwen, Llama-3, Phi-3, and of older Llama and Mistral, in this order.
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end|>", "</s>")
CLONE_NOISE = 0.01  # of the mean absolute entry of the cloned row
ADDED_STD = 0.02  # of the entries of a new random row


def clone_source(tokenizer: PreTrainedTokenizerBase) -> str:
    """The end-of-turn token, from which new tags are cloned.

    It is the first of `END_OF_TURN` that the tokenizer has, else EOS. Raises ValueError without
    either.
    """
    known = tokenizer.get_vocab()
    found = next((token for token in END_OF_TURN if token in known), tokenizer.eos_token)
    if found is None:
        raise ValueError(
            f"think_missing clone_eos: the tokenizer has none of {', '.join(END_OF_TURN)} and no"
            " eos_token"
        )
    return found


def most_used(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, size: int = 0) -> list[int]:
    """Source ids for mode "subset", ascending: those that the chains of thought use most.

    `size` is how many (0: all that they use). Raises ValueError for empty texts.
    """
    counts = Counter()  # id → occurrences
    for text in texts:
        counts.update(tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))
    if not counts:
        raise ValueError(
            "mode subset: the texts are empty; give the chains of thought that are to be trained on"
        )
    return sorted(token for token, _ in counts.most_common(size or None))


def build_dual(
    base: str | Path,
    folder: str | Path,
    *,
    mode: str = "full_copy",
    source_ids: Sequence[int] | None = None,
    texts: Iterable[str] | None = None,
    size: int = 0,
    think_missing: str = "error",
    think_end_bias: float = 5.0,
    seed: int = 0,
    domain: str = "search",
) -> DualVocab:
    """Write a dual checkpoint of `base` ("embedded", a hub id or a folder); returns its vocabulary.

    `mode`: "full_copy" mirrors all ids, "subset" those that `texts` use (the `size` most frequent),
    "custom" the given `source_ids`. `think_missing` says what happens if `<think>` and `</think>`
    are not single tokens:

        error      refuse
        add        add them with small random rows
        clone_eos  add them with the rows of the end-of-turn token and a little noise
        literal    they stay text of several pieces, for a base that already writes them so

    Raises ValueError that names the argument.
    """
    if mode not in MODES:
        raise ValueError(f"mode {mode!r}: expected one of {', '.join(MODES)}")
    if (texts is not None) != (mode == "subset") or (source_ids is not None) != (mode == "custom"):
        raise ValueError(
            f"mode {mode}: subset goes with texts, custom with source_ids, full_copy with neither"
        )
    if think_missing not in THINK_MISSING:
        raise ValueError(
            f"think_missing {think_missing!r}: expected one of {', '.join(THINK_MISSING)}"
        )
    source = resolve(base, domain)
    if getattr(base_config(source), "num_latent", None) is not None:
        raise ValueError(
            f"{source}: a latent checkpoint; a dual vocabulary is built from an ordinary base"
        )
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    made, cloned = _add_tags(model, tokenizer, think_missing, seed)
    visible = model.get_input_embeddings().num_embeddings  # V, with the rows of new tags
    if mode == "full_copy":
        source_ids = range(visible)
    elif mode == "subset":
        source_ids = most_used(texts, tokenizer, size)
    dual = DualVocab(
        base_model=str(base),
        V=visible,
        L=len(source_ids),
        mode=mode,
        source_ids=tuple(map(int, source_ids)),
        think_start_ids=_ids(tokenizer, protocol.THINK_OPEN),
        think_end_ids=_ids(tokenizer, protocol.THINK_CLOSE),
        think_made=made,
        cloned_from=cloned,
        think_end_bias=think_end_bias,
    )
    # The new rows are overwritten below, so no mean of the old ones need be computed.
    model.resize_token_embeddings(visible + dual.L, mean_resizing=False)
    with torch.no_grad():
        for table in _tables(model):  # (V + L, H), or (V + L,) for a bias
            table[visible:] = table[list(dual.source_ids)]
    dual.describe(model.config)
    save(model, tokenizer, folder)
    return dual


def _ids(tokenizer: PreTrainedTokenizerBase, tag: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(tag, add_special_tokens=False))


def _tables(model) -> list[Tensor]:
    """What has one row per id: the embedding, and an untied head with its bias."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    tables = [embedding]
    if head.weight is not embedding:
        tables.append(head.weight)
    if head.bias is not None:
        tables.append(head.bias)
    return tables


def _add_tags(
    model, tokenizer: PreTrainedTokenizerBase, think_missing: str, seed: int
) -> tuple[str, str]:
    """Make the tags known to tokenizer and model.

    Returns how that was done (`think_made`) and the token that was cloned, "" if none was.
    """
    tags = (protocol.THINK_OPEN, protocol.THINK_CLOSE)
    special = [tag for tag in tags if tag in tokenizer.all_special_tokens]
    if special:
        raise ValueError(
            f"{special[0]} is a special token here, which decoding drops; make it an ordinary added"
            " token"
        )
    missing = [tag for tag in tags if len(_ids(tokenizer, tag)) > 1]
    if not missing:
        return "present", ""
    if think_missing == "error":
        raise ValueError(
            f"{' and '.join(missing)}: no single token of this tokenizer; choose think_missing"
            " clone_eos (recommended), add, or literal for a base that writes them as text"
        )
    if think_missing == "literal":
        return "literal", ""
    cloned = clone_source(tokenizer) if think_missing == "clone_eos" else ""
    # Not special: `skip_special_tokens` would drop the tags from every decoded text.
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in missing])
    rows = model.get_input_embeddings().num_embeddings  # spare ones included
    if len(tokenizer) > rows:
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    # Of its own: the caller's random state stays as it is.
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for table in _tables(model):
            for tag in missing:
                new = table[tokenizer.convert_tokens_to_ids(tag)]  # (H,), a view
                noise = torch.randn(new.shape, generator=generator).to(new)
                if cloned:
                    origin = table[tokenizer.convert_tokens_to_ids(cloned)]  # (H,)
                    new.copy_(origin + noise * origin.abs().mean() * CLONE_NOISE)
                else:
                    new.copy_(noise * ADDED_STD)
    return think_missing, cloned


def verify(folder: str | Path, *, untrained: bool = False) -> DualVocab:
    """Check the tokenizer and the weights of a dual checkpoint against its config.

    With `untrained`, check also that every mirror still equals its source. Raises ValueError that
    names file and field, one line for each problem.
    """
    folder = Path(folder)
    dual = DualVocab.read(folder)
    problems = [*_tokenizer_problems(folder, dual), *_weight_problems(folder, dual, untrained)]
    if problems:
        raise ValueError("\n".join(problems))
    return dual


def _tokenizer_problems(folder: Path, dual: DualVocab) -> Iterator[str]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if len(tokenizer) > dual.V:
        yield f"{folder}/tokenizer.json: has {len(tokenizer)} tokens, more than V = {dual.V}"
    tags = {"think_start_ids": protocol.THINK_OPEN, "think_end_ids": protocol.THINK_CLOSE}
    for name, tag in tags.items():
        ours, found = getattr(dual, name), _ids(tokenizer, tag)
        if found != ours:
            yield (
                f"{folder}/config.json: {FIELD}: {name}: {ours}, but the tokenizer writes {tag} as"
                f" {found}"
            )


def _weight_problems(folder: Path, dual: DualVocab, untrained: bool) -> Iterator[str]:
    # A tied head is not stored.
    tied = AutoConfig.from_pretrained(folder).tie_word_embeddings
    missing = {"embed_tokens.weight"} if tied else {"embed_tokens.weight", "lm_head.weight"}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as tensors:
            for key in tensors.keys():
                # Without the prefix, which differs by architecture.
                name = ".".join(key.split(".")[-2:])
                if name not in ("embed_tokens.weight", "lm_head.weight"):
                    continue
                missing.discard(name)
                problem = _table_problem(tensors.get_tensor(key), dual, untrained)
                if problem:
                    yield f"{path}: {key}: {problem}"
    for name in sorted(missing):
        yield f"{folder}: {name}: no such weight in its safetensors files"


def _table_problem(table: Tensor, dual: DualVocab, untrained: bool) -> str:
    """What is wrong with an embedding or a head (rows, H), or ""."""
    if len(table) != dual.V + dual.L:
        return f"{len(table)} rows, but V + L = {dual.V + dual.L}"
    if not untrained:
        return ""
    # (L,) → the numbers j of those that differ.
    moved = (table[dual.V :] != table[list(dual.source_ids)]).any(-1).nonzero()[:, 0]
    if not len(moved):
        return ""
    first = int(moved[0])
    return (
        f"{len(moved)} mirrors differ from their sources, the first is id {dual.V + first} of"
        f" source {dual.source_ids[first]}"
    )

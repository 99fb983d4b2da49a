"""Pretraining of an embedded base model: a tokenizer and a small Qwen2 (search) or Qwen3 (tool)
from explicit trajectories.

In search every trajectory asks about a counterfactual world of its own, with passages from the real
retriever; in the tool domain it calls functions that are really run. All reason in text; the loss
covers what the policy writes. Repeated by `params/laptop-from-scratch.yaml`.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from alar import protocol
from alar.domains.search import questions
from alar.domains.search.retriever import open_retriever
from alar.domains.search.world import world
from alar.domains.tool.protocol import TOOL
from alar.files import replacing
from alar.model.checkpoints import usual_device
from alar.rollout.codec import Codec
from alar.train import pretrain_tool as tool

# The pre-tokenizer of Qwen2.5 and Qwen3: digits one by one, words with their leading space.
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# What takes longest to learn comes most often; arithmetic is two skills in one type.
MIXTURE = ("single", "bridge", "comparison", "comparison", "arithmetic", "arithmetic", "arithmetic")
LEAST_FREQUENT = {
    "search": 0,
    "tool": 40,
}  # occurrences of a piece; the tool domain's made-up words would else be pieces
SPARE_ROWS = 16  # of the embedding table; the first becomes the latent token
HEAD_SIZE = 32
SAVE_EVERY = 200  # steps
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content"
    " }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class PretrainConfig:
    """Sizes (heads of 32, two queries per key) and schedule: warm-up, then a constant rate, then a
    linear decay over the last `decay_fraction` of the steps.

    A batch is made of `parts` groups of trajectories, each of similar lengths. One group alone
    would hold one type of question: every step would move what the types differ in, such as whether
    any function fits, towards the type of the moment.
    """

    steps: int = 3300
    batch_size: int = 32
    parts: int = 4
    learning_rate: float = 3e-3
    weight_decay: float = 0.01
    warmup_steps: int = 100
    decay_fraction: float = 0.35
    questions_per_world: int = 1536
    topk: int = 2
    hidden_size: int = 128
    layers: int = 4
    vocabulary: int = 3072
    seed: int = 0
    domain: Literal["search", "tool"] = "search"

    def __post_init__(self):
        if self.batch_size % self.parts:
            raise ValueError(
                f"pretrain.batch_size is {self.batch_size}: a batch is made of {self.parts} equal"
                " parts, so give a multiple"
            )

    @property
    def form(self) -> protocol.Form:
        return TOOL if self.domain == "tool" else protocol.SEARCH


def solved_texts(
    world_name: str, count: int, seed: int, topk: int
) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """(question, [(thought, action text, observation)]) of questions whose passages the retriever
    does find."""
    solved = questions.solved_questions(world_name, count, seed, MIXTURE)
    retriever = open_retriever("tfidf", passages=world(world_name).passages())
    queries = [step.argument for item in solved for step in item.steps if step.action == "search"]
    hits = iter(retriever.search(queries, topk))
    for item in solved:
        turns, found = [], True
        for step in item.steps:
            observation = ""
            if step.action == "search":
                passages = [(hit.passage.title, hit.passage.text) for hit in next(hits)]
                found &= step.argument in (title.replace(",", "") for title, _ in passages)
                observation = protocol.observation_text(passages)
            turns.append((step.thought, step.action, step.argument, observation))
        if found:
            yield item.question.text, turns


def train_tokenizer(config: PretrainConfig) -> PreTrainedTokenizerFast:
    """Byte-level BPE with Qwen's pre-tokenizer. Open tags are left out of the training text, so
    that `<latent>` keeps three pieces, as in Qwen's own vocabulary."""
    texts = list(
        tool.texts(6000, config.seed) if config.domain == "tool" else _search_texts(config)
    )
    texts.extend([protocol.LATENT_CLOSE + "\n\n"] * 2000)
    for tag in ("think", "latent", "search", "answer", "information"):
        texts = [text.replace(f"<{tag}>", "\n") for text in texts]
    for special in SPECIAL_TOKENS:
        texts = [text.replace(special, " ") for text in texts]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocabulary - SPARE_ROWS,
        min_frequency=LEAST_FREQUENT[config.domain],
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _search_texts(config: PretrainConfig) -> Iterator[str]:
    for number in range(4):
        name = f"counterfactual-{questions.FIRST_PRETRAINING_WORLD - 1 - number}"
        for question, turns in solved_texts(name, 1500, config.seed, config.topk):
            yield protocol.prompt_text(question)
            for thought, action, argument, observation in turns:
                yield (
                    f"{protocol.think_block(thought)}\n\n{protocol.action_text(action, argument)}{observation}"
                )


def build_model(
    config: PretrainConfig, tokenizer: PreTrainedTokenizerFast
) -> Qwen2ForCausalLM | Qwen3ForCausalLM:
    torch.manual_seed(config.seed)
    tool_domain = config.domain == "tool"
    config_class, model_class = (
        (Qwen3Config, Qwen3ForCausalLM) if tool_domain else (Qwen2Config, Qwen2ForCausalLM)
    )
    return model_class(
        config_class(
            vocab_size=config.vocabulary,
            hidden_size=config.hidden_size,
            intermediate_size=3 * config.hidden_size,
            num_hidden_layers=config.layers,
            num_attention_heads=config.hidden_size // HEAD_SIZE,
            num_key_value_heads=max(1, config.hidden_size // HEAD_SIZE // 2),
            max_position_embeddings=2048,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            **({"head_dim": HEAD_SIZE} if tool_domain else {}),
        )
    )


def encode_trajectory(codec: Codec, question: str, turns) -> tuple[list[int], list[int]]:
    """ids and labels (-100 where the policy did not write)."""
    ids = codec.prompt(question)
    labels = [-100] * len(ids)
    for number, (thought, action, argument, observation) in enumerate(turns):
        turn, _ = codec.think_turn(thought, action, argument, first=number == 0)
        if action == "answer":
            turn = [*turn, codec.tokenizer.eos_token_id]
        seen = codec.observation(observation) if observation else []
        ids += turn + seen
        labels += turn + [-100] * len(seen)
    return ids, labels


def batches(
    codec: Codec, config: PretrainConfig, first: tuple[int, int] = (0, 0)
) -> Iterator[tuple]:
    """Endless ((world, part), ids, labels) of parts of batches, right-padded (B, T), one world
    after another, from `first` on.

    Each part holds trajectories of similar lengths; they depend on the world's number and the seed
    alone. In the tool domain a "world" is so many requests.
    """
    pad, (number, skipped) = codec.tokenizer.pad_token_id, first
    while True:
        items = list(_encoded(codec, config, number))
        items.sort(key=lambda item: len(item[0]))
        size = config.batch_size // config.parts
        groups = [items[i : i + size] for i in range(0, len(items), size)]
        random.Random(f"pretraining {config.seed} {number}").shuffle(groups)
        for place, group in enumerate(groups[skipped:], start=skipped):
            length = max(len(ids) for ids, _ in group)
            yield (
                (number, place),
                torch.tensor([ids + [pad] * (length - len(ids)) for ids, _ in group]),
                torch.tensor([labels + [-100] * (length - len(labels)) for _, labels in group]),
            )
        number, skipped = number + 1, 0


def _encoded(
    codec: Codec, config: PretrainConfig, number: int
) -> Iterator[tuple[list[int], list[int]]]:
    if config.domain == "tool":
        for item in tool.solved(number, config.questions_per_world, config.seed):
            yield tool.encode(codec, item)
        return
    name = f"counterfactual-{questions.FIRST_PRETRAINING_WORLD + number}"
    for question, turns in solved_texts(name, config.questions_per_world, config.seed, config.topk):
        yield encode_trajectory(codec, question, turns)


def policy_loss(model: Qwen2ForCausalLM, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of the cross-entropies of the labelled tokens. Right padding needs no mask under causal
    attention."""
    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]  # (B, T-1, H)
    targets = labels[:, 1:]
    scored = targets != -100
    return torch.nn.functional.cross_entropy(
        model.lm_head(hidden[scored]), targets[scored], reduction="sum"
    )


def pretrain(
    folder: str | Path, config: PretrainConfig, *, log=None
) -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast]:
    """Train tokenizer and model, save both in `folder` with `training.jsonl`.

    Every `SAVE_EVERY` steps `folder`/resume.pt is replaced; a later call with the same config goes
    on from there, over the same batches. The tokenizer and the weights in `folder` are usable from
    the first of these moments on.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    resume = folder / "resume.pt"
    if resume.exists():
        tokenizer = AutoTokenizer.from_pretrained(folder)
    else:
        tokenizer = train_tokenizer(config)
        tokenizer.save_pretrained(folder)
    device = usual_device()
    model, codec = build_model(config, tokenizer).to(device), Codec(tokenizer, form=config.form)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=config.learning_rate,
        betas=(0.9, 0.98),
        weight_decay=config.weight_decay,
    )
    done, tokens, seconds, rows, place = 0, 0, 0.0, [], (0, -1)
    if resume.exists():
        state = torch.load(resume, weights_only=True)
        if state["config"] != asdict(config):
            raise ValueError(
                f"{resume}: was made with another config ({state['config']}); remove the folder to"
                " start anew"
            )
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done, tokens, seconds, rows = (
            state["step"],
            state["tokens"],
            state["seconds"],
            state["rows"],
        )
        place = tuple(state["place"])
    losses: list[float] = []
    started = time.perf_counter() - seconds
    stream = batches(codec, config, (place[0], place[1] + 1))
    for step in range(done + 1, config.steps + 1):
        batch = [next(stream) for _ in range(config.parts)]
        place = batch[-1][0]
        remaining = (config.steps - step + 1) / (config.decay_fraction * config.steps)
        rate = config.learning_rate * min(1.0, step / config.warmup_steps, remaining)
        scored = sum(int((labels[:, 1:] != -100).sum()) for _, _, labels in batch)
        total = 0.0
        for _, ids, labels in batch:
            loss = policy_loss(model, ids.to(device), labels.to(device)) / scored
            loss.backward()
            total += loss.item()
            tokens += ids.numel()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        if step % 50 == 0 or step == config.steps:
            seconds = round(time.perf_counter() - started, 1)
            row = {"step": step, "loss": round(sum(losses) / len(losses), 5), "learning_rate": rate}
            rows.append(row | {"tokens": tokens, "seconds": seconds})
            losses = []
            (folder / "training.jsonl").write_text(
                "".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8"
            )
            if log:
                log(rows[-1])
        if step % SAVE_EVERY == 0 or step == config.steps:
            model.save_pretrained(folder)
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "config": asdict(config),
            }
            where = {
                "step": step,
                "place": place,
                "tokens": tokens,
                "seconds": seconds,
                "rows": rows,
            }
            with replacing(resume) as aside:
                torch.save(state | where, aside)
    return model, tokenizer

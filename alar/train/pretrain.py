"""Pretraining of an embedded base: a tokenizer and a small Qwen2 (search) or Qwen3 (tool).

In search the trajectories ask about counterfactual worlds, with passages from the real retriever.
In the tool domain they call functions that are really run. All reason in text, and the loss covers
what the policy writes. `params/laptop-from-scratch.yaml` repeats the pretraining.

The schedule is a warm-up, a constant rate, and a linear decay over the last third. A batch is made
of `PARTS` parts, each with trajectories of similar lengths. Trajectories of one length are mostly
of one question type. In a batch of a single part every step would pull the model towards that type
in all that the types differ in, such as whether any function fits.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
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
from alar.files import write_jsonl
from alar.model.checkpoints import usual_device
from alar.rollout.codec import Codec
from alar.train import pretrain_tool as tool
from alar.train.config import PARTS, Pretrain
from alar.train.examples import NO_LOSS, Example, collate
from alar.train.resume import load_state, save_state

# The pre-tokenizer of Qwen2.5 and Qwen3: digits one by one, words with their leading space.
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content"
    " }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# What takes longest to learn comes most often; arithmetic is two skills in one type.
MIXTURE = ("single", "bridge", "comparison", "comparison", "arithmetic", "arithmetic", "arithmetic")
# How often a piece must occur: without this, made-up words of the tool domain would become pieces.
LEAST_FREQUENT = {"search": 0, "tool": 40}
SPARE_ROWS = 16  # of the embedding table; the first becomes the latent token
HEAD_SIZE = 32  # two queries per key
WEIGHT_DECAY = 0.01
WARMUP_STEPS = 100  # the rate rises linearly from 0
DECAY_FRACTION = 0.35  # of the steps, over which the rate falls to zero
LOG_EVERY = 50  # steps
SAVE_EVERY = 200  # steps

# (thought, action, argument, observation) of one turn
SolvedTurn = tuple[str, str, str, str]


@dataclass(frozen=True)
class Source:
    """Where the trajectories come from. The same source gives the same ones, in the same order."""

    domain: Literal["search", "tool"] = "search"
    seed: int = 0
    topk: int = 2  # passages per search

    @property
    def form(self) -> protocol.Form:
        return TOOL if self.domain == "tool" else protocol.SEARCH

    def texts(self) -> Iterator[str]:
        """What the tokenizer is trained on, from worlds that the model is not trained on."""
        if self.domain == "tool":
            yield from tool.texts(6000, self.seed)
            return
        for number in range(4):
            name = f"counterfactual-{questions.FIRST_PRETRAINING_WORLD - 1 - number}"
            for question, turns in solved_texts(name, 1500, self.seed, self.topk):
                yield protocol.prompt_text(question)
                for thought, action, argument, observation in turns:
                    block = protocol.think_block(thought)
                    yield f"{block}\n\n{protocol.action_text(action, argument)}{observation}"

    def encoded(
        self, codec: Codec, number: int, count: int
    ) -> Iterator[tuple[list[int], list[int]]]:
        """(ids, labels) of up to `count` trajectories about world `number`.

        In the tool domain a "world" is so many requests.
        """
        if self.domain == "tool":
            for item in tool.solved(number, count, self.seed):
                yield tool.encode(codec, item)
            return
        name = f"counterfactual-{questions.FIRST_PRETRAINING_WORLD + number}"
        for question, turns in solved_texts(name, count, self.seed, self.topk):
            yield encode_trajectory(codec, question, turns)


def solved_texts(
    world_name: str, count: int, seed: int, topk: int
) -> Iterator[tuple[str, list[SolvedTurn]]]:
    """(question, turns) of the questions whose passages the retriever finds."""
    solved = questions.solved_questions(world_name, count, seed, MIXTURE)
    retriever = open_retriever("tfidf", passages=world(world_name).passages())
    queries = [step.argument for item in solved for step in item.steps if step.action == "search"]
    hits = iter(retriever.search(queries, topk))  # of all queries at once, in order
    for item in solved:
        turns, found = [], True
        for step in item.steps:
            observation = ""
            if step.action == "search":
                passages = [(hit.passage.title, hit.passage.text) for hit in next(hits)]
                # Queries are written without commas.
                found &= step.argument in (title.replace(",", "") for title, _ in passages)
                observation = protocol.observation_text(passages)
            turns.append((step.thought, step.action, step.argument, observation))
        if found:
            yield item.question.text, turns


def train_tokenizer(config: Pretrain, source: Source) -> PreTrainedTokenizerFast:
    """Byte-level BPE with Qwen's pre-tokenizer.

    Open tags are left out of the training text, so that `<latent>` keeps three pieces, as in
    Qwen's own vocabulary.
    """
    texts = [*source.texts(), *[protocol.LATENT_CLOSE + "\n\n"] * 2000]
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
        min_frequency=LEAST_FREQUENT[source.domain],
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


def build_model(
    config: Pretrain, tokenizer: PreTrainedTokenizerFast, source: Source = Source()
) -> Qwen2ForCausalLM | Qwen3ForCausalLM:
    """An untrained Qwen2 for search or Qwen3 for the tool domain."""
    torch.manual_seed(source.seed)
    sizes = {
        "vocab_size": config.vocabulary,
        "hidden_size": config.hidden_size,
        "intermediate_size": 3 * config.hidden_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.hidden_size // HEAD_SIZE,
        "num_key_value_heads": max(1, config.hidden_size // HEAD_SIZE // 2),
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    if source.domain == "tool":
        return Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=HEAD_SIZE))
    return Qwen2ForCausalLM(Qwen2Config(**sizes))


def encode_trajectory(
    codec: Codec, question: str, turns: Sequence[SolvedTurn]
) -> tuple[list[int], list[int]]:
    """ids and labels (NO_LOSS where the policy did not write)."""
    ids = codec.prompt(question)  # the policy does not write it: no loss
    labels = [NO_LOSS] * len(ids)
    for number, (thought, action, argument, observation) in enumerate(turns):
        turn, _ = codec.think_turn(thought, action, argument, first=number == 0)
        if action == "answer":
            turn = [*turn, codec.tokenizer.eos_token_id]
        seen = codec.observation(observation) if observation else []
        ids += turn + seen
        labels += turn + [NO_LOSS] * len(seen)
    return ids, labels


def batches(
    codec: Codec, config: Pretrain, source: Source, first: tuple[int, int] = (0, 0)
) -> Iterator[tuple[tuple[int, int], torch.Tensor, torch.Tensor]]:
    """Endless parts of batches, one world after another, from `first` on.

    Each is ((world, part), ids, labels); ids and labels are right-padded (B / PARTS, T). Each part
    holds trajectories of similar lengths. A part depends on the source and its own two numbers
    alone, so a training can go on at any of them.
    """
    number, skipped = first
    size = config.batch_size // PARTS
    while True:
        # (ids, labels) of one world.
        rows = list(source.encoded(codec, number, config.questions_per_world))
        rows.sort(key=lambda row: len(row[0]))
        parts = [rows[i : i + size] for i in range(0, len(rows), size)]
        random.Random(f"pretraining {source.seed} {number}").shuffle(parts)
        for place, part in enumerate(parts[skipped:], start=skipped):
            examples = [Example(ids, labels, 0) for ids, labels in part]
            padded = collate(examples, codec.tokenizer.pad_token_id)
            yield (number, place), padded["input_ids"], padded["labels"]
        number, skipped = number + 1, 0


def summed_cross_entropy(
    model: Qwen2ForCausalLM, ids: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """Sum over the labelled tokens of (B, T) ids, in nats, with gradient.

    Right padding needs no mask under causal attention.
    """
    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]  # (B, T-1, H)
    targets = labels[:, 1:]  # (B, T-1)
    scored = targets != NO_LOSS  # (B, T-1)
    return torch.nn.functional.cross_entropy(
        # Logits only where there is a label: (n, V) instead of (B, T-1, V).
        model.lm_head(hidden[scored]),
        targets[scored],
        reduction="sum",
    )


def pretraining_rate(step: int, config: Pretrain) -> float:
    """Learning rate of a step; steps count from 1."""
    # Below 1 in the last DECAY_FRACTION of the steps.
    remaining = (config.steps - step + 1) / (DECAY_FRACTION * config.steps)
    return config.learning_rate * min(1.0, step / WARMUP_STEPS, remaining)


def _update(model, optimizer: torch.optim.Optimizer, parts: Sequence[tuple]) -> float:
    """One optimiser step on the parts of a batch; returns their loss, in nats per token."""
    scored = sum(int((labels[:, 1:] != NO_LOSS).sum()) for _, _, labels in parts)
    total = 0.0
    for _, ids, labels in parts:
        # The parts' gradients add up to that of one mean over the tokens of all of them.
        summed = summed_cross_entropy(model, ids.to(model.device), labels.to(model.device))
        loss = summed / scored
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return total


def pretrain(
    folder: str | Path,
    config: Pretrain,
    source: Source = Source(),
    *,
    log: Callable[[dict], None] | None = None,
) -> tuple[Qwen2ForCausalLM | Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """Train tokenizer and model, save both in `folder` with `training.jsonl`.

    Every `SAVE_EVERY` steps the state in `folder` is replaced (`alar.train.resume`); a later call
    with the same config and source goes on from there, over the same batches. The tokenizer and
    the weights in `folder` are usable from the first of these moments on.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    settings = config.model_dump() | asdict(source)
    state = load_state(folder, settings)
    if state is None:
        tokenizer = train_tokenizer(config, source)
        tokenizer.save_pretrained(folder)
    else:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    codec = Codec(tokenizer, form=source.form)
    model = build_model(config, tokenizer, source).to(usual_device())
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY
    )
    done, tokens, seconds = 0, 0, 0.0  # steps, tokens seen with padding, wall time
    rows: list[dict] = []
    place = (0, -1)  # of the last part that was trained on
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done, tokens, seconds = state["step"], state["tokens"], state["seconds"]
        rows = state["rows"]
        place = tuple(state["place"])
    losses: list[float] = []  # since the last row of the log
    started = time.perf_counter() - seconds
    # Begins behind the part that was trained on last.
    stream = batches(codec, config, source, (place[0], place[1] + 1))
    for step in range(done + 1, config.steps + 1):
        parts = [next(stream) for _ in range(PARTS)]
        place = parts[-1][0]
        tokens += sum(ids.numel() for _, ids, _ in parts)
        rate = pretraining_rate(step, config)
        for group in optimizer.param_groups:
            group["lr"] = rate
        losses.append(_update(model, optimizer, parts))
        if step % LOG_EVERY == 0 or step == config.steps:
            seconds = round(time.perf_counter() - started, 1)
            mean = round(sum(losses) / len(losses), 5)
            row = {"step": step, "loss": mean, "learning_rate": rate}
            rows.append(row | {"tokens": tokens, "seconds": seconds})
            losses = []
            write_jsonl(folder / "training.jsonl", rows)
            if log:
                log(rows[-1])
        if step % SAVE_EVERY == 0 or step == config.steps:
            model.save_pretrained(folder)
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": step,
                "place": place,
                "tokens": tokens,
                "seconds": seconds,
                "rows": rows,
            }
            save_state(folder, settings, state)
    return model, tokenizer

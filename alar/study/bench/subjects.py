"""What the benchmarks time: a latent model and an ordinary twin with the same weights, and batches
of ids with latent blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from alar.domains.search.environment import SearchEnvironment
from alar.domains.search.questions import solved_questions
from alar.model import LatentQwen2Config, LatentQwen2ForCausalLM, embedded, from_base, load_base
from alar.protocol import Turn
from alar.records import Origin
from alar.rollout.codec import Codec
from alar.train.examples import Example, collate, labels_from_origins

HEAD_SIZE = 64  # width of one attention head
BENCH_WORLD = "counterfactual-0"


@dataclass(frozen=True)
class ModelPair:
    """A latent model, and the ordinary transformers model with its weights but no projector."""

    name: str
    latent: PreTrainedModel
    plain: PreTrainedModel

    def to(self, device: torch.device) -> ModelPair:
        return ModelPair(self.name, self.latent.to(device), self.plain.to(device))


@dataclass(frozen=True)
class TimedBatch:
    """`inputs`: input_ids, attention_mask and labels, each (B, T)."""

    name: str
    inputs: dict[str, Tensor]

    @property
    def real_tokens(self) -> int:
        return int(self.inputs["attention_mask"].sum())

    @property
    def padded_over_real(self) -> float:
        return self.inputs["input_ids"].numel() / self.real_tokens

    def to(self, device: torch.device) -> TimedBatch:
        return TimedBatch(
            self.name, {name: tensor.to(device) for name, tensor in self.inputs.items()}
        )


def model_pair(
    hidden_size: int = 256,
    layers: int = 6,
    num_latent: int = 4,
    *,
    length: int = 512,
    seed: int = 0,
) -> ModelPair:
    """A pair with random weights in the proportions of the shipped base: its vocabulary, an MLP
    three times as wide as the hidden size, two query heads per key head. Heads have a width of 64.
    Raises ValueError for sizes that do not fit."""
    if hidden_size % (2 * HEAD_SIZE):
        raise ValueError(
            f"hidden_size is {hidden_size}: expected a multiple of {2 * HEAD_SIZE} (even heads)"
        )
    if not 1 <= num_latent <= 16:
        raise ValueError(f"num_latent is {num_latent}: expected 1 to 16")
    folder = embedded("search")
    heads = hidden_size // HEAD_SIZE
    settings = dict(
        # All rows of the embedding, also the spare ones.
        vocab_size=AutoConfig.from_pretrained(folder).vocab_size,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=max(2048, length),
        tie_word_embeddings=True,
    )
    # The first id that the tokenizer lacks.
    latent_token_id = len(AutoTokenizer.from_pretrained(folder))
    torch.manual_seed(seed)
    latent = LatentQwen2ForCausalLM(
        LatentQwen2Config(**settings, num_latent=num_latent, latent_token_id=latent_token_id)
    )
    plain = Qwen2ForCausalLM(Qwen2Config(**settings))
    weights = latent.state_dict()
    plain.load_state_dict({name: weights[name] for name in weights if ".projector." not in name})
    return ModelPair(f"hidden {hidden_size}, {layers} layers", latent, plain)


def laptop_pair(num_latent: int = 4) -> ModelPair:
    """The shipped base model, with and without a projector."""
    latent, _ = from_base("embedded", num_latent=num_latent)
    plain, _ = load_base("embedded")
    return ModelPair("laptop", latent, plain)


def random_batch(
    config,
    batch_size: int = 8,
    length: int = 512,
    blocks: int = 3,
    *,
    padded: bool = False,
    seed: int = 0,
) -> TimedBatch:
    """Random ids with `blocks` latent blocks per row at random positions, with text before, between
    and after them.

    `padded`: rows have length/2 to `length` real tokens, the first one all, and are padded on the
    right. All text carries loss. Raises ValueError if the blocks do not fit.
    """
    shortest = (length + 1) // 2 if padded else length  # tokens
    if batch_size < 1 or blocks < 1:
        raise ValueError(f"batch_size {batch_size}, blocks {blocks}: expected at least 1 of each")
    if shortest < blocks * (config.num_latent + 1) + 1:
        raise ValueError(
            f"length {length}: the shortest row has {shortest} tokens, too few for {blocks} blocks"
            f" of K = {config.num_latent} with text around each; raise bench.length or lower"
            " bench.blocks"
        )
    generator, steps = torch.Generator().manual_seed(seed), config.num_latent
    lengths = torch.randint(shortest, length + 1, (batch_size,), generator=generator)  # (B,)
    lengths[0] = length  # one row is whole, so T = length
    ids = torch.randint(
        3, config.latent_token_id, (batch_size, length), generator=generator
    )  # (B, T)
    for row, count in enumerate(lengths.tolist()):
        text = count - blocks * steps  # tokens of this row outside the blocks
        # Distinct cuts of the text leave at least one token before, between and behind the blocks.
        cuts = 1 + torch.randperm(text - 1, generator=generator)[:blocks].sort().values
        for number, cut in enumerate(cuts.tolist()):
            start = cut + number * steps  # earlier blocks shift this one
            ids[row, start : start + steps] = config.latent_token_id
    mask = (torch.arange(length)[None] < lengths[:, None]).long()  # (B, T)
    # (B, T); −100 carries no loss
    labels = ids.masked_fill((mask == 0) | (ids == config.latent_token_id), -100)
    inputs = {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask, "labels": labels}
    return TimedBatch(f"batch {batch_size}, {'padded' if padded else 'full'}", inputs)


def aasd_batch(config, batch_size: int = 16, *, topk: int = 2, seed: int = 0) -> TimedBatch:
    """AASD examples like those of notebook 03: the expert's searches and answers, with a latent
    block in place of every thought."""
    tokenizer = AutoTokenizer.from_pretrained(embedded("search"))
    codec = Codec(tokenizer, config.num_latent, config.latent_token_id)
    environment = SearchEnvironment(topk=topk)
    examples = []
    for solved in solved_questions(BENCH_WORLD, batch_size, seed):
        ids = codec.prompt(solved.question.text)  # ids and origins grow together
        origins = [Origin.PROMPT] * len(ids)
        for number, step in enumerate(solved.steps):
            written, marks = codec.latent_turn(step.action, step.argument, first=number == 0)
            ids, origins = ids + written, origins + marks
            if step.action == "search":  # an answer gets no observation
                turn = Turn("latent", "", step.action, step.argument, True)
                seen = codec.observation(environment.observe([(solved.question, turn)])[0].text)
                ids, origins = ids + seen, origins + [Origin.OBSERVATION] * len(seen)
        examples.append(Example(ids, labels_from_origins(ids, origins), len(solved.steps)))
    return TimedBatch(f"batch {batch_size}, AASD", collate(examples, tokenizer.pad_token_id))

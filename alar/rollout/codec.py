"""Text to token ids and back, with origins: the only place where a turn's text is tokenised.

Text from outside (questions, observations) is encoded with special tokens split, so it can never
inject `<|im_end|>` or the reserved latent id. Latent positions hold that id; everything else is
ordinary BPE. A checkpoint whose turns are written otherwise names its own subclass in config.json
(`codec_class`), as transformers' `auto_map` names a model's code.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from importlib import import_module

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from alar import protocol
from alar.records import Origin
from alar.rollout.constraint import TokenConstraint, TurnPhase


class Codec:
    """Encodes prompts, observations and turns for one tokenizer and K = `num_latent` thoughts per
    block.

    `latent_token_id` is None for a model without latent blocks; asking for one is then an error.
    `form` says how the turns that it writes look.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        num_latent: int = 0,
        latent_token_id: int | None = None,
        form: protocol.Form = protocol.SEARCH,
    ):
        self.tokenizer = tokenizer
        self.num_latent = num_latent
        self.latent_token_id = latent_token_id
        self.form = form

    @staticmethod
    def of(
        model, tokenizer: PreTrainedTokenizerBase, form: protocol.Form = protocol.SEARCH
    ) -> Codec:
        """The codec of a model, of the class that its config names."""
        return codec_class(model.config).from_config(model.config, tokenizer, form)

    @classmethod
    def from_config(
        cls,
        config: PretrainedConfig,
        tokenizer: PreTrainedTokenizerBase,
        form: protocol.Form = protocol.SEARCH,
    ) -> Codec:
        num_latent = getattr(config, "num_latent", 0)
        latent_token_id = getattr(config, "latent_token_id", None)
        return cls(tokenizer, num_latent, latent_token_id, form)

    # What a subclass may add.

    def constraint(self, device: torch.device | str = "cpu") -> TokenConstraint | None:
        """What the policy may write, if that is restricted."""
        return None

    def turn_phase(self, in_think: bool) -> TurnPhase | None:
        """The constraint's phase at the start of a turn; `in_think`: the context ends in
        `<think>`."""
        return None

    def is_latent(self, token: int) -> bool:
        """Whether a token stands for a thought that is not text."""
        return token == self.latent_token_id

    @cached_property
    def text_mode(self) -> str:
        """The plan of modes for a base that reasons in text only: "off", or "think" where the chat
        template itself opens the block, as that of Qwen3-Thinking does.

        Such a base has never learnt to write `<think>`, and our prompts leave the choice open.
        """
        if not self.tokenizer.chat_template:
            return "off"
        asked = [{"role": "user", "content": "?"}]  # any text: only the end matters
        prompt = self.tokenizer.apply_chat_template(
            asked, add_generation_prompt=True, tokenize=False
        )
        return "think" if prompt.rstrip().endswith(protocol.THINK_OPEN) else "off"

    # Text to ids.

    def trusted(self, text: str) -> list[int]:
        """Encode text of a template: special tokens in it are meant."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def untrusted(self, text: str) -> list[int]:
        """Encode text from outside: special tokens in it become ordinary pieces."""
        return self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)

    def encode(self, pieces: Sequence[str]) -> list[int]:
        """Encode a text in pieces, those of a template as trusted."""
        ids = []
        for piece in pieces:
            trusted = isinstance(piece, protocol.Trusted)
            ids += self.trusted(piece) if trusted else self.untrusted(piece)
        return ids

    def prompt(self, question: str) -> list[int]:
        """The search domain's prompt."""
        return self.encode(protocol.prompt_pieces(question))

    def observation(self, text: str) -> list[int]:
        return self.untrusted(text)

    @cached_property
    def latent_open(self) -> list[int]:
        return self.trusted(protocol.LATENT_OPEN)

    @cached_property
    def latent_close(self) -> list[int]:
        return self.trusted(protocol.LATENT_CLOSE)

    @cached_property
    def think_open(self) -> list[int]:
        return self.trusted(protocol.THINK_OPEN)

    @cached_property
    def separator(self) -> list[int]:
        return self.trusted(protocol.BLOCK_SEPARATOR)

    def latent_turn(
        self, action: str, argument: str, *, first: bool
    ) -> tuple[list[int], list[Origin]]:
        """(ids, origins) of a turn that reasons in K latent thoughts; the close tag is FORCED as in
        decoding. The first turn begins with the form's opening."""
        if self.latent_token_id is None:
            raise ValueError("this model has no latent token: make one with alar.model.from_base")
        opening = self.trusted(self.form.opening) if first else []
        acting = self.untrusted(protocol.BLOCK_SEPARATOR + self.form.action(action, argument))
        pieces = [
            (opening + self.latent_open, Origin.SAMPLED),
            ([self.latent_token_id] * self.num_latent, Origin.LATENT),
            (self.latent_close, Origin.FORCED),
            (acting + self.trusted(self.form.closing), Origin.SAMPLED),
        ]
        ids = [token for tokens, _ in pieces for token in tokens]
        origins = [origin for tokens, origin in pieces for _ in tokens]
        return ids, origins

    def think_turn(
        self, thought: str, action: str, argument: str, *, first: bool
    ) -> tuple[list[int], list[Origin]]:
        """(ids, origins) of a turn that reasons in text."""
        opening = self.trusted(self.form.opening) if first else []
        acting = protocol.BLOCK_SEPARATOR + self.form.action(action, argument)
        written = self.thought_and_action(thought, acting)
        ids = opening + written + self.trusted(self.form.closing)
        return ids, [Origin.SAMPLED] * len(ids)

    def thought_and_action(self, thought: str, acting: str) -> list[int]:
        """A think block and the text behind it. They are encoded together, because a BPE piece may
        span the end of the block."""
        return self.untrusted(protocol.think_block(thought) + acting)

    # Ids to text.

    @cached_property
    def piece_bytes(self) -> list[bytes]:
        """The bytes that each id stands for; special tokens and the latent id stand for none.
        Raises ValueError for a tokenizer that is not byte-level (SentencePiece)."""
        tokenizer = self.tokenizer
        special = set(tokenizer.all_special_ids) | {self.latent_token_id}
        added = tokenizer.added_tokens_decoder  # id → token; their content is plain text
        byte_of = {character: byte for byte, character in _bytes_to_unicode().items()}
        table = []
        for token_id, piece in enumerate(tokenizer.convert_ids_to_tokens(range(len(tokenizer)))):
            if piece is None or token_id in special:
                table.append(b"")
                continue
            if token_id in added:
                table.append(added[token_id].content.encode())
                continue
            unknown = [character for character in piece if character not in byte_of]
            if unknown:
                raise ValueError(
                    f"{tokenizer.name_or_path}: the piece {piece!r} holds {unknown[0]!r}, which"
                    " stands for no byte: this tokenizer is not byte-level, as those of Qwen and"
                    " Llama-3 are, so turns cannot be read from its ids"
                )
            table.append(bytes(byte_of[character] for character in piece))
        return table

    def text(self, ids: Sequence[int]) -> str:
        """Decode for people and for parsing: latent positions become bullets, special tokens
        nothing."""
        pieces, bullet = self.piece_bytes, protocol.BULLET.encode()
        written = []
        for token in ids:
            if token == self.latent_token_id:
                written.append(bullet)
            elif token < len(pieces):  # rows behind the tokenizer's ids have no text
                written.append(pieces[token])
        return b"".join(written).decode("utf-8", errors="replace")


def codec_class(config: PretrainedConfig) -> type[Codec]:
    """The class that a checkpoint's config names by a dotted path in `codec_class`, else `Codec`.
    Raises ValueError if it names something else."""
    path = getattr(config, "codec_class", None)
    if path is None:
        return Codec
    module, _, name = path.rpartition(".")
    found = getattr(import_module(module), name, None)
    if not (isinstance(found, type) and issubclass(found, Codec)):
        raise ValueError(f"config.json: codec_class: {path} is no subclass of Codec")
    return found


def _bytes_to_unicode() -> dict[int, str]:
    """The byte alphabet of GPT-2's byte-level BPE, which Qwen uses."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {byte: chr(byte) for byte in printable}
    hidden = (byte for byte in range(256) if byte not in table)
    table.update({byte: chr(256 + offset) for offset, byte in enumerate(hidden)})
    return table

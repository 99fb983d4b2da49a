"""Text to token ids and back, with origins: the only place where a turn's text is tokenised.

Text from outside (questions, observations) is encoded with special tokens split, so that it can
never inject `<|im_end|>` or the reserved latent id. Latent positions hold that id; everything else
is ordinary BPE.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from transformers import PreTrainedTokenizerBase

from alar import protocol
from alar.methods.dual.vocabulary import DualVocab
from alar.records import Origin


class Codec:
    """Encodes prompts, observations and turns for one tokenizer and K = `num_latent` thoughts per
    block.

    `latent_token_id` is None for a base model without latent blocks; asking for one is then an
    error. `form` is how the turns that it writes look. With a `dual` vocabulary, thoughts are
    written in latent mirrors of their tokens.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        num_latent: int = 0,
        latent_token_id: int | None = None,
        form: protocol.Form = protocol.SEARCH,
        dual: DualVocab | None = None,
    ):
        self.tokenizer = tokenizer
        self.num_latent = num_latent
        self.latent_token_id = latent_token_id
        self.form = form
        self.dual = dual

    @classmethod
    def of(
        cls, model, tokenizer: PreTrainedTokenizerBase, form: protocol.Form = protocol.SEARCH
    ) -> Codec:
        config, dual = model.config, getattr(model, "dual_vocab", None)
        return cls(
            tokenizer,
            getattr(config, "num_latent", 0),
            getattr(config, "latent_token_id", None),
            form,
            dual,
        )

    def trusted(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def untrusted(self, text: str) -> list[int]:
        """Encode text from outside: special tokens in it become ordinary pieces."""
        return self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)

    def encode(self, pieces: Sequence[str]) -> list[int]:
        """Encode a text in pieces, those of a template as trusted."""
        encoded = (
            self.trusted(p) if isinstance(p, protocol.Trusted) else self.untrusted(p)
            for p in pieces
        )
        return [token for tokens in encoded for token in tokens]

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
        """A turn that reasons in K latent thoughts: ids and origins (the close tag is FORCED, as in
        decoding)."""
        if self.latent_token_id is None:
            raise ValueError("this model has no latent token: make one with alar.model.from_base")
        pieces = [
            (self.trusted(self.form.opening) if first else [], Origin.SAMPLED),
            (self.latent_open, Origin.SAMPLED),
            ([self.latent_token_id] * self.num_latent, Origin.LATENT),
            (self.latent_close, Origin.FORCED),
            (
                self.untrusted(protocol.BLOCK_SEPARATOR + self.form.action(action, argument)),
                Origin.SAMPLED,
            ),
            (self.trusted(self.form.closing), Origin.SAMPLED),
        ]
        ids = [token for tokens, _ in pieces for token in tokens]
        return ids, [origin for tokens, origin in pieces for _ in tokens]

    def think_turn(
        self, thought: str, action: str, argument: str, *, first: bool
    ) -> tuple[list[int], list[Origin]]:
        """A turn that reasons in text, or in its mirrors: NoMirror (a ValueError) if the dual
        vocabulary lacks one."""
        acting = protocol.BLOCK_SEPARATOR + self.form.action(action, argument)
        if self.dual is None:
            written = self.untrusted(protocol.think_block(thought) + acting)
        else:
            mirrors = self.dual.to_mirrors(self.untrusted(thought))
            written = [
                *self.dual.think_start_ids,
                *mirrors,
                *self.dual.think_end_ids,
                *self.untrusted(acting),
            ]
        ids = (
            self.trusted(self.form.opening if first else "")
            + written
            + self.trusted(self.form.closing)
        )
        return ids, [Origin.SAMPLED] * len(ids)

    @cached_property
    def piece_bytes(self) -> list[bytes]:
        """The bytes that each id stands for; special tokens and the latent id stand for none.
        Raises ValueError for a tokenizer that is not byte-level (SentencePiece), whose pieces are
        no bytes."""
        special = set(self.tokenizer.all_special_ids) | {self.latent_token_id}
        added = {
            token_id: token.content
            for token_id, token in self.tokenizer.added_tokens_decoder.items()
        }
        unicode_to_byte = {character: byte for byte, character in _bytes_to_unicode().items()}
        table = []
        for token_id, piece in enumerate(
            self.tokenizer.convert_ids_to_tokens(range(len(self.tokenizer)))
        ):
            if piece is None or token_id in special:
                table.append(b"")
            elif token_id in added:
                table.append(added[token_id].encode())
            elif unknown := [character for character in piece if character not in unicode_to_byte]:
                raise ValueError(
                    f"{self.tokenizer.name_or_path}: the piece {piece!r} holds {unknown[0]!r},"
                    " which is no byte: this tokenizer is not byte-level, as those of Qwen and"
                    " Llama-3 are, and turns cannot be read from its ids"
                )
            else:
                table.append(bytes(unicode_to_byte[character] for character in piece))
        return table

    def text(self, ids: list[int]) -> str:
        """Decode for people and for parsing: latent positions as bullets, mirrors as the text of
        their sources, special tokens dropped."""
        bullet, ids = (
            protocol.BULLET.encode(),
            ids if self.dual is None else self.dual.to_source(ids),
        )
        table = self.piece_bytes
        pieces = (
            bullet if i == self.latent_token_id else table[i] if i < len(table) else b""
            for i in ids
        )
        return b"".join(pieces).decode("utf-8", errors="replace")


def _bytes_to_unicode() -> dict[int, str]:
    """The byte alphabet of GPT-2's byte-level BPE, which Qwen uses."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {byte: chr(byte) for byte in printable}
    hidden = (byte for byte in range(256) if byte not in table)
    table.update({byte: chr(256 + offset) for offset, byte in enumerate(hidden)})
    return table

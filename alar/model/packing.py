"""Which tokens go into which call of the trunk: a batch as logical rows, and their schedule.

A logical row is one sequence. A (B, T) grid can store logical rows in three ways: padded on the
right, padded on the left, or several in one row of the grid (`segment_ids`). Here the three become
one thing, the list of the real tokens of each logical row. A call feeds real tokens only, those of
all rows one after the other, so nothing is ever computed for padding:

    call 0             the text of every row up to its first block (or its end)
    calls 1 … K        one latent token for every row that has a first block
    call K + 1         the text of those rows up to their second block (or their end), and so on

For example two rows with K = 2, where t is text and • a latent position:

    row 0   t t t • • t t • • t        call 0   t t t, t t t t t    (5 + 3 tokens)
    row 1   t t t t t                  call 1   •                   step 0 of the first block
                                       call 2   •                   step 1
                                       call 3   t t
                                       calls 4, 5, 6                •, •, t

That makes at most (blocks + 1) + blocks·K calls, where blocks is the largest number in any row.
Everything here is index arithmetic on the CPU. `alar.model.latent` makes the calls.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True)
class TrunkCall:
    """One call of the trunk: `lengths[i]` tokens of row `rows[i]`, after `starts[i]` earlier ones.

    `step` is None for text. For a latent step it is k (0-based), every length is 1, and the rows
    are 0, 1, …, n − 1.
    """

    rows: tuple[int, ...]
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    step: int | None = None

    @property
    def is_latent(self) -> bool:
        return self.step is not None

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(start + length for start, length in zip(self.starts, self.lengths))

    def positions(self) -> Int[Tensor, " tokens"]:
        """The position of each token in its logical row."""
        return torch.cat([torch.arange(start, end) for start, end in zip(self.starts, self.ends)])

    def last_tokens(self) -> Int[Tensor, " rows"]:
        """Where in this call's tokens the last one of each row stands."""
        return torch.tensor(self.lengths).cumsum(0) - 1


@dataclass(frozen=True)
class Packing:
    """The calls of a batch in order, and for each of their N tokens its place in the batch.

    `where` (N,) are indices into the flattened (B·T,) grid, call by call. Rows are numbered by
    falling number of blocks, so that the rows that open a block are always the first ones.
    """

    calls: tuple[TrunkCall, ...]
    where: Int[Tensor, " N"]
    num_rows: int
    longest: int  # tokens of the longest row

    @property
    def num_latents(self) -> int:
        return sum(call.tokens for call in self.calls if call.is_latent)

    def latents_in_reading_order(self) -> Int[Tensor, " latents"]:
        """Calls find z step by step over the rows; this permutation sorts them row by row."""
        places = [self.where[:0]]  # for a batch without blocks
        for call, part in zip(self.calls, self.where.split([c.tokens for c in self.calls])):
            if call.is_latent:
                places.append(part)
        return torch.cat(places).argsort()


def sequence_ids(
    input_ids: Int[Tensor, "B T"],
    attention_mask: Int[Tensor, "B T"] | None = None,
    segment_ids: Int[Tensor, "B T"] | None = None,
) -> Int[Tensor, "B T"]:
    """Which sequence of its row each position belongs to, 0 for padding; on the CPU."""
    for name, given in (("attention_mask", attention_mask), ("segment_ids", segment_ids)):
        if given is not None and given.shape != input_ids.shape:
            raise ValueError(
                f"{name} has shape {tuple(given.shape)}, input_ids has {tuple(input_ids.shape)}"
            )
    if segment_ids is None:
        sequences = torch.ones(input_ids.shape, dtype=torch.long)
    else:
        sequences = segment_ids.cpu().long()
    if bool((sequences < 0).any()):
        raise ValueError(
            "segment_ids holds negative numbers: expected 0 for padding and positive ids for"
            " sequences"
        )
    return sequences if attention_mask is None else sequences * attention_mask.cpu().bool()


def logical_rows(sequences: Int[Tensor, "B T"]) -> list[Int[Tensor, " length"]]:
    """The places of every sequence's tokens in the flattened grid, in reading order."""
    width = sequences.shape[1]
    places = sequences.flatten().nonzero()[:, 0]  # (N,) of real tokens
    if not len(places):
        return []
    # Of each real token: its row of the grid, and its sequence in that row.
    owners = torch.stack([places // width, sequences.flatten()[places]])  # (2, N)
    changes = (owners[:, 1:] != owners[:, :-1]).any(0)  # (N - 1,)
    firsts = changes.nonzero()[:, 0] + 1  # of every sequence but the first one
    rows = list(places.tensor_split(firsts))
    if len(rows) != torch.unique(owners, dim=1).shape[1]:
        raise ValueError(
            "segment_ids: a sequence is interrupted by another one; its tokens must follow each"
            " other"
        )
    return rows


def block_starts(is_latent: Bool[Tensor, " length"], num_latent: int) -> list[int]:
    """Where the blocks of one logical row start.

    Raises ValueError unless every run of latent positions is exactly K long and follows some text.
    """
    edge = torch.zeros(1, dtype=torch.int)
    steps = torch.diff(is_latent.int(), prepend=edge, append=edge)  # (length + 1,)
    starts = (steps == 1).nonzero()[:, 0].tolist()
    ends = (steps == -1).nonzero()[:, 0].tolist()
    if any(end - start != num_latent for start, end in zip(starts, ends)):
        raise ValueError(
            f"latent blocks in the data do not have K = {num_latent} positions each: either the"
            " trajectories were made with another K than the model's config.num_latent, or a block"
            " was cut"
        )
    if starts and starts[0] == 0:
        raise ValueError(
            "a sequence starts with a latent position: z needs the hidden state of the token"
            " before it"
        )
    return starts


def pack(
    input_ids: Int[Tensor, "B T"],
    sequences: Int[Tensor, "B T"],
    latent_token_id: int | None,
    num_latent: int,
) -> Packing:
    """The schedule of a batch; `sequences` as `sequence_ids` gives them.

    Without a `latent_token_id` everything is text and goes into one call. Raises ValueError for
    blocks that are not K long.
    """
    # No token has the id -1.
    is_latent = (input_ids.cpu() == (-1 if latent_token_id is None else latent_token_id)).flatten()
    rows = [(row, block_starts(is_latent[row], num_latent)) for row in logical_rows(sequences)]
    rows.sort(key=lambda row: -len(row[1]))  # stable: equal rows keep the order of the batch
    calls: list[TrunkCall] = []
    where: list[Tensor] = []

    def feed(members: list[int], starts: list[int], ends: list[int], step: int | None = None):
        """Add one call: of every member r the tokens from starts[r] to ends[r]."""
        begins = tuple(starts[r] for r in members)
        lengths = tuple(ends[r] - starts[r] for r in members)
        calls.append(TrunkCall(tuple(members), begins, lengths, step))
        where.extend(rows[r][0][starts[r] : ends[r]] for r in members)

    fed = [0] * len(rows)  # how many tokens of each row went into earlier calls
    most_blocks = len(rows[0][1]) if rows else -1
    for number in range(most_blocks + 1):
        # Text up to this block, or to the end of the row.
        ends = [blocks[number] if number < len(blocks) else len(row) for row, blocks in rows]
        text = [r for r in range(len(rows)) if fed[r] < ends[r]]
        if text:
            feed(text, fed, ends)
        fed = ends
        # The block itself, one position of every row that has one.
        opening = [r for r, (_, blocks) in enumerate(rows) if number < len(blocks)]
        for step in range(num_latent if opening else 0):
            following = [end + 1 if r < len(opening) else end for r, end in enumerate(fed)]
            feed(opening, fed, following, step)
            fed = following
    return Packing(
        tuple(calls),
        torch.cat(where) if where else torch.zeros(0, dtype=torch.long),
        num_rows=len(rows),
        longest=max((len(row) for row, _ in rows), default=0),
    )


def with_filler(
    input_ids: Int[Tensor, "B T"],
    sequences: Int[Tensor, "B T"],
    latent_token_id: int | None,
    num_latent: int,
    calls: int,
) -> tuple[Int[Tensor, "B+1 W"], Int[Tensor, "B+1 W"]]:
    """The batch with one more row at the bottom, which gives one token to each of `calls` calls.

    Every schedule is text, K latent steps, text, …, and ends after a text or after a block. The
    shorter of two schedules is therefore the beginning of the longer one, and this row makes a
    short one as long as is asked for.
    """
    wider = max(0, calls - input_ids.shape[1])
    pad = (0, wider, 0, 1)  # columns on the right, one row at the bottom
    ids = torch.nn.functional.pad(input_ids, pad)  # with id 0, which is some text
    owners = torch.nn.functional.pad(sequences, pad)
    owners[-1, :calls] = 1
    if num_latent:
        latent = torch.arange(calls, device=ids.device) % (num_latent + 1) > 0  # (calls,)
        ids[-1, :calls][latent] = latent_token_id
    return ids, owners

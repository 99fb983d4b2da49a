"""Which tokens go into which model call: a batch as logical rows, and their schedule of calls.

A logical row is one sequence. Left padding, right padding and several sequences packed into one row
(segment ids) are three ways of storing logical rows in a (B, T) table; here they become one thing,
the list of each row's real tokens. Every call feeds only real tokens, all rows' tokens one after
the other, so nothing is ever computed for padding:

    call 0             the text of every row up to its first block (or its end)
    calls 1 … K        one latent token for every row that has a first block
    call K + 1         the text of those rows up to their second block (or their end), and so on

That makes at most (blocks + 1) + blocks·K calls, whatever the number of rows. Pure index
arithmetic, on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor


@dataclass(frozen=True)
class Call:
    """One call of the trunk: `lengths[i]` tokens of row `rows[i]`, whose first `starts[i]` tokens
    went before.

    `step` is k for the k-th latent step (0-based; one token for each of the rows 0, 1, …, n − 1),
    None for text. `before` (latent calls only) says where in the previous call's output the hidden
    states stand from which z is computed.
    """

    rows: tuple[int, ...]
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    step: int | None = None
    before: Tensor | None = None

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(start + length for start, length in zip(self.starts, self.lengths))

    def positions(self) -> Int[Tensor, " tokens"]:
        return torch.cat([torch.arange(start, end) for start, end in zip(self.starts, self.ends)])


@dataclass(frozen=True)
class Packing:
    """`calls` in order, and `where` (N,): the place in the flattened (B·T) table of every token,
    call by call.

    Rows are numbered by falling number of blocks, so that the rows which open a block are always
    the first ones.
    """

    calls: tuple[Call, ...]
    where: Tensor
    num_rows: int
    longest: int

    @property
    def num_latents(self) -> int:
        return sum(call.tokens for call in self.calls if call.step is not None)

    def latent_places(self) -> Int[Tensor, " latents"]:
        """Places in the flattened table of the latent positions, in the order of the calls."""
        parts = self.where.split([call.tokens for call in self.calls])
        return torch.cat(
            [part for part, call in zip(parts, self.calls) if call.step is not None]
            or [self.where[:0]]
        )


def sequence_ids(
    input_ids: Int[Tensor, "B T"],
    attention_mask: Int[Tensor, "B T"] | None = None,
    segment_ids: Int[Tensor, "B T"] | None = None,
) -> Int[Tensor, "B T"]:
    """Which sequence of its row each position belongs to, 0 for padding; on the CPU."""
    ids = (
        torch.ones(input_ids.shape, dtype=torch.long)
        if segment_ids is None
        else segment_ids.cpu().long()
    )
    for name, table in (("attention_mask", attention_mask), ("segment_ids", segment_ids)):
        if table is not None and table.shape != input_ids.shape:
            raise ValueError(
                f"{name} has shape {tuple(table.shape)}, input_ids has {tuple(input_ids.shape)}"
            )
    if bool((ids < 0).any()):
        raise ValueError(
            "segment_ids holds negative numbers: expected 0 for padding and positive ids for"
            " sequences"
        )
    return ids if attention_mask is None else ids * attention_mask.cpu().bool()


def logical_rows(sequences: Int[Tensor, "B T"]) -> list[Int[Tensor, " length"]]:
    """Places in the flattened table of the tokens of every sequence, in reading order."""
    width = sequences.shape[1]
    places = sequences.flatten().nonzero()[:, 0]  # (N,)
    owner = torch.stack(
        [places // width, sequences.flatten()[places]]
    )  # (2, N): row of the table, sequence in it
    changed = (owner[:, 1:] != owner[:, :-1]).any(0)
    lengths = torch.diff(changed.nonzero()[:, 0] + 1, prepend=torch.zeros(1, dtype=torch.long))
    rows = (
        list(places.split([*lengths.tolist(), len(places) - int(lengths.sum())]))
        if len(places)
        else []
    )
    if len(rows) != torch.unique(owner, dim=1).shape[1]:
        raise ValueError(
            "segment_ids: a sequence is interrupted by another one; its tokens must follow each"
            " other"
        )
    return rows


def latent_blocks(latent: Tensor, num_latent: int) -> list[int]:
    """Where the blocks of one sequence start; `latent` (length,) is true at latent positions.

    Raises ValueError unless every run of latent positions is exactly K long and follows some text.
    """
    edges = torch.diff(
        latent.int(),
        prepend=torch.zeros(1, dtype=torch.int),
        append=torch.zeros(1, dtype=torch.int),
    )
    starts, ends = (edges == 1).nonzero()[:, 0].tolist(), (edges == -1).nonzero()[:, 0].tolist()
    if any(end - start != num_latent for start, end in zip(starts, ends)):
        raise ValueError(
            f"latent blocks in the data do not have K = {num_latent} positions each: the model's"
            " config.num_latent and the K that the trajectories were made with differ, or a block"
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
    """The schedule of a batch; raises ValueError for blocks that are not K long."""
    is_latent = (input_ids.cpu() == (-1 if latent_token_id is None else latent_token_id)).flatten()
    rows = [(row, latent_blocks(is_latent[row], num_latent)) for row in logical_rows(sequences)]
    rows.sort(key=lambda row: -len(row[1]))  # stable
    calls, where = [], []
    fed = [0] * len(rows)
    for turn in range(max((len(blocks) for _, blocks in rows), default=-1) + 1):
        ends = [blocks[turn] if turn < len(blocks) else len(places) for places, blocks in rows]
        text = [r for r, (_, blocks) in enumerate(rows) if turn <= len(blocks) and fed[r] < ends[r]]
        if text:
            calls.append(
                Call(
                    tuple(text), tuple(fed[r] for r in text), tuple(ends[r] - fed[r] for r in text)
                )
            )
            where += [rows[r][0][fed[r] : ends[r]] for r in text]
        opening = sum(turn < len(blocks) for _, blocks in rows)
        if not opening:
            break
        before = torch.tensor(calls[-1].lengths).cumsum(0)[:opening] - 1
        for step in range(num_latent):
            begins = tuple(ends[r] + step for r in range(opening))
            calls.append(Call(tuple(range(opening)), begins, (1,) * opening, step, before))
            where += [rows[r][0][begin : begin + 1] for r, begin in enumerate(begins)]
            before = torch.arange(opening)
        fed = [end + (num_latent if r < opening else 0) for r, end in enumerate(ends)]
    return Packing(
        tuple(calls),
        torch.cat(where) if where else torch.zeros(0, dtype=torch.long),
        len(rows),
        max((len(places) for places, _ in rows), default=0),
    )


def with_filler(
    input_ids: Int[Tensor, "B T"],
    sequences: Int[Tensor, "B T"],
    latent_token_id: int | None,
    num_latent: int,
    calls: int,
) -> tuple[Int[Tensor, "B+1 W"], Int[Tensor, "B+1 W"]]:
    """The batch with one more row, below the others, that takes part in each of `calls` calls with
    one token.

    Every schedule is text, K latent steps, text, …, ended somewhere after a text or a block: the
    shorter of two is the beginning of the longer, and a row of this kind makes them equal.
    """
    wider = max(0, calls - input_ids.shape[1])
    table, owners = (
        torch.nn.functional.pad(x, (0, wider, 0, 1)) for x in (input_ids, sequences)
    )  # id 0 is some text
    owners[-1, :calls] = 1
    if num_latent:
        table[-1, :calls][torch.arange(calls, device=table.device) % (num_latent + 1) > 0] = (
            latent_token_id
        )
    return table, owners


def pack_text(sequences: Int[Tensor, "B T"]) -> Packing:
    """Every token in one call: text without blocks, or with the z of every latent position at hand."""
    rows = logical_rows(sequences)
    lengths = tuple(map(len, rows))
    calls = (Call(tuple(range(len(rows))), (0,) * len(rows), lengths),) if rows else ()
    where = torch.cat(rows) if rows else torch.zeros(0, dtype=torch.long)
    return Packing(calls, where, len(rows), max(lengths, default=0))

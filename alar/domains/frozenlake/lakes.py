"""Lakes as questions: random solvable maps, their drawing, their shortest ways, and walks on them.

A walk is a function of the question and the moves. `walk` plays the moves on a fresh gymnasium
environment, which the question seeds. So nothing needs to be kept between turns, and the slips of a
slippery lake are the same every time.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map

from alar.records import Question

# Gymnasium's letters (start, frozen, hole, goal) → ours, without and with the walker on the tile.
_TILES = {"S": "_", "F": "_", "H": "O", "G": "G"}
_WALKER = {"H": "X", "G": "*"}  # P on any other tile


@dataclass(frozen=True)
class Walk:
    """Where some moves led.

    `position` is the walker's tile (row · columns + column), `played` the number of moves.
    """

    position: int
    played: int
    reached: bool = False
    fallen: bool = False

    @property
    def over(self) -> bool:
        return self.reached or self.fallen


def lakes(
    count: int,
    seed: int,
    *,
    size: int = 4,
    ice: float = 0.8,
    slippery: bool = False,
    without: Collection[str] = (),
) -> list[Question]:
    """`count` solvable lakes of `size` × `size` tiles, each of them ice with probability `ice`.

    `without` has drawings that must not be among them.
    """
    questions, number, forbidden = [], 0, set(without)
    while len(questions) < count:
        lake_seed = seed * 1_000_003 + number  # seeds have no draws in common
        number += 1
        rows = generate_random_map(size, ice, lake_seed)
        question = lake_question(rows, seed=lake_seed, slippery=slippery)
        if question.text not in forbidden:
            questions.append(question)
        # So many draws were in vain: stop before this becomes an endless loop.
        elif number > 100 * (count + 1):
            raise ValueError(
                f"nearly all lakes of size {size} are in `without`: ask for fewer or larger ones"
            )
    return questions


def lake_question(rows: Sequence[str], *, seed: int = 0, slippery: bool = False) -> Question:
    """One map in gymnasium's letters (S, F, H, G) as a question."""
    details = {"rows": list(rows), "slippery": slippery, "seed": seed}
    kind = "slippery" if slippery else "firm"
    return Question(f"lake-{seed}", drawing(rows, 0), (), type=kind, details=json.dumps(details))


def drawing(rows: Sequence[str], position: int) -> str:
    """The lake with the walker on it: a line per row, a space between tiles."""
    width = len(rows[0])
    tiles = [[_TILES[tile] for tile in row] for row in rows]
    row, column = divmod(position, width)
    tiles[row][column] = _WALKER.get(rows[row][column], "P")
    return "\n".join(" ".join(line) for line in tiles)


def walk(question: Question, moves: Sequence[int]) -> Walk:
    """Play `moves` from the start; those after the goal or a hole are not played."""
    details = json.loads(question.details)
    world = FrozenLakeEnv(desc=details["rows"], is_slippery=details["slippery"])
    position, _ = world.reset(seed=details["seed"])  # the seed decides every slip
    for played, move in enumerate(moves, start=1):
        position, reward, terminated, _, _ = world.step(move)
        if terminated:
            return Walk(position, played, reached=reward > 0, fallen=reward == 0)
    return Walk(position, len(moves))


def shortest_way(question: Question) -> list[int]:
    """The fewest moves to the goal of a lake that is not slippery.

    Of equally short ways, it takes the first in gymnasium's order of moves.
    """
    details = json.loads(question.details)
    world = FrozenLakeEnv(desc=details["rows"], is_slippery=False)
    start, _ = world.reset(seed=0)
    ways: dict[int, list[int]] = {start: []}  # tile → the moves that reach it
    waiting = deque([start])  # first in, first out: near tiles come before far ones
    while waiting:
        here = waiting.popleft()
        for move in range(4):
            # One outcome per move, since the ice does not slip: (probability, tile, …).
            ((_, there, reward, terminated),) = world.P[here][move]
            if there not in ways:
                ways[there] = [*ways[here], move]
                if reward > 0:
                    return ways[there]
                if not terminated:
                    waiting.append(there)
    raise ValueError(f"{question.id}: no way leads to the goal")

"""What one forward pass shows about the latent thoughts of a trajectory.

`inspect` feeds the model a recorded trajectory with its recorded z, whichever engine wrote it. For
each latent step it keeps the vector and everything that is read from it. The readings stand alone:
views and reports need neither model nor tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from alar.files import replacing
from alar.inspector import lens
from alar.inspector.attention import WATCHED, Watch
from alar.inspector.blocks import Block, check_trajectory, latent_blocks, latent_steps, segments
from alar.model.attention import attention_of
from alar.records import Trajectory
from alar.rollout.codec import Codec

_WORDS = "words"  # the array in a file that holds everything else (lists, dicts) as JSON


@dataclass(frozen=True)
class LatentReadings:
    """N latent steps of a trajectory of T tokens, read by a model of L layers.

    Arrays are float32 and int32:

    z                    (N, H)           the vectors as they were fed
    position, turn, step (N,)             place in `ids`; turn and k, both from 0
    norm                 (N,)             ‖z‖
    norm_ratio           (N,)             ‖z‖ over the median norm of the embeddings
    norm_quantile        (N,)             share of embeddings that are not longer than z
    lens_ids             (N, L+1, top_k)  logit lens at layers 0 (z itself) … L (the output)
    lens_probabilities   (N, L+1, top_k)
    lens_entropy         (N, L+1)         entropy of the lens distribution in nats
    nearest_ids          (N, top_k)       token embeddings with the largest cosine to z
    nearest_cosines      (N, top_k)
    cosines              (N, N)           between all steps of the trajectory
    action_attention     (N, L)           weight on this z from its turn's action, mean over heads
                                          and the action's tokens; 0 without an action
    latent_attention     (N, L, T)        weights of this z's query over all tokens, itself
                                          included, mean over heads; sums to 1
    ids, origins         (T,)             the trajectory's tokens and where they came from
    segment              (T,)             index into `segments`

    The names in `segments` come from `alar.inspector.blocks.segments`. `pieces` maps every id that
    occurs here to its text. `about` says what was inspected: question_id, question.
    """

    z: np.ndarray
    position: np.ndarray
    turn: np.ndarray
    step: np.ndarray
    norm: np.ndarray
    norm_ratio: np.ndarray
    norm_quantile: np.ndarray
    lens_ids: np.ndarray
    lens_probabilities: np.ndarray
    lens_entropy: np.ndarray
    nearest_ids: np.ndarray
    nearest_cosines: np.ndarray
    cosines: np.ndarray
    action_attention: np.ndarray
    latent_attention: np.ndarray
    ids: np.ndarray
    origins: np.ndarray
    segment: np.ndarray
    segments: list[str]
    pieces: dict[int, str]
    about: dict

    def __len__(self) -> int:
        return len(self.z)

    @property
    def num_layers(self) -> int:
        return self.action_attention.shape[1]

    @property
    def latent_turns(self) -> list[int]:
        """Turns (from 0) that hold a latent block."""
        return sorted(set(self.turn.tolist()))

    def rows(self, turn: int) -> np.ndarray:
        """Row numbers of the latent steps of one turn; ValueError for a turn without any."""
        rows = np.flatnonzero(self.turn == turn)
        if not len(rows):
            having = [number + 1 for number in self.latent_turns]
            raise ValueError(f"turn {turn + 1} has no latent block, only turns {having} have one")
        return rows

    def lens(self, row: int, layer: int = -1) -> list[tuple[str, float]]:
        """(text, probability) of the lens's top tokens in one latent step at one layer."""
        return self._named(self.lens_ids[row, layer], self.lens_probabilities[row, layer])

    def nearest(self, row: int) -> list[tuple[str, float]]:
        """(text, cosine) of the token embeddings closest to the direction of z."""
        return self._named(self.nearest_ids[row], self.nearest_cosines[row])

    def _named(self, ids: np.ndarray, values: np.ndarray) -> list[tuple[str, float]]:
        return [(self.pieces[token], value) for token, value in zip(ids.tolist(), values.tolist())]

    def block_cosines(self, turn: int) -> Float[np.ndarray, "K K"]:
        """Cosines between the steps of one block."""
        rows = self.rows(turn)
        return self.cosines[np.ix_(rows, rows)]

    def segment_attention(self) -> Float[np.ndarray, "N L segments"]:
        """`latent_attention` summed over the tokens of each segment; sums to 1."""
        member = np.arange(len(self.segments))[:, None] == self.segment[None]  # (segments, T)
        return self.latent_attention @ member.T.astype(np.float32)

    def table(self) -> pd.DataFrame:
        """One row per latent step: place, norm, top token of the last layer, nearest token."""
        tops = [self.lens(row)[0] for row in range(len(self))]
        near = [self.nearest(row)[0] for row in range(len(self))]
        return pd.DataFrame(
            {
                "turn": self.turn + 1,
                "k": self.step + 1,
                "norm": self.norm,
                "norm_ratio": self.norm_ratio,
                "norm_quantile": self.norm_quantile,
                "top_token": [text for text, _ in tops],
                "top_probability": [probability for _, probability in tops],
                "entropy": self.lens_entropy[:, -1],
                "nearest_token": [text for text, _ in near],
                "nearest_cosine": [cosine for _, cosine in near],
                "action_attention": self.action_attention.mean(1),
            }
        )

    def save(self, path: str | Path) -> Path:
        """Write everything into one .npz file and return its path; `load` gives the same bits."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        arrays, words = {}, {}
        for name, value in vars(self).items():
            kept = arrays if isinstance(value, np.ndarray) else words
            kept[name] = value
        # A string array: an object array would be pickled, which `load` refuses for safety.
        arrays[_WORDS] = np.array(json.dumps(words, ensure_ascii=False))
        with replacing(path) as aside, aside.open("wb") as stream:
            np.savez_compressed(stream, **arrays)
        return path

    @classmethod
    def load(cls, path: str | Path) -> LatentReadings:
        """ValueError for a file of another version."""
        with np.load(path, allow_pickle=False) as stored:
            found = dict(stored)
        found |= json.loads(str(found.pop(_WORDS, "{}")))
        missing = {field.name for field in fields(cls)} ^ set(found)  # also what is too many
        if missing:
            raise ValueError(
                f"{path}: not the readings of this version ({', '.join(sorted(missing))});"
                " inspect again"
            )
        # JSON made text of the ids.
        found["pieces"] = {int(token): piece for token, piece in found["pieces"].items()}
        return cls(**found)


@torch.no_grad()
def inspect(trajectory: Trajectory, model, codec: Codec, *, top_k: int = 8) -> LatentReadings:
    """The readings of one trajectory, from one forward pass with the recorded z.

    Raises ValueError for a trajectory without a latent block, for z that are missing, not finite or
    of another width, and for a model whose reserved id differs.
    """
    check_trajectory(trajectory, model.config)
    places, turn, step = latent_steps(trajectory)  # (N,) each
    blocks = latent_blocks(trajectory, codec)
    actions = [position for block in blocks for position in range(block.action, block.end)]
    z = torch.as_tensor(np.asarray(trajectory.latents, dtype=np.float32))  # (N, H)
    z = z.to(next(model.parameters()).device)
    queries = [*places.tolist(), *actions]  # first N latent positions, then the actions
    # L + 1 states (N, H); weights (queries, L, T).
    hidden_states, weights = _forward(model, trajectory.ids, z, places, queries)
    embeddings = lens.token_embeddings(model)  # (V, H)
    top_k = min(top_k, len(embeddings))  # a tiny vocabulary may have fewer tokens
    read = lens.logit_lens(model, lens.layer_states(model, hidden_states), top_k)
    nearest_ids, nearest_cosines = lens.nearest_tokens(z, embeddings, top_k)
    norm, ratio, quantile = lens.norm_statistics(z, embeddings)
    names, segment = segments(trajectory)
    arrays = {
        "z": z.cpu(),
        "position": places,
        "turn": turn,
        "step": step,
        "norm": norm,
        "norm_ratio": ratio,
        "norm_quantile": quantile,
        "lens_ids": read.ids,  # (N, L + 1, top_k)
        "lens_probabilities": read.probabilities,
        "lens_entropy": read.entropy,
        "nearest_ids": nearest_ids,
        "nearest_cosines": nearest_cosines,
        "cosines": lens.cosine_matrix(z.cpu()),  # (N, N)
        "action_attention": _onto_latents(places, turn, blocks, weights[len(places) :]),
        "latent_attention": weights[: len(places)],  # (N, L, T)
        "ids": trajectory.ids,
        "origins": trajectory.origins,
        "segment": segment,
    }
    seen = {*trajectory.ids, *read.ids.ravel().tolist(), *nearest_ids.ravel().tolist()}
    return LatentReadings(
        **{name: _narrow(value) for name, value in arrays.items()},
        segments=names,
        pieces={token: codec.text([token]) for token in sorted(seen)},
        about={"question_id": trajectory.question.id, "question": trajectory.question.text},
    )


def _forward(
    model, ids: list[int], z: Tensor, places: np.ndarray, queries: list[int]
) -> tuple[tuple[Tensor, ...], Float[np.ndarray, "queries L T"]]:
    """Hidden states (N, H) of each layer at the latent `places`, and the weights of `queries`."""
    embeddings = model.get_input_embeddings()(torch.tensor(ids, device=z.device))  # (T, H)
    embeddings[places] = z.to(embeddings)
    watch = Watch(queries, model.config.num_hidden_layers)
    # transformers hands `watch` on to the attention function of every layer.
    with attention_of(model.config, WATCHED):
        output = model.model(
            inputs_embeds=embeddings[None], use_cache=False, output_hidden_states=True, watch=watch
        )
    return tuple(state[0, places] for state in output.hidden_states), watch.weights().numpy()


def _onto_latents(
    places: np.ndarray,
    turn: np.ndarray,
    blocks: Sequence[Block],
    weights: Float[np.ndarray, "A L T"],
) -> Float[np.ndarray, "N L"]:
    """Weight on every z from the action of its own turn; 0 where the turn has no action.

    `places` and `turn` are (N,). `weights` holds the A action tokens of all blocks, in order.
    """
    attention = np.zeros((len(places), weights.shape[1]), dtype=np.float32)  # (N, L)
    first = 0  # row in `weights` where the action of this block begins
    for block in blocks:
        count = block.end - block.action
        if count:
            own = turn == block.turn  # (N,)
            action = weights[first : first + count]  # (count, L, T)
            attention[own] = action[:, :, places[own]].mean(0).T  # (count, L, K) → (K, L)
        first += count
    return attention


def _narrow(values) -> np.ndarray:
    values = np.asarray(values)
    return values.astype(np.float32 if values.dtype.kind == "f" else np.int32)

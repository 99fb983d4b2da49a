"""What one forward pass shows about the latent thoughts of a trajectory.

`inspect` feeds a recorded trajectory with its recorded z, whatever engine wrote it, and keeps per
latent step the vector and everything that is read from it. The record stands alone: views and
reports need neither model nor tokenizer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from alar.files import replacing
from alar.inspector import lens
from alar.inspector.attention import WATCHED, Watch
from alar.inspector.blocks import check_trajectory, codec_of, latent_blocks, segments, turn_of
from alar.model.attention import attention_of
from alar.records import Origin, Trajectory


@dataclass(frozen=True)
class LatentRecord:
    """N latent steps of a trajectory of T tokens, read by a model of L layers. Arrays are float32
    and int32.

    | field | shape | what |
    |---|---|---|
    | z | (N, H) | the vectors as they were fed |
    | position, turn, step | (N,) | where each stands in `ids`; its turn and its k, both from 0 |
    | norm, norm_ratio, norm_quantile | (N,) | ‖z‖; over the median embedding norm; share of
    embeddings not longer | | lens_ids, lens_probabilities | (N, L+1, top_k) | logit lens at layers
    0 (z itself) … L (the model's output) | | lens_entropy | (N, L+1) | entropy of the lens
    distribution in nats | | nearest_ids, nearest_cosines | (N, top_k) | token embeddings in the
    direction of z | | cosines | (N, N) | between all steps of the trajectory | | action_attention |
    (N, L) | weight on this z from its turn's action, mean over heads and the action's tokens; 0
    without one | | latent_attention | (N, L, T) | weights of this z's query over all tokens, itself
    included: mean over heads; sums to 1 | | ids, origins, segment | (T,) | the trajectory's tokens,
    where they came from, index into `segments` |

    `segments` are "prompt", "turn t", "latent t", "observation t" (t from 1). `pieces` maps every
    id that occurs anywhere here to its text. `about` says what was inspected: question, answer,
    turns (dicts of `TurnRecord`), model, K.
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
            raise ValueError(
                f"turn {turn} has no latent block; those with one:"
                f" {', '.join(map(str, self.latent_turns))}"
            )
        return rows

    def tokens(self) -> list[str]:
        """The text of every token of the trajectory."""
        return [self.pieces[int(token)] for token in self.ids]

    def lens(self, row: int, layer: int = -1) -> list[tuple[str, float]]:
        """(text, probability) of the top tokens that the lens reads in one latent step at one
        layer."""
        ids, probabilities = self.lens_ids[row, layer], self.lens_probabilities[row, layer]
        return [(self.pieces[int(token)], float(p)) for token, p in zip(ids, probabilities)]

    def nearest(self, row: int) -> list[tuple[str, float]]:
        """(text, cosine) of the token embeddings that point most in the direction of z."""
        return [
            (self.pieces[int(token)], float(c))
            for token, c in zip(self.nearest_ids[row], self.nearest_cosines[row])
        ]

    def block_cosines(self, turn: int) -> np.ndarray:
        """Cosines (K, K) between the steps of one block."""
        rows = self.rows(turn)
        return self.cosines[np.ix_(rows, rows)]

    def segment_attention(self) -> np.ndarray:
        """(N, L, segments): `latent_attention` summed over the tokens of each segment; sums to 1."""
        member = np.arange(len(self.segments))[:, None] == self.segment[None]  # (segments, T)
        return self.latent_attention @ member.T.astype(np.float32)

    def table(self) -> pd.DataFrame:
        """One row per latent step: place, norm, the final layer's top token with its probability,
        entropy, nearest token."""
        tops, near = (
            [self.lens(row)[0] for row in range(len(self))],
            [self.nearest(row)[0] for row in range(len(self))],
        )
        return pd.DataFrame(
            {
                "turn": self.turn + 1,
                "k": self.step + 1,
                "norm": self.norm,
                "norm_ratio": self.norm_ratio,
                "norm_quantile": self.norm_quantile,
                "top_token": [text for text, _ in tops],
                "top_probability": [p for _, p in tops],
                "entropy": self.lens_entropy[:, -1],
                "nearest_token": [text for text, _ in near],
                "nearest_cosine": [c for _, c in near],
                "action_attention": self.action_attention.mean(1),
            }
        )

    def save(self, stem: str | Path) -> Path:
        """Write `stem`.npz (arrays) and `stem`.json (words); returns the stem. `load` gives back
        the same bits."""
        arrays, words = _files(stem)
        arrays.parent.mkdir(parents=True, exist_ok=True)
        held = {field.name: getattr(self, field.name) for field in fields(self)}
        with replacing(arrays) as aside, aside.open("wb") as stream:
            np.savez_compressed(
                stream,
                **{name: value for name, value in held.items() if isinstance(value, np.ndarray)},
            )
        text = {name: value for name, value in held.items() if not isinstance(value, np.ndarray)}
        with replacing(words) as aside:
            aside.write_text(
                json.dumps(text, ensure_ascii=False, indent=1) + "\n", encoding="utf-8"
            )
        return Path(stem)

    @classmethod
    def load(cls, stem: str | Path) -> LatentRecord:
        arrays, words = _files(stem)
        for path in (arrays, words):
            if not path.exists():
                raise FileNotFoundError(
                    f"{path}: no such part of a latent record; write both with LatentRecord.save"
                )
        text = json.loads(words.read_text(encoding="utf-8"))
        text["pieces"] = {int(token): piece for token, piece in text["pieces"].items()}
        with np.load(arrays, allow_pickle=False) as held:
            found = {name: held[name] for name in held.files} | text
        missing = {field.name for field in fields(cls)} ^ set(found)
        if missing:
            raise ValueError(
                f"{stem}: not a latent record of this version ({', '.join(sorted(missing))});"
                " inspect again"
            )
        return cls(**found)


def _files(stem: str | Path) -> tuple[Path, Path]:
    stem = Path(stem)
    return stem.with_name(stem.name + ".npz"), stem.with_name(stem.name + ".json")


@torch.no_grad()
def inspect(trajectory: Trajectory, model, tokenizer, *, top_k: int = 8) -> LatentRecord:
    """The record of one trajectory; one forward pass with the recorded z, which nothing recomputes.

    Raises ValueError for a trajectory without latent block, with z missing, of another width or not
    finite, and for a model whose reserved id differs.
    """
    check_trajectory(trajectory, model.config)
    codec, device = codec_of(model, tokenizer), next(model.parameters()).device
    places = [i for i, origin in enumerate(trajectory.origins) if origin == Origin.LATENT]
    blocks = latent_blocks(trajectory, codec)
    z = torch.as_tensor(np.asarray(trajectory.latents, dtype=np.float32))  # (N, H)
    actions = [position for block in blocks for position in range(block.action, block.end)]
    hidden_states, weights = _forward(model, trajectory.ids, z.to(device), places, places + actions)
    embeddings, count = lens.token_embeddings(model), len(places)
    top_k = min(top_k, len(embeddings))
    read = lens.logit_lens(model, lens.layer_states(model, hidden_states), top_k)
    nearest_ids, nearest_cosines = lens.nearest_tokens(z.to(device), embeddings, top_k)
    norm, ratio, quantile = lens.norm_statistics(z.to(device), embeddings)
    turn = np.array([turn_of(trajectory, place) for place in places])
    names, segment = segments(trajectory)
    held = {*trajectory.ids, *read.ids.ravel().tolist(), *nearest_ids.ravel().tolist()}
    arrays = {
        "z": z.numpy(),
        "position": places,
        "turn": turn,
        "step": _steps(places),
        "norm": norm,
        "norm_ratio": ratio,
        "norm_quantile": quantile,
        "lens_ids": read.ids,
        "lens_probabilities": read.probabilities,
        "lens_entropy": read.entropy,
        "nearest_ids": nearest_ids,
        "nearest_cosines": nearest_cosines,
        "cosines": lens.cosine_matrix(z),
        "action_attention": _on_latents(places, turn, blocks, weights[count:]),
        "latent_attention": weights[:count],
        "ids": trajectory.ids,
        "origins": trajectory.origins,
        "segment": segment,
    }
    return LatentRecord(
        **{name: _narrow(value) for name, value in arrays.items()},
        segments=names,
        pieces={token: codec.text([token]) for token in sorted(held)},
        about=_about(trajectory, model),
    )


def _forward(model, ids, z, places, queries):
    """Hidden states (N, H) of each layer at the latent `places`, and the weights (queries, L, T) of
    these `queries`."""
    embeddings = model.get_input_embeddings()(torch.tensor(ids, device=z.device))  # (T, H)
    embeddings[places] = z.to(embeddings)
    watch = Watch(queries, model.config.num_hidden_layers)
    with attention_of(model.config, WATCHED):
        output = model.model(
            inputs_embeds=embeddings[None], use_cache=False, output_hidden_states=True, watch=watch
        )
    return tuple(state[0, places] for state in output.hidden_states), watch.weights().numpy()


def _on_latents(places, turn, blocks, weights) -> np.ndarray:
    """(N, L): weight on every z from the action of its own turn; 0 where the turn has no action."""
    attention, first = np.zeros((len(places), weights.shape[1]), dtype=np.float32), 0
    for block in blocks:
        count = block.end - block.action
        if count:
            own = np.flatnonzero(turn == block.turn)
            attention[own] = weights[first : first + count][:, :, np.asarray(places)[own]].mean(0).T
        first += count
    return attention


def _steps(places: list[int]) -> list[int]:
    """k (from 0) of every latent position within its run."""
    steps: list[int] = []
    for index, place in enumerate(places):
        steps.append(steps[-1] + 1 if index and places[index - 1] == place - 1 else 0)
    return steps


def _narrow(values) -> np.ndarray:
    values = np.asarray(values)
    return values.astype(np.float32 if values.dtype.kind == "f" else np.int32)


def _about(trajectory: Trajectory, model) -> dict:
    question, config = trajectory.question, model.config
    return {
        "question_id": question.id,
        "question": question.text,
        "question_type": question.type,
        "answers": list(question.answers),
        "hard_turns": list(question.hard_turns),
        "prediction": trajectory.prediction,
        "correct": bool(trajectory.correct),
        "turns": [vars(turn) | {"titles": list(turn.titles)} for turn in trajectory.turns],
        "model_type": config.model_type,
        "num_latent": config.num_latent,
    }

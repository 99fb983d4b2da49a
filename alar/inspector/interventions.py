"""Does the action depend on the thoughts? Replace z in one latent block, write the action again,
compare.

    zero     z = 0
    mean     the mean z of this step over a reference set
    noise    a random direction with the norm of z
    shuffle  the same z in another order (with a step: that z swaps places with another one)
    patch    the z of a donor, another question's latent turn
    drop     the position is taken out, later tokens move up

Each acts on the whole block or on one step k. Each has a random control, which moves z by *the same
distance* in a random direction. The control of `drop` keeps the position and fills it with a random
direction of the same norm. If an intervention does more than its control, it matters where z was
moved, and not only how far.

The action is written greedily by the engine that writes all turns, and scored by teacher forcing:
KL(intact ‖ replaced) of the next-token distribution, mean over the tokens of the recorded action,
in nats. Both compute the tokens up to `<latent>` once. The intact action is written anew in the
same way, since the recorded one may have been sampled, and chance would look like an effect.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import DynamicCache

from alar import protocol
from alar.inspector.blocks import Site, sites
from alar.model.attention import grouped_attention
from alar.records import Trajectory
from alar.rollout.engine import Sampling, TurnOutput, TurnRequest
from alar.rollout.hf import HFEngine, policy_logits

KINDS = ("zero", "mean", "noise", "shuffle", "patch", "drop")
_TAG = re.compile(r"\s*<(\w+)>")  # the open tag of an action names its kind


@dataclass(frozen=True)
class Intervention:
    """What is done to a block: to all of its steps, or only to `step` (k from 0).

    "none" leaves z as it is. `control` asks for the random control instead.
    """

    kind: str
    step: int | None = None
    control: bool = False

    def __post_init__(self):
        if self.kind not in ("none", *KINDS):
            raise ValueError(f"intervention {self.kind!r}: expected none, {', '.join(KINDS)}")


@dataclass(frozen=True)
class Effect:
    """What one intervention did."""

    site: Site
    intervention: Intervention
    z: np.ndarray  # (K′, H): what was fed
    output: TurnOutput  # what the policy wrote behind `</latent>`
    action: str  # the same as text
    reference: str  # what it writes there with z intact
    kl: float  # nats per token
    distance: float  # mean ‖z′ − z‖ of the steps that changed; NaN for "drop"
    donor_action: str = ""  # as recorded; "" without a donor
    donor_gain: float = float("nan")  # by how much that became likelier, nats per token

    @property
    def changed(self) -> bool:
        return self.action != self.reference

    @property
    def to_donor(self) -> bool:
        """Whether the action became the donor's."""
        return bool(self.donor_action) and self.changed and self.action == self.donor_action

    @property
    def to_donor_kind(self) -> float:
        """Whether the action became one of the donor's kind, such as "search" or "answer".

        NaN if it was of that kind already, or if there is no donor.
        """
        donor = _kind(self.donor_action)
        if donor in ("", _kind(self.reference)):
            return float("nan")
        return float(_kind(self.action) == donor)


def _kind(action: str) -> str:
    """The name of the action's tag; "text" for an answer without a tag."""
    if not action:
        return ""
    found = _TAG.match(action)
    return found[1] if found else "text"


def replaced(
    z: Float[np.ndarray, "K H"],
    intervention: Intervention,
    rng: np.random.Generator,
    *,
    donor: Float[np.ndarray, "K H"] | None = None,
    mean: Float[np.ndarray, "K H"] | None = None,
) -> Float[np.ndarray, "K′ H"]:
    """z after the intervention; K′ < K for "drop".

    ValueError for a step outside the block, for a block of one step to shuffle, and for a donor or
    mean that is missing or of another shape.
    """
    kind, step, total = intervention.kind, intervention.step, len(z)
    if step is not None and not 0 <= step < total:
        raise ValueError(f"step {step}: this block has the steps 0 to {total - 1}")
    if kind == "shuffle" and total < 2:
        raise ValueError("shuffle needs at least two latent steps, this block has one")
    if kind == "drop" and intervention.control:
        kind = "noise"  # the position stays; no distance is defined between K and K′ vectors
    chosen = np.arange(total) if step is None else np.array([step])
    new = z.copy()  # (K, H)
    if kind == "zero":
        new[chosen] = 0
    elif kind == "mean":
        new[chosen] = _like(z, mean, "mean thoughts")[chosen]
    elif kind == "patch":
        new[chosen] = _like(z, donor, "a donor")[chosen]
    elif kind == "noise":
        norms = np.linalg.norm(z[chosen], axis=1, keepdims=True)  # (chosen, 1)
        new[chosen] = _directions(rng, len(chosen), z.shape[1]) * norms
    elif kind == "shuffle":
        new = z[_order(rng, total, step)]
    elif kind == "drop":
        new = np.delete(z, chosen, axis=0)
    if intervention.control and intervention.kind != "drop":
        distance = np.linalg.norm(new - z, axis=1, keepdims=True)  # (K, 1)
        new = z + distance * _directions(rng, total, z.shape[1])
    return new.astype(np.float32)


def _like(z: np.ndarray, given: np.ndarray | None, what: str) -> np.ndarray:
    shape = None if given is None else given.shape
    if shape != z.shape:
        raise ValueError(f"this intervention needs {what} of shape {z.shape}, got {shape}")
    return given


def _directions(rng: np.random.Generator, rows: int, width: int) -> np.ndarray:
    drawn = rng.standard_normal((rows, width))  # normalised, it is uniform on the sphere
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


def _order(rng: np.random.Generator, total: int, step: int | None) -> np.ndarray:
    """An order of the steps that differs from 0, 1, …; with `step`, only that one swaps places."""
    order = np.arange(total)
    if step is not None:
        other = (step + rng.integers(1, total)) % total  # any step but this one
        order[[step, other]] = order[[other, step]]
        return order
    while (order == np.arange(total)).all():  # an unchanged order is no intervention
        order = rng.permutation(total)
    return order


class InterventionLab:
    """Interventions on the turns of one engine's model.

    `mean` (K, H) is what "mean" puts in. At most `max_new_tokens` tokens are written behind
    `</latent>`, up to one of the `stop` strings; `stop` and `form` are the domain's. Random draws
    depend only on `seed`, question, turn and intervention. Make a new lab when the weights change,
    since a lab keeps keys, values and intact actions.
    """

    def __init__(
        self,
        engine: HFEngine,
        *,
        mean: np.ndarray | None = None,
        max_new_tokens: int = 64,
        stop: tuple[str, ...] = protocol.SEARCH_STOPS,
        form: protocol.Form = protocol.SEARCH,
        seed: int = 0,
        batch_size: int = 64,
    ):
        self.engine, self.model, self.codec = engine, engine.model, engine.codec
        self.form, self.mean, self.seed, self.batch_size = form, mean, seed, batch_size
        self.sampling = Sampling(max_new_tokens, 0.0, stop=stop)  # 0.0: greedy
        self._references: dict[Site, str] = {}  # site → intact action
        self._kept: tuple[Site, list[tuple[Tensor, Tensor]]] | None = None  # of the last site

    def sites(self, trajectories: Sequence[Trajectory]) -> list[Site]:
        return sites(trajectories, self.model.config, self.codec)

    def thoughts(
        self, site: Site, intervention: Intervention, donor: Site | None = None
    ) -> Float[np.ndarray, "K′ H"]:
        """z of the site after the intervention. The same arguments give the same z."""
        # Seeded by name, so that a result does not depend on what was drawn before it.
        name = f"{site.trajectory.question.id} {site.block.turn} {intervention}"
        rng = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
        donated = None if donor is None else donor.z
        return replaced(site.z, intervention, rng, donor=donated, mean=self.mean)

    def effect(self, site: Site, intervention: Intervention, donor: Site | None = None) -> Effect:
        return self.effects([(site, intervention, donor)])[0]

    def effects(self, cases: Sequence[tuple[Site, Intervention, Site | None]]) -> list[Effect]:
        """The effect of every (site, intervention, donor), in order.

        Neighbouring cases with the same site and donor share their forward passes.
        """
        fed = [self.thoughts(*case) for case in cases]  # (K′, H) each
        unknown = list(dict.fromkeys(site for site, _, _ in cases if site not in self._references))
        pairs = [(site, site.z) for site in unknown]  # the intact actions come first
        pairs += [(site, z) for (site, _, _), z in zip(cases, fed)]
        outputs = self._write(pairs)
        for site, output in zip(unknown, outputs):
            self._references[site] = self._text(output.ids)
        outputs, scores = outputs[len(unknown) :], self._scores(cases, fed)
        found = []
        for (site, change, donor), z, output, (kl, gain) in zip(cases, fed, outputs, scores):
            found.append(
                Effect(
                    site,
                    change,
                    z,
                    output,
                    action=self._text(output.ids),
                    reference=self._references[site],
                    kl=kl,
                    distance=_distance(site.z, z),
                    donor_action="" if donor is None else self._text(donor.action_ids),
                    donor_gain=gain,
                )
            )
        return found

    def _text(self, ids: list[int]) -> str:
        return self.codec.text(ids).strip()

    def _write(self, pairs: Sequence[tuple[Site, np.ndarray]]) -> list[TurnOutput]:
        """What the policy writes greedily behind `</latent>`, for each pair of a site and its z."""
        outputs: list[TurnOutput] = []
        for start in range(0, len(pairs), self.batch_size):
            requests = []
            for session, (site, z) in enumerate(pairs[start : start + self.batch_size]):
                latent = [self.codec.latent_token_id] * len(z)
                ids = site.prefix + latent + self.codec.latent_close
                requests.append(TurnRequest(session, ids, site.earlier_z + list(z)))
            outputs += self.engine.generate(requests, self.sampling)
            # Sessions are numbered anew in each batch, so the engine must forget these.
            self.engine.release([request.session for request in requests])
        return outputs

    def _scores(self, cases, fed: Sequence[np.ndarray]) -> list[tuple[float, float]]:
        """(KL, donor gain) of every case."""
        scores: list[tuple[float, float]] = []
        # Neighbours with the same site and donor form a run; sites compare by identity.
        runs = groupby(zip(cases, fed), key=lambda pair: (pair[0][0], pair[0][2]))
        for (site, donor), run in runs:
            changed = [z for _, z in run]
            for start in range(0, len(changed), self.batch_size):
                chunk = changed[start : start + self.batch_size]
                scores += self._scores_at(site, donor, chunk)
        return scores

    def _scores_at(self, site: Site, donor: Site | None, changed: Sequence[np.ndarray]):
        variants = [site.z, *changed]  # n of them, the intact one first
        logprobs = self.next_token_logprobs(site, variants, site.action_ids)  # (n, A, V)
        intact = logprobs[0]
        # KL(intact ‖ replaced) of every token, then the mean over the action.
        divergence = (intact.exp() * (intact - logprobs)).sum(-1).mean(-1)  # (n,)
        gain = torch.full_like(divergence, float("nan"))
        if donor is not None:
            logprobs = self.next_token_logprobs(site, variants, donor.action_ids)  # (n, A', V)
            wanted = torch.tensor(donor.action_ids, device=logprobs.device)[None, :, None]
            likely = logprobs.gather(-1, wanted.expand(len(variants), -1, 1)).mean((1, 2))  # (n,)
            gain = likely - likely[0]
        return list(zip(divergence[1:].tolist(), gain[1:].tolist()))  # without the intact one

    @torch.no_grad()
    def next_token_logprobs(
        self, site: Site, variants: Sequence[np.ndarray], action: Sequence[int]
    ) -> Float[Tensor, "n A V"]:
        """Log-probs (float64) of the next token at each of the A tokens of `action`.

        `action` is teacher-forced behind each of n variants of z, which may differ in length. The
        prefix is computed once and kept for the next call.
        """
        embed, close = self.model.get_input_embeddings(), self.codec.latent_close
        device = self.engine.device
        text = embed(torch.tensor([*close, *action[:-1]], dtype=torch.long, device=device))
        rows = [torch.cat([torch.as_tensor(z).to(text), text]) for z in variants]  # (K′ + T, H)
        # Padding stands behind every token that is read, so causal attention never sees it.
        inputs = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)  # (n, K + T, H)
        count = len(rows)
        # A cache of its own for this call: the forward pass appends to it, not to the kept prefix.
        past = DynamicCache(
            [
                (k.expand(count, -1, -1, -1), v.expand(count, -1, -1, -1))
                for k, v in self._past(site)
            ]
        )
        with grouped_attention(self.model):
            output = self.model.model(inputs_embeds=inputs, past_key_values=past, use_cache=True)
        # The last piece of `</latent>` predicts the action's first token.
        starts = torch.tensor([len(z) + len(close) - 1 for z in variants], device=device)
        places = starts[:, None] + torch.arange(len(action), device=device)  # (n, A)
        row = torch.arange(count, device=device)[:, None]
        read = output.last_hidden_state[row, places]  # (n, A, H)
        return torch.log_softmax(policy_logits(self.model, read).double(), dim=-1)

    def _past(self, site: Site) -> list[tuple[Tensor, Tensor]]:
        """Keys and values (1, kv heads, T, D) of every layer for the tokens before the block."""
        if self._kept is None or self._kept[0] is not site:
            ids = torch.tensor(site.prefix, device=self.engine.device)
            embeddings = self.model.get_input_embeddings()(ids)  # (T, H)
            if site.block.row:  # there are blocks before this one
                earlier = torch.as_tensor(np.stack(site.earlier_z))
                embeddings[ids == self.codec.latent_token_id] = earlier.to(embeddings)
            past = DynamicCache(config=self.model.config)
            with grouped_attention(self.model):
                self.model.model(
                    inputs_embeds=embeddings[None], past_key_values=past, use_cache=True
                )
            self._kept = site, [(layer.keys, layer.values) for layer in past.layers]
        return self._kept[1]


def _distance(z: np.ndarray, new: np.ndarray) -> float:
    """Mean distance ‖z′ − z‖ of the steps that moved; NaN if steps were dropped."""
    if new.shape != z.shape:
        return float("nan")
    moved = np.linalg.norm(new - z, axis=1)
    moved = moved[moved > 0]
    return float(moved.mean()) if len(moved) else 0.0

"""Does the action depend on the thoughts? Replace z in one latent block, write the action again,
compare.

    zero     z = 0
    mean     the mean z of this step over a reference set
    noise    a random direction with the norm of z
    shuffle  the same z in another order (with a step: that z changes places with another one)
    patch    the z of a donor, another question's latent turn
    drop     the position is taken out, later tokens move up

for the whole block or for one step k. Each has a random control: z moved by *the same distance* in
a random direction; for `drop`, the position kept and filled with a random direction of the same
norm. What an intervention does beyond its control is owed to where z was moved, not to how far.

The action is written greedily by the engine that writes all turns, and scored by teacher forcing:
KL(intact ‖ replaced) of the next-token distribution, mean over the tokens of the recorded action,
in nats. Both compute the tokens up to `<latent>` once. The intact action is written in the same
way, so that a sampled trajectory is no effect.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

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
_TAG = re.compile(r"\s*<(\w+)>")


@dataclass(frozen=True)
class Intervention:
    """What is done to a block: to all of its steps, or to `step` (k from 0). "none" leaves z as it
    is."""

    kind: str
    step: int | None = None
    control: bool = False

    def __post_init__(self):
        if self.kind not in ("none", *KINDS):
            raise ValueError(f"intervention {self.kind!r}: expected none, {', '.join(KINDS)}")


@dataclass(frozen=True)
class Effect:
    """What one intervention did. `action` is what stands behind `</latent>`, `reference` the same
    with z intact.

    `donor_gain`: how much likelier the donor's recorded action became, nats per token; NaN (and
    `to_donor` False) without a donor. `distance` is the mean ‖z′ − z‖ of the steps that changed
    (NaN for "drop").
    """

    site: Site
    intervention: Intervention
    z: np.ndarray  # what was fed
    output: TurnOutput  # what the policy wrote behind `</latent>`
    action: str
    reference: str
    kl: float
    distance: float
    donor_action: str = ""
    donor_gain: float = float("nan")

    @property
    def changed(self) -> bool:
        return self.action != self.reference

    @property
    def to_donor(self) -> bool:
        """Whether the action became the donor's."""
        return bool(self.donor_action) and self.changed and self.action == self.donor_action

    @property
    def to_donor_kind(self) -> float:
        """Whether the action became one of the donor's kind, "search" or "answer" for example; NaN
        if it was of that kind."""
        reference, donor, own = map(_kind, (self.reference, self.donor_action, self.action))
        return float("nan") if not donor or donor == reference else float(own == donor)


def _kind(action: str) -> str:
    """The name of its tag; "text" for an answer without one."""
    found = _TAG.match(action)
    return found[1] if found else "text" if action else ""


def replaced(
    z: Float[np.ndarray, "K H"],
    intervention: Intervention,
    rng: np.random.Generator,
    *,
    donor: Float[np.ndarray, "K H"] | None = None,
    mean: Float[np.ndarray, "K H"] | None = None,
) -> Float[np.ndarray, "K′ H"]:
    """z after the intervention; K′ < K for "drop". ValueError where it needs what is not given."""
    kind, step, total = intervention.kind, intervention.step, len(z)
    if step is not None and not 0 <= step < total:
        raise ValueError(f"step {step}: this block has the steps 0 to {total - 1}")
    for wanted, given in (("patch", donor), ("mean", mean)):
        if kind == wanted and (given is None or given.shape != z.shape):
            shape = "none" if given is None else given.shape
            raise ValueError(
                f"{kind} needs {'a donor' if kind == 'patch' else 'mean thoughts'} of shape"
                f" {z.shape}, got {shape}"
            )
    if kind == "shuffle" and total < 2:
        raise ValueError("shuffle needs at least two latent steps, this block has one")
    chosen = np.arange(total) if step is None else np.array([step])
    new = z.copy()
    if kind == "zero":
        new[chosen] = 0
    elif kind == "mean":
        new[chosen] = mean[chosen]
    elif kind == "patch":
        new[chosen] = donor[chosen]
    elif kind == "noise" or (kind == "drop" and intervention.control):
        new[chosen] = _directions(rng, len(chosen), z.shape[1]) * np.linalg.norm(
            z[chosen], axis=1, keepdims=True
        )
    elif kind == "shuffle":
        new = z[_order(rng, total, step)]
    elif kind == "drop":
        new = np.delete(z, chosen, axis=0)
    if intervention.control and kind != "drop":
        distance = np.linalg.norm(new - z, axis=1, keepdims=True)
        new = z + distance * _directions(rng, total, z.shape[1])
    return new.astype(np.float32)


def _directions(rng: np.random.Generator, rows: int, width: int) -> np.ndarray:
    drawn = rng.standard_normal((rows, width))
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


def _order(rng: np.random.Generator, total: int, step: int | None) -> np.ndarray:
    """An order of the steps that is not the given one; with a step, one exchange that moves it."""
    order = np.arange(total)
    if step is not None:
        other = (step + rng.integers(1, total)) % total
        order[[step, other]] = order[[other, step]]
        return order
    while (order == np.arange(total)).all():
        order = rng.permutation(total)
    return order


class Bench:
    """Interventions on the turns of one engine's model. `mean` (K, H) serves "mean".

    At most `max_new_tokens` tokens are written behind `</latent>`, up to one of the `stop` strings;
    `stop` and `form` are the domain's (the search domain's by default). Random draws depend on
    `seed`, question, turn and intervention only. Make a new bench when the weights change.
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
        self.sampling = Sampling(max_new_tokens, 0.0, stop=stop)
        self._references: dict[Site, str] = {}
        self._prefix: tuple[Site, list[tuple[Tensor, Tensor]]] | None = (
            None  # the last site's keys and values
        )

    def sites(self, trajectories: Sequence[Trajectory]) -> list[Site]:
        return sites(trajectories, self.model.config, self.codec)

    def thoughts(
        self, site: Site, intervention: Intervention, donor: Site | None = None
    ) -> np.ndarray:
        """z of the site after the intervention."""
        name = f"{site.trajectory.question.id} {site.block.turn} {intervention}"
        rng = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
        return replaced(
            site.z, intervention, rng, donor=None if donor is None else donor.z, mean=self.mean
        )

    def effect(self, site: Site, intervention: Intervention, donor: Site | None = None) -> Effect:
        """One intervention, for an interactive view."""
        return self.effects([(site, intervention, donor)])[0]

    def effects(self, cases: Sequence[tuple[Site, Intervention, Site | None]]) -> list[Effect]:
        """Effect of every (site, intervention, donor), in order. Cases of one site should stand
        next to each other."""
        thoughts = [self.thoughts(*case) for case in cases]
        unknown = list(dict.fromkeys(site for site, _, _ in cases if site not in self._references))
        outputs = self.write(
            [(site, site.z) for site in unknown]
            + [(case[0], z) for case, z in zip(cases, thoughts)]
        )
        for site, output in zip(unknown, outputs):
            self._references[site] = self.action_text(output)
        return [
            self._effect(case, z, output, scores)
            for case, z, output, scores in zip(
                cases, thoughts, outputs[len(unknown) :], self._scores(cases, thoughts)
            )
        ]

    def _effect(
        self, case, z: np.ndarray, output: TurnOutput, scores: tuple[float, float]
    ) -> Effect:
        site, intervention, donor = case
        moved = np.linalg.norm(z - site.z, axis=1) if z.shape == site.z.shape else np.zeros(0)
        return Effect(
            site,
            intervention,
            z,
            output,
            self.action_text(output),
            self._references[site],
            scores[0],
            float(moved[moved > 0].mean()) if moved.any() else 0.0 if len(moved) else float("nan"),
            "" if donor is None else self.codec.text(donor.action_ids).strip(),
            scores[1],
        )

    def action_text(self, output: TurnOutput) -> str:
        return self.codec.text(output.ids).strip()

    def write(self, pairs: Sequence[tuple[Site, np.ndarray]]) -> list[TurnOutput]:
        """What the policy writes greedily behind `</latent>`, for each site with these z."""
        outputs: list[TurnOutput] = []
        for start in range(0, len(pairs), self.batch_size):
            requests = [
                TurnRequest(number, self._context(site, len(z)), site.earlier_z + list(z))
                for number, (site, z) in enumerate(pairs[start : start + self.batch_size])
            ]
            outputs += self.engine.generate(requests, self.sampling)
            self.engine.release([request.session for request in requests])
        return outputs

    def _context(self, site: Site, steps: int) -> list[int]:
        return site.prefix + [self.codec.latent_token_id] * steps + self.codec.latent_close

    def _scores(self, cases, thoughts: Sequence[np.ndarray]) -> list[tuple[float, float]]:
        """(KL, donor gain) of every case; cases of one site that follow each other share a forward
        pass."""
        scores: list[tuple[float, float]] = []
        while len(scores) < len(cases):
            first = len(scores)
            site, _, donor = cases[first]
            last = first
            while (
                last < len(cases)
                and cases[last][0] is site
                and cases[last][2] is donor
                and last - first < self.batch_size
            ):
                last += 1
            variants = [site.z, *thoughts[first:last]]
            logprobs = self.next_token_logprobs(site, variants, site.action_ids)
            divergence = (
                (logprobs[0].exp() * (logprobs[0] - logprobs)).sum(-1).mean(-1)
            )  # (variants,)
            gain = torch.full_like(divergence, float("nan"))
            if donor is not None:
                wanted = torch.tensor(donor.action_ids, device=logprobs.device)
                likely = self.next_token_logprobs(
                    site, variants, donor.action_ids
                )  # (variants, A, V)
                likely = likely.gather(-1, wanted[None, :, None].expand(len(likely), -1, 1)).mean(
                    (1, 2)
                )
                gain = likely - likely[0]
            scores += list(zip(divergence[1:].tolist(), gain[1:].tolist()))
        return scores

    @torch.no_grad()
    def next_token_logprobs(
        self, site: Site, variants: Sequence[np.ndarray], action: Sequence[int]
    ) -> Float[Tensor, "variants A V"]:
        """Log-probs (float64) of the next token at every token of `action`, teacher-forced behind
        each of the z variants.

        The prefix is computed once and kept for the next call; variants may differ in length.
        """
        embed, device, close = (
            self.model.get_input_embeddings(),
            self.engine.device,
            self.codec.latent_close,
        )
        text = embed(torch.tensor([*close, *action[:-1]], dtype=torch.long, device=device))
        rows = [torch.cat([torch.as_tensor(z).to(text), text]) for z in variants]
        inputs = torch.nn.utils.rnn.pad_sequence(
            rows, batch_first=True
        )  # padding stands behind all that is read
        past = DynamicCache(
            [
                (k.expand(len(rows), -1, -1, -1), v.expand(len(rows), -1, -1, -1))
                for k, v in self._keys(site)
            ]
        )
        with grouped_attention(self.model):
            hidden = self.model.model(
                inputs_embeds=inputs, past_key_values=past, use_cache=True
            ).last_hidden_state
        starts = torch.tensor([len(z) + len(close) - 1 for z in variants], device=device)
        places = starts[:, None] + torch.arange(len(action), device=device)  # (variants, A)
        read = hidden[torch.arange(len(rows), device=device)[:, None], places]  # (variants, A, H)
        return torch.log_softmax(policy_logits(self.model, read).double(), dim=-1)

    def _keys(self, site: Site) -> list[tuple[Tensor, Tensor]]:
        """Keys and values (1, kv heads, T, D) of every layer for the tokens before the block."""
        if self._prefix is None or self._prefix[0] is not site:
            ids = torch.tensor(site.prefix, device=self.engine.device)
            embeddings = self.model.get_input_embeddings()(ids)
            if site.block.row:
                embeddings[ids == self.codec.latent_token_id] = torch.as_tensor(
                    np.stack(site.earlier_z)
                ).to(embeddings)
            cache = DynamicCache(config=self.model.config)
            with grouped_attention(self.model):
                self.model.model(
                    inputs_embeds=embeddings[None], past_key_values=cache, use_cache=True
                )
            self._prefix = site, [(layer.keys, layer.values) for layer in cache.layers]
        return self._prefix[1]

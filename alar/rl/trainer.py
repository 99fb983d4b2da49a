"""AR-GRPO in one process: roll out, reward within groups, one clipped step, and again.

    questions ─ sampler ─> trajectories ─ reward ─> rewards ─ credit ─> advantages ─ loss ─> update

The trainer is given these four parts as a `Strategy` (`alar.rl.strategy`). Three points differ from
the released code: behaviour log-probs are the true ones, the mask comes from token origins, and the
step of d_t is the trainer's own, also after a resume.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from alar.records import Environment, Origin, Question, Trajectory
from alar.rl.config import RLConfig, learning_rate_at
from alar.rl.objective import kl_penalty
from alar.rl.strategy import Strategy
from alar.rl.summary import TrajectorySummary, own_choices, rollout_metrics, validation_metrics
from alar.rollout.engine import Sampling
from alar.rollout.hf import HFEngine, policy_logits
from alar.rollout.loop import ModePlan, run
from alar.rollout.modes import latent_probabilities
from alar.train.masters import keep_masters
from alar.train.resume import load_state, save_state
from alar.train.supervised import mark_trainable, merged


@dataclass
class Batch:
    """Some trajectories, right-padded. Values refer to the token at each position."""

    ids: Int[Tensor, "batch time"]
    attention_mask: Int[Tensor, "batch time"]
    behaviour: Float[Tensor, "batch time"]  # log-probs at the time of sampling; 0 where none
    mask: Bool[Tensor, "batch time"]  # tokens that carry loss
    advantages: Float[Tensor, "batch time"]
    latents: Float[Tensor, "latents hidden"]  # z as recorded, row by row; (0, 0) without any

    def to(self, device: torch.device) -> Batch:
        return type(self)(**{name: tensor.to(device) for name, tensor in vars(self).items()})


def is_sampled(trajectory: Trajectory) -> list[bool]:
    return [origin == Origin.SAMPLED for origin in trajectory.origins]


def padded(rows: Sequence[Sequence], fill, dtype: torch.dtype) -> Tensor:
    """(B, T) from rows of different lengths, filled up on the right."""
    width = max(len(row) for row in rows)
    return torch.tensor([list(row) + [fill] * (width - len(row)) for row in rows], dtype=dtype)


def make_batch(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[Sequence[float]],
    pad: int,
    carries_loss: Callable[[Trajectory], list[bool]] = is_sampled,
) -> Batch:
    """`advantages` holds one value per token of each trajectory; `pad` is the padding id."""
    z = [torch.as_tensor(t.latents) for t in trajectories if len(t.latents)]  # (n, H) each
    # Only sampled tokens have a log-prob; NaN at the others must not reach the loss.
    behaviour = [[0.0 if lp != lp else lp for lp in t.logprobs] for t in trajectories]
    return Batch(
        ids=padded([t.ids for t in trajectories], pad, torch.long),
        attention_mask=padded([[1] * len(t.ids) for t in trajectories], 0, torch.long),
        behaviour=padded(behaviour, 0.0, torch.float32),
        mask=padded([carries_loss(t) for t in trajectories], False, torch.bool),
        advantages=padded(advantages, 0.0, torch.float32),
        latents=torch.cat(z) if z else torch.zeros(0, 0),
    )


def token_logprobs(
    model,
    batch: Batch,
    *,
    temperature: float,
    latents: str,
    constrain: Callable[[Tensor], Tensor] | None = None,
) -> Float[Tensor, " tokens"]:
    """Log-probs (n,) of the masked tokens, row by row, under a latent or an ordinary model.

    `latents`: "recomputed" by `model`, or "cached" as recorded. `constrain` changes the logits
    (tokens, V) before the temperature.
    """
    base = _base(model)
    if hasattr(base, "latent_states"):
        cached = batch.latents if latents == "cached" and len(batch.latents) else None
        # hidden (B, T, H); z is computed anew unless recorded ones are given.
        hidden = base.latent_states(batch.ids, batch.attention_mask, latents=cached).hidden
    else:
        output = base.model(batch.ids, batch.attention_mask, use_cache=False)
        hidden = output.last_hidden_state  # (B, T, H)
    # The state before a token predicts it: position t − 1 for the token at t.
    chosen = batch.mask[:, 1:]  # (B, T − 1)
    logits = policy_logits(base, hidden[:, :-1][chosen])  # (n, V)
    if constrain is not None:
        logits = constrain(logits)
    # The ratio needs the distribution that was sampled from, so the same temperature here.
    if temperature > 0:
        logits = logits / temperature
    return torch.log_softmax(logits, -1).gather(1, batch.ids[:, 1:][chosen][:, None])[:, 0]


class ARGRPO:
    """`step()` makes one update; `fit()` all of them, with validation, checkpoints and resume.

    A subclass may override what depends on the vocabulary: `carries_loss`, `batch`, `constrained`.
    """

    def __init__(
        self,
        model,
        tokenizer,
        environment: Environment,
        questions: Sequence[Question],
        validation: Sequence[Question],
        config: RLConfig,
        strategy: Strategy,
        *,
        folder: str | Path,
        max_turns: int = 6,
        max_new_tokens: int = 128,
        batch_size: int = 256,
    ):
        """`max_new_tokens` counts per turn, `batch_size` trajectories at once.

        `folder` keeps the state of an interrupted training. Raises ValueError for a config that
        contradicts itself and for fewer questions than a step needs.
        """
        config.refuse_inconsistencies()
        # These raise here rather than in the first step.
        strategy.sampler.prompts(questions, 1)
        strategy.reward.require(questions)
        self.config, self.strategy, self.tokenizer = config, strategy, tokenizer
        self.environment = strategy.reward.environment(environment)
        self.questions, self.validation = list(questions), list(validation)
        self.folder = Path(folder)
        self.max_turns, self.max_new_tokens = max_turns, max_new_tokens
        self.batch_size = batch_size
        torch.manual_seed(strategy.sampler.seed)  # for the first values of adapters
        # Copied before adapters are added: the KL penalty is to the start of the training.
        self.reference = copy.deepcopy(model).eval().requires_grad_(False)
        self.model = mark_trainable(
            model,
            config.trainable,
            lora_rank=config.lora_rank,
            lora_alpha=config.lora_alpha,
            train_projector=config.train_projector,
        )
        weights = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = keep_masters(
            torch.optim.AdamW(weights, lr=config.learning_rate, weight_decay=config.weight_decay)
        )
        self.engine = self.make_engine(_base(self.model))
        unheeded = type(self).constrained is ARGRPO.constrained
        if self.engine.constraint is not None and unheeded:
            # Sampled under a constraint and scored without it, every ratio would be wrong.
            raise ValueError(
                "this checkpoint constrains what may be written, and this trainer would score it"
                " without the constraint; use the trainer of its method (alar/methods)"
            )
        on_policy = strategy.sampler.writer == "policy"
        self.writer = self.engine if on_policy else self.make_engine(self.reference)
        self.scorer = strategy.reward.scorer(self.reference, tokenizer, environment.form)
        self.done = 0  # finished steps
        self.best = float("-inf")  # best validation reward so far
        self.best_weights: dict[str, Tensor] | None = None
        self.rows: list[dict] = []  # metrics, one row per step

    def make_engine(self, model) -> HFEngine:
        return HFEngine(model, self.tokenizer)

    def carries_loss(self, trajectory: Trajectory) -> list[bool]:
        """Which tokens are trained."""
        return is_sampled(trajectory)

    def batch(
        self, trajectories: Sequence[Trajectory], advantages: Sequence[Sequence[float]]
    ) -> Batch:
        return make_batch(trajectories, advantages, self.tokenizer.pad_token_id, self.carries_loss)

    def constrained(
        self, logits: Float[Tensor, "tokens vocabulary"], batch: Batch
    ) -> Float[Tensor, "tokens vocabulary"]:
        """The logits that the batch's masked tokens were sampled from, before the temperature."""
        return logits

    def logprobs(self, model, batch: Batch) -> Float[Tensor, " tokens"]:
        return token_logprobs(
            model,
            batch,
            temperature=self.config.temperature,
            latents=self.config.latents,
            constrain=lambda logits: self.constrained(logits, batch),
        )

    def rollouts(self, step: int) -> tuple[list[Trajectory], list[int]]:
        """The trajectories of a step, and the group of each."""
        sampler, reward = self.strategy.sampler, self.strategy.reward
        size = sampler.group_size
        asked = sampler.prompts(self.questions, step)
        trajectories = self._run(
            self.writer,
            [question for question in asked for _ in range(size)],
            temperature=self.config.temperature,
            modes=sampler.modes(step) if reward.modes == "free" else "off",
            seed=sampler.rollout_seed(step),
        )
        return trajectories, [row // size for row in range(len(trajectories))]

    def _run(
        self,
        engine: HFEngine,
        questions: Sequence[Question],
        *,
        temperature: float,
        modes: str | ModePlan,
        seed: int = 0,
    ) -> list[Trajectory]:
        try:
            return run(
                questions,
                engine,
                self.environment,
                Sampling(self.max_new_tokens, temperature, stop=self.environment.stop),
                modes=modes,
                max_turns=self.max_turns,
                batch_size=self.batch_size,
                seed=seed,
            )
        finally:
            engine.reset()  # its keys belong to these weights, and the update needs the memory

    def step(self) -> dict:
        """One update; returns its metrics."""
        started = time.perf_counter()
        number, total = self.done + 1, self.config.steps
        reward, credit, sampler = (
            self.strategy.reward,
            self.strategy.credit,
            self.strategy.sampler,
        )
        self.model.eval()  # no dropout: update and rollout must be one policy
        trajectories, groups = self.rollouts(number)
        scores = [float("nan")] * len(trajectories)  # NaN: this reward has no scorer
        if self.scorer:
            scores = self.scorer(trajectories)
        summaries = [
            TrajectorySummary.of(t, self.engine.codec, score, explorer=sampler.explores(row))
            for row, (t, score) in enumerate(zip(trajectories, scores))
        ]
        rewards = reward.rewards(summaries, groups, number, total)
        lengths = [len(t.ids) for t in trajectories]
        # One list per trajectory, one value per token.
        advantages = credit.advantages(summaries, lengths, rewards, groups, number, total)
        kept = sampler.kept(rewards, groups)
        # Empty where no reward varies: then there is no update.
        trained = [row for row, used in enumerate(kept) if used]
        update = {}
        if trained:
            update = self._update(
                [trajectories[row] for row in trained], [advantages[row] for row in trained]
            )
        self.done = number
        p_latent = []
        if reward.modes == "free":
            free = [trajectories[row] for row in own_choices(summaries)]
            p_latent = latent_probabilities(self.engine.model, self.engine.codec, free)
        return {
            **rollout_metrics(
                summaries, p_latent, rewards, groups, kept, step=number, total_steps=total
            ),
            "learning_rate": learning_rate_at(number - 1, self.config),
            **({"score": sum(scores) / len(scores)} if self.scorer else {}),
            "trained_tokens": sum(lengths[row] for row in trained),
            **update,
            "seconds": round(time.perf_counter() - started, 2),
        }

    def _update(self, trajectories: list[Trajectory], advantages: list[list[float]]) -> dict:
        """One optimiser step over all trajectories, in `gradient_accumulation` parts.

        Each part holds trajectories of similar shape, so there is little padding.
        """
        config = self.config
        order = sorted(
            range(len(trajectories)),
            key=lambda i: (trajectories[i].num_latent_turns, len(trajectories[i].ids)),
        )
        size = -(-len(order) // config.gradient_accumulation)  # rounded up
        parts = [order[i : i + size] for i in range(0, len(order), size)]
        # Tokens that carry loss, over all parts.
        total = sum(sum(self.carries_loss(t)) for t in trajectories)
        sums = {"loss": 0.0, "kl": 0.0, "clip_fraction": 0.0, "ratio_error": 0.0}
        self.model.zero_grad()
        for part in parts:
            batch = self.batch([trajectories[i] for i in part], [advantages[i] for i in part])
            batch = batch.to(self.engine.device)
            if not batch.mask.any():  # no token of this part carries loss
                continue
            logprobs = self.logprobs(self.model, batch)  # (n,)
            with torch.no_grad():
                reference = self.logprobs(self.reference, batch)  # (n,)
            chosen = batch.mask[:, 1:]  # (B, T − 1), the order of logprobs
            behaviour, advantage = batch.behaviour[:, 1:][chosen], batch.advantages[:, 1:][chosen]
            loss, clipped = self.strategy.loss(logprobs, behaviour, advantage)
            kl = kl_penalty(logprobs, reference).mean()
            share = len(logprobs) / total  # every token weighs alike, whatever part it is in
            # Backward per part: only one part's activations are in memory.
            ((loss + config.kl_coefficient * kl) * share).backward()
            sums["loss"] += loss.item() * share
            sums["kl"] += kl.item() * share
            sums["clip_fraction"] += clipped * share
            distance = (
                (logprobs.detach() - behaviour).exp().sub(1).abs().max().item()
            )  # of ρ from 1
            sums["ratio_error"] = max(sums["ratio_error"], distance)
        torch.nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p.requires_grad], 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate_at(self.done, config)
        self.optimizer.step()
        return sums

    def validate(self) -> dict:
        """Greedy answers to the validation questions.

        In search they ask about counterfactual worlds that nothing trains on.
        """
        reward = self.strategy.reward
        self.model.eval()
        trajectories = self._run(self.engine, self.validation, temperature=0.0, modes=reward.modes)
        summaries = [TrajectorySummary.of(t, self.engine.codec) for t in trajectories]
        return validation_metrics(summaries, reward.validation(summaries, self.config.steps))

    def fit(self, log: Callable[[dict], None] = print):
        """Do all steps, from the state in `folder` if there is one.

        Returns the selected model, merged and in eval mode. `log` gets one row per step, including
        the steps before an interruption.
        """
        config = self.config
        self._resume(log)
        while self.done < config.steps:
            row = self.step()
            last = self.done == config.steps
            if config.validation_every and (self.done % config.validation_every == 0 or last):
                row |= self.validate()
                if row["validation_reward"] > self.best:
                    self.best = row["validation_reward"]
                    if self.strategy.reward.selects and config.returned_weights == "best":
                        # On the CPU: on a GPU they would lie there until the training ends.
                        self.best_weights = {n: w.cpu() for n, w in self._trained().items()}
            self.rows.append(row)
            log(row)
            if self.done % config.checkpoint_every == 0 or last:
                self._checkpoint()
        if self.best_weights is not None:
            # strict=False: only the trained weights were kept.
            self.model.load_state_dict(self.best_weights, strict=False)
        return merged(self.model).requires_grad_(True).eval()

    def _trained(self) -> dict[str, Tensor]:
        return {
            name: p.detach().clone() for name, p in self.model.named_parameters() if p.requires_grad
        }

    def _stepped(self) -> dict[str, Tensor]:
        """Name → what the optimiser steps on: the trained weight, or its float32 master."""
        names = [name for name, p in self.model.named_parameters() if p.requires_grad]
        (group,) = self.optimizer.param_groups
        return dict(zip(names, group["params"], strict=True))

    def _settings(self) -> dict:
        """All that the numbers depend on. The strategy's `credit` replaces the config's."""
        limits = {
            "max_turns": self.max_turns,
            "max_new_tokens": self.max_new_tokens,
            "batch_size": self.batch_size,
        }
        return self.config.model_dump() | self.strategy.to_json() | limits

    def _checkpoint(self) -> None:
        state = {
            "done": self.done,
            "best": self.best,
            "best_weights": self.best_weights,
            "rows": self.rows,
            "weights": {name: p.detach() for name, p in self._stepped().items()},
            "optimizer": self.optimizer.state_dict(),
        }
        save_state(self.folder, self._settings(), state)

    def _resume(self, log: Callable[[dict], None]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        state = load_state(self.folder, self._settings())
        if state is None:
            return
        self.done, self.best, self.rows = state["done"], state["best"], state["rows"]
        self.best_weights = state["best_weights"]
        self.model.load_state_dict(state["weights"], strict=False)
        with torch.no_grad():
            for name, weight in self._stepped().items():  # the masters, unrounded
                weight.copy_(state["weights"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        for row in self.rows:
            log(row)


def _base(model):
    """The model below LoRA's adapters, if there are any."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model

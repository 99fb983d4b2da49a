"""AR-GRPO in one process: rollouts of the agent loop, shaped rewards within groups, the clipped
objective.

Unlike in the released code, behaviour log-probs are the true ones, the mask comes from token
origins, the step of d_t from the trainer's state; `variant` chooses the published reward or the
repaired one. Two additions, both parameters: `credit="turn"` gives each turn's mode tokens an
advantage of their own, and in an `explore_fraction` of every group the mode of one turn is drawn at
random, so that the comparison of modes never runs dry.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from alar.files import replacing
from alar.methods.dual.constraint import PhaseConstraint
from alar.methods.length_rewards import with_stated_limit
from alar.methods.logprob.client import scorer_of
from alar.records import Origin, Trajectory
from alar.rl.config import RLConfig, learning_rate_at
from alar.rl.objective import kl_penalty, policy_loss
from alar.rl.rollouts import (
    Summary,
    explores,
    mode_plan,
    own_choices,
    prompts_of_step,
    rewards_of,
    rollout_metrics,
    rollout_seed,
    token_advantages,
    trained_rows,
    validation_metrics,
    validation_mode,
)
from alar.rollout.codec import Codec
from alar.rollout.engine import Sampling, phases_of
from alar.rollout.hf import HFEngine, policy_logits
from alar.rollout.loop import run
from alar.rollout.modes import latent_probabilities
from alar.train.supervised import mark_trainable, merged


@dataclass
class Batch:
    """Right-padded tensors (B, T) of some trajectories; `advantages`, `mask` and `phases` (of a
    dual vocabulary: the row of its constraint) refer to the token at each position."""

    ids: torch.Tensor
    attention_mask: torch.Tensor
    behaviour: torch.Tensor
    mask: torch.Tensor
    advantages: torch.Tensor
    latents: torch.Tensor
    phases: torch.Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(**{name: tensor.to(device) for name, tensor in vars(self).items()})


def carries_loss(
    trajectory: Trajectory, codec: Codec | None = None, latent_only: bool = False
) -> list[bool]:
    """Which tokens are trained: the SAMPLED ones, and with `latent_only` of these the mirrors of
    the codec's dual vocabulary."""
    sampled = [origin == Origin.SAMPLED for origin in trajectory.origins]
    return (
        [s and codec.dual.is_mirror(i) for s, i in zip(sampled, trajectory.ids)]
        if latent_only
        else sampled
    )


def make_batch(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[Sequence[float]],
    pad: int,
    codec: Codec | None = None,
    latent_only: bool = False,
) -> Batch:
    """`advantages` holds one value per token of each trajectory; the mask is `carries_loss`.
    `codec` is needed where a dual vocabulary constrains the policy."""
    width = max(len(t.ids) for t in trajectories)

    def table(values: Sequence[Sequence], fill, dtype) -> torch.Tensor:
        return torch.tensor([list(v) + [fill] * (width - len(v)) for v in values], dtype=dtype)

    z = [torch.as_tensor(t.latents) for t in trajectories if len(t.latents)]
    return Batch(
        table([t.ids for t in trajectories], pad, torch.long),
        table([[1] * len(t.ids) for t in trajectories], 0, torch.long),
        table(
            [[0.0 if lp != lp else lp for lp in t.logprobs] for t in trajectories],
            0.0,
            torch.float32,
        ),
        table([carries_loss(t, codec, latent_only) for t in trajectories], False, torch.bool),
        table(advantages, 0.0, torch.float32),
        torch.cat(z) if z else torch.zeros(0, 0),
        table(
            [
                phases_of(t, codec) if codec and codec.dual else [0] * len(t.ids)
                for t in trajectories
            ],
            0,
            torch.long,
        ),
    )


def token_logprobs(
    model,
    batch: Batch,
    *,
    temperature: float,
    latents: str,
    constraint: PhaseConstraint | None = None,
) -> torch.Tensor:
    """Log-probs (n,) of the masked tokens in row-major order, under `model`, latent or not, and the
    constraint if any."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if hasattr(base, "latent_states"):
        cached = batch.latents if latents == "cached" and len(batch.latents) else None
        hidden = base.latent_states(batch.ids, batch.attention_mask, latents=cached).hidden[:, :-1]
    else:
        hidden = base.model(batch.ids, batch.attention_mask, use_cache=False).last_hidden_state[
            :, :-1
        ]
    chosen = batch.mask[:, 1:]
    logits = policy_logits(base, hidden[chosen])
    if constraint is not None:
        logits = constraint(logits, batch.phases[:, 1:][chosen])
    if temperature > 0:
        logits = logits / temperature
    return torch.log_softmax(logits, -1).gather(1, batch.ids[:, 1:][chosen][:, None])[:, 0]


class ARGRPO:
    """The trainer. `step()` does one update; `fit()` all of them, with validation, checkpoints and
    resume."""

    def __init__(
        self,
        model,
        tokenizer,
        environment,
        questions,
        validation,
        config: RLConfig,
        *,
        folder: str | Path,
    ):
        self.config, self.tokenizer = config, tokenizer
        self.environment = with_stated_limit(environment, config.length_reward)
        self.questions, self.validation = list(questions), list(validation)
        self.folder = Path(folder)
        if len(self.questions) < config.prompts_per_step:
            raise ValueError(
                f"{len(self.questions)} training questions, fewer than rl.prompts_per_step"
            )
        torch.manual_seed(config.seed)
        self.reference = copy.deepcopy(model).eval().requires_grad_(False)
        self.model = mark_trainable(
            model,
            config.trainable,
            lora_rank=config.lora_rank,
            lora_alpha=config.lora_alpha,
            train_projector=config.train_projector,
        )
        weights = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(weights, lr=config.learning_rate, weight_decay=0.0)
        base = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        self.engine = HFEngine(base, tokenizer)
        if config.latent_only and self.engine.codec.dual is None:
            raise ValueError(
                "rl.latent_only trains the mirrors of a dual vocabulary, and this model has none"
            )
        off_policy = config.length_reward and config.length_reward.off_policy
        self.sampler = HFEngine(self.reference, tokenizer) if off_policy else self.engine
        self.scorer = scorer_of(config.logprob_reward, self.reference, tokenizer, environment.form)
        self.done = 0
        self.best = float("-inf")
        self.rows: list[dict] = []

    def rollouts(self, step: int) -> tuple[list[Trajectory], list[int]]:
        """Groups of trajectories; the last `explore_fraction` of each group explores (`mode_plan`)."""
        config = self.config
        questions = [
            q
            for q in prompts_of_step(self.questions, config, step)
            for _ in range(config.group_size)
        ]
        self.sampler.reset()
        trajectories = run(
            questions,
            self.sampler,
            self.environment,
            Sampling(config.max_new_tokens, config.temperature, stop=self.environment.stop),
            modes=mode_plan(config, step),
            max_turns=config.max_turns,
            batch_size=config.rollout_batch,
            seed=rollout_seed(config, step),
        )
        return trajectories, [row // config.group_size for row in range(len(questions))]

    def step(self) -> dict:
        """One AR-GRPO update; returns its metrics."""
        config, started = self.config, time.perf_counter()
        number = self.done + 1
        self.model.eval()
        trajectories, groups = self.rollouts(number)
        scores = (
            [score.value for score in self.scorer.score(trajectories)]
            if self.scorer
            else [float("nan")] * len(trajectories)
        )
        summaries = [
            Summary.of(t, self.engine.codec, score, explorer=explores(config, row))
            for row, (t, score) in enumerate(zip(trajectories, scores))
        ]
        rewards = rewards_of(summaries, groups, config, number)
        lengths = [len(t.ids) for t in trajectories]
        advantages, _ = token_advantages(summaries, lengths, rewards, groups, config, number)
        trained = [row for row, used in enumerate(trained_rows(rewards, groups, config)) if used]
        update = (
            self._update(
                [trajectories[row] for row in trained], [advantages[row] for row in trained]
            )
            if trained
            else {}
        )
        self.done = number
        free = [trajectories[row] for row in own_choices(summaries)]
        p_latent = (
            []
            if config.length_reward
            else latent_probabilities(self.engine.model, self.engine.codec, free)
        )
        return {
            **rollout_metrics(summaries, p_latent, rewards, groups, config, number),
            "learning_rate": learning_rate_at(number - 1, config),
            **({"score": sum(scores) / len(scores)} if self.scorer else {}),
            "trained_tokens": sum(lengths[row] for row in trained),
            **update,
            "seconds": round(time.perf_counter() - started, 2),
        }

    def _update(self, trajectories: list[Trajectory], advantages: list[list[float]]) -> dict:
        """One optimiser step over all trajectories, in `gradient_accumulation` parts of similar
        shape."""
        config = self.config
        order = sorted(
            range(len(trajectories)),
            key=lambda i: (trajectories[i].num_latent_turns, len(trajectories[i].ids)),
        )
        size = -(-len(order) // config.gradient_accumulation)
        parts = [order[i : i + size] for i in range(0, len(order), size)]
        codec, latent_only = self.engine.codec, config.latent_only
        total = sum(sum(carries_loss(t, codec, latent_only)) for t in trajectories)
        sums = {"loss": 0.0, "kl": 0.0, "clip_fraction": 0.0, "ratio_error": 0.0}
        self.optimizer.zero_grad()
        for part in parts:
            batch = make_batch(
                [trajectories[i] for i in part],
                [advantages[i] for i in part],
                self.tokenizer.pad_token_id,
                codec,
                latent_only,
            ).to(self.engine.device)
            if not batch.mask.any():  # rollouts without a mirror, where only these are trained
                continue
            scoring = {
                "temperature": config.temperature,
                "latents": config.latents,
                "constraint": self.engine.constraint,
            }
            logprobs = token_logprobs(self.model, batch, **scoring)
            with torch.no_grad():
                reference = token_logprobs(self.reference, batch, **scoring)
            chosen = batch.mask[:, 1:]
            behaviour, advantage = batch.behaviour[:, 1:][chosen], batch.advantages[:, 1:][chosen]
            ones = torch.ones_like(logprobs, dtype=torch.bool)
            loss, details = policy_loss(
                logprobs[None],
                behaviour[None],
                advantage[None],
                ones[None],
                clip_low=config.clip_low,
                clip_high=config.clip_high,
            )
            kl = kl_penalty(logprobs, reference, kind="low_var_kl").mean()
            share = len(logprobs) / total
            ((loss + config.kl_coefficient * kl) * share).backward()
            sums["loss"] += loss.item() * share
            sums["kl"] += kl.item() * share
            sums["clip_fraction"] += float(details["clip_fraction"]) * share
            sums["ratio_error"] = max(
                sums["ratio_error"], (logprobs.detach() - behaviour).exp().sub(1).abs().max().item()
            )
        torch.nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p.requires_grad], 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate_at(self.done, config)
        self.optimizer.step()
        return sums

    def validate(self) -> dict:
        """Greedy rollouts on the validation questions (counterfactual worlds that nothing trains
        on)."""
        config = self.config
        self.model.eval()
        self.engine.reset()
        trajectories = run(
            self.validation,
            self.engine,
            self.environment,
            Sampling(config.max_new_tokens, 0.0, stop=self.environment.stop),
            modes=validation_mode(config),
            max_turns=config.max_turns,
            batch_size=config.rollout_batch,
        )
        return validation_metrics([Summary.of(t, self.engine.codec) for t in trajectories], config)

    def fit(self, log: Callable[[dict], None] = print):
        """All steps, from `folder`/resume.pt if there is one; returns the selected model, merged
        and in eval mode."""
        self._resume(log)
        while self.done < self.config.steps:
            row = self.step()
            last = self.done == self.config.steps
            if self.config.validation_every and (
                self.done % self.config.validation_every == 0 or last
            ):
                row |= self.validate()
                if row["validation_reward"] > self.best:
                    self.best = row["validation_reward"]
                    torch.save(self._trained(), self.folder / "best.pt")
            self.rows.append(row)
            log(row)
            if self.done % self.config.checkpoint_every == 0 or last:
                self._checkpoint()
        if self.config.select == "best" and (self.folder / "best.pt").exists():
            self.model.load_state_dict(
                torch.load(self.folder / "best.pt", weights_only=True), strict=False
            )
        return merged(self.model).requires_grad_(True).eval()

    def _trained(self) -> dict[str, torch.Tensor]:
        return {
            name: p.detach().clone() for name, p in self.model.named_parameters() if p.requires_grad
        }

    def _checkpoint(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        best = self.folder / "best.pt"
        with replacing(self.folder / "resume.pt") as aside:
            torch.save(
                {
                    "config": asdict(self.config),
                    "done": self.done,
                    "best": self.best,
                    "best_weights": torch.load(best, weights_only=True) if best.exists() else None,
                    "rows": self.rows,
                    "weights": self._trained(),
                    "optimizer": self.optimizer.state_dict(),
                },
                aside,
            )

    def _resume(self, log: Callable[[dict], None]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "resume.pt"
        if not path.exists():
            return
        state = torch.load(path, weights_only=True)
        if state["config"] != asdict(self.config):
            raise ValueError(
                f"{path}: was written with other rl parameters; remove {self.folder} to start anew"
            )
        self.done, self.best, self.rows = state["done"], state["best"], state["rows"]
        self.model.load_state_dict(state["weights"], strict=False)
        self.optimizer.load_state_dict(state["optimizer"])
        if state["best_weights"] is not None:
            torch.save(state["best_weights"], self.folder / "best.pt")
        for row in self.rows:
            log(row)

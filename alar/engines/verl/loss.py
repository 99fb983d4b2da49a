"""The policy loss under verl: verl's own PPO loss, and a metric of how far the actor is from the
policy that sampled."""

from __future__ import annotations

import torch
from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla, register_policy_loss


@register_policy_loss("alar")
def alar_loss(
    old_log_prob,
    log_prob,
    advantages,
    response_mask,
    loss_agg_mode="token-mean",
    config=None,
    rollout_is_weights=None,
):
    """`compute_policy_loss_vanilla`, after setting the log-probs outside the mask to 0.

    Ids outside the mask are not scored. `old_log_prob` are the behaviour log-probs. The metric
    `actor/ratio_error` is added: the largest |ρ − 1|, which verl averages over micro-batches.
    """
    mask = response_mask.bool()  # (B, T), as the log-probs and advantages
    # A sampled id of a group that is left out has an old log-prob, and 0 as its new one.
    log_prob, old_log_prob = log_prob.masked_fill(~mask, 0.0), old_log_prob.masked_fill(~mask, 0.0)
    loss, metrics = compute_policy_loss_vanilla(
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights
    )
    with torch.no_grad():  # ρ = exp(new − old); exactly 1 outside the mask
        metrics["actor/ratio_error"] = (log_prob - old_log_prob).exp().sub(1).abs().max().item()
    return loss, metrics

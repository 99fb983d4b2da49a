"""What a full copy implies before anything is trained.

A mirror shares embedding and head row with its source, so a sequence whose thoughts are remapped
has the same hidden states as the plain one, and every logit stands twice in the softmax. For each
label, whether a mirror or not,

    −log p_dual(y) = −ℓ_y + log Σ_{v < V} 2 e^{ℓ_v} = −log p(y) + ln 2.

The gradient is the same too for everything that mirrors and sources share. So LoRA on attention
alone, or any other training that leaves the rows as they are, is ordinary supervised training, and
the constrained policy is the ordinary one. The method begins where the latent rows
are trained.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from alar.train.examples import Example, collate


@torch.no_grad()
def label_losses(model, examples: Sequence[Example], pad_token_id: int) -> torch.Tensor:
    """Cross-entropy (n,) of every label, in reading order, over all ids of the model."""
    tensors = collate(examples, pad_token_id)
    batch = {name: tensor.to(model.device) for name, tensor in tensors.items()}
    output = model(batch["input_ids"], attention_mask=batch["attention_mask"])
    logits = output.logits[:, :-1].float()  # (B, T − 1, V + L)
    labels = batch["labels"][:, 1:]  # (B, T − 1): position t predicts token t + 1
    chosen = labels != -100  # (B, T − 1)
    return torch.nn.functional.cross_entropy(logits[chosen], labels[chosen], reduction="none")

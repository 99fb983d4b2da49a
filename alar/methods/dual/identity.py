"""What a full copy implies before anything is trained.

A mirror shares embedding and head row with its source, so a sequence whose thoughts are remapped
has the same hidden states as the plain one, and every logit stands twice in the softmax: for each
label, whether a mirror or not,

    −log p_dual(y) = −ℓ_y + log Σ_{v < V} 2 e^{ℓ_v} = −log p(y) + ln 2.

The gradient with respect to everything that mirrors and sources share is the same too. So LoRA on
attention alone, or any other training that leaves the rows alone, is ordinary supervised training
under another name, and the constrained policy is the ordinary one: the latent rows must be trained
for the method to be one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from alar.train.examples import Example, collate


@torch.no_grad()
def label_losses(model, examples: Sequence[Example], pad_token_id: int) -> torch.Tensor:
    """Cross-entropy (n,) of every label, in reading order, over all ids of the model."""
    batch = {
        name: tensor.to(model.device) for name, tensor in collate(examples, pad_token_id).items()
    }
    logits = (
        model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1].float()
    )
    labels = batch["labels"][:, 1:]
    chosen = labels != -100
    return torch.nn.functional.cross_entropy(logits[chosen], labels[chosen], reduction="none")

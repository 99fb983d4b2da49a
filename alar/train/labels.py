"""How often the labels of thoughts are read: what to watch while labelled thoughts are learnt.

They are learnt in the order of the steps, each after the one before it, with plateaus between. So
the loss of a run that stands at a plateau looks like that of a run that is done; this table tells
the two apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import torch

from alar.rollout.codec import Codec
from alar.train.examples import NO_LOSS, Example, collate


@torch.no_grad()
def label_accuracy(
    model, examples: Sequence[Example], codec: Codec, batch_size: int = 32
) -> pd.DataFrame:
    """k (1 … K) → how many thoughts k have a label, and the share whose label is the first choice
    of the LM head. Without labels `n` is 0 and the share NaN."""
    hits: dict[int, list[bool]] = {k: [] for k in range(1, codec.num_latent + 1)}
    padding = codec.tokenizer.pad_token_id
    for start in range(0, len(examples), batch_size):
        batch = collate(examples[start : start + batch_size], padding)
        batch = {name: tensor.to(model.device) for name, tensor in batch.items()}  # (B, T) each
        labels = batch["labels"]
        hidden = model.latent_states(batch["input_ids"], batch["attention_mask"]).hidden
        is_latent = batch["input_ids"] == codec.latent_token_id  # (B, T)
        k = 0
        for row, place in is_latent.nonzero().tolist():  # in reading order
            k = k + 1 if is_latent[row, place - 1] else 1
            if labels[row, place] != NO_LOSS:
                choice = model.lm_head(hidden[row, place - 1]).argmax()
                hits[k].append(bool(choice == labels[row, place]))
    rows = [
        (k, len(found), sum(found) / len(found) if found else float("nan"))
        for k, found in hits.items()
    ]
    return pd.DataFrame(rows, columns=["k", "n", "label is read"]).set_index("k")

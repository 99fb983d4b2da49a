"""The schedule of a batch: calls hold real tokens only, and every token has one place."""

import pytest
import torch

from alar.model.packing import logical_rows, pack, sequence_ids

LATENT = 9


def test_a_call_holds_real_tokens_only_and_every_token_has_one_place():
    # Three sequences, with two blocks, one and none; 0 in `segments` is padding.
    ids = torch.tensor([[0, 0, 1, 2, 9, 9, 3, 4, 9, 9], [5, 6, 9, 9, 7, 0, 1, 0, 0, 0]])
    segments = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 2, 0, 0, 0]])
    packing = pack(ids, sequence_ids(ids, None, segments), LATENT, num_latent=2)
    assert [(call.rows, call.starts, call.lengths, call.step) for call in packing.calls] == [
        ((0, 1, 2), (0, 0, 0), (2, 2, 1), None),
        ((0, 1), (2, 2), (1, 1), 0),
        ((0, 1), (3, 3), (1, 1), 1),
        ((0, 1), (4, 4), (2, 1), None),
        ((0,), (6,), (1,), 0),
        ((0,), (7,), (1,), 1),
    ]
    assert sorted(packing.where.tolist()) == segments.flatten().nonzero()[:, 0].tolist()
    assert packing.where[:5].tolist() == [2, 3, 10, 11, 16]
    assert packing.calls[0].last_tokens().tolist() == [1, 3, 4]
    # Calls find z step by step: rows 0 and 1, rows 0 and 1 again, then twice row 0.
    assert packing.latents_in_reading_order().tolist() == [0, 2, 4, 5, 1, 3]


def test_without_a_latent_token_everything_is_text_in_one_call():
    ids = torch.tensor([[1, LATENT, LATENT], [2, 3, 4]])
    mask = torch.tensor([[1, 1, 1], [0, 1, 1]])
    packing = pack(ids, sequence_ids(ids, mask), None, num_latent=2)
    (call,) = packing.calls
    assert (call.rows, call.lengths, call.step) == ((0, 1), (3, 2), None)
    assert packing.where.tolist() == [0, 1, 2, 4, 5]


@pytest.mark.parametrize(
    ("segments", "word"),
    [([[1, 2, 1, 1]], "interrupted"), ([[1, -1, 1, 1]], "negative"), ([[1, 1, 1]], "shape")],
)
def test_impossible_segment_ids_are_refused(segments, word):
    ids = torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match=word):
        logical_rows(sequence_ids(ids, None, torch.tensor(segments)))

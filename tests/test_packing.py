"""Logical rows and their calls: real tokens only, one place each."""

import pytest
import torch

from alar.model.packing import logical_rows, pack, sequence_ids


def test_a_call_holds_real_tokens_only_and_every_token_has_one_place():
    ids = torch.tensor([[0, 0, 1, 2, 9, 9, 3, 4, 9, 9], [5, 6, 9, 9, 7, 0, 1, 0, 0, 0]])
    segments = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 2, 0, 0, 0]])
    packing = pack(ids, sequence_ids(ids, None, segments), 9, 2)
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


def test_impossible_segment_ids_are_refused():
    ids = torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match="interrupted"):
        logical_rows(sequence_ids(ids, None, torch.tensor([[1, 2, 1, 1]])))
    with pytest.raises(ValueError, match="negative"):
        sequence_ids(ids, None, torch.tensor([[1, -1, 1, 1]]))
    with pytest.raises(ValueError, match="shape"):
        sequence_ids(ids, torch.ones(1, 3))

"""`score_tokens`: the values and gradients of the plain computation, without its logits."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from alar.model import scoring
from alar.model.scoring import UNSCORED, score_tokens

B, T, H, SIZE, VOCABULARY = 2, 50, 8, 40, 37  # SIZE: rows of the head, with spare ones


class MostRows(TorchDispatchMode):
    """The largest number of rows of a tensor whose last dimension is one of `widths`.

    The head's own weight, seen from the other side, has `hidden_size` rows and does not count.
    """

    def __init__(self, *widths, hidden_size):
        super().__init__()
        self.widths, self.hidden_size, self.rows = widths, hidden_size, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **kwargs or {})
        tensors = [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
        for tensor in tensors:
            if not tensor.is_nested and tensor.shape[-1:].numel() in self.widths:
                rows = tensor.shape[:-1].numel()
                self.rows = max(self.rows, rows if rows != self.hidden_size else 0)
        return made


def inputs(share, seed=0):
    torch.manual_seed(seed)
    head = torch.nn.Linear(H, SIZE)
    hidden = torch.randn(B, T, H, requires_grad=True)
    labels = torch.randint(0, VOCABULARY, (B, T))
    labels[torch.rand(B, T) >= share] = UNSCORED
    return head, hidden, labels


def plain(head, hidden, labels, temperature):
    logits = head(hidden)[..., :VOCABULARY] / temperature  # of all tokens
    logprobs, scored = torch.log_softmax(logits, -1), labels != UNSCORED
    chosen = logprobs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return chosen * scored, torch.distributions.Categorical(logits=logits).entropy() * scored


def gradients(head, hidden, log_probs, entropy):
    weights = torch.linspace(-1, 1, log_probs.numel()).view_as(log_probs)
    total = (log_probs * weights).sum() + (0 if entropy is None else (entropy * weights).sum())
    return torch.autograd.grad(total, [hidden, head.weight, head.bias])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_scores_in_parts_equal_the_plain_ones(monkeypatch, share, with_entropy, temperature):
    monkeypatch.setattr(scoring, "LOGITS_AT_ONCE", 7 * VOCABULARY)  # seven tokens at once
    head, hidden, labels = inputs(share)
    log_probs, entropy = plain(head, hidden, labels, temperature)
    expected = gradients(head, hidden, log_probs, entropy if with_entropy else None)
    found = score_tokens(
        head, hidden, labels, VOCABULARY, temperature=temperature, entropy=with_entropy
    )
    assert found.log_probs.dtype == torch.float32
    torch.testing.assert_close(found.log_probs, log_probs, rtol=1e-5, atol=1e-6)
    assert (found.entropy is None) != with_entropy
    if with_entropy:
        torch.testing.assert_close(found.entropy, entropy, rtol=1e-5, atol=1e-6)
    for one, other in zip(gradients(head, hidden, found.log_probs, found.entropy), expected):
        assert (one - other).norm() <= 1e-5 * other.norm()


def test_no_tensor_of_all_logits_is_made_forward_or_backward(monkeypatch):
    monkeypatch.setattr(scoring, "LOGITS_AT_ONCE", 7 * VOCABULARY)
    head, hidden, labels = inputs(1.0)
    with MostRows(SIZE, VOCABULARY, hidden_size=H) as made:
        found = score_tokens(head, hidden, labels, VOCABULARY, entropy=True)
        gradients(head, hidden, found.log_probs, found.entropy)
    assert made.rows == 7
    with MostRows(SIZE, VOCABULARY, hidden_size=H) as made:
        gradients(head, hidden, *plain(head, hidden, labels, 1.0))
    assert made.rows == B * T  # what the counter sees of the plain computation


def test_a_batch_without_labels_still_reaches_the_head():
    head, hidden, labels = inputs(0.0)
    found = score_tokens(head, hidden, labels, VOCABULARY)
    assert not found.log_probs.any()
    for gradient in gradients(head, hidden, found.log_probs, None):
        assert not gradient.any()


def test_a_model_scores_in_bfloat16_what_its_logits_say(random_model):
    model, _ = random_model()
    model = model.to(torch.bfloat16)
    ids = torch.randint(5, 200, (1, 30))
    labels = ids.roll(-1, 1)
    labels[:, -1] = UNSCORED
    ones = torch.ones_like(ids)  # one segment
    found = model(ids, segment_ids=ones, shift_labels=labels)
    logits = model(ids, segment_ids=ones).logits.float()[..., : model.config.latent_token_id]
    expected = torch.log_softmax(logits, -1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
    assert found.log_probs.dtype == torch.float32 and "logits" not in found
    torch.testing.assert_close(found.log_probs[0, :-1], expected)

"""The cross-entropy contract, against PyTorch's own loss and gradients in FP64."""

import pytest
import torch
import torch.nn.functional as F

from octavo.errors import ConfigError
from octavo.kernels.cross_entropy import cross_entropy_, reference


def inputs(rows=9, vocab=70, dtype=torch.float32):
    return (3 * torch.randn(rows, vocab)).to(dtype), torch.randint(vocab, (rows,))


def exact(logits, targets, softcap=0.0, z_loss=0.0, ignore_index=-100):
    leaf = logits.double().requires_grad_()
    z = softcap * torch.tanh(leaf / softcap) if softcap else leaf
    losses = F.cross_entropy(z, targets, ignore_index=ignore_index, reduction="none")
    losses = losses + z_loss * z.logsumexp(1).square() * (targets != ignore_index)
    return losses.detach(), torch.autograd.grad(losses.sum(), leaf)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("softcap", "z_loss"), [(0.0, 0.0), (5.0, 0.0), (0.0, 0.01), (4.0, 0.02)])
def test_loss_and_gradient(dtype, softcap, z_loss):
    logits, targets = inputs(dtype=dtype)
    targets[4] = -100
    expected, gradient = exact(logits, targets, softcap, z_loss)
    losses = cross_entropy_(logits, targets, softcap=softcap, z_loss=z_loss)
    assert losses.dtype == torch.float32 and losses[4] == 0
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
    half_step = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(logits.double(), gradient, rtol=max(half_step, 1e-5) * 1.01, atol=1e-6)


def test_without_a_gradient_the_logits_stay():
    logits, targets = inputs()
    before = logits.clone()
    expected = exact(before, targets)[0]
    torch.testing.assert_close(cross_entropy_(logits, targets, gradient=False).double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(logits, before)


def test_ignored_rows_count_for_nothing_whatever_they_hold():
    logits, targets = inputs()
    logits[2], targets[2] = float("nan"), 5
    losses = cross_entropy_(logits, targets, ignore_index=5)
    assert losses[2] == 0 and (logits[2] == 0).all() and losses.isfinite().all()


@pytest.mark.parametrize("target", [-1, 70, -99])
def test_a_target_outside_the_vocabulary_is_named(target):
    logits, targets = inputs()
    targets[3] = target
    with pytest.raises(ConfigError, match=f"target {target} is outside the vocabulary of 70"):
        cross_entropy_(logits, targets)


def test_where_nobody_looks_such_a_target_gives_nan():
    logits, targets = inputs()
    targets[3] = 70
    losses = reference.cross_entropy_(logits, targets, -100, True, 0.0, 0.0)
    assert losses.isnan().tolist() == logits.isnan().any(1).tolist() == [row == 3 for row in range(9)]


def test_no_rows():
    assert cross_entropy_(torch.zeros(0, 70), torch.zeros(0, dtype=torch.int64)).shape == (0,)

"""The Triton cross-entropy, against the formula in FP64 with PyTorch's own gradients."""

import pytest
import torch
from torch import Tensor

fast = pytest.importorskip("octavo.kernels.cross_entropy.triton")

# What lies past the end of a row is -inf, and in the interpreter NumPy warns of what is computed from it.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

BITS = {torch.float32: 18, torch.bfloat16: 8, torch.float16: 11}
"""Of a gradient's accuracy: those of its dtype, or what FP32 leaves of a softmax."""


def inputs(rows: int, vocab: int, device: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    logits = (3 * torch.randn(rows, vocab)).to(dtype).to(device)
    return logits, torch.randint(vocab, (rows,)).to(device)


def exact(logits: Tensor, targets: Tensor, softcap: float = 0.0, z_loss: float = 0.0) -> tuple[Tensor, Tensor]:
    """Each row's loss and the gradient of their sum, in float64."""
    leaf = logits.double().requires_grad_()
    z = softcap * torch.tanh(leaf / softcap) if softcap else leaf
    lse = z.logsumexp(1)
    losses = lse - z.gather(1, targets[:, None])[:, 0] + z_loss * lse**2
    return losses.detach(), torch.autograd.grad(losses.sum(), leaf)[0]


def check(logits: Tensor, targets: Tensor, softcap: float = 0.0, z_loss: float = 0.0) -> None:
    expected, gradient = exact(logits, targets, softcap, z_loss)
    bits = BITS[logits.dtype]
    losses = fast.cross_entropy_(logits, targets, -100, True, softcap, z_loss)
    assert losses.dtype == torch.float32 and losses.shape == targets.shape
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits.double(), gradient, rtol=2.0**-bits, atol=2.0 ** -(bits + 6))


@pytest.mark.covering(1)
@pytest.mark.parametrize("block", [16, 64, 16384])
@pytest.mark.parametrize("vocab", [1, 2, 63, 64, 65, 200])
def test_rows_of_any_length_in_any_number_of_blocks(vocab, block, device, monkeypatch):
    monkeypatch.setattr(fast, "WALK", fast.Walk(block, warps=4))
    check(*inputs(5, vocab, device))


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize(("softcap", "z_loss"), [(0.0, 0.0), (5.0, 0.0), (0.0, 0.01), (4.0, 0.02)])
def test_dtypes_soft_cap_and_z_loss(dtype, softcap, z_loss, device, monkeypatch):
    monkeypatch.setattr(fast, "WALK", fast.Walk(64, warps=4))
    check(*inputs(9, 150, device, dtype), softcap, z_loss)


def test_large_logits_neither_overflow_nor_lose_the_small_ones(device, monkeypatch):
    monkeypatch.setattr(fast, "WALK", fast.Walk(32, warps=4))
    logits, targets = inputs(8, 100, device)
    logits[0] += 1e4
    logits[1] -= 1e4
    logits[2] *= 1e3
    logits[3, 70], logits[4, 2], logits[5, :64] = 3e38, -3e38, -float("inf")
    targets[3:6] = torch.tensor([70, 3, 99])
    check(logits, targets)


def test_the_cap_holds_at_the_largest_logits(device):
    logits, targets = inputs(4, 40, device)
    logits[:, 7] = 1e30
    check(logits, targets, softcap=30.0)


def test_ignored_rows_have_no_loss_and_no_gradient_whatever_they_hold(device):
    logits, targets = inputs(6, 90, device)
    logits[2] = float("nan")
    targets[[2, 4]] = -100
    kept = [0, 1, 3, 5]
    expected, gradient = exact(logits[kept], targets[kept])
    losses = fast.cross_entropy_(logits, targets, -100, True, 0.0, 0.0)
    assert (losses[[2, 4]] == 0).all() and (logits[[2, 4]] == 0).all()
    torch.testing.assert_close(losses[kept].double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits[kept].double(), gradient, rtol=1e-5, atol=1e-7)


def test_targets_outside_the_vocabulary_and_nan_logits_give_nan(device):
    logits, targets = inputs(6, 50, device)
    targets[1], targets[2], logits[4, 9] = 50, -1, float("nan")
    losses = fast.cross_entropy_(logits, targets, -100, True, 0.0, 0.0)
    assert losses.isnan().tolist() == [False, True, True, False, True, False]
    assert logits.isnan().all(1).tolist() == [False, True, True, False, True, False]
    assert logits.isnan().any(1).tolist() == [False, True, True, False, True, False]


def test_an_ignore_index_inside_the_vocabulary(device):
    logits, targets = inputs(3, 50, device)
    targets[:] = torch.tensor([7, 8, 7])
    losses = fast.cross_entropy_(logits, targets, 7, True, 0.0, 0.0)
    assert (losses != 0).tolist() == [False, True, False]
    assert (logits != 0).any(1).tolist() == [False, True, False]


def test_without_a_gradient_the_logits_stay(device):
    logits, targets = inputs(4, 130, device)
    before = logits.clone()
    losses = fast.cross_entropy_(logits, targets, -100, False, 0.0, 0.0)
    torch.testing.assert_close(losses.double(), exact(before, targets)[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(logits, before)


def test_rows_that_lie_apart(device):
    wide, targets = inputs(5, 200, device)
    before, view = wide.clone(), wide[:, 20:150]
    targets %= 130
    check(view, targets)
    assert torch.equal(wide[:, :20], before[:, :20]) and torch.equal(wide[:, 150:], before[:, 150:])


@pytest.mark.gpu
def test_a_real_vocabulary(device):
    check(*inputs(300, 128256, device, torch.bfloat16))


@pytest.mark.gpu
def test_offsets_past_32_bits(device):
    logits = torch.randn(17000, 128256, device=device, dtype=torch.bfloat16)
    targets = torch.randint(128256, (17000,), device=device)
    expected, gradient = exact(logits[-5:], targets[-5:])
    losses = fast.cross_entropy_(logits, targets, -100, True, 0.0, 0.0)
    torch.testing.assert_close(losses[-5:].double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits[-5:].double(), gradient, rtol=2.0**-8, atol=2.0**-14)

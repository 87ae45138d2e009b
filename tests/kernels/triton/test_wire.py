"""Messages of gradients: Triton packs the same bytes and adds up to the same values as the reference, bit for bit."""

import pytest
import torch

from octavo.kernels.wire import reference
from octavo.kernels.wire.message import message_bytes

fast = pytest.importorskip("octavo.kernels.wire.triton")

SHAPES = [(1, 1, 1), (2, 3, 5), (4, 128, 512), (3, 300, 700), (2, 4200, 8400), (3, 130, 140)]
"""Messages, their length, and values: the last messages may be empty."""


def hard(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of very different sizes, zeros, NaN, infinities, a group of zeros, a tiny and a huge group."""
    x = torch.randn(count) * torch.exp2(torch.randint(-20, 3, (count,)).float())
    x[::7], x[3::97], x[5::131], x[6::137] = 0, torch.nan, torch.inf, -torch.inf
    x[128:256], x[256:384] = 0, x[256:384] * 1e-30
    x[384:512] *= 1e30
    return x.to(dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    """Bytes of a tensor, all NaN alike."""
    return torch.where(x.isnan(), torch.nan, x).view(torch.uint8)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("messages", "length", "count"), SHAPES)
def test_messages_are_the_same_bytes(messages, length, count, dtype, device):
    x = hard(count, dtype)
    made = fast.pack(x.to(device), messages, length)
    assert made.shape == (messages, message_bytes(length))
    assert torch.equal(made.cpu(), reference.pack(x, messages, length))


@pytest.mark.covering(1)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("parts", "terms"), [(1, 1), (1, 3), (3, 1), (2, 4)])
@pytest.mark.parametrize("length", [5, 128, 300])
def test_sums_are_the_same_values(parts, terms, length, dtype, device):
    messages = torch.stack([reference.pack(hard(parts * length) * 2**i, parts, length) for i in range(terms)], 1)
    check(messages, length, parts * length - 1, dtype, device)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float32])
def test_sums_of_plain_values(wire, device):
    check(hard(2 * 3 * 300, wire).view(2, 3, 300), 300, 590, torch.float32, device)


def check(messages, length, count, dtype, device):
    expected, found = torch.empty(count, dtype=dtype), torch.empty(count, dtype=dtype, device=device)
    reference.add(messages, length, expected, 1 / 3)
    fast.add(messages.to(device), length, found, 1 / 3)
    assert torch.equal(bits(found.cpu()), bits(expected))


def test_every_code_is_decoded(device):
    message = torch.zeros(1, message_bytes(256), dtype=torch.uint8)
    message[0, :256], message[0, 256:] = torch.arange(256), 127
    found = torch.empty(256, device=device)
    fast.add(message[None].to(device), 256, found, 1.0)
    expected = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float() + 0.0  # a sum is never -0
    assert torch.equal(bits(found.cpu()), bits(expected))

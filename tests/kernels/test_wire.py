"""Messages hold the codes and scales of the specification, and their sum is that of FP64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.kernels.wire import add, pack
from octavo.kernels.wire.message import message_bytes
from octavo.numerics import E4M3, E8M0, TILE_1x128, dequantize, quantize


@given(count=st.integers(0, 700), messages=st.integers(1, 4), more=st.integers(0, 130))
@settings(max_examples=40, deadline=None)
def test_a_message_is_codes_and_scales(count, messages, more):
    length = -(-count // messages) + more
    x = torch.randn(count, generator=torch.Generator().manual_seed(count)) * 1e-3
    made = pack(x, messages, length)
    assert made.shape == (messages, message_bytes(length)) and made.shape[1] % 16 == 0
    for number, message in enumerate(made):
        values = x[number * length : (number + 1) * length]
        expected = quantize(values[None], E4M3, TILE_1x128)
        there, groups = values.numel(), -(-values.numel() // 128)
        assert torch.equal(message[:there], expected.codes[0].view(torch.uint8))
        assert not message[there:length].any()
        scale = E8M0.decode(message[length : length + groups]).float()
        assert torch.equal(scale, expected.scale[0, :groups])
        assert (message[length + groups :] == 1).all()


def test_padding_enters_no_scale():
    x = torch.full((130,), 2.0**-30)
    alone, padded = pack(x, 1, 130), pack(x, 1, 256)
    assert torch.equal(alone[0, 130:132], padded[0, 256:258])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_is_that_of_fp64(dtype):
    gradients = torch.randn(4, 1000)
    messages = torch.stack([pack(gradient, 1, 1000)[0] for gradient in gradients])
    exact = sum(dequantize(quantize(g[None], E4M3, TILE_1x128)).double()[0] for g in gradients) / 4
    found = torch.empty(1000, dtype=dtype)
    add(messages[None], 1000, found, 0.25)
    torch.testing.assert_close(found.double(), exact, rtol=2.0**-8 if dtype == torch.bfloat16 else 1e-6, atol=1e-7)


def test_parts_lie_one_after_another_and_the_end_is_cut_off():
    x = torch.randn(300)
    found = torch.empty(300)
    add(pack(x, 3, 128)[:, None], 128, found)
    assert torch.equal(found, torch.cat([dequantize(quantize(p[None], E4M3, TILE_1x128))[0] for p in x.split(128)]))


def test_what_is_not_finite_arrives_and_touches_no_neighbour():
    x = torch.randn(128)
    x[3], x[4], x[5] = torch.nan, torch.inf, -torch.inf
    clean = x.nan_to_num(0, 0, 0)
    found, expected = torch.empty(128), torch.empty(128)
    add(torch.cat([pack(x, 1, 128), pack(torch.ones(128), 1, 128)])[None], 128, found)
    add(torch.cat([pack(clean, 1, 128), pack(torch.ones(128), 1, 128)])[None], 128, expected)
    assert found[3:6].isnan().all()
    assert torch.equal(found[6:], expected[6:]) and torch.equal(found[:3], expected[:3])


def test_values_of_bf16_are_summed_in_fp32():
    terms = torch.tensor([[1.0, 256.0], [2.0**-7, 1.0], [2.0**-8, 1.0]], dtype=torch.bfloat16)
    found = torch.empty(2)
    add(terms[None], 2, found)
    assert found.tolist() == [1 + 2.0**-7 + 2.0**-8, 258.0]


@pytest.mark.parametrize("count", [0, 3])
def test_nothing_to_send(count):
    assert pack(torch.empty(0), count, 0).shape == (count, 0)
    add(torch.empty(1, count, 0, dtype=torch.uint8), 0, torch.empty(0))


def test_wrong_shapes():
    with pytest.raises(ConfigError, match="flatten"):
        pack(torch.ones(3, 4), 1, 12)
    with pytest.raises(ConfigError, match="hold 4 values"):
        pack(torch.ones(5), 2, 2)
    with pytest.raises(ConfigError, match="do not hold 6 values"):
        add(torch.zeros(1, 1, 5), 6, torch.empty(6))

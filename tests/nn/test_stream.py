"""A residual stream is in every respect the tensor that it stands for, but for the time at which a sum is computed."""

import copy
import operator

import pytest
import torch

from octavo.nn.stream import Stream, materialize


def pair(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, addend = (torch.randn(2, 3, 8, generator=generator).to(dtype) for _ in range(2))
    return x, addend


SUMS = [
    operator.add,
    lambda a, b: b + a,
    torch.add,
    lambda a, b: torch.add(b, a),
    lambda a, b: a.add(b),
    lambda a, b: b.add(a),
]


@pytest.mark.parametrize("add", SUMS)
def test_a_sum_with_a_tensor_waits_and_has_pytorchs_bits(add):
    x, addend = pair()
    stream = Stream(x)
    total = add(stream, addend)
    if isinstance(total, Stream):  # a method of the tensor adds at once
        assert total.parts[0] is x and total.parts[1] is addend
        assert torch.equal(total.tensor(), x + addend) and total.parts == (total.tensor(), None)
    assert torch.equal(materialize(total), x + addend)
    assert stream.parts == (x, None)


def test_all_but_methods_wait():
    x, addend = pair()
    assert [isinstance(add(Stream(x), addend), Stream) for add in SUMS] == [True, True, True, True, False, True]


@pytest.mark.parametrize(
    "other", [2.0, torch.ones(8), torch.ones(2, 3, 8, dtype=torch.long), Stream(torch.ones(2, 3, 8))]
)
def test_sums_of_another_kind_are_computed_at_once(other):
    x, _ = pair(torch.float32)
    for got in (Stream(x) + other, other + Stream(x)):
        assert type(got) is torch.Tensor and torch.equal(got, x + materialize(other))


def test_a_third_summand_is_added_to_the_sum():
    x, addend = pair()
    third = Stream(x) + addend + addend
    assert torch.equal(third.tensor(), x + addend + addend)
    assert torch.equal(torch.add(Stream(x), addend, alpha=2), torch.add(x, addend, alpha=2))


READS = {
    "attribute": lambda x: x.shape,
    "dtype": lambda x: x.dtype,
    "method": lambda x: x.float().pow(2).mean(-1, keepdim=True),
    "function": lambda x: torch.nn.functional.silu(x),
    "in a list": lambda x: torch.cat([x, x], -1),
    "keyword": lambda x: torch.sum(input=x, dim=-1),
    "product": lambda x: 0.5 * x * 0.3,
    "difference": lambda x: 1 - x - x,
    "quotient": lambda x: x / 3 + 2 / x,
    "power": lambda x: x**2,
    "matrix product": lambda x: x @ x.transpose(-1, -2),
    "index": lambda x: x[..., :4],
    "comparison": lambda x: (x > 0) & (x == x) & ~(x < -1),
    "negative": lambda x: -x,
    "length": len,
    "rows": lambda x: torch.stack(list(x)),
    "truth": lambda x: bool((x - x + 1)[0, 0, 0]),
    "copy": copy.deepcopy,
    "shallow copy": copy.copy,
    "text": repr,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_whatever_reads_it_sees_the_sum(read):
    x, addend = pair()
    got, want = read(Stream(x) + addend), read(x + addend)
    assert type(got) is type(want)
    assert torch.equal(got, want) if isinstance(want, torch.Tensor) else got == want


def test_writes_change_the_tensor_as_they_would_change_it_themselves():
    x, addend = pair()
    mine, want = x.clone(), x + addend
    stream = Stream(mine)
    stream += addend
    assert stream is mine and torch.equal(mine, want)
    stream = Stream(x) + addend
    stream[0] = 0
    stream.mul_(2)
    want[0] = 0
    assert torch.equal(stream.tensor(), want * 2)


def test_gradients_are_those_of_the_sum():
    x, addend = (each.requires_grad_() for each in pair(torch.float32))
    ((Stream(x) + addend) * 3).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3)) and torch.equal(addend.grad, x.grad)


def test_settling_reaches_into_structures():
    x, addend = pair()
    made = materialize((Stream(x) + addend, [Stream(x)], {"y": Stream(x), "n": None}))
    assert torch.equal(made[0], x + addend) and made[1][0] is x and made[2] == {"y": x, "n": None}

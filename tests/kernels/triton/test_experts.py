"""Triton's passes over the rows of experts against their definition, bit for bit."""

import pytest
import torch

from octavo.kernels.activation import INPUTS, Factors, Targets
from octavo.kernels.experts import reference, route
from octavo.kernels.experts import triton as fast
from octavo.kernels.grouped import reference as reference_groups
from octavo.kernels.grouped import triton as fast_groups
from octavo.kernels.quant_spec import QuantSpec
from octavo.kernels.quantize.reference import quantize_pair

pytestmark = pytest.mark.usefixtures("loops_with_bounds")
ROWS = QuantSpec("e4m3", "row", "power_of_two")


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("scaling", ["power_of_two", "float32", "engine"])
def test_tokens_are_quantised_once_and_copied(scaling, device):
    x = (torch.randn(9, 100, device=device) * torch.logspace(-3, 3, 9, device=device)[:, None]).bfloat16()
    x[0, 0], x[3, 1] = torch.nan, torch.inf
    x[4], x[5] = 0, x[5] * 1e-9
    routing = route(torch.randint(5, (9, 3), device=device), 5)
    target = ROWS._replace(scaling=scaling)
    made, want = (module.quantize_tokens(x, routing.place, target) for module in (fast, reference))
    for ours, theirs in zip(made, want, strict=True):
        assert same(ours.codes, theirs.codes) and torch.equal(ours.scale, theirs.scale)
    assert torch.equal(made[1].scale, made[0].scale[routing.source])


@pytest.mark.parametrize("rotation", [0, 64])
def test_tokens_are_rotated_and_have_a_second_set(rotation, device):
    x = (torch.randn(9, 192, device=device) * torch.logspace(-3, 3, 9, device=device)[:, None]).bfloat16()
    x[0, 0], x[3, 1] = torch.nan, torch.inf
    place = route(torch.randint(5, (9, 3), device=device), 5).place
    arguments = x, place, QuantSpec("int8", "row", "float32", "nearest", rotation), ROWS
    made, want = fast.quantize_tokens(*arguments), reference.quantize_tokens(*arguments)
    for ours, theirs in zip(made, want, strict=True):
        assert same(ours.codes, theirs.codes) and torch.equal(ours.scale.nan_to_num(9.0), theirs.scale.nan_to_num(9.0))
    assert same(made[0].codes, reference.quantize_tokens(x, place, ROWS)[0].codes)
    assert made[1].codes.dtype == torch.int8 and made[1].scale.isnan().sum() == 2 * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_summed_in_order(dtype, device):
    y, place = torch.randn(18, 40, device=device, dtype=dtype), torch.randperm(18, device=device).int().view(6, 3)
    assert torch.equal(fast.combine(y, place), reference.combine(y, place))


@pytest.mark.parametrize(
    ("kind", "gated", "kept"),
    [("silu", True, "values"), ("relu2", True, "codes"), ("relu2", False, "values"), ("silu", False, "codes")],
)
def test_gradients_of_an_activation(kind, gated, kept, device):
    counts, width = [3, 0, 9], 144
    rows, wide = sum(counts), 2 * width if gated else width
    ends = torch.tensor(counts, device=device).cumsum(0).int()
    dh, gate, up = torch.randn(3, rows, width, device=device)
    weights, scale = torch.rand(rows, device=device), torch.full((rows, 1), 2.0**-6, device=device)
    inputs = [gate, up if gated else None]
    if kept == "codes":
        inputs = [x if x is None else quantize_pair([x], INPUTS, None)[0] for x in inputs]
    factors = Factors(torch.rand(3, wide, device=device), torch.rand(rows, 1, device=device), scale)
    arguments = kind, dh, *inputs, weights, ends, Targets(ROWS, ROWS, ROWS), factors
    made, want = fast.activation_backward(*arguments), reference.activation_backward(*arguments)
    allowed = 0 if device == "cpu" else 2e-3
    for ours, theirs in zip((*made[0], *made[1], made[2]), (*want[0], *want[1], want[2]), strict=True):
        assert ours.shape == theirs.shape
        assert (ours.view(torch.uint8) != theirs.view(torch.uint8)).float().mean() <= allowed
    torch.testing.assert_close(made[3], want[3], rtol=1e-4, atol=1e-4)
    if not gated:
        fewer = fast.activation_backward(*arguments[:-2], Targets(rows=ROWS), factors)
        assert same(fewer[0][0], made[0][0]) and fewer[1:3] == (None, None)


@pytest.mark.parametrize("gated", [True, False])
def test_gradients_stay_within_their_memory(gated, device, monkeypatch):
    allocate, memory = torch.empty, []

    def guarded(*size, **options):
        """Return memory that others' follows, 64 rows of it."""
        shape = torch.Size(size[0] if isinstance(size[0], (tuple, list, torch.Size)) else size)
        whole = allocate(shape.numel() + 64 * max(shape[1:].numel(), 1), **options)
        whole.view(torch.uint8).fill_(0x5A)
        memory.append((whole, shape.numel()))
        return whole[: shape.numel()].view(shape)

    rows, width = 12, 48
    ends = torch.tensor([3, 3, rows], device=device).int()
    dh, gate, up = torch.randn(3, rows, width, device=device)
    fold, ones = torch.rand(3, 2 * width if gated else width, device=device), torch.ones(rows, 1, device=device)
    inputs, targets = (dh, gate, up if gated else None), Targets(ROWS, ROWS, ROWS)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", guarded)
        made = fast.activation_backward("silu", *inputs, ones[:, 0], ends, targets, Factors(fold, ones, ones))
    assert made[3].shape == (rows,) and any(whole.data_ptr() == made[3].data_ptr() for whole, _ in memory)
    assert all(bool((whole.view(torch.uint8)[size * whole.element_size() :] == 0x5A).all()) for whole, size in memory)


@pytest.mark.parametrize("counts", [[5], [16, 0, 33], [0, 0, 7, 1]], ids=str)
def test_rows_read_through_their_source(counts, device):
    ends = torch.tensor(counts, device=device).cumsum(0).int()
    x = torch.randn(11, 48, device=device)
    source = torch.randint(11, (sum(counts),), device=device).int()
    folds = torch.rand(len(counts), 48, device=device), torch.rand(sum(counts), 1, device=device)
    made = fast_groups.quantize_groups(x, ends, ROWS, ROWS, *folds, source)
    want = reference_groups.quantize_groups(x[source], ends, ROWS, ROWS, *folds)
    for ours, theirs in zip(made, want, strict=True):
        assert same(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    codes = x.to(torch.float8_e4m3fn)
    expected = reference_groups.transpose_groups(codes.view(torch.uint8)[source].view(codes.dtype), ends)
    assert same(fast_groups.transpose_groups(codes, ends, source), expected)

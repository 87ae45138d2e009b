"""Triton's passes over groups against the loop over experts, bit for bit."""

import pytest
import torch

from octavo.kernels.grouped import reference
from octavo.kernels.grouped import triton as fast
from octavo.kernels.quant_spec import QuantSpec

pytestmark = pytest.mark.usefixtures("loops_with_bounds")

ROW = QuantSpec("e4m3", "row", "power_of_two")
COUNTS = [[5], [16, 0, 33], [0, 0, 7, 1], [70, 3]]
counts = pytest.mark.parametrize("counts", COUNTS, ids=str)


def ends_of(counts: list[int], device: str) -> torch.Tensor:
    return torch.tensor(counts, device=device).cumsum(0).int()


@pytest.mark.parametrize(
    ("counts", "cols", "scaling"),
    [
        ([5], 16, "float32"),
        ([16, 0, 33], 100, "power_of_two"),
        ([0, 0, 7, 1], 16, "power_of_two"),
        ([70, 3], 48, "float32"),
    ],
)
def test_codes_bit_for_bit(counts, cols, scaling, device):
    ends, tokens = ends_of(counts, device), sum(counts)
    x = (torch.randn(tokens, cols, device=device) * torch.logspace(-3, 3, tokens, device=device)[:, None]).bfloat16()
    x[0, 0], x[-1, 1], x[-1, 2] = torch.nan, torch.inf, 0.0
    target = QuantSpec("e4m3", "row", scaling)
    folds = torch.rand(len(counts), cols, device=device).exp2(), torch.rand(tokens, 1, device=device)
    for rows, columns, fold in ((target, target, folds), (target, None, (None, None)), (None, target, (None, None))):
        made = fast.quantize_groups(x, ends, rows, columns, *fold)
        want = reference.quantize_groups(x, ends, rows, columns, *fold)
        for ours, theirs in zip(made, want, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                assert torch.equal(ours[1], theirs[1])
                assert torch.equal(ours[0].view(torch.uint8), theirs[0].view(torch.uint8))


def test_ends_may_be_a_row_of_those_of_several_layers(device):
    """The element before them, the number of tokens of the layer before, is not a start."""
    ends = ends_of([150, 0, 50], device).repeat(2, 1)[1]
    x = torch.randn(200, 16, device=device)
    made, want = (module.quantize_groups(x, ends, ROW, ROW, None, None) for module in (fast, reference))
    for ours, theirs in zip(made, want, strict=True):
        assert torch.equal(ours[0].view(torch.uint8), theirs[0].view(torch.uint8))
        assert torch.equal(ours[1], theirs[1])


@counts
def test_every_byte_arrives(counts, device):
    ends = ends_of(counts, device)
    codes = torch.randint(0, 256, (sum(counts), 24), dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    made, want = fast.transpose_groups(codes, ends), reference.transpose_groups(codes, ends)
    assert torch.equal(made.view(torch.uint8), want.view(torch.uint8))

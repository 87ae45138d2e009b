"""Triton's norms against their reference: statistics and y to FP32 rounding, codes one apart in 1 of 10,000."""

import pytest
import torch

from octavo.kernels.norm import KEPT, reference
from octavo.kernels.norm import triton as fused
from octavo.kernels.quant_spec import QuantSpec, laid_out
from octavo.numerics import E4M3, Quantized, quantize

pytestmark = pytest.mark.usefixtures("loops_with_bounds")

EPS = 1e-5
ROW = QuantSpec("e4m3", "row", "power_of_two")
TARGETS = [
    ROW,
    QuantSpec("e5m2", "row", "float32"),
    QuantSpec("e4m3", "1x128", "power_of_two"),
    QuantSpec("e4m3", "1x128", "float32"),
]
WHOLE = [
    QuantSpec("int8", "row", "float32", rotation=256),
    QuantSpec("int8", "row", "power_of_two", rotation=-64),
    QuantSpec("int8", "row", "float32"),
    QuantSpec("e4m3", "row", "power_of_two", rotation=64),
]
"""Targets of which one program holds a whole row: of `rotated`, by Sylvester's matrices, not rotated, in FP8."""
SHAPES = [(1, 128), (5, 1), (33, 96), (40, 300), (3, 3000)]
STEP = {torch.float32: 4e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""One unit in the last place, relative: what another order of FP32 sums may turn a rounding by."""

every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
both_norms = pytest.mark.parametrize("centred", [False, True], ids=["rms", "layer"])


def matrix(shape: tuple[int, int], device: str) -> torch.Tensor:
    return torch.randn(shape, device=device) * torch.exp(torch.randn(shape[0], 1, device=device)) + 0.3


def order(codes: torch.Tensor) -> torch.Tensor:
    """Number the codes from the lowest to the highest, so that neighbours differ by one."""
    if codes.dtype == torch.int8:
        return codes.int()
    bits = codes.view(torch.uint8).int()
    return torch.where(bits < 128, bits, 128 - bits)


def assert_same_codes(got: Quantized, want: Quantized) -> None:
    assert got.codes.shape == want.codes.shape and got.scale.shape == want.scale.shape
    torch.testing.assert_close(got.scale, want.scale, rtol=1e-6, atol=0)
    apart = (order(got.codes) - order(want.codes)).abs()
    assert int(apart.max()) <= 1
    assert int((apart > 0).sum()) <= -(-apart.numel() // 10_000)


def assert_close(got: torch.Tensor, want: torch.Tensor, size: float = 1.0) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=STEP[want.dtype], atol=4e-6 * size)
    if want.dtype != torch.float32:  # where the sums agree, so does the rounding: most must be equal
        assert float((got != want).float().mean()) < 0.01 or got.numel() < 100


@pytest.mark.covering(1)
@every_shape
@both_norms
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_codes(shape, centred, target, device):
    x, weight, bias = matrix(shape, device).bfloat16(), torch.randn(shape[1], device=device), None
    arguments = (x, weight, bias, EPS, target, centred)
    _, quantized, rstd, mean, *_ = fused.forward(*arguments)
    _, want, want_rstd, want_mean, *_ = reference.forward(*arguments)
    assert_same_codes(quantized, want)
    assert_close(rstd, want_rstd, float(want_rstd.max()))
    assert (mean is None) == (want_mean is None)
    if mean is not None:
        assert_close(mean, want_mean)


@pytest.mark.covering(1)
@every_shape
@both_norms
@pytest.mark.parametrize("target", [*TARGETS[:2], *WHOLE], ids=str)
@pytest.mark.parametrize("second", TARGETS[:2], ids=str)
def test_two_sets_of_codes(shape, centred, target, second, device):
    x, weight = matrix(shape, device).bfloat16(), torch.randn(shape[1], device=device)
    arguments = (x, weight, weight.flip(0) if centred else None, EPS, target, centred)
    y, quantized, *_, others, _ = fused.forward(*arguments, second)
    want, wanted, *_, wanted_others, _ = reference.forward(*arguments, second)
    assert_same_codes(quantized, wanted)
    assert_same_codes(others, wanted_others)
    assert torch.equal(y, fused.forward(*arguments)[0])  # whatever codes are written with it
    assert_close(y, want, 4.0)
    (_, alone, *_), (_, other, *_) = fused.forward(*arguments), fused.forward(*arguments[:4], second, centred)
    for got, same in ((quantized, alone), *([] if centred else [(others, other)])):  # FMAs of a layer norm differ
        assert torch.equal(got.codes.view(torch.uint8), same.codes.view(torch.uint8))
        assert torch.equal(got.scale, same.scale)


@pytest.mark.covering(1)
@every_shape
@both_norms
@pytest.mark.parametrize("dtypes", [(torch.bfloat16,) * 2, (torch.float32, torch.bfloat16), (torch.float32,) * 2])
@pytest.mark.parametrize("target", [None, ROW, WHOLE[0]], ids=str)
def test_the_norm_of_a_sum_is_that_of_what_pytorch_adds(shape, centred, dtypes, target, device):
    x, addend = (matrix((2 * shape[0], shape[1]), device).to(dtype)[::2] for dtype in dtypes)
    arguments = (torch.randn(shape[1], device=device), None, EPS, target, centred, None if target is None else ROW)
    y, codes, rstd, mean, second, total = fused.forward(x, *arguments, addend)
    alike = torch.empty_strided(x.shape, x.stride(), dtype=total.dtype, device=device).copy_(x + addend)
    want = fused.forward(alike, *arguments)
    assert total.dtype == dtypes[0] and torch.equal(total, alike)
    got = y, codes, rstd, mean, second
    if dtypes[0] == dtypes[1]:  # loads of one width: a compiler adds a row up in one order
        for one, other in zip(flat(got), flat(want), strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    else:
        assert_close(y, want[0])
        torch.testing.assert_close([*flat((rstd, mean))], [*flat(want[2:4])], rtol=4e-6, atol=4e-6)
        for one, other in ((codes, want[1]), (second, want[4])):
            assert one is other or abs(order(one.codes) - order(other.codes)).max() <= 1


def flat(made):
    """Yield the tensors of results, those of codes one by one."""
    for each in made:
        if each is not None:
            yield from each[:2] if isinstance(each, Quantized) else (each,)


@pytest.mark.covering(1)
@every_shape
@both_norms
@pytest.mark.parametrize("dtype", STEP, ids=str)
def test_the_gradient_that_passes_by_is_added_after_the_rounding(shape, centred, dtype, device):
    x, dy, passing = (matrix(shape, device).to(dtype) for _ in range(3))
    weight = torch.randn(shape[1], device=device)
    _, _, rstd, mean, *_ = reference.forward(x, weight, None, EPS, None, centred)
    dx, *sums = fused.backward(dy, x, weight, None, mean, rstd)
    got, *others = fused.backward(dy, x, weight, None, mean, rstd, passing)
    assert torch.equal(got, dx + passing) and torch.equal(others[0], sums[0])


@pytest.mark.parametrize("target", WHOLE, ids=str)
@pytest.mark.parametrize("shape", [(5, 256), (3, 3000)], ids=str)
def test_codes_of_an_rms_norm_are_the_specifications_bit_for_bit_given_its_rstd(shape, target, device):
    x, weight = matrix(shape, device).bfloat16(), torch.randn(shape[1], device=device)
    _, quantized, rstd, _, others, _ = fused.forward(x, weight, None, EPS, target, False, ROW)
    y = x.float() * rstd[:, None] * weight
    for got, spec in ((quantized, target), (others, ROW)):
        want = quantize(y, spec.fmt, spec.tile, spec.scaling, rotation=spec.rotation)
        assert torch.equal(got.codes.view(torch.uint8), want.codes.view(torch.uint8))
        assert torch.equal(got.scale, want.scale)


@pytest.mark.covering(1)
@pytest.mark.parametrize("target", WHOLE[:3], ids=str)
@pytest.mark.parametrize("width", [130, 256])
def test_a_row_that_is_not_finite_has_no_scale_in_int8_and_leaves_others_alone(target, width, device):
    x = matrix((6, width), device)
    broken = x.clone()
    broken[2, 7], broken[4, 9] = torch.nan, torch.inf
    (_, got, *_, others, _), (_, want, *_) = (
        fused.forward(v, None, None, EPS, target, False, ROW) for v in (broken, x)
    )
    finite = [0, 1, 3, 5]
    assert bool(got.scale[[2, 4]].isnan().all()) and not got.codes[[2, 4]].any()
    assert bool(others.codes[2].float().isnan().all())
    assert torch.equal(got.codes[finite], want.codes[finite]) and torch.equal(got.scale[finite], want.scale[finite])


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", STEP, ids=str)
@both_norms
@pytest.mark.parametrize("affine", [False, True], ids=["plain", "affine"])
def test_y(dtype, centred, affine, device):
    x = matrix((21, 200), device).to(dtype)
    weight, bias = (torch.randn(200, device=device).to(dtype) if affine else None for _ in range(2))
    for target in (None, ROW):
        arguments = (x, weight, bias if centred else None, EPS, target, centred)
        assert_close(fused.forward(*arguments)[0], reference.forward(*arguments)[0], 4.0)


@both_norms
def test_rows_may_lie_apart_or_across(centred, device):
    wide, narrow = matrix((20, 400), device), matrix((300, 20), device)
    for x in (wide[:, 50:350], narrow.t()):
        y, quantized, *_ = fused.forward(x, None, None, EPS, ROW, centred)
        want, wanted, *_ = reference.forward(x, None, None, EPS, ROW, centred)
        assert_close(y, want, 4.0)
        assert_same_codes(quantized, wanted)


def test_rule_3_nan_stays_in_its_row(device):
    x = matrix((6, 200), device)
    x[2, 7], x[4, 9] = torch.nan, torch.inf
    arguments = (None, None, EPS, TARGETS[2], False)
    y, quantized, *_ = fused.forward(x, *arguments)
    want, wanted, *_ = reference.forward(x, *arguments)
    assert torch.equal(y.isnan(), want.isnan()) and bool(y[2].isnan().all())
    assert torch.equal(quantized.codes.float().isnan(), wanted.codes.float().isnan())
    assert bool((quantized.scale[[2, 4]] == 2.0**-126).all())
    assert_same_codes(
        Quantized(quantized.codes[[0, 1, 3, 5]], quantized.scale[[0, 1, 3, 5]], quantized.granularity),
        Quantized(wanted.codes[[0, 1, 3, 5]], wanted.scale[[0, 1, 3, 5]], wanted.granularity),
    )


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_an_infinite_weight_gives_nan_and_decides_no_scale(target, device):
    x, weight = matrix((4, 200), device), torch.ones(200, device=device)
    weight[7], weight[150] = torch.inf, -torch.inf
    arguments = (x, weight, None, EPS, target, False)
    (_, quantized, *_), (_, wanted, *_) = fused.forward(*arguments), reference.forward(*arguments)
    there = wanted.codes.float().isnan()
    assert torch.equal(quantized.codes.float().isnan(), there) and int(there.sum()) == 8
    torch.testing.assert_close(quantized.scale, wanted.scale, rtol=1e-6, atol=0)


def test_zeros_take_the_smallest_scale(device):
    _, quantized, rstd, *_ = fused.forward(torch.zeros(3, 130, device=device), None, None, EPS, ROW, False)
    assert bool((quantized.scale == 2.0**-126).all()) and not quantized.codes.float().any()
    torch.testing.assert_close(rstd, torch.full_like(rstd, EPS**-0.5))


@pytest.mark.covering(1)
@every_shape
@both_norms
@pytest.mark.parametrize("affine", [False, True], ids=["plain", "affine"])
def test_gradients(shape, centred, affine, device):
    x, dy = matrix(shape, device), torch.randn(shape, device=device)
    weight, bias = (torch.randn(shape[1], device=device) if affine else None for _ in range(2))
    _, _, rstd, mean, *_ = reference.forward(x, weight, None, EPS, None, centred)
    arguments = (dy, x, weight, bias if centred else None, mean, rstd)
    got, want = fused.backward(*arguments), reference.backward(*arguments)
    size = 1 + float(rstd.max()) * (float(weight.abs().max()) if affine else 1.0)
    assert_close(got[0], want[0], size)
    for mine, theirs in zip(got[1:], want[1:], strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=2e-5 * shape[0] ** 0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_in_16_bits_with_rows_apart(dtype, device):
    x, dy = (matrix((50, 300), device).to(dtype)[:, 20:220] for _ in range(2))
    weight = torch.randn(200, device=device).to(dtype)
    _, _, rstd, mean, *_ = reference.forward(x, weight, None, EPS, None, True)
    arguments = (dy, x, weight, weight, mean, rstd)
    got, want = fused.backward(*arguments), reference.backward(*arguments)
    assert_close(got[0], want[0], 1 + float(rstd.max()))
    for mine, theirs in zip(got[1:], want[1:], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=STEP[dtype], atol=1e-4)


def test_programs_walk_over_every_row_once(device, monkeypatch):
    x, weight = matrix((37, 130), device), torch.ones(130, device=device)
    _, _, rstd, *_ = reference.forward(x, weight, None, EPS, None, False)
    want = reference.backward(x, x, weight, None, None, rstd)
    monkeypatch.setattr(fused, "SUM", fused.SUM._replace(height=2))
    for programs in (1, 2, 100):
        monkeypatch.setattr(fused, "_programs", lambda device, elements, n=programs: n)
        got = fused.backward(x, x, weight, None, None, rstd)
        assert_close(got[0], want[0], 10.0)
        torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
@both_norms
@pytest.mark.parametrize("cols", [4096, 5120, 14336, 16384])
def test_the_widths_of_real_models(cols, centred):
    x, weight = matrix((700, cols), "cuda").bfloat16(), torch.randn(cols, device="cuda").bfloat16()
    for target in TARGETS:
        arguments = (x, weight, None, EPS, target, centred)
        y, quantized, rstd, mean, *_ = fused.forward(*arguments)
        want, wanted, *_ = reference.forward(*arguments)
        assert_same_codes(quantized, wanted)
        assert_close(y, want, 4.0)
    for target in WHOLE:
        (_, quantized, *_, others), (_, wanted, *_, wanted_others) = (
            each.forward(x, weight, None, EPS, target, centred, ROW) for each in (fused, reference)
        )
        assert_same_codes(quantized, wanted)
        assert_same_codes(others, wanted_others)
    arguments = (x.flip(1), x, weight, weight if centred else None, mean, rstd)
    got, want = fused.backward(*arguments), reference.backward(*arguments)
    assert_close(got[0], want[0], 1 + 4 * float(rstd.max()))
    torch.testing.assert_close(got[1], want[1], rtol=STEP[weight.dtype], atol=1e-2)


@pytest.mark.covering(1)
@both_norms
@pytest.mark.parametrize("shape", [(1, 128), (33, 96), (40, 300), (3, 3000)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_codes(shape, centred, dtype, device):
    x, dy = matrix(shape, device), torch.randn(shape, device=device).to(dtype)
    weight = torch.randn(shape[1], device=device)
    x[0, 5] = torch.nan
    codes = laid_out(quantize(x, E4M3, KEPT.tile))
    _, _, rstd, mean, *_ = reference.forward(x.nan_to_num(), weight, None, EPS, None, centred)
    arguments = (dy, codes, weight, weight if centred else None, mean, rstd)
    got, want = fused.backward(*arguments), reference.backward(*arguments)
    assert got[0].dtype == dtype and torch.equal(got[0].isnan(), want[0].isnan()) and bool(want[0][0].isnan().all())
    assert_close(got[0][1:], want[0][1:], 1 + float(rstd.max()) * float(weight.abs().max()))
    for mine, theirs in zip(got[1:], want[1:], strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=2e-5 * shape[0] ** 0.5, equal_nan=True)

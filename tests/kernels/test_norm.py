"""The norm contract: what comes out for what is asked, in eager mode and in compiled code, and what is refused."""

import itertools

import pytest
import torch

from octavo.errors import ConfigError, UnsupportedError
from octavo.kernels.norm import (
    KEPT,
    normalise,
    normalise_backward,
    normalise_sum,
    reference,
    unsupported_reason,
)
from octavo.kernels.quant_spec import QuantSpec
from octavo.kernels.quantize import quantize
from octavo.kernels.runtime import ledger
from octavo.numerics import dequantize

EPS = 1e-5
ROW = QuantSpec("e4m3", "row", "power_of_two")
BLOCK = QuantSpec("e5m2", "1x128", "float32")
ROTATED = QuantSpec("int8", "row", "float32", rotation=64)


def equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    one_byte = a.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    return a.dtype == b.dtype and (
        torch.equal(a.view(torch.uint8), b.view(torch.uint8)) if one_byte else torch.equal(a, b)
    )


@pytest.mark.parametrize("target", [None, ROW, BLOCK], ids=str)
@pytest.mark.parametrize("rows", [0, 9])
def test_what_is_asked_for_comes_out_and_nothing_else(target, rows):
    x, weight = torch.randn(rows, 200).bfloat16(), torch.randn(200)
    for bias, centred in ((None, False), (torch.randn(200), True)):
        made = normalise(x, weight, bias, EPS, centred=centred, target=target)
        want = reference.forward(x, weight, bias, EPS, target, centred)
        for mine, theirs in zip((made.y, made.rstd, made.mean), (want[0], *want[2:4]), strict=True):
            assert equal(mine, theirs)
        assert (made.quantized is None) == (target is None)
        if target is not None:
            assert made.quantized.granularity == target.tile and made.quantized.codes.dtype == target.fmt.dtype
            assert equal(made.quantized.codes, want[1].codes) and equal(made.quantized.scale, want[1].scale)


@pytest.mark.parametrize("rows", [0, 9])
@pytest.mark.parametrize("centred", [False, True], ids=["rms", "layer"])
def test_both_sets_of_codes_are_those_that_the_specification_makes_of_y(rows, centred):
    x, weight = torch.randn(rows, 192), torch.randn(192)
    made = normalise(x, weight, weight if centred else None, EPS, centred=centred, target=ROTATED, second=ROW)
    for got, target in ((made.quantized, ROTATED), (made.second, ROW)):
        want = quantize(made.y, *target[:3], rotation=target.rotation)  # y is FP32: it is not rounded
        assert got.granularity == target.tile and equal(got.codes, want.codes) and equal(got.scale, want.scale)
    assert normalise(x, weight, None, EPS, target=ROTATED).second is None


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("centred", [False, True], ids=["rms", "layer"])
def test_the_norm_of_a_sum_is_that_of_what_pytorch_adds(dtypes, centred):
    x, addend = (torch.randn(9, 192).to(dtype) for dtype in dtypes)
    weight, options = torch.randn(192), {"centred": centred, "target": ROTATED, "second": ROW}
    made = normalise_sum(x, addend, weight, weight if centred else None, EPS, **options)
    want = normalise(x + addend, weight, weight if centred else None, EPS, **options)
    assert equal(made.sum, x + addend) and equal(made.y, want.y) and equal(made.rstd, want.rstd)
    for got, wanted in ((made.quantized, want.quantized), (made.second, want.second)):
        assert equal(got.codes, wanted.codes) and equal(got.scale, wanted.scale)
    assert (made.mean is not None) == centred and normalise_sum(x, addend, weight, None, EPS).quantized is None
    assert want.sum is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_gradient_that_passes_by_is_added_as_autograd_adds_it(dtype):
    x, dy, passing = (torch.randn(9, 192).to(dtype) for _ in range(3))
    made = normalise(x, x[0], None, EPS)
    alone = normalise_backward(dy, x, x[0], None, None, made.rstd)
    dx, dweight, _ = normalise_backward(dy, x, x[0], None, None, made.rstd, passing)
    assert equal(dx, alone[0] + passing) and equal(dweight, alone[1])


@pytest.mark.parametrize("rows", [0, 9])
def test_gradients_come_in_the_dtypes_of_what_they_are_of(rows):
    x, weight, bias = torch.randn(rows, 40).bfloat16(), torch.randn(40).half(), torch.randn(40)
    dy = torch.randn(rows, 40).bfloat16()
    _, _, rstd, mean, *_ = normalise(x, weight, bias, EPS, centred=True)
    dx, dweight, dbias = normalise_backward(dy, x, weight, bias, mean, rstd)
    want = reference.backward(dy, x, weight, bias, mean, rstd)
    assert equal(dx, want[0]) and equal(dweight, want[1].half()) and equal(dbias, want[2])
    assert normalise_backward(dy, x, None, None, mean, rstd)[1:] == (None, None)
    assert normalise_backward(dy, x, weight, None, mean, rstd)[2] is None
    arguments = dy, x, weight, None, None, rstd
    assert equal(normalise_backward(*arguments)[0], reference.backward(*arguments)[0])


@pytest.mark.parametrize(
    ("target", "why"),
    [
        (QuantSpec("e4m3", "tensor", "float32"), "row and 1x128 scales only, not 'tensor'"),
        (QuantSpec("e4m3", "128x128", "float32"), "row and 1x128 scales only, not '128x128'"),
        (QuantSpec("e4m3", "row", "float32", "stochastic"), "rounds to nearest only"),
        (QuantSpec("int8", "1x128", "float32"), "INT8 and rotated codes have row scales only, not '1x128'"),
    ],
    ids=str,
)
def test_refused_targets(target, why):
    assert unsupported_reason(ROW) is None and why in unsupported_reason(target)
    x = torch.randn(4, 8)
    with pytest.raises(UnsupportedError, match="Quantise y after it"):
        normalise(x, None, None, EPS, target=target)
    for second in (target, BLOCK, ROTATED):
        with pytest.raises(UnsupportedError, match="Quantise y after it"):
            normalise(x, None, None, EPS, target=ROW, second=second)


def test_shapes_that_do_not_fit():
    x, row = torch.randn(4, 8), torch.randn(4)
    with pytest.raises(ConfigError, match=r"shape \(2, 4, 8\): flatten"):
        normalise(torch.randn(2, 4, 8), None, None, EPS)
    with pytest.raises(ConfigError, match=r"weight has shape \(4,\), but x \(4, 8\) wants \(8,\)"):
        normalise(x, row, None, EPS)
    with pytest.raises(ConfigError, match="bias"):
        normalise(x, None, row, EPS)
    with pytest.raises(ConfigError, match="dy"):
        normalise_backward(x.t(), x, None, None, None, row)
    with pytest.raises(ConfigError, match="passing"):
        normalise_backward(x, x, None, None, None, row, x.t())
    with pytest.raises(ConfigError, match="addend"):
        normalise_sum(x, x.t(), None, None, EPS)


def test_the_operators_are_well_formed():
    x, weight, rows = torch.randn(200, 5).bfloat16().t(), torch.randn(200), torch.rand(5)
    check = torch.library.opcheck
    for target in (None, BLOCK):
        for bias in (None, weight):
            arguments = x, weight, bias, EPS, target, bias is not None, target and ROW
            check(normalise.operator, normalise.encode(*arguments), test_utils="test_faketensor")
            of_sum = normalise_sum.encode(x, weight.expand(5, 200), *arguments[1:])
            check(normalise_sum.operator, of_sum, test_utils="test_faketensor")
    for parameter, mean in itertools.product((None, weight.half()), (None, rows)):
        arguments = normalise_backward.encode(x, x, parameter, None, mean, rows, None if parameter is None else x)
        check(normalise_backward.operator, arguments, test_utils="test_faketensor")


def test_compiled_code_gives_the_same():
    x, weight = torch.randn(5, 200).bfloat16(), torch.randn(200)

    def both(x):
        made = normalise_sum(x, weight.bfloat16().expand(5, 200), weight, None, EPS, target=ROTATED, second=ROW)
        return (
            made.y,
            (*made.quantized[:2], *made.second[:2]),
            normalise_backward(made.y, made.sum, weight, None, None, made.rstd, x)[:2],
        )

    eager, compiled = both(x), torch.compile(both, backend="aot_eager", fullgraph=True)(x)
    assert equal(eager[0], compiled[0]) and all(map(equal, eager[1], compiled[1]))
    assert all(equal(a, b) for a, b in zip(eager[2], compiled[2], strict=True))


@pytest.mark.gpu
def test_rows_too_long_for_a_program_are_written_down():
    x = torch.randn(3, 20000, device="cuda")
    with ledger.record() as record:
        made = normalise(x, None, None, EPS, target=ROW)
    assert record.fallbacks == ["rms_norm ran as reference: rows of 20000 elements are longer than 16384"]
    torch.testing.assert_close(made.y, torch.nn.functional.rms_norm(x, (20000,), None, EPS))


@pytest.mark.gpu
def test_a_gpu_runs_the_kernels():
    x = torch.randn(300, 4096, device="cuda").bfloat16()
    with ledger.record() as record:
        made = normalise(x, x[0], None, EPS, target=ROTATED, second=ROW)
        normalise_backward(x, x, x[0], None, None, made.rstd)
    assert not record.fallbacks
    assert made.y.is_cuda and made.quantized.codes.shape == made.second.codes.shape == x.shape


@pytest.mark.parametrize("centred", [False, True], ids=["rms", "layer"])
def test_the_backward_reads_codes_as_their_values(centred):
    x, dy, weight = torch.randn(37, 300), torch.randn(37, 300), torch.randn(300)
    bias = weight if centred else None
    made = normalise(x, weight, bias, EPS, centred=centred)
    codes = quantize(x, *KEPT)

    def gradients(x):
        return normalise_backward(dy, x, weight, bias, made.mean, made.rstd)

    assert all(equal(a, b) for a, b in zip(gradients(codes), gradients(dequantize(codes)), strict=True))
    copied = codes._replace(scale=codes.scale.contiguous())  # as a hook may hand it back
    assert all(equal(a, b) for a, b in zip(gradients(codes), gradients(copied), strict=True))
    dy = dy.bfloat16()
    assert gradients(codes)[0].dtype == torch.bfloat16
    with pytest.raises(UnsupportedError, match="is kept as"):
        gradients(quantize(x, *ROW))


def test_the_backward_of_codes_is_well_formed():
    x, weight, rows = torch.randn(5, 200).bfloat16(), torch.randn(200), torch.rand(5)
    codes = quantize(x, *KEPT)
    for bias, mean in ((None, None), (weight, rows)):
        arguments = normalise_backward.encode(x, codes, weight, bias, mean, rows, None)
        torch.library.opcheck(normalise_backward.operator, arguments, test_utils="test_faketensor")

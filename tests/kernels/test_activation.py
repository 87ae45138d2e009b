"""The activation contract, against the formula in FP64 with PyTorch's own gradients, quantised by the specification."""

import pytest
import torch
import torch.nn.functional as F

from octavo.errors import ConfigError
from octavo.kernels import activation as contract
from octavo.kernels.activation import (
    INPUTS,
    KINDS,
    Factors,
    Targets,
    activate,
    activate_plain,
    activation_backward,
    activation_backward_plain,
)
from octavo.kernels.quant_spec import QuantSpec, laid_out
from octavo.numerics import dequantize, quantize
from octavo.numerics.quantize import to_codes

ROW = QuantSpec("e4m3", "row", "power_of_two")
COLUMN = QuantSpec("e4m3", "column", "power_of_two")
TARGETS = [
    ROW,
    QuantSpec("e5m2", "tensor", "float32"),
    QuantSpec("e4m3", "1x128", "power_of_two"),
    QuantSpec("e4m3", "128x128", "float32"),
    QuantSpec("e4m3", "column", "float32"),
    QuantSpec("e4m3", "1x32", "power_of_two"),
]
FORMULAS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}


def inputs(rows=70, cols=130, gated=True, dtype=torch.bfloat16):
    """dh, gate, up; gate and up lie side by side, as a stacked GEMM leaves them.

    Not below -4: there 1 + erf cancels in FP32, in PyTorch's GELU too, and E5M2 is fine enough to show it.
    """
    both = (torch.randn(rows, 2 * cols) * 2).clamp(min=-4).to(dtype)
    dh = (torch.randn(rows, cols) * torch.logspace(-4, 1, rows)[:, None]).to(dtype)
    return dh, both[:, :cols], both[:, cols:] if gated else None


def exact(kind, dh, gate, up):
    """h, d gate, d up in FP64, by autograd."""
    leaves = [x.double().requires_grad_() for x in (gate, up) if x is not None]
    h = FORMULAS[kind](leaves[0]) * (leaves[1] if up is not None else 1)
    h.backward(dh.double())
    return h.detach(), *(leaf.grad for leaf in leaves)


def codes_apart(a, b):
    """How many elements differ, and by how many codes at most. There are no NaN here."""
    a, b = (x.contiguous().view(torch.uint8).int() for x in (a, b))
    a, b = (torch.where(x > 127, 128 - x, x) for x in (a, b))
    distance = (a - b).abs()
    return int((distance > 0).sum()), int(distance.max())


def check(got, expected, target):
    """FP32 arithmetic may land on the other side of a rounding boundary: on one element of these small matrices.

    Or codes are those of the scale that came out: processors differ in the last bit of an FP32 one, which moves all.
    """
    oracle = quantize(expected.float(), target.fmt, target.tile, target.scaling)
    by_own_scale = to_codes((expected / target.tile.expand(got.scale.double(), *expected.shape)).float(), target.fmt)
    differ, by = min(codes_apart(got.codes, codes) for codes in (oracle.codes, by_own_scale))
    assert differ <= 1 and by <= 1
    assert got.codes.is_contiguous() and got.granularity == target.tile
    rtol = 0 if target.scaling == "power_of_two" else 4e-6
    torch.testing.assert_close(got.scale, oracle.scale, rtol=rtol, atol=0)


@pytest.mark.covering(2)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_codes_of_h(target, kind, gated):
    dh, gate, up = inputs(gated=gated)
    check(activate(kind, gate, up, target).hidden, exact(kind, dh, gate, up)[0], target)


@pytest.mark.covering(2)
@pytest.mark.parametrize("folded", [True, False])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_codes_of_the_gradients(target, kind, gated, folded):
    dh, gate, up = inputs(gated=gated)
    h, *parts = exact(kind, dh, gate, up)
    d = torch.cat(parts, 1)
    row_fold = torch.rand(1, d.shape[1]) if folded else None
    column_fold = torch.rand(d.shape[0], 1) if folded else None
    got = activation_backward(kind, dh, gate, up, Targets(target, target, target), Factors(row_fold, column_fold))
    check(got.rows, d * row_fold if folded else d, target)
    check(got.columns, (d * column_fold if folded else d).t(), target)
    check(got.hidden, h.t(), target)


@pytest.mark.covering(2)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_plain_gradients(dtype, kind, gated):
    dh, gate, up = inputs(gated=gated, dtype=dtype)
    h, *expected = exact(kind, dh, gate, up)
    d_gate, d_up = activation_backward_plain(kind, dh, gate, up)
    rtol = 4e-6 if dtype == torch.float32 else torch.finfo(dtype).eps  # far out, 1 - sigmoid and 1 + erf cancel
    for got, want in zip((d_gate, d_up), expected, strict=False):
        assert got.dtype == dtype and got.is_contiguous()
        torch.testing.assert_close(got.double(), want, rtol=rtol, atol=4e-6)
    assert (d_up is None) == (not gated)
    got = activate_plain(kind, gate, up)
    assert got.dtype == dtype and got.is_contiguous()
    torch.testing.assert_close(got.double(), h, rtol=rtol, atol=4e-6)


@pytest.mark.covering(2)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("kind", KINDS)
def test_with_the_forwards_scale_h_has_the_forwards_codes(kind, fmt, gated):
    dh, gate, up = inputs(gated=gated)
    gate[3] = 0
    forward = activate(kind, gate, up, ROW._replace(format=fmt)).hidden
    hidden = COLUMN._replace(format=fmt)
    got = activation_backward(kind, dh, gate, up, Targets(hidden=hidden), Factors(hidden=forward.scale)).hidden
    assert codes_apart(got.codes, forward.t().codes) == (0, 0)
    assert torch.equal(got.scale, forward.t().scale) and got.granularity == forward.t().granularity


@pytest.mark.covering(2)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_codes_of_gate_and_up_beside_those_of_h(target, dtype, gated):
    _, gate, up = inputs(gated=gated, dtype=dtype)
    hidden, kept = activate("silu", gate, up, target, keeps_inputs=True)[:2]
    expected = [activate("silu", gate, up, target).hidden]
    expected += [quantize(x, INPUTS.fmt, INPUTS.tile, INPUTS.scaling) for x in (gate, up) if x is not None]
    for got, want in zip((hidden, *kept), expected, strict=True):
        assert codes_apart(got.codes, want.codes) == (0, 0) and torch.equal(got.scale, want.scale)
        assert got.granularity == want.granularity and got.codes.is_contiguous()
    assert kept[0].scale.shape == (70, 2)  # 130 columns: the second tile has two


@pytest.mark.covering(2)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_from_codes_the_backward_is_that_of_their_values(target, kind, gated):
    dh, gate, up = inputs(gated=gated)
    codes = activate(kind, gate, up, ROW, keeps_inputs=True)[:2][1]
    values = [dequantize(x) for x in codes]
    rest = Targets(target, target, target), Factors(torch.rand(1, 130 * len(codes)), torch.rand(70, 1))
    for read in (codes, [x._replace(scale=x.scale.clone(memory_format=torch.contiguous_format)) for x in codes]):
        pair = read if gated else (read[0], None)
        made = activation_backward(kind, dh, *pair, *rest)
        expected = activation_backward(kind, dh, *(values if gated else (values[0], None)), *rest)
        for got, want in zip(made, expected, strict=True):
            assert codes_apart(got.codes, want.codes) == (0, 0) and torch.equal(got.scale, want.scale)


def test_scales_that_were_saved_and_brought_back_lie_as_kernels_read_them():
    _, gate, _ = inputs()
    codes = activate("gelu", gate, None, ROW, keeps_inputs=True)[:2][1][0]
    moved = laid_out(codes._replace(scale=codes.scale.contiguous()))
    assert moved.scale.stride() == codes.scale.stride() == (1, 70) and torch.equal(moved.scale, codes.scale)


def test_h_from_codes_saturates_where_it_was_at_the_end_of_the_range():
    # h = 21.1^2 = 445 has the scale 1. 21.1 becomes 22, whose square is 484.
    gate = torch.tensor([[21.1, 1.0]])
    hidden, codes = activate("relu2", gate, None, ROW, keeps_inputs=True)[:2]
    got = activation_backward(
        "relu2", gate, codes[0], None, Targets(hidden=COLUMN), Factors(hidden=hidden.scale)
    ).hidden
    assert dequantize(codes[0])[0, 0] == 22 and hidden.scale == 1
    assert dequantize(got).flatten().tolist() == [448, 1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("far", [100.0, 3e4, 1e10])
def test_far_from_zero_nothing_becomes_nan(far, kind):
    gate = torch.tensor([[far, -far]])
    d_gate, d_up = activation_backward_plain(kind, torch.ones(1, 2), gate, torch.ones(1, 2))
    expected = exact(kind, torch.ones(1, 2), gate, torch.ones(1, 2))
    torch.testing.assert_close(d_gate.double(), expected[1], rtol=1e-6, atol=1e-30)
    torch.testing.assert_close(d_up.double(), expected[2], rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("wanted", [("rows",), ("columns",), ("hidden",), ()])
def test_only_what_is_asked_for(wanted):
    dh, gate, up = inputs(5, 6)
    names = ("rows", "columns", "hidden")
    got = activation_backward("silu", dh, gate, up, Targets(**dict.fromkeys(wanted, ROW)))
    assert tuple(name for name in names if getattr(got, name) is not None) == wanted


@pytest.mark.parametrize("shape", [(0, 8), (3, 0)])
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_empty_matrices(target, shape):
    dh, gate, up = inputs(*shape)
    assert activate("silu", gate, up, target).hidden.codes.shape == shape
    got = activation_backward("silu", dh, gate, up, Targets(target, target, target))
    assert [x.codes.shape for x in got] == [(shape[0], 2 * shape[1]), (2 * shape[1], shape[0]), shape[::-1]]
    assert [x.scale.shape for x in got] == [target.tile.scale_shape(*x.codes.shape) for x in got]
    assert activation_backward_plain("silu", dh, gate, up)[0].shape == activate_plain("silu", gate, up).shape == shape
    hidden, codes = activate("silu", gate, up, target, keeps_inputs=True)[:2]
    assert [x.codes.shape for x in (hidden, *codes)] == [shape] * 3
    again = activation_backward("silu", dh, *codes, Targets(target, target, target))
    assert [x.codes.shape for x in again] == [x.codes.shape for x in got]


def test_operators_obey_their_schemas_and_shapes():
    dh, gate, up = inputs(6, 8)
    scale, check = activate("silu", gate, up, ROW).hidden.scale, torch.library.opcheck
    forward, backward = contract._activation, contract.activation_backward
    plain, plain_forward = contract.activation_backward_plain, contract.activate_plain
    for second in (up, None):
        check(plain_forward.operator, plain_forward.encode("gelu", gate, second))
        check(forward.operator, forward.encode("gelu", gate, second, ROW, None, ROW))
        check(plain.operator, plain.encode("gelu", dh, gate, second))
        check(forward.operator, forward.encode("gelu", gate, second, ROW, INPUTS, None))
        rest = Targets(ROW, None, COLUMN), Factors()
        check(backward.operator, backward.encode("gelu", dh, gate, second, *rest))
        codes = activate("gelu", gate, second, ROW, keeps_inputs=True)[:2][1]
        from_codes = backward.encode("gelu", dh, *codes, *[None] * (2 - len(codes)), *rest)
        # The schema's own test compares inputs in arithmetic that PyTorch does not have for FP8.
        check(backward.operator, from_codes, test_utils=("test_faketensor", "test_aot_dispatch_dynamic"))
    factors = Factors(None, torch.ones(6, 1), scale)
    check(backward.operator, backward.encode("gelu", dh, gate, up, Targets(None, ROW, COLUMN), factors))


def test_compiled_code_calls_them_whole():
    dh, gate, up = inputs(6, 8)

    def both(dh, gate, up):
        h = activate("silu", gate, up, ROW).hidden
        got = activation_backward("silu", dh, gate, up, Targets(ROW, None, COLUMN), Factors(None, h.scale, h.scale))
        kept = activate("silu", gate, up, ROW, keeps_inputs=True)[:2][1]
        from_codes = activation_backward("silu", dh, *kept, Targets(ROW, ROW))
        plain = activation_backward_plain("silu", dh, gate, up)[1]
        return h.codes, got.rows.codes, got.hidden.codes, kept[1].codes, from_codes.columns.codes, plain

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(dh, gate, up), both(dh, gate, up), strict=True):
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


def test_what_cannot_be_is_refused():
    dh, gate, up = inputs(6, 8)
    with pytest.raises(ConfigError, match=r"unknown activation 'silo'\. Did you mean 'silu'"):
        activate("silo", gate, up, ROW)
    with pytest.raises(ConfigError, match="up has shape"):
        activate("silu", gate, up[:, :4], ROW)
    with pytest.raises(ConfigError, match="dh has shape"):
        activation_backward_plain("silu", dh[:3], gate, up)
    with pytest.raises(ConfigError, match="must be a matrix"):
        activate("silu", gate[0], None, ROW)
    with pytest.raises(ConfigError, match="rounds to nearest"):
        activate("silu", gate, up, ROW._replace(rounding="stochastic"))
    with pytest.raises(ConfigError, match=r"factors.rows must be FP32 \(1, 16\)"):
        activation_backward("silu", dh, gate, up, Targets(), Factors(torch.ones(1, 8)))
    codes = activate("silu", gate, up, ROW, keeps_inputs=True)[:2][1]
    e5m2 = codes[0].codes.float().to(torch.float8_e5m2)
    for wrong in (codes[0]._replace(granularity=ROW.tile), codes[0]._replace(codes=e5m2)):
        with pytest.raises(ConfigError, match=r"gate has codes of .* the backward reads torch\.float8_e4m3fn"):
            activation_backward("silu", dh, wrong, codes[1], Targets())
    with pytest.raises(ConfigError, match="one of each"):
        activation_backward("silu", dh, codes[0], up, Targets())
    with pytest.raises(ConfigError, match=r"the scale of up must be FP32 \(6, 1\)"):
        activation_backward("silu", dh, codes[0], codes[1]._replace(scale=torch.ones(6, 2)), Targets())
    with pytest.raises(ConfigError, match="rounds to nearest"):
        activate("silu", gate, None, ROW._replace(rounding="stochastic"), keeps_inputs=True)[:2]
    with pytest.raises(ConfigError, match=r"factors\.hidden holds one scale per token"):
        activation_backward("silu", dh, gate, up, Targets(hidden=ROW), Factors(hidden=torch.ones(6, 1)))

"""Triton's activations against their definition: the same scales, and codes that are the same but for one rounding."""

import pytest
import torch

from octavo.kernels.activation import INPUTS, KINDS, reference
from octavo.kernels.quant_spec import QuantSpec
from octavo.numerics import dequantize

fused = pytest.importorskip("octavo.kernels.activation.triton")
Shape = pytest.importorskip("octavo.kernels.triton.shape").Shape

ROW = QuantSpec("e4m3", "row", "power_of_two")
COLUMN = QuantSpec("e4m3", "column", "power_of_two")
TARGETS = [
    ROW,
    COLUMN,
    QuantSpec("e5m2", "tensor", "float32"),
    QuantSpec("e4m3", "tensor", "power_of_two"),
    QuantSpec("e4m3", "1x128", "power_of_two"),
    QuantSpec("e4m3", "128x1", "float32"),
    QuantSpec("e4m3", "128x128", "float32"),
]


@pytest.fixture(autouse=True)
def tiles_for_the_interpreter(device, monkeypatch):
    """Tiles that suit small matrices in the interpreter: several programs of several steps, but not many."""
    if device == "cpu":
        for name in ("FORWARD_SEARCH", "BACKWARD_SEARCH"):
            monkeypatch.setattr(fused, name, Shape(16, 128, warps=4, steps=8))
        for name in ("FORWARD_WRITE", "BACKWARD_WRITE", "PLAIN"):
            monkeypatch.setattr(fused, name, Shape(32, 128, warps=4))


def inputs(device, rows=40, cols=130, gated=True, dtype=torch.bfloat16):
    """dh, gate, up; gate and up lie side by side, as a stacked GEMM leaves them. The second row of gates is zero."""
    both = (torch.randn(rows, 2 * cols) * 2).clamp(min=-4).to(dtype)
    both[1, :cols] = 0
    dh = (torch.randn(rows, cols) * torch.logspace(-4, 1, rows)[:, None]).to(dtype)
    dh, both = dh.to(device), both.to(device)
    return dh, both[:, :cols], both[:, cols:] if gated else None


def codes_apart(a, b):
    """How many elements differ, and by how many codes at most. NaN, of either sign, is far from all but NaN."""

    def place(x):
        codes = x.contiguous().view(torch.uint8).int()
        return torch.where(x.float().isnan(), 999, torch.where(codes > 127, 128 - codes, codes))

    distance = (place(a) - place(b)).abs()
    return int((distance > 0).sum()), int(distance.max())


def check(got, expected, allowed=1):
    if expected is None:
        assert got is None
        return
    assert got.granularity == expected.granularity and got.codes.shape == expected.codes.shape
    differ, by = codes_apart(got.codes, expected.codes)
    assert differ <= allowed and by <= 1
    # FP32 scales follow the last bit of exp and erf; powers of two do not.
    torch.testing.assert_close(got.scale, expected.scale, rtol=2e-6, atol=0)
    assert got.codes.is_contiguous()


@pytest.mark.covering(1)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_codes_of_h(target, gated, device):
    _, gate, up = inputs(device, gated=gated)
    check(fused.activate("silu", gate, up, target)[0], reference.activate("silu", gate, up, target)[0])


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kinds_and_dtypes(dtype, kind, device):
    dh, gate, up = inputs(device, 6, 200, dtype=dtype)
    check(fused.activate(kind, gate, up, ROW)[0], reference.activate(kind, gate, up, ROW)[0])
    arguments = (kind, dh, gate, up, (ROW, ROW, ROW), (None, None, None))
    for got, expected in zip(
        fused.activation_backward(*arguments), reference.activation_backward(*arguments), strict=True
    ):
        check(got, expected)
    plain = fused.activation_backward_plain(kind, dh, gate, up)
    for got, expected in zip(plain, reference.activation_backward_plain(kind, dh, gate, up), strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got, expected, rtol=max(4e-6, torch.finfo(dtype).eps), atol=1e-6)
    for second in (up, None):
        h, expected = fused.activate_plain(kind, gate, second), reference.activate_plain(kind, gate, second)
        assert h.dtype == dtype and h.is_contiguous()
        torch.testing.assert_close(h, expected, rtol=max(4e-6, torch.finfo(dtype).eps), atol=1e-6)


@pytest.mark.covering(1)
@pytest.mark.parametrize("folded", [True, False])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_codes_of_the_gradients(target, gated, folded, device):
    # Scales of tiles need more than one tile; 70 is no multiple of four, so codes are not packed into words.
    rows, cols = (132, 128 if gated else 256) if "128" in target.granularity else (70, 130)
    dh, gate, up = inputs(device, rows, cols, gated)
    assert fused.unsupported_reason(cols, gated, rows=target, columns=target, hidden=target) is None
    n = cols * (1 + gated)
    folds = (torch.rand(1, n, device=device), torch.rand(rows, 1, device=device)) if folded else (None, None)
    arguments = ("silu", dh, gate, up, (target, target, target), (*folds, None))
    for got, expected in zip(
        fused.activation_backward(*arguments), reference.activation_backward(*arguments), strict=True
    ):
        check(got, expected, allowed=3)  # of up to 67,584


@pytest.mark.covering(2)
@pytest.mark.parametrize("rows", [None, ROW, QuantSpec("e4m3", "tensor", "power_of_two")], ids=str)
@pytest.mark.parametrize("columns", [None, ROW, QuantSpec("e4m3", "1x128", "power_of_two")], ids=str)
@pytest.mark.parametrize("hidden", [None, ROW], ids=str)
def test_targets_of_one_matrix_may_differ_or_be_missing(rows, columns, hidden, device):
    dh, gate, up = inputs(device, 40, 70)
    arguments = ("silu", dh, gate, up, (rows, columns, hidden), (None, None, None))
    for got, expected in zip(
        fused.activation_backward(*arguments), reference.activation_backward(*arguments), strict=True
    ):
        check(got, expected)


@pytest.mark.covering(1)
@pytest.mark.filterwarnings("ignore:(invalid|overflow)")
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("kind", KINDS)
def test_with_the_forwards_scale_h_has_the_forwards_codes(kind, fmt, gated, device):
    dh, gate, up = inputs(device, 10, 130, gated)
    gate[3, 5], gate[4, 6] = torch.nan, torch.inf
    forward = fused.activate(kind, gate, up, ROW._replace(format=fmt))[0]
    hidden = COLUMN._replace(format=fmt)
    *_, got = fused.activation_backward(kind, dh, gate, up, (ROW, ROW, hidden), (None, None, forward.scale))
    assert codes_apart(got.codes, forward.t().codes) == (0, 0)
    assert torch.equal(got.scale, forward.t().scale) and got.granularity == forward.t().granularity


def test_the_scale_of_h_is_taken_as_it_is_given(device):
    dh, gate, up = inputs(device, 10)
    scale = reference.activate("silu", gate, up, ROW)[0].scale * 4
    arguments = ("silu", dh, gate, up, (None, None, COLUMN), (None, None, scale))
    got, expected = fused.activation_backward(*arguments)[2], reference.activation_backward(*arguments)[2]
    assert torch.equal(got.scale, scale.t())
    check(got, expected)


@pytest.mark.covering(1)
@pytest.mark.filterwarnings("ignore:(invalid|overflow)")  # of the interpreter, which is NumPy
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", [ROW, COLUMN, QuantSpec("e4m3", "128x128", "power_of_two")], ids=str)
def test_nan_and_infinities_stay_where_they_are(target, kind, device):
    dh, gate, up = inputs(device, 20, 128)
    gate[0, 0], up[1, 1], dh[2, 2], gate[3, 3], up[4, 4] = torch.nan, torch.nan, torch.nan, torch.inf, -torch.inf
    gate[5, 5], dh[6, 6], gate[7], gate[8, 0], gate[8, 1] = -torch.inf, torch.inf, torch.nan, -3e4, 3e4
    check(fused.activate(kind, gate, up, target)[0], reference.activate(kind, gate, up, target)[0])
    arguments = (kind, dh, gate, up, (target, target, target), (None, None, None))
    for got, expected in zip(
        fused.activation_backward(*arguments), reference.activation_backward(*arguments), strict=True
    ):
        check(got, expected)


def test_long_rows_are_searched_first(device, monkeypatch):
    _, gate, up = inputs(device, 20, 300)
    whole = fused.activate("silu", gate, up, ROW)[0]
    monkeypatch.setattr(fused, "LONGEST_ROW", 256)
    searched = fused.activate("silu", gate, up, ROW)[0]
    assert codes_apart(whole.codes, searched.codes) == (0, 0) and torch.equal(whole.scale, searched.scale)


def test_maxima_are_those_of_what_is_written(device):
    """So nothing but the largest element has the largest code, and nothing saturates."""
    dh, gate, up = inputs(device)
    target = QuantSpec("e4m3", "row", "float32")
    rows, columns, hidden = fused.activation_backward(
        "silu", dh, gate, up, (target, target, target), (None, None, None)
    )
    for made in (rows, columns, hidden):
        largest = made.codes.float().abs().amax(1)
        assert torch.equal(largest[largest > 0], torch.full_like(largest[largest > 0], 448.0))


def test_what_the_kernels_refuse():
    block, thin = QuantSpec("e4m3", "128x128", "power_of_two"), QuantSpec("e4m3", "1x128", "power_of_two")
    assert "1x32" in fused.unsupported_reason(128, True, rows=QuantSpec("e4m3", "1x32", "power_of_two"))
    assert "straddle" in fused.unsupported_reason(130, True, rows=block)
    assert "straddle" in fused.unsupported_reason(130, True, rows=thin)
    assert "straddle" in fused.unsupported_reason(130, True, columns=block)
    assert fused.unsupported_reason(130, True, columns=thin, hidden=block) is None
    assert fused.unsupported_reason(130, False, rows=block, columns=block) is None
    assert fused.unsupported_reason(256, True, rows=block, columns=thin) is None


def bytes_of(x):
    return x.contiguous().view(torch.uint8)


@pytest.mark.filterwarnings("ignore:(invalid|overflow)")
@pytest.mark.parametrize(
    ("target", "gated", "cols"),
    [
        pytest.param(ROW, True, 70, marks=pytest.mark.gpu),
        (ROW, True, 300),
        (ROW, False, 256),
        (COLUMN, True, 130),
        (QuantSpec("e4m3", "1x128", "power_of_two"), True, 256),
        (QuantSpec("e5m2", "tensor", "float32"), False, 130),
    ],
    ids=str,
)
def test_codes_of_gate_and_up(target, gated, cols, device):
    _, gate, up = inputs(device, 24, cols, gated)
    gate[3, 5], gate[4, 6], gate[5], gate[6, 0] = torch.nan, torch.inf, torch.nan, 1e-30
    hidden, *kept = fused.activate("silu", gate, up, target, INPUTS)[:-1]
    expected, *wanted = reference.activate("silu", gate, up, target, INPUTS)[:-1]
    check(hidden, expected)
    assert len(kept) == len(wanted) == 1 + gated
    for got, want in zip(kept, wanted, strict=True):
        assert torch.equal(bytes_of(got.codes), bytes_of(want.codes)) and torch.equal(got.scale, want.scale)
        assert got.scale.t().is_contiguous() and got.granularity == want.granularity
    assert torch.equal(bytes_of(hidden.codes), bytes_of(fused.activate("silu", gate, up, target)[0].codes))


@pytest.mark.filterwarnings("ignore:(invalid|overflow)")
@pytest.mark.parametrize(
    ("target", "gated", "rows", "cols"),
    [
        (ROW, True, 20, 130),
        (ROW, False, 17, 300),
        pytest.param(ROW, True, 32, 256, marks=pytest.mark.gpu),
        (QuantSpec("e5m2", "tensor", "float32"), True, 20, 70),
        (QuantSpec("e4m3", "1x128", "power_of_two"), True, 20, 128),
    ],
    ids=str,
)
def test_gradients_from_codes_are_those_of_their_values(target, gated, rows, cols, device, monkeypatch):
    if device == "cpu" and "128" not in target.granularity:  # a tile of several scales, and tiles of less than one
        monkeypatch.setattr(fused, "BACKWARD_SEARCH", Shape(8, 256, warps=4, steps=8))
        monkeypatch.setattr(fused, "BACKWARD_WRITE", Shape(32, 64, warps=4))
    dh, gate, up = inputs(device, rows, cols, gated)
    gate[3, 5] = torch.nan
    hidden, *codes = reference.activate("silu", gate, up, ROW, INPUTS)[:-1]
    pair = codes if gated else (codes[0], None)
    values = [x if x is None else dequantize(x) for x in pair]
    n = cols * (1 + gated)
    folds = torch.rand(1, n, device=device), torch.rand(rows, 1, device=device)
    for h, scale in ((target, None), (COLUMN, hidden.scale)):
        rest = (target, target, h), (*folds, scale)
        made = fused.activation_backward("silu", dh, *pair, *rest)
        alike = fused.activation_backward("silu", dh, *values, *rest)
        expected = reference.activation_backward("silu", dh, *pair, *rest)
        for got, same, want in zip(made, alike, expected, strict=True):
            assert torch.equal(bytes_of(got.codes), bytes_of(same.codes)) and torch.equal(got.scale, same.scale)
            check(got, want, allowed=3)


@pytest.mark.gpu
def test_the_operators_run_in_triton_on_a_gpu():
    from octavo.kernels import activation as contract
    from octavo.kernels.runtime.ledger import record

    dh, gate, up = inputs("cuda", 300, 1000)
    with record() as ledger:
        got = contract.activate("silu", gate, up, ROW).hidden
        contract.activation_backward("silu", dh, gate, up, contract.Targets(ROW, ROW, ROW))
        codes = contract.activate("silu", gate, up, ROW, keeps_inputs=True).inputs
        contract.activation_backward("silu", dh, *codes, contract.Targets(ROW, ROW, ROW))
    assert not ledger.fallbacks
    check(got, reference.activate("silu", gate, up, ROW)[0], allowed=30)


@pytest.mark.parametrize("keeps_inputs", [True, False])
@pytest.mark.parametrize("gated", [True, False])
def test_rotated_codes_and_the_scales_of_a_second_set(gated, keeps_inputs, device):
    _, gate, up = inputs(device, 5, 192, gated)
    gate[3, 5] = torch.nan
    target = QuantSpec("int8", "row", "float32", "nearest", 64)
    kept = INPUTS if keeps_inputs else None
    got = fused.activate("relu2", gate, up, target, kept, ROW)
    want = reference.activate("relu2", gate, up, target, kept, ROW)
    assert torch.equal(got[0].codes, want[0].codes) and torch.equal(got[-1], want[-1])
    torch.testing.assert_close(got[0].scale, want[0].scale, rtol=0, atol=0, equal_nan=True)
    assert len(got) == len(want) == 2 + (1 + gated) * keeps_inputs
    for one, other in zip(got[1:-1], want[1:-1], strict=True):
        assert torch.equal(bytes_of(one.codes), bytes_of(other.codes))

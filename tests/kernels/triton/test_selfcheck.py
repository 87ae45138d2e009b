"""The self-check passes the kernels there are, and finds wrong ones."""

import pytest
import torch

from octavo.errors import UnsupportedError
from octavo.kernels import selfcheck
from octavo.kernels.quant_spec import QuantSpec
from octavo.kernels.selfcheck import KERNELS, check_kernels, compare, failures
from octavo.numerics import E4M3, PER_ROW, quantize

pytest.importorskip("triton")
ROW = QuantSpec("e4m3", "row", "power_of_two")
pytestmark = [
    pytest.mark.usefixtures("loops_with_bounds"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy of NaN and infinities, in the interpreter
]


@pytest.fixture(autouse=True)
def interpreted(device, monkeypatch):
    """Let the interpreter pass for a GPU, and give it small matrices, and two cases of each function."""
    if device == "cpu":
        monkeypatch.setattr(selfcheck, "triton_unsupported_reason", lambda device: None)
        monkeypatch.setattr(selfcheck, "SHAPES", ((26, 150),))
        for kernel, cases in list(KERNELS.items()):
            monkeypatch.setitem(KERNELS, kernel, lambda cases=cases: ends(cases()))


def ends(cases):
    """Return the first and the last case of each function."""
    cases = list(cases)
    first = {case.kernel: case for case in reversed(cases)}
    last = {case.kernel: case for case in cases}
    return iter({case.name: case for case in (*first.values(), *last.values())}.values())


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_kernels_that_there_are_pass(kernel, device):
    rows = check_kernels(device, [kernel])
    assert len(rows) >= 2 and {row["kernel"] for row in rows} == {kernel}
    assert [row for row in rows if not row["passed"]] == []
    assert len({row["case"] for row in rows}) == len(rows) and all(row["detail"] for row in rows)
    assert failures(rows) == []


def codes_turned(quantized):
    """One byte is another."""
    quantized.codes.view(torch.uint8)[3, 2] ^= 4
    return quantized


WRONG = {
    "a byte of codes": ("quantize", "quantize_pair", lambda made: (made[0] and codes_turned(made[0]), made[1])),
    "a byte of transposed codes": (
        "quantize",
        "quantize_pair",
        lambda made: (made[0], made[1] and codes_turned(made[1])),
    ),
    "a byte of a transpose": (
        "transpose",
        "transpose",
        lambda made: made.clone().view(torch.uint8).roll(1).view(made.dtype),
    ),
    "a scale": ("activation", "activate", lambda made: [made[0]._replace(scale=made[0].scale * 2), *made[1:]]),
    "one result of three": ("activation", "activation_backward", lambda made: (made[0], None, made[2])),
    "the dtype": ("activation", "activation_backward_plain", lambda made: tuple(d.float() for d in made)),
    "half a percent": ("norm", "backward", lambda made: (made[0] * 1.02, *made[1:])),
    "a lost NaN": ("norm", "forward", lambda made: (made[0].nan_to_num(), *made[1:])),
    "the last bit": ("rotary", "rotate", lambda made: torch.nextafter(made, made + 1)),
    "a byte of a group": ("grouped", "transpose_groups", lambda made: made.view(torch.uint8).roll(1).view(made.dtype)),
    "a loss": ("cross_entropy", "cross_entropy_", lambda made: made + 0.01),
}


@pytest.mark.parametrize(("kernel", "function", "change"), WRONG.values(), ids=WRONG)
def test_a_wrong_kernel_is_found(kernel, function, change, device, monkeypatch):
    module = pytest.importorskip(f"octavo.kernels.{kernel}.triton")
    right = getattr(module, function)

    def wrong(*operands):
        return change(right(*operands))

    monkeypatch.setattr(module, function, wrong)
    cases = list(KERNELS[kernel]())
    few = [case for case in cases if case.kernel == f"{kernel}.{function}"][:1]
    monkeypatch.setitem(KERNELS, kernel, lambda: iter(few))
    rows = check_kernels(device, [kernel])
    assert failures(rows) == [kernel] and not any(row["passed"] for row in rows)
    assert all(row["detail"] not in ("", "equal") for row in rows)


def test_the_weights_kernel_is_found_too(device, monkeypatch):
    fused = pytest.importorskip("octavo.kernels.quantize.triton_weights")
    right = fused.quantize_rows

    def wrong(rows, dtype, out, rule):
        right(rows, dtype, out, rule)
        codes_turned(out)

    monkeypatch.setattr(fused, "quantize_rows", wrong)
    rows = check_kernels(device, ["weights"])
    assert all("1 of " in row["detail"] and "first at (3, 2)" in row["detail"] for row in rows)


def test_what_a_kernel_raises_is_a_finding_and_the_next_case_is_looked_at(device, monkeypatch):
    fused = pytest.importorskip("octavo.kernels.transpose.triton")

    def broken(codes, after):
        raise RuntimeError("illegal instruction\nand much more")

    monkeypatch.setattr(fused, "transpose", broken)
    rows = check_kernels(device, ["transpose", "rotary"])
    assert {row["detail"] for row in rows if row["kernel"] == "transpose"} == {"RuntimeError: illegal instruction"}
    assert failures(rows) == ["transpose"] and len({row["case"] for row in rows if row["kernel"] == "transpose"}) > 1
    assert all(row["passed"] for row in rows if row["kernel"] == "rotary")


def test_a_triton_that_lacks_what_we_import_is_a_finding(device, monkeypatch):
    def cases():
        raise ImportError("no name 'knobs'")
        yield

    monkeypatch.setitem(KERNELS, "norm", cases)
    assert check_kernels(device, ["norm"]) == [
        {"kernel": "norm", "case": "all", "passed": False, "detail": "ImportError: no name 'knobs'"}
    ]


def test_where_triton_does_not_run_there_is_nothing_to_check(monkeypatch):
    monkeypatch.setattr(selfcheck, "triton_unsupported_reason", lambda device: "this is a toaster")
    with pytest.raises(UnsupportedError, match="toaster"):
        check_kernels("cpu")


# --- the bounds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("changed", "by", "passed"), [(3, 1, True), (4, 1, False), (1, 2, False)])
def test_one_code_in_ten_thousand_may_be_one_off(changed, by, passed):
    want = quantize(torch.randn(100, 300).clamp(0.2, 1), E4M3, PER_ROW)
    got = want._replace(codes=want.codes.clone())
    got.codes.view(torch.uint8)[7, :changed] -= by
    assert compare(got, want, exact=False)[0] == passed
    assert not compare(got, want, exact=True)[0] and compare(want, want, exact=True) == (True, "equal")


def test_minus_zero_is_another_code_only_where_equality_is_asked_for():
    zero, minus_zero = (torch.full((3, 3), value).to(torch.float8_e4m3fn) for value in (0.0, -0.0))
    assert compare(minus_zero, zero, exact=False)[0] and not compare(minus_zero, zero, exact=True)[0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3.0])
def test_numbers_are_compared_with_nan_and_infinities_in_their_places(value):
    want = torch.randn(50)
    want[4] = value
    assert compare((want * (1 + 2e-6), None), (want, None), exact=False)[0]
    assert not compare((want * (1 + 2e-6), None), (want, None), exact=True)[0]
    for other in (float("nan"), -float("inf"), 3.1):
        got = want.clone()
        got[4] = other
        assert compare(got, want, exact=False)[0] == (str(other) == str(value))

"""DeepGEMM by a stand-in: what it is called with, and what is kept from it."""

import sys
import types

import pytest
import torch

from octavo.kernels.reference.gemm import gemm as reference
from octavo.kernels.vendor import deep_gemm as vendor
from octavo.numerics import E4M3, Quantized, granularity_named, quantize


def operand(granularity: str, rows: int = 24, cols: int = 256) -> Quantized:
    return quantize(torch.randn(rows, cols), E4M3, granularity_named(granularity))


def product(a, b, d, c=None, recipe=None):
    """Like `deep_gemm.fp8_gemm_nt` on Hopper: writes to d, takes FP32 sums only together with c."""
    by_rows = recipe == (1, 1, 128)
    assert d.dtype == (torch.float32 if by_rows else torch.bfloat16) and (c is not None) == by_rows
    right = granularity_named("1x128" if by_rows else "128x128")
    result = reference(Quantized(*a, granularity_named("1x128")), Quantized(*b, right), torch.float32)
    d.copy_(result if c is None else c + result)


@pytest.fixture(autouse=True)
def forgetful():
    yield
    vendor._library.cache_clear()
    vendor._refuses_machine.cache_clear()


@pytest.fixture
def installed(monkeypatch):
    module = types.ModuleType("deep_gemm")
    module.__spec__ = types.SimpleNamespace(name="deep_gemm")
    module.fp8_gemm_nt = product
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    return module


@pytest.fixture
def hopper(monkeypatch):
    """A device that says it is a GPU of compute capability 9.0."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return torch.device("cuda", 0)


@pytest.mark.parametrize("right", ["128x128", "1x128"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_gives_the_product(right, dtype, installed):
    a, b = operand("1x128"), operand(right, rows=40)
    result = vendor.deep_gemm(a, b, dtype, False)
    exact = reference(a, b, torch.float32)
    assert result.dtype == dtype
    assert torch.equal(result, (exact.bfloat16() if right == "128x128" else exact).to(dtype))


@pytest.mark.parametrize(("left", "right"), [("128x128", "1x128"), ("row", "128x128"), ("1x128", "row")])
def test_other_granularities_are_refused(left, right):
    assert vendor.refuses(operand(left), operand(right)) == "its operands are not 1x128 by 128x128, or 1x128 by 1x128"


def test_e5m2_is_refused():
    a, b = operand("1x128"), operand("128x128")
    e5m2 = b._replace(codes=b.codes.float().to(torch.float8_e5m2))
    assert vendor.refuses(a, e5m2) == "block scales take E4M3 operands only"


@pytest.mark.parametrize(
    ("right", "rows", "cols", "reason"),
    [
        ("128x128", 24, 255, "K is not a multiple of 16, or N not of 8"),
        ("128x128", 25, 256, "K is not a multiple of 16, or N not of 8"),
        ("1x128", 24, 240, "K is not a multiple of 128, or N not of 8"),
        ("1x128", 25, 256, "K is not a multiple of 128, or N not of 8"),
    ],
)
def test_sizes_that_it_does_not_take_are_refused(right, rows, cols, reason):
    assert vendor.refuses(operand("1x128", cols=cols), operand(right, rows, cols)) == reason


def test_a_cpu_is_refused():
    assert vendor.refuses(operand("1x128"), operand("128x128")) == "it is used on Hopper (compute capability 9.0) only"


def test_a_machine_without_it_is_refused(hopper, monkeypatch):
    monkeypatch.setattr(vendor.importlib.util, "find_spec", lambda name: None)
    assert vendor._refuses_machine(hopper) == "deep_gemm is not installed"


def test_a_package_of_another_kind_is_refused(hopper, installed):
    del installed.fp8_gemm_nt
    assert vendor._refuses_machine(hopper) == "this deep_gemm has no fp8_gemm_nt"


def test_a_package_that_does_not_load_is_refused(hopper, installed, monkeypatch):
    def fail(name):
        raise OSError("undefined symbol")

    monkeypatch.setattr(vendor.importlib, "import_module", fail)
    assert vendor._refuses_machine(hopper) == "this deep_gemm has no fp8_gemm_nt"


def test_a_hopper_that_has_it_is_not_refused(hopper, installed):
    assert vendor._refuses_machine(hopper) is None

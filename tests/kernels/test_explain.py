"""Which kernel runs where, and why not another."""

import pytest
import torch

from octavo import kernels
from octavo.kernels.explain import OPERATIONS, gemm_kernel, probe_operand
from octavo.kernels.gemm import KERNELS, choose
from octavo.kernels.gemm.vendor import cpu_unsupported_reason

ROW, TENSOR = ("reference",) * 2 if cpu_unsupported_reason() else ("scaled_mm.row", "scaled_mm.tensor")


def gemms(device: str) -> list[dict[str, str | bool]]:
    return [row for row in kernels.explain(device) if row["operation"] == "gemm"]


def gemm(kernel: str, reason: str = "") -> dict[str, str | bool]:
    return {"operation": "gemm", "kernel": kernel, "available": not reason, "reason": reason}


def test_every_kernel_has_a_line():
    rows = kernels.explain("cpu")
    assert [row["kernel"] for row in gemms("cpu")] == [kernel.name for kernel in KERNELS]
    expected = [(operation, kernel) for operation in OPERATIONS for kernel in ("triton", "reference")]
    assert [(row["operation"], row["kernel"]) for row in rows if row["operation"] != "gemm"] == expected
    assert all(set(row) == {"operation", "kernel", "available", "reason"} for row in rows)


def test_what_a_cpu_runs():
    block = gemm("scaled_mm.block", "PyTorch has no block-scaled GEMM for a CPU")
    by_row = [gemm(f"scaled_mm.{scales}", cpu_unsupported_reason() or "") for scales in ("tensor", "row")]
    found = gemms("cpu")
    assert all(row in found for row in (*by_row, block, gemm("reference")))
    available = {row["kernel"]: row["available"] for row in kernels.explain("cpu") if row["operation"] in OPERATIONS}
    assert available == {"triton": False, "reference": True}


def test_a_kernel_that_does_not_run_says_why():
    assert all(bool(row["reason"]) == (not row["available"]) for row in kernels.explain(torch.device("cpu")))


@pytest.mark.parametrize(
    ("left", "right", "kernel"),
    [
        (("e4m3", "row"), ("e4m3", "row"), ROW),
        (("e4m3", "row"), ("e4m3", "column"), ROW),
        (("e5m2", "tensor"), ("e4m3", "tensor"), TENSOR),
        (("e4m3", "1x128"), ("e4m3", "128x128"), "reference"),
        (("e4m3", "1x32"), ("e4m3", "1x32"), "emulated.1x32"),
    ],
)
def test_the_kernel_of_two_operands(left, right, kernel):
    name, refused = gemm_kernel("cpu", left, right)
    assert name == kernel
    assert name not in refused


@pytest.mark.parametrize("granularity", ["tensor", "row", "1x128", "128x128", "1x32"])
def test_a_probe_is_chosen_for_as_a_layers_operand_is(granularity):
    layers_own = kernels.quantize(torch.randn(48, 200), "e4m3", granularity)
    assert choose(layers_own, layers_own)[0] == choose(*[probe_operand(granularity, "e4m3", "cpu")] * 2)[0]


@pytest.mark.gpu
def test_what_hopper_runs():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("not Hopper")
    available = {row["kernel"] for row in gemms("cuda") if row["available"]}
    assert available >= {"scaled_mm.tensor", "scaled_mm.row", "scaled_mm.block", "reference"}
    assert all(row["available"] for row in kernels.explain("cuda") if row["kernel"] == "triton")
    assert gemm_kernel("cuda", ("e4m3", "1x128"), ("e4m3", "1x128"))[0] == "scaled_mm.block"
    name, refused = gemm_kernel("cuda", ("e5m2", "row"), ("e4m3", "row"))
    assert (name, refused["scaled_mm.row"]) == ("reference", "row scales take E4M3 operands only")

"""The machine's own rates, from the products that a step has."""

from __future__ import annotations

import pytest
import torch

from octavo.numerics import dequantize
from octavo_bench import rates
from octavo_bench.workloads import WORKLOADS


@pytest.mark.parametrize("name", WORKLOADS)
def test_shapes_are_all_products_of_a_step(name: str) -> None:
    workload = WORKLOADS[name]
    flops = sum(2 * m * n * k * count for (m, n, k), count in rates.gemm_shapes(workload).items())
    assert flops == 6 * workload.tokens * workload.weights


def test_every_precision_is_measured() -> None:
    measured = rates.measure(WORKLOADS["tiny"], "cpu", repeats=1)
    assert set(measured.tflops) == {"bf16", *rates.PRECISIONS}
    assert measured.copy_gb_per_s > 0


def test_operands_are_random_normal_and_the_same_in_every_precision() -> None:
    shape = (32, 48, 256)
    a, b = rates.normal(shape, "cpu")
    assert (a.shape, b.shape) == ((32, 256), (48, 256))
    assert float(a.float().std()) == pytest.approx(1, abs=0.05)
    for granularities in (("tensor", "tensor"), ("1x128", "128x128")):
        quantized = rates.quantized(shape, granularities, "cpu")
        for matrix, codes in zip((a, b), quantized, strict=True):
            torch.testing.assert_close(dequantize(codes), matrix.float(), rtol=0.07, atol=0.02)

"""The floor is what it says: products, attention, bytes."""

from __future__ import annotations

import pytest

from octavo_bench import rates as floor
from octavo_bench.implementations import Implementation
from octavo_bench.rates import Rates
from octavo_bench.workloads import WORKLOADS, Workload

INFINITE = 1e30


def rates(copy: float = INFINITE, **tflops: float) -> Rates:
    return Rates(copy_gb_per_s=copy, tflops={"bf16": INFINITE, "row slow": INFINITE} | tflops)


FP8 = Implementation(name="fp8", gemms=("row slow", "row slow", "row slow"))
MIXED = Implementation(name="mixed", gemms=("row slow", "bf16", "bf16"))


@pytest.mark.parametrize("name", WORKLOADS)
def test_at_one_rate_the_gemms_take_the_flops_of_the_model(name: str) -> None:
    workload = WORKLOADS[name]
    flops = 6 * workload.tokens * workload.weights
    assert floor.floor_ms(workload, Implementation(name="bf16"), rates(bf16=2.0), 0.0) == pytest.approx(flops / 2e9)


def test_each_gemm_counts_at_its_own_rate() -> None:
    workload = WORKLOADS["tiny-model"]
    product = 2 * workload.tokens * 1e-9  # of one weight, in ms at 1 TFLOP/s
    head = workload.vocab * workload.dim
    blocks = workload.weights - head
    row, bf16 = rates(**{"row slow": 1.0}), rates(bf16=1.0)
    assert floor.gemm_ms(workload, FP8, row) == pytest.approx(3 * product * blocks)
    assert floor.gemm_ms(workload, FP8, bf16) == pytest.approx(3 * product * head)
    assert floor.gemm_ms(workload, MIXED, row) == pytest.approx(product * blocks)
    with_head = Implementation(name="head", gemms=FP8.gemms, fp8_head=True)
    assert floor.gemm_ms(workload, with_head, row) == pytest.approx(3 * product * workload.weights)


def test_attention_is_taken_as_it_is() -> None:
    assert floor.floor_ms(WORKLOADS["tiny"], FP8, rates(), 12.5) == pytest.approx(12.5)


def test_bytes_of_a_block_by_hand() -> None:
    """One head of one channel pair, one token, everything 2 wide but the feed-forward (3)."""
    workload = Workload(name="x", dim=2, ffn=3, heads=1, kv_heads=1, layers=1, batch=1, sequence=1)
    norms = 2 * (2 * 2 * 4)  # stream, branch, stream, operand: BF16, or two codes
    rotation = 2 * (2 * 2 * 2)  # Q and K, read and written
    bf16 = norms + 2 * (2 * 2 * 4) + 2 * rotation + 3 * 2 * 3 + 3 * 2 * 5
    assert floor.block_bytes(workload, fp8=False) == bf16
    weights = (6 * 2 + 2 * 2 + 6 * 2 + 2 * 3) * 4
    more = 2 * (2 * 2) + 2 * 4 + 2 * 4  # codes of the norms' gradients; V's gradient; attention's result
    assert floor.block_bytes(workload, fp8=True) == bf16 + more + weights
    assert floor.floor_ms(workload, FP8, rates(copy=1.0), 0.0) == pytest.approx((bf16 + more + weights) / 1e6)


def test_a_whole_model_moves_more() -> None:
    stack = WORKLOADS["tiny"]
    model = stack.but(vocab=10)
    more = floor.step_bytes(model, fp8=True) - floor.step_bytes(stack, fp8=True)
    parameters = stack.weights + 2 * 10 * stack.dim
    assert more == stack.tokens * (2 * stack.dim * 9 + 2 * 10 * 2) + parameters * 16

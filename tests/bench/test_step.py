"""The step bench runs every implementation on the same workload and says where time goes."""

import pytest

from octavo.bench import step
from octavo.errors import UnsupportedError


def test_measures_every_recipe_against_bf16():
    rows = step.bench_step(
        step.WORKLOADS["tiny"], ("octavo folded", "octavo block"), device="cpu", compile=False, steps=2
    )
    assert [row["implementation"] for row in rows] == ["bf16", "octavo folded", "octavo block"]
    assert rows[0]["ratio_to_bf16"] == 1.0
    assert rows[1]["ratio_to_bf16"] == pytest.approx(rows[0]["ms"] / rows[1]["ms"], abs=1e-3)
    layers, linears, gemms = 2, 7, 3
    assert sum(rows[0]["fp8_gemms"].values()) == 0
    assert [sum(row["fp8_gemms"].values()) for row in rows[1:]] == [layers * linears * gemms] * 2


def test_an_unknown_implementation_is_named():
    with pytest.raises(UnsupportedError, match="no implementation 'octavo foldd'"):
        step.bench_step(step.WORKLOADS["tiny"], ("octavo foldd",), device="cpu")


@pytest.mark.parametrize(
    ("kernel", "category"),
    [
        ("nvjet_qqtst_128x256_128x6_1x2_h_bz_coopA_NTT", "gemm"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma", "attention"),
        ("triton_red_fused_abs_amax_0", "elementwise"),
        ("triton_poi_fused_gemm_mul_3", "elementwise"),
    ],
)
def test_kernels_are_sorted_by_name(kernel, category):
    assert step._category(kernel) == category

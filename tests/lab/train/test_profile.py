"""Kernels are sorted by name, and time that two of them share counts once."""

from __future__ import annotations

import importlib

import pytest

from octavo.lab.train.profile import Kernel, Profile, category, summarise


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("nvjet_qqtst_128x256_128x6_1x2_h_bz_coopA_NTT", "gemm"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int>", "gemm"),
        ("_block_gemm_kernel", "gemm"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma", "attention"),
        ("triton_red_fused_abs_amax_0", "elementwise"),
        ("triton_poi_fused_gemm_mul_3", "elementwise"),
        ("_backward_search_kernel", "elementwise"),
        ("Memcpy DtoD (Device -> Device)", "elementwise"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<LpNormFunctor>", "optimizer"),
    ],
)
def test_kernels_are_sorted_by_name(kernel: str, part: str) -> None:
    assert category(kernel) == part


def test_a_profile_is_the_mean_of_its_steps() -> None:
    ran = [Kernel("nvjet", 0, 3000), Kernel("add", 3000, 4000), Kernel("nvjet", 6000, 9000), Kernel("add", 9000, 10000)]
    found = summarise(ran, steps=2)
    assert (found.parts["gemm"], found.parts["elementwise"], found.parts["attention"]) == (3.0, 1.0, 0.0)
    assert found.busy == 4.0
    assert found.kernels == [{"name": "nvjet", "calls": 1.0, "ms": 3.0}, {"name": "add", "calls": 1.0, "ms": 1.0}]


def test_kernels_that_only_quantise_are_told_from_others() -> None:
    names = ("search_strip", "_rows_kernel_0", "_backward_write_kernel", "nvjet")
    ran = [Kernel(name, 1000 * i, 1000 * i + 500) for i, name in enumerate(names)]
    assert summarise(ran, steps=1).quantize == 1.0


@pytest.mark.parametrize(
    ("file", "part"),
    [
        ("grouped_gemm", "gemm"),
        ("optimizer", "optimizer"),
        ("coefficients", "optimizer"),
        ("gradient", "optimizer"),
        ("grouped", "elementwise"),
        ("batch", "elementwise"),
    ],
)
def test_own_kernels_belong_to_parts(file: str, part: str) -> None:
    pytest.importorskip("triton")
    module = importlib.import_module(f"octavo.kernels.{file}.triton")
    own = [name for name, value in vars(module).items() if name.endswith("_kernel") and hasattr(value, "function")]
    names = [name for name in own if name != "_blocks_kernel"]
    assert len(names) >= 2 and {category(name) for name in names} == {part}
    spent = summarise([Kernel(name, 0, 500) for name in names], steps=1)
    assert spent.quantize == (0.5 * len(names) if part == "elementwise" else 0.0)


@pytest.mark.parametrize(
    ("spans", "busy"),
    [
        ([], 0.0),
        ([(0, 1000), (2000, 3000)], 2.0),
        ([(0, 2000), (1000, 3000)], 3.0),
        ([(500, 800), (0, 2000)], 2.0),
        ([(0, 3000), (1000, 2000), (2500, 4000)], 4.0),
    ],
)
def test_overlapping_kernels_count_once(spans: list[tuple[float, float]], busy: float) -> None:
    assert summarise([Kernel("add", *span) for span in spans], steps=1).busy == busy


def test_a_row_has_what_was_spent_and_what_was_idle() -> None:
    parts = {"gemm": 4.0, "attention": 0.0, "elementwise": 2.0, "optimizer": 0.5, "communication": 0.0}
    found = Profile(parts=parts, busy=6.25, kernels=[])
    spent = {"gemm_ms": 4.0, "attention_ms": 0.0, "elementwise_ms": 2.0, "optimizer_ms": 0.5}
    assert found.spent(7.0) == {**spent, "idle_ms": 0.75}
    assert found.spent(6.0)["idle_ms"] == 0.0  # the profiler slows the host, and the step timed without it is shorter

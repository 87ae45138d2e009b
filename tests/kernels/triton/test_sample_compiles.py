"""Telemetry's kernels are compiled for a GPU that need not be there: a compiler refuses what an interpreter takes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

PROGRAM = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from octavo.kernels.sample import triton as sample

POINTERS = {"fold_ptr": "*fp32", "scale_ptr": "*fp32", "edge_ptr": "*bf16", "row_ptr": "*fp32", "work_ptr": "*fp32",
            "bins_ptr": "*i32", "powers_ptr": "*fp32"}
FLOATS = dict.fromkeys(("sampled", "height_all", "width_all", "bound"), "fp32")

def compiled(kernel, x, constants):
    function = kernel.function  # of Triton: its compiler takes nothing that only resembles one
    known = {"x_ptr": x, **POINTERS, **FLOATS}
    signature = {name: "constexpr" if name in constants else known.get(name, "i32") for name in function.arg_names}
    fixed = {(index,): constants[name] for index, name in enumerate(function.arg_names) if name in constants}
    options = {"num_warps": 4, "enable_fp_fusion": False}
    return triton.compile(ASTSource(function, signature, fixed), GPUTarget("cuda", 90, 32), options)

for x, coded, fmt, detailed in (("*bf16", False, tl.float8e5, False), ("*fp8e4nv", True, tl.float8e4nv, True)):
    common = {"CODED": coded, "DETAILED": detailed}
    limits = {"FLUSHED": 0.001, "SUBNORMAL": 0.01, "SATURATED": 464.0, "FORMAT": fmt, "BLOCK": 2048}
    made = [
        compiled(sample._look_kernel, x, {**common, **limits, "FOLDED": not coded, "SAMPLE_ONLY": coded}),
        compiled(sample._gather_kernel, x, {**common, "TILE": True, "BLOCK": 256, "TILE_BLOCK": 2048}),
    ]
    assert all("cubin" in each.asm for each in made)
"""


def test_it_compiles_for_an_h200(tmp_path: Path) -> None:
    known = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    settings = {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=known | settings, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]

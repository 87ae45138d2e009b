from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo_bench import clients, gemm, kernels, results, step
from octavo_bench.results import Result

MakeResult = Callable[..., Result]


def test_step_has_one_table_a_workload() -> None:
    rows = [
        {"workload": w, "implementation": i, "ms": ms, "ratio_to_bf16": r, "peak_gib": 24.7}
        for w, i, ms, r in [
            ("8 layers", "bf16", 341.0, 1.0),
            ("8 layers", "folded", 280.0, 1.2179),
            ("1", "x", 1, 1),
        ]
    ]
    text = step.KIND.markdown(rows)
    assert text.count("| implementation |") == 2
    assert "| folded | 280.0 | 1.22 | 24.7 |" in text


SHAPE = {"dim": 128, "ffn": 256, "heads": 4, "kv_heads": 2, "layers": 2, "batch": 2, "sequence": 1024}


def timed(implementation: str, ms: float, **more: Any) -> dict[str, Any]:
    row = {"workload": "w", "implementation": implementation, "ms": ms, "ratio_to_bf16": 100 / ms, "peak_gib": 2.0}
    return {**row, "gemm_ms": ms / 2, "attention_ms": 10.0, "elementwise_ms": 20.0, "idle_ms": 1.0} | more


def test_step_says_where_time_goes_and_what_was_possible() -> None:
    rates = {"copy_gb_per_s": 4170.4, "tflops": {"bf16": 668.2, "row slow": 1154.6}}
    rows = [
        timed("bf16", 100.0, rates=rates, drift=-0.012, shape=SHAPE, fraction_of_floor=0.9),
        timed("torchao tensorwise", 80.0),
        timed("octavo folded", 64.0, fraction_of_floor=0.755),
        {"workload": "w", "implementation": "octavo block", "error": "OutOfMemoryError: full"},
    ]
    text = step.KIND.markdown(rows)
    header, _, bf16, torchao, folded, block = (line for line in text.splitlines() if line.startswith("|"))
    assert "| times torchao tensorwise | GEMM ms |" in header and "optimizer" not in header
    assert bf16.endswith("| 100.0 | 1.00 | 0.80 | 50.0 | 10.0 | 20.0 | 1.0 | 2.0 | 0.90 |")
    assert torchao.endswith("| 80.0 | 1.25 | 1.00 | 40.0 | 10.0 | 20.0 | 1.0 | 2.0 |  |")
    assert folded.endswith("| 64.0 | 1.56 | 1.25 | 32.0 | 10.0 | 20.0 | 1.0 | 2.0 | 0.76 |")
    assert block.startswith("| octavo block | failed: OutOfMemoryError: full |  |")
    assert "**w**: 2 layers, dim 128, ffn 256, 4 heads, 2 KV heads, no head, 2 x 1,024 tokens" in text
    assert "copy 4,170 GB/s; GEMM TFLOP/s: bf16 668, row slow 1,155." in text
    assert "timed again at the end: -1.2 % of its time" in text


def test_gemm_has_a_line_a_shape_and_a_column_a_kernel() -> None:
    def row(shape: str, kernel: str, operands: str, accumulate: str, **figures: Any) -> dict[str, Any]:
        return {"shape": shape, "kernel": kernel, "operands": operands, "accumulate": accumulate, **figures}

    rows = [
        row("8x16x32", "bf16", "bf16", "slow", tflops=668.4, ratio_to_bf16=1.0),
        row("8x16x32", "scaled_mm.row", "row", "fast", tflops=1290.4, ratio_to_bf16=1.9311),
        row("8x8x8", "bf16", "bf16", "slow", tflops=600.0, ratio_to_bf16=1.0),
        row("8x8x8", "new", "1x128 x 1x128", "slow", error="ValueError: no"),
    ]
    lines = gemm.KIND.markdown(rows).splitlines()
    assert lines[0] == "| M x N x K | BF16 | row, fast: `scaled_mm.row` | 1x128 x 1x128, slow: `new` |"
    assert lines[2:] == ["| 8 x 16 x 32 | 668 | 1,290 (1.93) |  |", "| 8 x 8 x 8 | 600 |  | failed: ValueError: no |"]


def test_kernels_are_beside_a_copy() -> None:
    figures = {"ms": 0.0561, "bytes": 1, "passes": 2, "gb_per_s": 3610.2, "ratio_to_copy": 0.866}
    rows = [
        {"kernel": "transpose", "shape": "8 x 8", **figures},
        {"kernel": "rotary", "shape": "8 x 8", "error": "ValueError: no"},
    ]
    lines = kernels.KIND.markdown(rows).splitlines()
    assert lines[0] == "| kernel | shape | ms | passes | GB/s | of a copy's |"
    assert lines[2:] == [
        "| transpose | 8 x 8 | 0.056 | 2 | 3,610 | 0.87 |",
        "| rotary | 8 x 8 | failed: ValueError: no |  |  |  |",
    ]


def client(name: str, **more: Any) -> dict[str, Any]:
    row = {"client": name, "library": "peft", "version": "1.0", "lines": 2, "fp8_layers": 14, "gap_percent": -0.021}
    return row | {"graphs": 2, "bf16_graphs": 1, "graph_breaks": 0, "ratio_to_bf16": 0.4} | more


def test_clients_have_the_figures_of_a_cpu_and_the_speeds_of_each_gpu(result: MakeResult, tmp_path: Path) -> None:
    on_cpu = result("clients", client("LoRA", resumes=True), client("Trainer", resumes=False))
    rows = client("LoRA", gap_percent=0.5, ratio_to_bf16=1.253), client("Lightning", resumes=True)
    on_gpu = result("clients", *rows, {"client": "script", "library": "x", "version": "", "error": "OSError: no"})
    results.write(replace(on_cpu, hardware="amd-epyc"), tmp_path)
    results.write(replace(on_gpu, hardware="nvidia-h200"), tmp_path)
    header, _, *lines = (line for line in clients.table(tmp_path).splitlines() if line.startswith("|"))
    assert header.endswith("| graph breaks | times BF16's speed, nvidia-h200 |")
    assert lines[0] == "| LoRA | peft 1.0 | 2 | 14 | -0.02 % | bit for bit | 2 (1) | 0 | 1.25 |"
    assert lines[1].startswith("| Trainer |") and "| differs |" in lines[1] and lines[1].endswith("| 0 |  |")
    assert lines[2].startswith("| Lightning |") and lines[2].endswith("| 0.40 |")
    assert lines[3].startswith("| script | x  | failed: OSError: no |")

"""How fast: a step, a product, the passes between products."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from octavo.cli.flags import positive
from octavo_bench.cli.app import Json, Names, Write, bench, device_named, finish, printer


@bench.command
def step(
    *,
    workload: Names = ("llama-8b-stack",),
    only: Names = (),
    dim: int | None = None,
    ffn: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    layers: int | None = None,
    batch: int | None = None,
    sequence: int | None = None,
    vocab: int | None = None,
    device: str = "auto",
    steps: int = 20,
    trace: Annotated[Path | None, Parameter(negative=())] = None,
    write: Write = None,
    json_output: Json = False,
) -> int:
    """Time a training step of Llama blocks, a whole Llama or a ResNet: BF16, torchao if it is there, every recipe.

    Exits with 1 where an implementation failed; the others are measured all the same.

    Examples:

        octavo bench step
        octavo bench step --workload llama-1b --only "octavo folded" --trace traces
        octavo bench step --dim 5120 --ffn 17408 --heads 40 --layers 4 --batch 1
        octavo bench step --workload tiny --device cpu

    Parameters
    ----------
    workload
        llama-8b-stack (8 layers, 16,384 tokens), llama-1b-stack, llama-1b (with head, loss and optimizer), resnet50
        (256 images, channels last), tiny, tiny-model or tiny-resnet; more than one where given again.
    only
        Implementations to run beside BF16; all where it is not given.
    dim
        In place of the workload's: width of the residual stream.
    ffn
        Hidden width of the feed-forward.
    heads
        Query heads.
    kv_heads
        Key and value heads.
    layers
        Blocks.
    batch
        Sequences a step, or images.
    sequence
        Tokens of a sequence.
    vocab
        Token ids of a whole model; 0 for a stack of blocks without head and optimizer.
    device
        cuda or cpu; auto takes the GPU where there is one.
    steps
        Steps timed, after a warm-up; the median counts.
    trace
        Directory for the longest kernels of each implementation, as JSON; on a GPU.
    """
    from octavo.errors import ConfigError, did_you_mean
    from octavo_bench.images import IMAGE_WORKLOADS, ImageWorkload
    from octavo_bench.speed.step import bench_step
    from octavo_bench.workloads import WORKLOADS, Workload

    known: dict[str, Workload | ImageWorkload] = {**WORKLOADS, **IMAGE_WORKLOADS}
    shape = {"dim": dim, "ffn": ffn, "heads": heads, "kv_heads": kv_heads, "layers": layers}
    shape |= {"batch": batch, "sequence": sequence, "vocab": vocab}
    chosen = []
    for name in workload:
        if name not in known:
            near = did_you_mean(name, known)
            raise ConfigError(f"--workload: there is no '{name}'.{near} Workloads: {', '.join(known)}.")
        chosen.append(known[name].but(**shape))
    device = device_named(device)
    say = printer(json_output)
    rows: list[dict[str, Any]] = []
    for one in chosen:
        rows += bench_step(
            one,
            only,
            device=device,
            compile=device == "cuda",
            steps=positive("--steps", steps),
            trace=trace,
            report=lambda row: say(_step_line(row)),
        )
    flags = [*(f"--workload {name}" for name in workload), *(f'--only "{name}"' for name in only)]
    flags += [f"--{key.replace('_', '-')} {value}" for key, value in shape.items() if value is not None]
    command = " ".join(["octavo bench step", *flags, f"--steps {steps}"])
    return finish("step", rows, write, json_output, command, device=device)


def _step_line(row: dict[str, Any]) -> str:
    name = f"{row['workload']:<15} {row['implementation']:<24}"
    if "error" in row:
        return f"{name} failed: {row['error']}"
    if "drift" in row:
        return f"{name} {100 * row['drift']:+.1f} % when timed again at the end"
    parts = ("gemm", "attention", "elementwise", "optimizer", "communication", "idle")
    spent = " ".join(f"{part} {row[f'{part}_ms']:.1f}" for part in parts if f"{part}_ms" in row)
    floor = f"  {row['fraction_of_floor']:.2f} of floor" if "fraction_of_floor" in row else ""
    figures = f"{row['ms']:>9.2f} ms  {row['ratio_to_bf16']:.2f} x BF16  {row['peak_gib']:.1f} GiB{floor}"
    return f"{name} {figures}  {spent}".rstrip()


@bench.command
def gemm(
    *,
    shape: Names = (),
    device: str = "auto",
    repeats: int = 20,
    write: Write = None,
    json_output: Json = False,
) -> int:
    """Time every FP8 GEMM kernel of this machine beside BF16, on random normal matrices.

    Examples:

        octavo bench gemm
        octavo bench gemm --shape 8192x4096x4096 --shape 16384x28672x4096
        octavo bench gemm --shape 64x64x64 --device cpu

    Parameters
    ----------
    shape
        MxNxK of A (M, K) times B (N, K) transposed; may be given again. By default the shapes of a Llama-8B.
    device
        cuda or cpu; auto takes the GPU where there is one.
    repeats
        Calls timed, after a warm-up; the median counts.
    """
    from octavo_bench.speed.gemm import SHAPES, bench_gemm, parse_shape

    shapes = tuple(map(parse_shape, shape)) or SHAPES
    say = printer(json_output)
    rows = bench_gemm(
        shapes,
        device=device_named(device),
        repeats=positive("--repeats", repeats),
        report=lambda row: say(_gemm_line(row)),
    )
    command = " ".join(["octavo bench gemm", *(f"--shape {text}" for text in shape), f"--repeats {repeats}"])
    return finish("gemm", rows, write, json_output, command, device=device)


def _gemm_line(row: dict[str, Any]) -> str:
    name = f"{row['shape']:<18} {row['kernel']:<18} {row['operands']:<16} {row['accumulate']:<5}"
    if "error" in row:
        return f"{name} failed: {row['error']}"
    return f"{name} {row['tflops']:>8.1f} TFLOP/s  {row['ratio_to_bf16']:.2f} x BF16"


@bench.command
def kernels(
    *,
    only: Names = (),
    device: str = "auto",
    repeats: int = 20,
    write: Write = None,
    json_output: Json = False,
) -> int:
    """Time each fused kernel beside a copy of as many bytes, at the shapes of a Llama-8B; small ones on a CPU.

    Examples:

        octavo bench kernels
        octavo bench kernels --only quantize --only transpose
        octavo bench kernels --device cpu

    Parameters
    ----------
    only
        What the names of the kernels to run begin with; all where it is not given.
    device
        cuda or cpu; auto takes the GPU where there is one.
    repeats
        Calls timed, after a warm-up; the median counts.
    """
    from octavo.errors import ConfigError, did_you_mean
    from octavo_bench.speed.kernels import CASES, bench_kernels

    names = [case.kernel for case in CASES]
    for start in only:
        if not any(name.startswith(start) for name in names):
            known = ", ".join(dict.fromkeys(names))
            raise ConfigError(f"--only: no kernel begins with '{start}'.{did_you_mean(start, names)} Kernels: {known}.")
    say = printer(json_output)
    rows = bench_kernels(
        only,
        device=device_named(device),
        repeats=positive("--repeats", repeats),
        report=lambda row: say(_kernel_line(row)),
    )
    command = " ".join(["octavo bench kernels", *(f'--only "{name}"' for name in only), f"--repeats {repeats}"])
    return finish("kernels", rows, write, json_output, command, device=device)


def _kernel_line(row: dict[str, Any]) -> str:
    name = f"{row['kernel']:<30} {row['shape']:<15}"
    if "error" in row:
        return f"{name} failed: {row['error']}"
    return f"{name} {row['ms']:>8.3f} ms  {row['gb_per_s']:>7.1f} GB/s  {row['ratio_to_copy']:.2f} of a copy's"

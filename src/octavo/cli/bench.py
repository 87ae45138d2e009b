"""`octavo bench`: measure, and write result files."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

bench = App(name="bench", help="Measure speed and accuracy, and write the result files that the tables are made from.")


Names = Annotated[tuple[str, ...], Parameter(negative=())]
Write = Annotated[Path | None, Parameter(negative=())]
Json = Annotated[bool, Parameter(name="--json", negative=())]


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
    write
        Directory of result files to write to, benchmarks/results in this repository. What the file of the day says of
        other workloads stays.
    json_output
        Print the rows as JSON on stdout, the progress on stderr.
    """
    from octavo.bench.images import IMAGE_WORKLOADS, ImageWorkload
    from octavo.bench.step import bench_step
    from octavo.bench.workloads import WORKLOADS, Workload
    from octavo.errors import ConfigError, did_you_mean

    known: dict[str, Workload | ImageWorkload] = {**WORKLOADS, **IMAGE_WORKLOADS}
    shape = {"dim": dim, "ffn": ffn, "heads": heads, "kv_heads": kv_heads, "layers": layers}
    shape |= {"batch": batch, "sequence": sequence, "vocab": vocab}
    chosen = []
    for name in workload:
        if name not in known:
            near = did_you_mean(name, known)
            raise ConfigError(f"--workload: there is no '{name}'.{near} Workloads: {', '.join(known)}.")
        chosen.append(known[name].but(**shape))
    device = _device(device)
    say = _printer(json_output)
    rows: list[dict[str, Any]] = []
    for one in chosen:
        rows += bench_step(
            one,
            only,
            device=device,
            compile=device == "cuda",
            steps=_positive("--steps", steps),
            trace=trace,
            report=lambda row: say(_step_line(row)),
        )
    flags = [*(f"--workload {name}" for name in workload), *(f'--only "{name}"' for name in only)]
    flags += [f"--{key.replace('_', '-')} {value}" for key, value in shape.items() if value is not None]
    command = " ".join(["octavo bench step", *flags, f"--steps {steps}"])
    return _finish("step", rows, write, json_output, command, device=device)


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
    write
        Directory of result files to write to, benchmarks/results in this repository.
    json_output
        Print the rows as JSON on stdout, the progress on stderr.
    """
    from octavo.bench.gemm import SHAPES, bench_gemm, parse_shape

    shapes = tuple(map(parse_shape, shape)) or SHAPES
    say = _printer(json_output)
    rows = bench_gemm(
        shapes,
        device=_device(device),
        repeats=_positive("--repeats", repeats),
        report=lambda row: say(_gemm_line(row)),
    )
    command = " ".join(["octavo bench gemm", *(f"--shape {text}" for text in shape), f"--repeats {repeats}"])
    return _finish("gemm", rows, write, json_output, command, device=device)


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
    write
        Directory of result files to write to, benchmarks/results in this repository.
    json_output
        Print the rows as JSON on stdout, the progress on stderr.
    """
    from octavo.bench.kernels import CASES, bench_kernels
    from octavo.errors import ConfigError, did_you_mean

    names = [case.kernel for case in CASES]
    for start in only:
        if not any(name.startswith(start) for name in names):
            known = ", ".join(dict.fromkeys(names))
            raise ConfigError(f"--only: no kernel begins with '{start}'.{did_you_mean(start, names)} Kernels: {known}.")
    say = _printer(json_output)
    rows = bench_kernels(
        only, device=_device(device), repeats=_positive("--repeats", repeats), report=lambda row: say(_kernel_line(row))
    )
    command = " ".join(["octavo bench kernels", *(f'--only "{name}"' for name in only), f"--repeats {repeats}"])
    return _finish("kernels", rows, write, json_output, command, device=device)


def _kernel_line(row: dict[str, Any]) -> str:
    name = f"{row['kernel']:<30} {row['shape']:<15}"
    if "error" in row:
        return f"{name} failed: {row['error']}"
    return f"{name} {row['ms']:>8.3f} ms  {row['gb_per_s']:>7.1f} GB/s  {row['ratio_to_copy']:.2f} of a copy's"


@bench.command
def parity(
    *,
    recipes: str = "bf16,folded,block,tensorwise",
    seeds: str = "0,1",
    preset: str = "parity-cuda",
    steps: int | None = None,
    slots: int | None = None,
    out: Path = Path("runs/parity"),
    write: Write = None,
    json_output: Json = False,
) -> int:
    """Train one model by several recipes and seeds, on the same batches, and compare held-out losses.

    Beside the losses: the gap to BF16 of the same seeds with its intervals, tokens and time to equal loss, and the
    cosine of FP8 gradients with BF16 gradients. OUT keeps runs, curves.json and report.txt.

    Examples:

        octavo bench parity
        octavo bench parity --recipes bf16,folded --seeds 0,1,2 --steps 1000
        octavo bench parity --preset parity-350m-cuda --recipes bf16,folded,block
        octavo bench parity --preset tiny

    Parameters
    ----------
    recipes
        Recipes, with commas between them.
    seeds
        Seeds, with commas between them. Runs of one seed share weights and batches.
    preset
        The run that all share.
    steps
        Steps of each run, in place of the preset's.
    slots
        Runs at a time; by default one a GPU.
    out
        Directory for the runs.
    write
        Directory of result files to write to, benchmarks/results in this repository.
    json_output
        Print the rows as JSON on stdout, the progress on stderr.
    """
    import torch

    from octavo.bench.parity import add_evidence, curves, run_parity

    say = _printer(json_output)
    names, numbers = tuple(recipes.split(",")), tuple(int(seed) for seed in seeds.split(","))
    shared = ["--preset", preset, *(["--steps", str(steps)] if steps else [])]
    rows = run_parity(
        shared,
        names,
        numbers,
        out=out,
        slots=slots or max(torch.cuda.device_count(), 1),
        report=say,
    )
    rows = add_evidence(rows, out, report=say)
    (out / "curves.json").write_text(json.dumps(curves(out, names, numbers)), encoding="utf-8")
    say(_parity_report(rows, out))
    command = f"octavo bench parity --recipes {recipes} --seeds {seeds} {' '.join(shared)}"
    return _finish("parity", rows, write, json_output, command)


def _parity_report(rows: list[dict[str, Any]], out: Path) -> str:
    """Return the tables of the study, and how the losses ran apart; the same text is left in `report.txt`."""
    from octavo.bench.parity import gap_curves
    from octavo.bench.tables import parity_of
    from octavo.train.plot import plot

    gaps = gap_curves(out, rows)
    parts = [parity_of(rows)]
    if gaps:
        parts += ["Training loss less BF16's, nats a token, by tokens:", plot(gaps, unit="tokens").plain]
    report = "\n\n".join(parts) + "\n"
    (out / "report.txt").write_text(report, encoding="utf-8")
    return report


@bench.command
def optimizer(
    *,
    states: Names = (),
    parameters: float | None = None,
    ablation: Annotated[bool, Parameter(negative=())] = False,
    device: str = "auto",
    repeats: int = 20,
    steps: int = 1000,
    seeds: str = "0,1",
    write: Write = None,
    json_output: Json = False,
) -> int:
    """Time the optimizer of every tier of states beside PyTorch's fused AdamW; or train with each of FP8-LM's choices.

    Examples:

        octavo bench optimizer
        octavo bench optimizer --states fp8 --states exact --parameters 3e8
        octavo bench optimizer --device cpu --repeats 3
        octavo bench optimizer --ablation --steps 1000

    Parameters
    ----------
    states
        Tiers to time; all where it is not given.
    parameters
        About how many; by default 1e9 on a GPU and 1e6 on a CPU.
    ablation
        Train a small model of bytes on the CPU with each storage of FP8-LM's ablation instead, and compare losses.
    device
        cuda or cpu; auto takes the GPU where there is one.
    repeats
        Steps timed, after a warm-up; the median counts.
    steps
        Steps of each run of the ablation.
    seeds
        Seeds of the ablation, with commas between them.
    write
        Directory of result files to write to, benchmarks/results in this repository.
    json_output
        Print the rows as JSON on stdout, the progress on stderr.
    """
    from octavo.bench.ablation import run_ablation
    from octavo.bench.optimizer import bench_optimizer
    from octavo.optim import states_named

    say = _printer(json_output)
    for name in states:
        states_named(name)
    if ablation:
        numbers = tuple(int(seed) for seed in seeds.split(","))
        rows = run_ablation(
            steps=_positive("--steps", steps), seeds=numbers, report=lambda row: say(_ablation_line(row))
        )
        command = f"octavo bench optimizer --ablation --steps {steps} --seeds {seeds}"
        _finish("ablation", rows, write, json_output, command, device="cpu")
        return 0  # that a choice diverges is what is measured
    device = _device(device)
    count = int(parameters or (1e9 if device == "cuda" else 1e6))
    rows = bench_optimizer(
        parameters=_positive("--parameters", count),
        device=device,
        repeats=_positive("--repeats", repeats),
        states=states,
        report=lambda row: say(_optimizer_line(row)),
    )
    flags = [*(f"--states {name}" for name in states), f"--parameters {count}", f"--repeats {repeats}"]
    return _finish("optimizer", rows, write, json_output, " ".join(["octavo bench optimizer", *flags]), device=device)


def _ablation_line(row: dict[str, Any]) -> str:
    return f"{row['states']:<12} seed {row['seed']}  {row.get('heldout_loss', 'diverged')}  {row['about']}"


def _optimizer_line(row: dict[str, Any]) -> str:
    name = f"{row['states']:<18} weight {row['weight']:<14} gradient {row['gradient']:<9}"
    if "error" in row:
        return f"{name} failed: {row['error']}"
    figures = f"{row['bytes_per_parameter']:>6.2f} B  {row['ms']:>9.3f} ms  {row['ratio_to_fused_adamw']:.2f} of fused"
    return f"{name} {figures}  clipped {row['ms_clipped']:.3f} ms  {row['ratio_to_copy']:.2f} of a copy's rate"


@bench.command
def stress(
    *,
    recipe: Names = (),
    device: str = "auto",
    write: Write = None,
    json_output: Json = False,
) -> int:
    """Give one linear layer hard inputs and print the signal to noise of its three products, by recipe, in seconds.

    Outlier tokens, SwiGLU spikes, gradients at 1e-9, a weight row that grows a thousandfold, odd sequence lengths;
    median row / worst row in dB, against float64.

    Examples:

        octavo bench stress
        octavo bench stress --recipe folded --recipe delayed --device cpu

    Parameters
    ----------
    recipe
        Recipes; all where it is not given.
    device
        cuda or cpu; auto takes the GPU where there is one.
    write
        Directory of result files to write to, benchmarks/results in this repository.
    json_output
        Print the rows as JSON on stdout, the progress on stderr.
    """
    from octavo.bench.stress import bench_stress

    say, device = _printer(json_output), _device(device)
    rows = bench_stress(recipe, device=device, report=lambda row: say(_stress_line(row)))
    command = " ".join(["octavo bench stress", *(f"--recipe {name}" for name in recipe)])
    return _finish("stress", rows, write, json_output, command, device=device)


def _stress_line(row: dict[str, Any]) -> str:
    name = f"{row['case']:<26} {row['recipe']:<20}"
    if "error" in row:
        return f"{name} failed: {row['error']}"
    figures = [
        f"{title} {row[f'{key}_median_db']:5.1f} /{row[f'{key}_worst_db']:6.1f} dB" if f"{key}_worst_db" in row else ""
        for title, key in (("Y", "y"), ("dX", "dx"), ("dW", "dw"))
    ]
    broken = f"  {row['nonfinite']} values are not finite" if row["nonfinite"] else ""
    return f"{name} {'   '.join(figures)}{broken}"


@bench.command
def portability(
    run: Path,
    /,
    *,
    tolerance: float | None = None,
    tokens: int | None = None,
    device: str = "auto",
    write: Write = None,
    json_output: Json = False,
) -> int:
    """Compute one model's held-out loss as it was trained, with slow accumulation, with exact sums and in BF16.

    Exits with 1 where they part by more than the tolerance: the weights have grown used to one accumulator. Off Hopper
    its accumulator is emulated, which is slow: for small models.

    Examples:

        octavo bench portability runs/demo
        octavo bench portability runs/demo/checkpoints/step-000300 --tokens 4096 --tolerance 0.01

    Parameters
    ----------
    run
        Directory of a run, or of one of its checkpoints.
    tolerance
        Largest difference to the loss as trained that is no alarm, in nats a token; 0.02.
    tokens
        Held-out tokens, in place of those that the run was evaluated on.
    device
        cuda or cpu; auto takes the GPU where there is one.
    write
        Directory of result files to write to, benchmarks/results in this repository.
    json_output
        Print the rows as JSON on stdout, the progress on stderr.
    """
    from octavo.bench.portability import TOLERANCE, alarm, probe

    say = _printer(json_output)
    say("held-out loss, nats a token; beside it the difference to that as trained")
    rows = probe(run, device=device, tokens=tokens, report=lambda row: say(_portability_line(row)))
    say("{model}, {recipe}, step {step}, {heldout_tokens:,} tokens; accumulator: {accumulator}".format(**rows[0]))
    flags = [f"--{name} {value}" for name, value in (("tolerance", tolerance), ("tokens", tokens)) if value is not None]
    command = " ".join(["octavo bench portability", run.name, *flags])
    code = _finish("portability", rows, write, json_output, command, device=_device(device))
    message = alarm(rows, TOLERANCE if tolerance is None else tolerance)
    if message is not None:
        print(f"octavo: alarm: {message}", file=sys.stderr)
    return code if message is None else 1


def _portability_line(row: dict[str, Any]) -> str:
    kernels = ", ".join(f"{count} x {name}" for name, count in row["kernels"].items()) or "no FP8"
    return f"{row['computation']:<24} {row['heldout_loss']:.4f}  {row['difference']:+.4f}  {kernels}"


def _device(name: str) -> str:
    from octavo.train.device import resolve

    return resolve(name).type


def _positive(flag: str, number: int) -> int:
    from octavo.errors import ConfigError

    if number < 1:
        raise ConfigError(f"{flag}: {number} is not a positive number.")
    return number


def _printer(json_output: bool) -> Callable[[str], None]:
    """Return what prints a line of progress: to stderr where stdout is for JSON."""
    return lambda line: print(line, file=sys.stderr if json_output else sys.stdout, flush=True)


def _finish(
    kind: str,
    rows: list[dict[str, Any]],
    write: Path | None,
    json_output: bool,
    command: str,
    *,
    device: str = "auto",
) -> int:
    """Print and write what was measured. Returns the exit code: 1 where a row failed."""
    from octavo.bench import results

    if json_output:
        print(json.dumps(rows, indent=1))
    if write is not None:
        result = results.Result(
            kind=kind,
            date=results.today(),
            hardware=results.hardware(device),
            versions=results.versions(),
            command=command,
            rows=tuple(rows),
        )
        print(f"written: {results.write(result, write)}", file=sys.stderr)
    return 1 if any("error" in row for row in rows) else 0

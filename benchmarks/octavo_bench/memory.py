"""Measured and predicted peak memory of training a Llama, and the largest one that fits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Annotated, Any

import torch
from cyclopts import Parameter

import octavo
from octavo.errors import ConfigError, NonFiniteError, RunError, UnsupportedError
from octavo.kernels.storage import Storage
from octavo.lab import memory
from octavo.lab.memory.forecast import GIB
from octavo.lab.models.llama import Llama
from octavo.lab.train.memory import largest_of
from octavo.optim import AdamW, keep_none, keep_small
from octavo.optim.states import States
from octavo_bench.kind import TO_STDOUT, Kind, Names, Output, known
from octavo_bench.render import figures, grouped, has_failed
from octavo_bench.results import Row
from octavo_bench.timing import attempt, made_in_bf16, median_ms, peak_gib
from octavo_bench.workloads import WORKLOADS, Workload

USABLE = 0.95
"""Share of a GPU's memory available to the largest model; the rest is for the driver and for fragmentation."""


def by_workload(rows: Sequence[Row]) -> str:
    """Return one line per workload and case: parameters, measured and predicted peak, and the forecast by kind.

    Where steps were timed there is also the speed, relative to the first case's.
    """
    shown = list[Row]()
    for own in grouped(rows, "workload").values():
        first = next((row["peak_gib"] for row in own if not has_failed(row)), 0.0)
        ms = next((row["ms"] for row in own if "ms" in row), 0.0)
        for row in own:
            if has_failed(row):
                about = {key: row[key] for key in ("workload", "implementation", "predicted_gib") if key in row}
                shown.append(about | {"peak": "failed"})
            else:
                less = {} if "largest" in row["workload"] else {"less": 1 - row["peak_gib"] / first}
                faster = {"speed": ms / row["ms"]} if "ms" in row else {}
                shown.append(row | _derived(row) | less | faster)
    timed = any("speed" in row for row in shown)
    return figures((*KIND.columns, *SPEED) if timed else KIND.columns, shown, every=True)


def _derived(row: Row) -> Row:
    found = {"peak": f"{row['peak_gib']:.2f}", "off": row["predicted_gib"] / row["peak_gib"] - 1}
    return found | ({"billions": row["parameters"] / 1e9} if "parameters" in row else {})


KIND = Kind(
    name="memory",
    keys={"workload": str, "implementation": str, "peak_gib": float, "predicted_gib": float},
    columns=(
        ("workload", "{workload}"),
        ("trained as", "{implementation}"),
        ("parameters", "{billions:.2f} B"),
        ("peak GiB", "{peak}"),
        ("predicted", "{predicted_gib:.2f}"),
        ("error", "{off:+z.1%}"),
        ("less than the first", "{less:.0%}"),
        *((kind, f"{{{kind}_gib:.2f}}") for kind in memory.KINDS),
    ),
    names=2,
    derived=_derived,
    show=by_workload,
)
SPEED = (("ms per step", "{ms:.1f}"), ("times the first's speed", "{speed:.2f}"))

_FP32 = Storage("fp32")
COMMON = States(name="fp32", about="FP32 moments, and a master apart", first=_FP32, second=_FP32, master=_FP32)
"""States of common mixed precision: the tier `fp32` stores 16 remainder bits with a BF16 weight, not a master."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Training settings that determine memory."""

    recipe: str = "bf16"
    policy: octavo.Policy = field(default_factory=octavo.Policy)
    states: str | States = COMMON
    release: bool = False
    """Each gradient is applied and freed as soon as backward has computed it."""


_LEAN = octavo.Policy(min_gain=0.0, weights="fp8", activation_inputs="fp8", norm_inputs="fp8", attention_output="fp8")
CASES = {
    "bf16, fp32 adam": Case(),
    "folded, fp8 states": Case(recipe="folded", policy=octavo.Policy(min_gain=0.0), states="fp8"),
    "folded_fast, fp8-lm states": Case(recipe="folded_fast", policy=octavo.Policy(min_gain=0.0), states="fp8-lm"),
    "folded_fast + fp8 head, fp8-lm states": Case(
        recipe="folded_fast", policy=octavo.Policy(min_gain=0.0, keep_defaults=False), states="fp8-lm"
    ),
    "folded, fp8 weights and activations, fp8-min states, released gradients": Case(
        recipe="folded", policy=_LEAN, states="fp8-min", release=True
    ),
}
"""By name, the baseline first: BF16 weights and gradients, FP32 master and moments, 16 bytes per parameter."""
BASELINE, *_, LEANEST = CASES


def bench_memory(
    workload: Workload, names: tuple[str, ...] = (), *, largest: bool = False, steps: int = 0
) -> Iterator[Row]:
    """Yield one row per case; rows of failed ones have `error`.

    Args:
        workload: a whole model.
        names: of `CASES`; by default all, with `largest` the baseline and the leanest.
        largest: measure the largest model of the workload's proportions that is predicted to fit, with one sequence per
            step, instead of the workload.
        steps: timed steps after the two whose peak is measured; 0 for none.

    Raises:
        RunError: there is no CUDA device.
        UnsupportedError: the workload is not a whole model.
    """
    if not torch.cuda.is_available():
        raise RunError("bench memory needs a CUDA device, and there is none here. `octavo plan --memory` needs none.")
    if not workload.vocab:
        raise UnsupportedError(f"workload '{workload.name}' is a stack of blocks: memory is measured for whole models.")
    for name in names or ((BASELINE, LEANEST) if largest else CASES):
        chosen = _largest(workload, CASES[name]) if largest else workload
        about: Row = {"workload": chosen.name, "implementation": name, "shape": asdict(chosen)}
        row = attempt(about, lambda: predict(chosen, CASES[name]).to_dict())  # noqa: B023  # called at once
        if "error" not in row:  # the row keeps the forecast if the measurement fails
            row = attempt(row, partial(_measure, chosen, CASES[name], row["predicted_gib"], steps), "cuda")
        yield row


def predict(workload: Workload, case: Case, *, gpus: int = 1) -> memory.Forecast:
    """Return the forecast of a case."""
    return memory.forecast(lambda: build(workload, case, "cpu"), gpus=gpus)


def build(workload: Workload, case: Case, device: str) -> memory.Program:
    """Return a case as a program: BF16 weights, compiled blocks, one batch of random tokens."""
    with made_in_bf16(device):
        model = Llama(workload.config)
    model.reset_parameters(torch.Generator(device).manual_seed(0))
    octavo.convert(model, case.recipe, policy=case.policy, tokens=workload.tokens)
    for block in model.layers:
        block.compile(fullgraph=True)
    shape = (workload.batch, workload.sequence)
    tokens, targets = (torch.randint(workload.vocab, shape, device=device) for _ in range(2))
    keep = keep_none if case.states is COMMON else keep_small
    optimizer = AdamW(model.named_parameters(), lr=1e-4, states=case.states, keep=keep, release=case.release)

    def forward_backward() -> torch.Tensor:
        loss: torch.Tensor = model(tokens, targets)
        loss.backward()
        return loss.detach()

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return memory.Program(models=[model], forward_backward=forward_backward, update=update)


def _largest(workload: Workload, case: Case) -> Workload:
    """Return the largest workload of these proportions that is predicted to fit this GPU, one sequence per step."""
    gib = torch.cuda.get_device_properties(0).total_memory * USABLE / GIB
    config = workload.config

    def forecast(model: Any) -> memory.Forecast:
        return predict(_of_shape(workload, model), case)

    found = largest_of(config, forecast, gib)
    if found is None:
        raise RunError(f"no model of the proportions of '{workload.name}' fits {gib:.0f} GiB.")
    return _of_shape(workload, found[0])


def _of_shape(workload: Workload, model: Any) -> Workload:
    shape = {"dim": model.dim, "ffn": model.ffn_dim, "heads": model.heads, "kv_heads": model.key_value_heads}
    return replace(workload, name=f"largest {workload.name}", batch=1, layers=model.layers, **shape)


def _measure(workload: Workload, case: Case, predicted_gib: float, steps: int) -> Row:
    """Return the peak memory allocated by building the program and making two steps, and the median of timed ones."""
    torch.cuda.reset_peak_memory_stats()
    program = build(workload, case, "cuda")
    for _ in range(2):
        loss = program.forward_backward()
        program.update()
    if not math.isfinite(float(loss)):
        raise NonFiniteError(f"the loss of {workload.name} is {float(loss)} at the second step.")
    peak = peak_gib("cuda")
    row = {"peak_gib": round(peak, 3), "error_percent": round((predicted_gib / peak - 1) * 100, 2)}
    return row | (_timed(program, workload.tokens, steps) if steps else {})


def _timed(program: memory.Program, tokens: int, steps: int) -> Row:
    """Return the median milliseconds of whole steps, the optimizer's update included."""

    def step() -> None:
        program.forward_backward()
        program.update()

    ms = median_ms(step, "cuda", steps)
    return {"ms": round(ms, 3), "tokens_per_s": round(tokens / ms * 1000)}


def command(
    *,
    workload: str = "llama-1b",
    only: Names = (),
    largest: Annotated[bool, Parameter(negative=())] = False,
    steps: int = 0,
    output: Output = TO_STDOUT,
) -> int:
    """Train two steps of a Llama in BF16 and by Octavo's options, and compare peak memory with the forecast.

    Needs a CUDA device. `octavo plan --memory` predicts without one.

    Examples:

        octavo bench memory
        octavo bench memory --largest
        octavo bench memory --workload 175b --steps 6

    Parameters
    ----------
    workload
        A whole model among the workloads of `octavo bench step`.
    only
        Cases to measure; all by default.
    largest
        Train the largest model of the workload's proportions that is predicted to fit this GPU instead.
    steps
        Time this many further steps of each case, so that memory and speed are of one run; by default none.
    """
    if steps < 0:
        raise ConfigError(f"--steps: {steps} is negative. It is the number of timed steps, 0 for none.")
    chosen = WORKLOADS[known("--workload", workload, list(WORKLOADS), "workload")]
    names = tuple(known("--only", name, list(CASES), "case") for name in only)
    rows = bench_memory(chosen, names, largest=largest, steps=steps)
    return output.finish(KIND, rows, device="cuda", workload=workload, only=only, largest=largest, steps=steps or None)

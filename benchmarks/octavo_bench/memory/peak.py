"""Measure the peak memory of training a Llama, beside what was predicted; and find and train the largest that fits."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

import octavo
from octavo import memory
from octavo.errors import NonFiniteError, RunError, UnsupportedError, did_you_mean
from octavo.kernels.storage import Storage
from octavo.models.llama import Llama
from octavo.optim import AdamW, keep_none, keep_small
from octavo.optim.states import States
from octavo.train.memory import largest_of
from octavo_bench.results import failure
from octavo_bench.workloads import Workload

Row = dict[str, Any]

GIB = 2**30
USABLE = 0.95
"""Share of a GPU's memory that the largest model may take: the rest is the driver's, and the allocator's fragments."""


_FP32 = Storage("fp32")
COMMON = States(name="fp32", about="FP32 moments, and a master apart", first=_FP32, second=_FP32, master=_FP32)
"""As mixed precision commonly keeps them: the tier `fp32` has no master beside a BF16 weight, but 16 bits of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A way to train, as far as memory goes."""

    recipe: str = "bf16"
    policy: octavo.Policy = field(default_factory=octavo.Policy)
    states: str | States = COMMON
    release: bool = False
    """Whether each gradient is stepped and freed as soon as backward has it."""


_LEAN = octavo.Policy(min_gain=0.0, weights="fp8", activation_inputs="fp8", norm_inputs="fp8", attention_output="fp8")
CASES = {
    "bf16, fp32 adam": Case(),
    "folded, fp8 states": Case(recipe="folded", policy=octavo.Policy(min_gain=0.0), states="fp8"),
    "folded, fp8 weights and activations, fp8-min states, released gradients": Case(
        recipe="folded", policy=_LEAN, states="fp8-min", release=True
    ),
}
"""By name, the baseline first: BF16 weights and gradients, FP32 master and moments, 16 bytes a parameter."""
BASELINE, *_, LEANEST = CASES


def bench_memory(
    workload: Workload,
    names: tuple[str, ...] = (),
    *,
    largest: bool = False,
    report: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Return one row a case, as the result kind `memory` has them. A case that fails has a row with `error`.

    Args:
        workload: a whole model.
        names: of `CASES`; all where empty.
        largest: measure, of the baseline and the leanest case, the largest model of its proportions that is predicted
            to fit, on one sequence a step, instead of the workload.
        report: called with each row as it comes.

    Raises:
        RunError: there is no CUDA device.
        UnsupportedError: a name that is not there, or a workload that is no whole model.
    """
    if not torch.cuda.is_available():
        raise RunError("bench memory measures on a CUDA device, and there is none. `octavo plan --memory` needs none.")
    if not workload.vocab:
        raise UnsupportedError(f"workload '{workload.name}' is a stack of blocks: memory is measured of whole models.")
    if missing := next((name for name in names if name not in CASES), None):
        near = did_you_mean(missing, CASES)
        raise UnsupportedError(f"no case '{missing}' here.{near} There are: {'; '.join(CASES)}.")
    rows = []
    for name in names or ((BASELINE, LEANEST) if largest else CASES):
        chosen = _largest(workload, CASES[name]) if largest else workload
        rows.append(_row(chosen, name))
        report(rows[-1])
    return rows


def predict(workload: Workload, case: Case, *, gpus: int = 1) -> memory.Forecast:
    """Return the forecast of a case."""
    return memory.forecast(lambda: build(workload, case, "cpu"), gpus=gpus)


def build(workload: Workload, case: Case, device: str) -> memory.Program:
    """Return a case as a program: BF16 weights, compiled blocks, one batch of random tokens."""
    model = _model(workload, device)
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


def _model(workload: Workload, device: str) -> Llama:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # in FP32, a model that just fits would not be made
    try:
        with torch.device(device):
            model = Llama(workload.config)
    finally:
        torch.set_default_dtype(before)
    model.reset_parameters(torch.Generator(device).manual_seed(0))
    return model


def _largest(workload: Workload, case: Case) -> Workload:
    """Return the largest workload of these proportions that is predicted to fit this GPU, one sequence a step."""
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


def _row(workload: Workload, name: str) -> Row:
    row: Row = {"workload": workload.name, "implementation": name}
    try:
        predicted = predict(workload, CASES[name]).to_dict()
        row |= {"shape": asdict(workload), **predicted}
        peak = _measure(workload, CASES[name])
        return row | {"peak_gib": round(peak / GIB, 3), "error_percent": _percent(predicted["predicted_gib"], peak)}
    except Exception as error:  # one that fails, of memory above all, must not lose the others
        return row | {"error": failure(error)}
    finally:
        gc.collect()
        torch._dynamo.reset()
        torch.cuda.empty_cache()


def _measure(workload: Workload, case: Case) -> int:
    """Return the most bytes allocated while the program is made and makes two steps."""
    torch.cuda.reset_peak_memory_stats()
    program = build(workload, case, "cuda")
    for _ in range(2):
        loss = program.forward_backward()
        program.update()
    if not math.isfinite(float(loss)):
        raise NonFiniteError(f"the loss of {workload.name} is {float(loss)} at the second step.")
    return torch.cuda.max_memory_allocated()


def _percent(predicted_gib: float, peak: int) -> float:
    return round((predicted_gib * GIB / peak - 1) * 100, 2)

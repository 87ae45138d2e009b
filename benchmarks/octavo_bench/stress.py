"""Stress: per-row errors of the three GEMMs of a linear layer on hard inputs, by recipe, against float64.

Each case is a few steps of one layer, of which the last is measured. In sudden cases the earlier steps are plain, so
that scales with a history do not anticipate the input. M tokens, K input features, N output features.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import octavo
from octavo import recipes
from octavo.numerics import sqnr_per_row_db
from octavo.recipes import Recipe
from octavo_bench.kind import TO_STDOUT, Kind, Names, Output, device_named, known
from octavo_bench.render import cell, grouped, has_failed, table
from octavo_bench.results import Row
from octavo_bench.timing import attempt

M, K, N = 256, 384, 256
STEPS_BEFORE = 4
GRADIENT = 2.0**-10
"""Standard deviation of a plain gradient."""
LONGEST_DB = 150.0
"""Figure of a row without error: figures must be finite."""
PRODUCTS = {
    "Y": "{y_median_db:.1f} / {y_worst_db:.1f} dB",
    "dX": "{dx_median_db:.1f} / {dx_worst_db:.1f} dB",
    "dW": "{dw_median_db:.1f} / {dw_worst_db:.1f} dB",
}
"""Signal-to-noise ratio of the median row, and of the worst."""


def by_case(rows: Sequence[Row]) -> str:
    """Return, per case, the signal-to-noise ratio of the three GEMMs by recipe: median row / worst row."""
    blocks = []
    for (case,), of_case in grouped(rows, "case").items():
        body = [(row["recipe"], *(_cell(form, row) for form in PRODUCTS.values())) for row in of_case]
        blocks.append(f"**{case}**\n\n{table(('recipe', *PRODUCTS), body)}")
    return "\n\n".join(blocks)


def _cell(form: str, row: Row) -> str:
    return f"failed: {row['error']}" if has_failed(row) else cell(form, row) or "not finite"


KIND = Kind(
    name="stress",
    keys={"case": str, "recipe": str, "nonfinite": int},
    columns=(("case", "{case}"), ("recipe", "{recipe}"), *PRODUCTS.items(), ("not finite", "{spoiled}")),
    names=2,
    derived=lambda row: {"spoiled": row["nonfinite"] or None},
    show=by_case,
)


@dataclass(frozen=True, slots=True)
class Inputs:
    """Operands of one step of the layer, FP32."""

    x_MK: Tensor
    weight_NK: Tensor
    dy_MN: Tensor


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of hard input."""

    name: str
    make: Callable[[Inputs, torch.Generator], Inputs]
    """(plain inputs, generator) -> hard inputs."""
    is_sudden: bool
    """Whether the steps before the measured one are plain."""
    tokens: int = M


def outlier_tokens(plain: Inputs, draw: torch.Generator) -> Inputs:
    """Multiply one token in 32 by 1000 in all features, and one feature in 64 by 20 in all tokens."""
    x_MK = plain.x_MK * _some(plain.x_MK.shape[0], 32, 1000.0, draw)[:, None] * _some(K, 64, 20.0, draw)
    return Inputs(x_MK, plain.weight_NK, plain.dy_MN)


def swiglu_spikes(plain: Inputs, draw: torch.Generator) -> Inputs:
    """Set single values to ±2000, as inputs of a down projection have if gate and up align (arXiv 2409.12517)."""
    rows, columns = (torch.randint(size, (4,), generator=draw) for size in plain.x_MK.shape)
    x_MK = plain.x_MK.clone()
    x_MK[rows, columns] = 2000 * x_MK[rows, columns].sign()
    return Inputs(x_MK, plain.weight_NK, plain.dy_MN)


def tiny_gradients(plain: Inputs, draw: torch.Generator) -> Inputs:
    """Scale gradients to 1e-9, which no lower limit of an amax may flush."""
    return Inputs(plain.x_MK, plain.weight_NK, plain.dy_MN * (1e-9 / GRADIENT))


def grown_weight_row(plain: Inputs, draw: torch.Generator) -> Inputs:
    """Multiply one row of the weight by 1000 from one step to the next."""
    weight_NK = plain.weight_NK.clone()
    weight_NK[int(torch.randint(N, (), generator=draw))] *= 1000
    return Inputs(plain.x_MK, weight_NK, plain.dy_MN)


def odd_packing(plain: Inputs, draw: torch.Generator) -> Inputs:
    """Pack documents of odd lengths into one sequence, each with its own level, from 2^-12 to 2^3."""
    documents = {1: 2.0**3, 3: 2.0**-12, 7: 1.0, 33: 2.0**-3, 65: 2.0**-9, 97: 2.0**-6, 127: 2.0}
    levels = torch.cat([torch.full((length,), level) for length, level in documents.items()])
    return Inputs(plain.x_MK * levels[:, None], plain.weight_NK, plain.dy_MN * levels[:, None])


CASES = (
    Case("outlier tokens", outlier_tokens, is_sudden=False),
    Case("SwiGLU spikes of 2000", swiglu_spikes, is_sudden=True),
    Case("gradients at 1e-9", tiny_gradients, is_sudden=False),
    Case("a weight row times 1000", grown_weight_row, is_sudden=True),
    Case("packing with odd lengths", odd_packing, is_sudden=False, tokens=333),
)


def bench_stress(names: Sequence[str] = (), *, device: str = "cpu") -> Iterator[Row]:
    """Yield one row for each case and recipe; `names`: recipes, all if empty."""
    for case in CASES:
        for name in names or recipes.names():
            yield attempt({"case": case.name, "recipe": name}, partial(measure, case, name, device))


def measure(case: Case, recipe: str, device: str = "cpu") -> dict[str, Any]:
    """Return the signal-to-noise ratio of Y, dX and dW, in dB, of the median and of the worst row, and a count.

    `nonfinite` counts the NaN and infinities in all three; a result with any has no figures.
    """
    draw = torch.Generator().manual_seed(0)
    steps = [_plain(case.tokens, draw) for _ in range(STEPS_BEFORE + 1)]
    weight = steps[0].weight_NK
    steps = [Inputs(step.x_MK, weight, step.dy_MN) for step in steps]
    steps = [step if case.is_sudden else case.make(step, draw) for step in steps[:-1]] + [case.make(steps[-1], draw)]
    steps = [Inputs(s.x_MK.to(device), s.weight_NK.to(device), s.dy_MN.bfloat16().float().to(device)) for s in steps]
    model = _converted(recipe, steps, device)
    last = steps[-1]
    x, w, dy = last.x_MK.double(), last.weight_NK.double(), last.dy_MN.double()
    computed = _step(model, last)
    exact = {"y": x @ w.t(), "dx": dy @ w, "dw": dy.t() @ x}
    row: dict[str, Any] = {"nonfinite": sum(int((~made.isfinite()).sum()) for made in computed.values())}
    for name, reference in exact.items():
        if computed[name].isfinite().all():
            row |= _figures(name, reference, computed[name])
    return row


def _figures(name: str, reference: Tensor, computed: Tensor) -> dict[str, float]:
    signal = reference.square().sum(dim=1) > 0
    db = sqnr_per_row_db(reference[signal], computed[signal]).clamp(max=LONGEST_DB)
    return {f"{name}_median_db": float(db.median()), f"{name}_worst_db": float(db.min())}


def _plain(tokens: int, draw: torch.Generator) -> Inputs:
    return Inputs(
        torch.randn(tokens, K, generator=draw),
        torch.randn(N, K, generator=draw) / K**0.5,
        torch.randn(tokens, N, generator=draw) * GRADIENT,
    )


def _some(size: int, one_in: int, factor: float, draw: torch.Generator) -> Tensor:
    """Return a vector of ones in which one value in `one_in` is `factor`."""
    factors = torch.ones(size)
    factors[torch.randperm(size, generator=draw)[: max(1, size // one_in)]] = factor
    return factors


def _converted(recipe: str, steps: Sequence[Inputs], device: str) -> nn.Sequential:
    """Return the layer in FP8 after all steps but the last."""
    spec = recipes.load(recipe)
    if not spec.needs_calibration:
        model = _linear(spec, device)
        for step in steps[:-1]:
            _step(model, step)
        return model
    with tempfile.TemporaryDirectory() as folder:  # `static` uses the scales of `delayed`
        path = Path(folder) / "scales.json"
        stored = octavo.scales(_converted("delayed", steps, device))
        assert stored is not None  # `delayed` stores scales
        stored.save(path)
        return _linear(spec, device, scales=path)


def _linear(spec: Recipe, device: str, **options: Any) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(K, N, bias=False, device=device))
    octavo.convert(model, spec, policy=octavo.Policy(min_gain=0), tokens=M, **options)
    return model


def _step(model: nn.Sequential, inputs: Inputs) -> dict[str, Tensor]:
    """Make one step with learning rate 0, and return its results."""
    weight = model.get_parameter("0.weight")
    with torch.no_grad():
        weight.copy_(inputs.weight_NK)
    x_MK = inputs.x_MK.detach().requires_grad_()
    weight.grad = None
    with torch.autocast(x_MK.device.type, torch.bfloat16):
        y_MN = model(x_MK)
    y_MN.backward(inputs.dy_MN.to(y_MN.dtype))
    assert x_MK.grad is not None and weight.grad is not None
    computed = {"y": y_MN.detach(), "dx": x_MK.grad, "dw": weight.grad.clone()}
    torch.optim.SGD([weight], lr=0.0).step()  # stored scales are updated by an optimizer step
    return computed


def command(*, recipe: Names = (), device: str = "auto", output: Output = TO_STDOUT) -> int:
    """Print the signal-to-noise ratio of a linear layer's three GEMMs on hard inputs, by recipe; takes seconds.

    Outlier tokens, SwiGLU spikes, gradients at 1e-9, a weight row that grows a thousandfold, odd sequence lengths;
    median row / worst row in dB, against float64.

    Examples:

        octavo bench stress
        octavo bench stress --recipe folded --recipe delayed --device cpu

    Parameters
    ----------
    recipe
        Recipes; all by default.
    device
        cuda or cpu; auto takes the GPU if there is one.
    """
    device, names = device_named(device), [known("--recipe", name, recipes.names(), "recipe") for name in recipe]
    return output.finish(KIND, bench_stress(names, device=device), device=device, recipe=recipe)

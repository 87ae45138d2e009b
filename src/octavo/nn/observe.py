"""`octavo.observed`: quantisation errors of each FP8 layer, and the layer that met a NaN or an infinity first.

Every operand is quantised once more, beside the layer, and every element counted, while `octavo.nn.telemetry` reads a
sample. That costs passes and memory: it is meant for finding faults, not for every step. Nothing waits for the device
until the report is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from octavo import kernels
from octavo._util.terminal import columns
from octavo.errors import ConfigError, UnsupportedError
from octavo.kernels import ScaleRef
from octavo.kernels.patches import unfold
from octavo.kernels.quant_spec import spec_of
from octavo.kernels.sample import limits
from octavo.nn.conv import Conv1d, Conv2d, as_images, window_of
from octavo.nn.fp8_weights import values
from octavo.nn.functional import scale_ref_of
from octavo.nn.grouped import GroupedLinear
from octavo.nn.linear import LinearLayer
from octavo.nn.modules import hooked, input_of
from octavo.nn.multihead import MultiheadAttention
from octavo.nn.telemetry_ops import rotated
from octavo.numerics import PER_TENSOR, Quantized, format_of, tile_amax
from octavo.recipes import STORED_SCALE_ROLES, Operand, Recipe

ROLES = ("input", "weight", "grad_output")
_READERS = {
    "input": (("fprop", False), ("wgrad", True)),
    "weight": (("fprop", False), ("dgrad", True)),
    "grad_output": (("dgrad", False), ("wgrad", True)),
}
"""GEMMs that read a role, and whether they read it transposed."""

Layer = LinearLayer | Conv1d | Conv2d


class Observed(NamedTuple):
    """Counts of one role of one layer."""

    layer: str
    """Full name of the layer."""
    role: str
    """`input`, `weight` or `grad_output`."""
    operand: str
    """Quantisation by the first GEMM that reads it in FP8."""
    elements: int
    """Number of elements; a NaN in a pixel that nine patches of a convolution read counts nine times."""
    non_finite: int
    """Number of NaN and infinite elements."""
    saturated: int
    """Finite elements beyond the largest code by more than rounding."""
    flushed: int
    """Finite, nonzero elements whose code is zero."""
    amax: float
    """The largest finite magnitude, before the scales of a folded partner are multiplied in."""


class Fault(NamedTuple):
    """A role of a layer that was not finite."""

    layer: str
    role: str
    non_finite: int


class Observation:
    """The report of `octavo.observed`. `print` shows a table, the worst first. Reading it waits for the device."""

    not_counted: tuple[str, ...]
    """FP8 layers that are not counted: experts (`octavo.nn.GroupedLinear`), and q, k, v of `nn.MultiheadAttention`."""

    def __init__(self, layers: dict[str, Layer], not_counted: Iterable[str] = ()) -> None:
        self.not_counted = tuple(not_counted)
        self._tallies = {name: _Tally(layer.weight.device) for name, layer in layers.items()}
        self._counted = 0
        self._is_open = True

    def rows(self) -> list[Observed]:
        """Return the counts: most non-finite elements first, then the largest shares saturated and flushed."""
        found = [row for name, tally in self._tallies.items() for row, _ in tally.read(name)]
        return sorted(found, key=lambda r: (-r.non_finite, -r.saturated / r.elements, -r.flushed / r.elements))

    def faults(self) -> list[Fault]:
        """Return every role that was not finite, in order of occurrence: the first is where to look."""
        found = [(first, row) for name, tally in self._tallies.items() for row, first in tally.read(name) if first]
        return [Fault(row.layer, row.role, row.non_finite) for _, row in sorted(found)]

    def to_json(self) -> str:
        """Return the rows and the layers not counted as JSON."""
        rows = [row._asdict() for row in self.rows()]
        return json.dumps({"rows": rows, "not_counted": self.not_counted}, indent=1)

    def __str__(self) -> str:
        shown = self.rows()
        header = ("layer", "role", "quantised as", "elements", "non-finite", "saturated", "flushed", "amax")
        ran = len({row.layer for row in shown})
        notes = [f"{ran} of {len(self._tallies)} layers ran", *(f"not counted: {name}" for name in self.not_counted)]
        return "\n".join([*columns([header, *map(_cells, shown)]), "", *notes])

    def _hook(self, name: str) -> Callable[..., None]:
        """Return the forward hook that counts a layer, and the gradient of its output when there is one."""
        tally = self._tallies[name]

        def watch(layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any], y: Tensor) -> None:
            if not layer.enabled:
                return
            x, recipe = input_of(args, kwargs), layer.recipe
            runs = _gemms_that_run(x, layer.weight)
            x_MK, weight_NK = _input_matrix(layer, x), _weight_matrix(layer)
            input8 = self._look(tally, layer, "input", x_MK, runs)
            weight8 = self._look(tally, layer, "weight", weight_NK, runs)
            if y.requires_grad:
                second = _second(recipe, "input", x_MK) or input8, _second(recipe, "weight", weight_NK) or weight8
                fold = _fold(recipe, runs, *second)

                def watch_gradient(dy: Tensor) -> None:
                    self._look(tally, layer, "grad_output", _output_matrix(layer, dy), runs, fold)

                y.register_hook(watch_gradient)

        return watch

    @torch.no_grad()
    def _look(
        self, tally: _Tally, layer: Layer, role: str, x: Tensor, runs: set[str], fold: Tensor | None = None
    ) -> Quantized | None:
        """Count a matrix as read by the first GEMM that runs; None if none reads it in FP8."""
        recipe = layer.recipe
        reader = _reader(recipe, role, runs)
        if reader is None or not self._is_open:
            return None
        self._counted += 1
        gemm, transposed = reader
        slot = layer.scaling_slot if isinstance(layer, LinearLayer) and role in STORED_SCALE_ROLES else None
        stored = recipe.plan.x_stored if role == "input" else recipe.plan.dy_stored
        scale_ref = None if slot is None else scale_ref_of(slot.scale_and_amax, stored, update_amax=False)
        return tally.add(role, getattr(recipe.gemm(gemm), role), x, transposed, scale_ref, fold, self._counted)


class _Tally:
    """Counts of one layer, a row for each of `ROLES`, on its device."""

    def __init__(self, device: torch.device) -> None:
        with torch.inference_mode(False):  # they are written outside of inference mode too
            self.lost = torch.zeros(len(ROLES), 3, dtype=torch.int64, device=device)
            self.amax = torch.zeros(len(ROLES), device=device, dtype=torch.float32)
            self.first = torch.zeros(len(ROLES), dtype=torch.int64, device=device)
        self.elements = [0] * len(ROLES)
        self.operands = [""] * len(ROLES)

    def add(
        self,
        role: str,
        operand: Operand,
        x: Tensor,
        transposed: bool,
        scale_ref: ScaleRef | None,
        fold: Tensor | None,
        number: int,
    ) -> Quantized:
        """Quantise x (R, C), or its transpose, as a layer would, count the errors, and return it.

        Args:
            fold: factor multiplied in before, broadcastable to x.
            number: number of matrices counted so far, this one included.
        """
        read = x if fold is None else x.float() * fold
        read = read.t() if transposed else read
        target = spec_of(operand)._replace(rounding="nearest")
        if scale_ref is None:
            made = kernels.quantize(read, *target)
        else:
            made = cast(Quantized, kernels.quantize_with_scale([read.contiguous()], scale_ref, target, None)[0])
        lost, row = count_lost(rotated(read, target), made), ROLES.index(role)
        lost[2] = (~read.isfinite()).sum()  # a rotation spreads one over its block
        self.amax[row] = torch.maximum(self.amax[row], tile_amax(x, PER_TENSOR).view(()))
        self.lost[row] += lost
        is_first = (self.first[row] == 0) & (lost[2] > 0)
        self.first[row] = torch.where(is_first, number, self.first[row])
        self.elements[row] += x.numel()
        self.operands[row] = str(operand)
        return made

    def read(self, layer: str) -> Iterator[tuple[Observed, int]]:
        """Yield each role that was counted, and the number of the first matrix that was not finite, or 0."""
        firsts = self.first.tolist()
        for row, role in enumerate(ROLES):
            if elements := self.elements[row]:
                flushed, saturated, non_finite = self.lost[row].tolist()
                counts = elements, non_finite, saturated, flushed
                yield Observed(layer, role, self.operands[row], *counts, float(self.amax[row])), firsts[row]


@contextmanager
def observed(model: nn.Module) -> Iterator[Observation]:
    """Count quantisation errors per FP8 layer inside the block: flushed, saturated and non-finite elements.

    A layer's `input` and `weight` are counted in every forward inside the block, its `grad_output` in every backward of
    such a forward; a recomputed forward counts again. Results of the forward are bitwise unchanged. Fused MLPs are
    computed layer by layer, as with any hook inside, so that their gradients are rounded once more, to the dtype of the
    layers (and `activation_inputs="fp8"` keeps BF16). Code under `torch.compile` runs eagerly inside the block. CUDA
    graphs captured before it are not counted.

    Each layer is counted by itself, with the format, granularity and scaling of its recipe: with its stored scale if
    the recipe stores scales, otherwise with the scale of its own maximum, scales of folded partners multiplied in.
    Layers that share an input share scales: their counts of flushed elements of a gradient, or of a weight with one
    scale per tensor, may differ slightly from the real ones. Stochastic rounding is counted as rounding to nearest.

    Args:
        model: converted, or with layers of `octavo.nn`: `Linear`, `Conv1d`, `Conv2d`.

    Raises:
        ConfigError: no such layer computes in FP8.
        UnsupportedError: in compiled code.
    """
    if torch.compiler.is_compiling():
        raise UnsupportedError("octavo.observed cannot begin in compiled code: call the compiled code inside of it.")
    kinds = Layer | GroupedLinear | MultiheadAttention
    modules = [(n, m) for n, m in model.named_modules() if isinstance(m, kinds) and m.recipe.is_fp8]
    layers = {name: module for name, module in modules if isinstance(module, Layer)}
    if not layers:
        raise ConfigError("octavo.observed: the model has no LinearLayer, Conv1d or Conv2d in FP8. Convert it first.")
    report = Observation(layers, [name for name, module in modules if not isinstance(module, Layer)])
    hooks = (
        layer.register_forward_hook(report._hook(name), prepend=True, with_kwargs=True)
        for name, layer in layers.items()
    )
    try:
        with hooked(hooks), torch.compiler.set_stance("force_eager"):
            yield report
    finally:
        report._is_open = False


def count_lost(x: Tensor, quantized: Quantized) -> Tensor:
    """Return how many elements are flushed to zero, saturated, and not finite, int64 (3,).

    Args:
        x: (R, C), the quantised values, with their fold if there was one.
        quantized: codes (R, C), rounded to nearest.
    """
    if x.numel() == 0:
        return torch.zeros(3, dtype=torch.int64, device=x.device)
    magnitude = x.float().abs()
    finite = magnitude < torch.inf
    is_zero = quantized.codes.view(torch.uint8) & 0x7F == 0
    scale = quantized.granularity.expand(quantized.scale, *x.shape)
    saturated = finite & (magnitude / scale > limits(format_of(quantized.codes)).saturated)
    return torch.stack([found.sum() for found in (finite & (magnitude > 0) & is_zero, saturated, ~finite)])


def _cells(row: Observed) -> tuple[str, ...]:
    shares = (f"{100 * count / row.elements:.3g} %" for count in (row.saturated, row.flushed))
    return row.layer, row.role, row.operand, str(row.elements), str(row.non_finite), *shares, f"{row.amax:.4g}"


def _gemms_that_run(x: Tensor, weight: Tensor) -> set[str]:
    needed = {"fprop": True, "dgrad": x.requires_grad, "wgrad": weight.requires_grad}
    return {gemm for gemm, is_needed in needed.items() if is_needed and (gemm == "fprop" or torch.is_grad_enabled())}


def _reader(recipe: Recipe, role: str, runs: set[str]) -> tuple[str, bool] | None:
    """Return the first GEMM that runs and reads a role in FP8, and whether it reads it transposed."""
    readers = ((gemm, way) for gemm, way in _READERS[role] if gemm in runs and recipe.gemm(gemm).is_fp8)
    return next(readers, None)


def _second(recipe: Recipe, role: str, x: Tensor) -> Quantized | None:
    """Return the second set of codes of `input` or `weight`, if a backward GEMM reads one."""
    target = recipe.plan.x_second if role == "input" else recipe.plan.w_second
    return None if target is None else kernels.quantize(x.detach(), *target)


def _fold(recipe: Recipe, runs: set[str], input8: Quantized | None, weight8: Quantized | None) -> Tensor | None:
    """Return the scales that move into the gradient (M, N) for the GEMM that it is counted for: (1, N) or (M, 1)."""
    reader = _reader(recipe, "grad_output", runs)
    if reader == ("dgrad", False) and recipe.folds("dgrad.weight") and weight8 is not None:
        return weight8.scale.t()
    if reader == ("wgrad", True) and recipe.folds("wgrad.input") and input8 is not None:
        return input8.scale
    return None


def _input_matrix(layer: Layer, x: Tensor) -> Tensor:
    """Return the input (M, K) of a layer's GEMM; for a convolution, its patches."""
    return _flat(x) if isinstance(layer, LinearLayer) else unfold(_pixels(layer, x), window_of(layer))


def _output_matrix(layer: Layer, y: Tensor) -> Tensor:
    """Return the output of a layer, or its gradient, as (M, N)."""
    return _flat(y if isinstance(layer, LinearLayer) else _pixels(layer, y))


def _weight_matrix(layer: Layer) -> Tensor:
    """Return the weight of a layer as (N, K)."""
    if isinstance(layer, LinearLayer):
        return values(layer.matrix.detach(), layer.weight.dtype)
    return layer.weight.movedim(1, -1).flatten(1)


def _pixels(layer: Conv1d | Conv2d, x: Tensor) -> Tensor:
    """Return images in any shape that a convolution takes as (B, H, W, C)."""
    return as_images(x, len(layer.kernel_size)).movedim(1, -1).contiguous()


def _flat(x: Tensor) -> Tensor:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])

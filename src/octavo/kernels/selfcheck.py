"""Self-check of this machine's Triton kernels against their references, on small random data.

Some Triton versions miscompile correct kernels: transposes of byte tiles, and NaN-propagating maxima. The kernels here
avoid both, to be verified on every new machine by comparison with the references on its CPU. Codes and scales are
equal; if sums or exponentials differ in the last bit, codes may be off by one for at most 1 element in 10,000.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.errors import UnsupportedError
from octavo.kernels.activation import INPUTS
from octavo.kernels.activation import reference as activation
from octavo.kernels.norm import reference as norm
from octavo.kernels.quant_spec import QuantSpec, empty
from octavo.kernels.runtime.dispatch import architecture, implementation, launches_on, triton_unsupported_reason
from octavo.kernels.wire import reference as wire
from octavo.numerics import Quantized, quantize

SHAPES = ((130, 300), (256, 1024))
"""One shape that no tile divides, and one that every tile divides, compiled like shapes of real models."""
STEP = {torch.float32: 4e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""Relative tolerance per dtype, for another order of FP32 summation."""
OF_LARGEST = 1e-5
"""Additional tolerance relative to the largest element."""

_ROW, _COLUMN = QuantSpec("e4m3", "row", "power_of_two"), QuantSpec("e4m3", "column", "power_of_two")
_TILE = QuantSpec("e4m3", "1x128", "power_of_two")
_ROTATED = QuantSpec("int8", "row", "float32", rotation=256)
_FORWARD, _GRADIENT = (
    QuantSpec("e4m3", "tensor", "float32"),
    QuantSpec("e5m2", "tensor", "float32"),
)  # as in `tensorwise`
_GRANULARITIES = ("tensor", "row", "column", "1x128", "128x1", "128x128")
_TARGETS = (
    *(QuantSpec("e4m3", granularity, "power_of_two") for granularity in _GRANULARITIES),
    _FORWARD,
    _GRADIENT,
    QuantSpec("e5m2", "128x128", "float32"),
)


class Case(NamedTuple):
    """One call of a kernel and its reference."""

    name: str
    operands: tuple[Any, ...]
    """On the CPU."""
    kernel: str | tuple[Callable[..., Any], Callable[..., Any]]
    """File and function, as for `run_kernel`; or a pair of kernel and reference."""
    exact: bool = False
    """Whether results must be bit-identical."""


def check_kernels(device: torch.device | str, kernels: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Return one row per case: `kernel`, `case`, `passed`, `detail`. The first call compiles every kernel.

    Args:
        kernels: keys of `KERNELS` to check; default all.

    Raises:
        UnsupportedError: the device has no support for Triton kernels.
    """
    device = torch.device(device)
    if reason := triton_unsupported_reason(device):
        raise UnsupportedError(f"there are no Triton kernels to check: {reason}.")
    with launches_on(device):
        return [_row(name, *outcome) for name in kernels or KERNELS for outcome in _check(KERNELS[name], device)]


def _row(kernel: str, case: str, passed: bool, detail: str) -> dict[str, Any]:
    return {"kernel": kernel, "case": case, "passed": passed, "detail": detail}


def _check(cases: Callable[[], Iterator[Case]], device: torch.device) -> Iterator[tuple[str, bool, str]]:
    """Yield (case, passed, detail)."""
    try:
        for case in cases():
            yield case.name, *_outcome(case, device)
    except Exception as error:  # an import missing in this Triton version
        yield "all", False, _message_of(error)


def _outcome(case: Case, device: torch.device) -> tuple[bool, str]:
    """Compare results and, for in-place kernels, operands after the call."""
    try:
        kernel, reference = case.kernel if isinstance(case.kernel, tuple) else _both(case.kernel)
        operands, expected = _copy_to(case.operands, device), _copy_to(case.operands, torch.device("cpu"))
        return compare((kernel(*operands), operands), (reference(*expected), expected), case.exact)
    except Exception as error:  # from Triton's compiler or the driver: reported as a failure
        return False, _message_of(error)


def _both(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    file, _, function = name.partition(".")
    return getattr(implementation("triton", file), function), getattr(implementation("reference", file), function)


def _message_of(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _copy_to(operands: Sequence[Any], device: torch.device) -> list[Any]:
    """Return copies of operands on a device: kernels may write in place."""
    copies = []
    for value in operands:
        if isinstance(value, Tensor):
            value = value.to(device, copy=True)
        if isinstance(value, Quantized):
            value = Quantized(*_copy_to(value, device))
        copies.append(_copy_to(value, device) if type(value) in (list, tuple) else value)
    return copies


# --- comparing -------------------------------------------------------------------------------------------------------


def compare(got: Any, want: Any, exact: bool) -> tuple[bool, str]:
    """Return whether results agree, and a description: tensors, `Quantized`, None, or tuples of these."""
    pairs = itertools.zip_longest(_tensors(got), _tensors(want))
    outcomes = [_compare(one, other, exact) for one, other in pairs]
    details = [text for passed, text in outcomes if not passed] or [text for _, text in outcomes if text]
    return all(passed for passed, _ in outcomes), "; ".join(dict.fromkeys(details)) or "equal"


def _tensors(value: Any) -> Iterator[Tensor | None]:
    if value is None or isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)


def _compare(got: Tensor | None, want: Tensor | None, exact: bool) -> tuple[bool, str]:
    if got is None or want is None:
        return got is want, "" if got is want else "a result is missing or unexpected"
    got = got.cpu()
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        return False, f"got {got.dtype} {tuple(got.shape)}, expected {want.dtype} {tuple(want.shape)}"
    if want.dtype.itemsize == 1:
        return _compare_codes(got, want, exact)
    return _compare_numbers(got, want, exact)


def _compare_codes(got: Tensor, want: Tensor, exact: bool) -> tuple[bool, str]:
    if exact:
        differ = got.view(torch.uint8) != want.view(torch.uint8)
        return not differ.any(), _describe(differ, "bytes differ")
    distance = (_ordinal(got) - _ordinal(want)).abs()
    passed = int(distance.max()) <= 1 and int((distance > 0).sum()) <= -(-distance.numel() // 10_000)
    return passed, _describe(distance > 0, f"codes differ, by up to {int(distance.max())}")


def _ordinal(codes: Tensor) -> Tensor:
    """Rank codes by value; NaN is far from all other codes."""
    if codes.dtype == torch.int8:
        return codes.int()
    bits = codes.view(torch.uint8).int()
    return torch.where(codes.float().isnan(), 999, torch.where(bits < 128, bits, 128 - bits))


def _compare_numbers(got: Tensor, want: Tensor, exact: bool) -> tuple[bool, str]:
    one, other = got.double(), want.double()
    equal = (one == other) | (one.isnan() & other.isnan())
    if exact:
        return bool(equal.all()), _describe(~equal, "values differ")
    size = other.abs().where(other.isfinite(), 0.0)
    allowed = STEP.get(want.dtype, 0.0) * size + OF_LARGEST * size.max()
    far = ~equal & ~((one - other).abs() <= allowed)
    if far.any():
        return False, _describe(far, "values exceed the tolerance")
    return True, "" if equal.all() else "within rounding"


def _describe(differ: Tensor, what: str) -> str:
    if not differ.any():
        return ""
    first = tuple(torch.nonzero(differ)[0].tolist())
    return f"{int(differ.sum()):,} of {differ.numel():,} {what}, first at {first}"


# --- the cases -------------------------------------------------------------------------------------------------------


def _normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal random numbers, seeded by the shape, with row magnitudes over 12 binades."""
    generator = torch.Generator().manual_seed(sum(shape))
    sizes = torch.exp2(torch.randint(-6, 7, (shape[0], *(1 for _ in shape[1:])), generator=generator))
    return (torch.randn(shape, generator=generator, dtype=torch.float32) * sizes).to(dtype)


def _special_values(rows: int, cols: int) -> Tensor:
    """Normal random numbers with NaN, infinities, zero rows and columns, tiny and huge rows."""
    x = _normal(rows, cols)
    x[3, 5], x[7, 9], x[8, 1], x[rows - 1, cols - 1] = torch.nan, torch.inf, -torch.inf, torch.nan
    x[9], x[:, 11], x[12] = 0, 0, torch.nan
    x[20] *= 1e-25
    x[21] *= 1e25
    return x


def _folds(rows: int, cols: int) -> tuple[Tensor, Tensor]:
    """Powers of two, (1, cols) and (rows, 1)."""
    powers = torch.exp2((torch.arange(rows + cols) % 7 - 3).float())
    return powers[None, :cols].contiguous(), powers[cols:, None].contiguous()


def _quantize() -> Iterator[Case]:
    kernel = "quantize.quantize_pair"
    for shape in SHAPES:
        size, x, folds = f"{shape[0]}x{shape[1]}", _special_values(*shape), _folds(*shape)
        for target in _TARGETS:
            yield Case(f"{target}, both ways, {size}", ([x], target, target, *folds), kernel, exact=True)
        yield Case(f"{_ROW}, as it lies, {size}", ([x], _ROW, None, folds[0]), kernel, exact=True)
        yield Case(f"{_ROW}, transposed, {size}", ([x], None, _ROW, None, folds[1]), kernel, exact=True)
    parts = list(_special_values(130, 300).split((128, 128, 44), dim=1))
    for target in (_ROW, _TILE):
        yield Case(f"{target}, three matrices", (parts, target, target, *_folds(130, 300)), kernel, exact=True)


def _transpose() -> Iterator[Case]:
    for rows, cols in (*SHAPES, (257, 16)):
        codes = (torch.arange(rows * cols) * 7919 >> 3).to(torch.uint8).reshape(rows, cols).view(torch.float8_e4m3fn)
        yield Case(f"{rows}x{cols}", (codes, None), "transpose.transpose", exact=True)


def _weights() -> Iterator[Case]:
    def run(weights: list[Tensor], target: QuantSpec) -> Quantized:
        fused, rows = implementation("triton_weights", "quantize"), sum(weight.shape[0] for weight in weights)
        out = empty(target, rows, weights[0].shape[1], weights[0].device)
        fused.quantize_rows(fused.find_rows(weights), weights[0].dtype, out, target.rule)
        return out

    def reference(weights: list[Tensor], target: QuantSpec) -> Quantized:
        return quantize(torch.cat(weights), target.fmt, target.tile, target.scaling)

    for dtype, cols in itertools.product((torch.bfloat16, torch.float32), (300, 384)):
        weights = [_normal(rows, cols, dtype=dtype) for rows in (24, 7, 40)]
        for target in (_ROW, _ROW._replace(scaling="float32"), _ROW._replace(scaling="engine")):
            yield Case(f"{target} of {str(dtype)[6:]}, 71x{cols}", (weights, target), (run, reference), exact=True)


def _hidden(rows: int, cols: int, gated: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradient of h, gate and up."""
    dh, gate, up = (_normal(rows + i, cols)[:rows] for i in range(3))
    gate = (gate / 8).clamp(-4, 4)  # beyond it, outputs are 0 or the input
    gate[1], gate[2, 3], dh[4, 5] = 0, torch.nan, torch.inf
    return dh, gate, up if gated else None


def _activation() -> Iterator[Case]:
    forward, backward = "activation.activate", "activation.activation_backward"
    kinds = (("silu", True), ("gelu_tanh", True), ("gelu", False), ("relu2", False))
    for (kind, gated), shape in itertools.product(kinds, SHAPES):
        dh, gate, up = _hidden(*shape, gated)
        scale = activation.activate(kind, gate, up, _ROW)[0].scale
        folds = _folds(shape[0], shape[1] * (1 + gated))
        name = f"{kind}{', gated' if gated else ''}, {shape[0]}x{shape[1]}"
        yield Case(f"folded {name}", (kind, gate, up, _ROW), forward)
        yield Case(f"folded {name}, backward", (kind, dh, gate, up, (_ROW, _ROW, _COLUMN), (*folds, scale)), backward)
    recipes = (("block", _TILE, _TILE), ("tensorwise", _FORWARD, _GRADIENT))
    for (rows, cols), (recipe, ahead, gradient) in itertools.product(SHAPES, recipes):
        cols = -(-cols // 128) * 128  # a tile may not straddle [d gate | d up]
        dh, gate, up = _hidden(rows, cols, True)
        targets = (gradient, gradient, ahead), (None, None, None)
        yield Case(f"{recipe} silu, gated, {rows}x{cols}", ("silu", gate, up, ahead), forward)
        yield Case(f"{recipe} silu, gated, {rows}x{cols}, backward", ("silu", dh, gate, up, *targets), backward)
    plain = "silu", *_hidden(130, 300, True)
    yield Case("silu, gated, 130x300, plain", (plain[0], *plain[2:]), "activation.activate_plain")
    yield Case("silu, gated, 130x300, plain backward", plain, "activation.activation_backward_plain")
    yield from _inputs_of_activations()


def _inputs_of_activations() -> Iterator[Case]:
    """Gate and up saved as codes: quantised in forward, read in backward."""
    recipes = (("folded", _ROW, _ROW, _COLUMN), ("block", _TILE, _TILE, _TILE))
    for (rows, cols), gated, (recipe, ahead, gradient, hidden) in itertools.product(SHAPES, (True, False), recipes):
        cols = cols if recipe == "folded" else -(-cols // 128) * 128
        dh, gate, up = _hidden(rows, cols, gated)
        h, *codes = activation.activate("silu", gate, up, ahead, INPUTS)[:-1]
        factors = (*_folds(rows, cols * (1 + gated)), h.scale) if recipe == "folded" else (None, None, None)
        operands = "silu", dh, codes[0], codes[1] if gated else None, (gradient, gradient, hidden), factors
        name = f"{recipe} silu{', gated' if gated else ''}, {rows}x{cols}"
        yield Case(f"{name}, and its inputs", ("silu", gate, up, ahead, INPUTS), "activation.activate")
        yield Case(f"{name}, backward from codes", operands, "activation.activation_backward")


def _norm() -> Iterator[Case]:
    for (name, centred), shape in itertools.product((("rms", False), ("layer", True)), SHAPES):
        x, dy = (_normal(shape[0] + i, shape[1])[: shape[0]] for i in range(2))
        weight, bias = _normal(1, shape[1])[0], _normal(2, shape[1])[0] if centred else None
        size = f"{name}, {shape[0]}x{shape[1]}"
        for target in (_ROW, _TILE):
            broken = x.clone()
            broken[2, 7], broken[4, 9], broken[6] = torch.nan, torch.inf, 0
            yield Case(f"{size}, {target}", (broken, weight, bias, 1e-5, target, centred), "norm.forward")
        rotated = (x, weight, bias, 1e-5, _ROTATED, centred, _ROW)
        yield Case(f"{size}, {_ROTATED} and {_ROW}", rotated, "norm.forward")
        yield Case(f"{size}, of a sum", (x, weight, bias, 1e-5, _ROW, centred, None, dy), "norm.forward")
        rstd, mean = norm.forward(x, None, None, 1e-5, None, centred)[2:4]
        yield Case(f"{size}, backward", (dy, x, weight, bias, mean, rstd), "norm.backward")
        yield Case(f"{size}, backward beside another", (dy, x, weight, bias, mean, rstd, dy), "norm.backward")


def _rotary() -> Iterator[Case]:
    for length, width in ((33, 12), (32, 128)):
        x, angles = _normal(2, length, 3, width), _normal(1, length, width, dtype=torch.float32)
        for conjugate in (False, True):
            name = f"2x{length}x3x{width}{', back' if conjugate else ''}"
            yield Case(name, (x, angles.cos(), angles.sin(), conjugate), "rotary.rotate", exact=True)


def _cross_entropy() -> Iterator[Case]:
    for (rows, vocab), dtype, (softcap, z_loss) in itertools.product(
        ((40, 300), (3, 20_000)), (torch.float32, torch.bfloat16), ((0.0, 0.0), (5.0, 0.01))
    ):
        logits, targets = _normal(rows, vocab, dtype=dtype).clamp(-20, 20), torch.arange(rows) * 7 % vocab
        targets[1] = -100
        name = f"{rows}x{vocab} of {str(dtype)[6:]}{', soft cap and z-loss' if softcap else ''}"
        yield Case(name, (logits, targets, -100, True, softcap, z_loss), "cross_entropy.cross_entropy_")


def _wire() -> Iterator[Case]:
    """Gradients packed into messages, and messages of three ranks reduced."""
    for length, dtype in itertools.product((300, 8192), (torch.float32, torch.bfloat16)):
        ranks = [_special_values(40, 1024).flatten()[i : i + 2 * length].to(dtype) for i in range(3)]
        name = f"2x{length} of {str(dtype)[6:]}"
        yield Case(f"pack {name}", (ranks[0], 2, length), "wire.pack", exact=True)
        messages = torch.stack([wire.pack(x, 2, length) for x in ranks], dim=1)
        values = torch.stack([x.view(2, length) for x in ranks], dim=1)
        out = torch.zeros(2 * length - 1, dtype=dtype)
        yield Case(f"add {name}", (messages, length, out, 1 / 3), "wire.add", exact=True)
        yield Case(f"add plain {name}", (values, length, out, 1 / 3), "wire.add", exact=True)


def _grouped() -> Iterator[Case]:
    ends, (row_fold, column_fold) = torch.tensor([30, 30, 47], dtype=torch.int32), _folds(47, 48)
    operands = _special_values(47, 48), ends, _ROW, _ROW, row_fold.repeat(3, 1), column_fold
    yield Case("3 groups, both ways", operands, "grouped.quantize_groups", exact=True)
    whole = (torch.arange(3 * 48 * 128) * 7 % 9 - 4).float().to(torch.float8_e4m3fn)  # sums are exact in any order
    rows, stack = whole[: 47 * 48].view(47, 48), whole.view(3, 128, 48)
    yield Case("bytes of 3 groups", (rows, ends), "grouped.transpose_groups", exact=True)
    if torch.cuda.is_available() and not architecture(torch.device("cuda")).grouped:
        return
    scale, scales = (torch.exp2((torch.arange(count) % 5 - 2).float()) for count in (47, 3 * 128))
    for fast in (False, True):
        product = rows, scale[:, None], stack, scales.view(3, 128), ends, torch.float32, fast
        yield Case(
            f"product of 3 groups, {'fast' if fast else 'slow'}", product, "grouped_gemm.grouped_gemm", exact=True
        )
    sums = whole[: 32 * 512].view(32, 512), scales[:96].view(3, 32), whole[: 16 * 512].view(16, 512), None, ends
    yield Case("sums over 3 groups", (*sums, torch.bfloat16), "grouped_gemm.grouped_wgrad", exact=True)


KERNELS: dict[str, Callable[[], Iterator[Case]]] = {
    "quantize": _quantize,
    "transpose": _transpose,
    "weights": _weights,
    "activation": _activation,
    "norm": _norm,
    "rotary": _rotary,
    "cross_entropy": _cross_entropy,
    "wire": _wire,
    "grouped": _grouped,
}
"""Test cases per kernel."""


def failures(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Return the names of kernels with a failed case, without duplicates."""
    return list(dict.fromkeys(str(row["kernel"]) for row in rows if not row["passed"]))

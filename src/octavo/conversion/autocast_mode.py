"""`octavo.autocast`: a block of code whose white-listed operators run in FP8, without converting any module.

A `torch.overrides.TorchFunctionMode` sees every call from Python: `F.linear` on raw parameters, `@`, `torch.bmm`.
Modules that `octavo.convert` has converted, or left in BF16, keep what their plan says.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from octavo._util.compiler import assume_constant_result
from octavo._util.terminal import columns
from octavo.conversion.gain import predicted_gain
from octavo.conversion.matmul_ops import PARSERS, MatmulCall
from octavo.conversion.operators import Operators
from octavo.errors import ConfigError, UnsupportedError
from octavo.kernels.bmm import batched_unsupported_reason
from octavo.kernels.runtime.devices import Rates
from octavo.kernels.runtime.dispatch import rates
from octavo.nn.first_call import note_weight
from octavo.nn.functional import compute_dtype
from octavo.nn.operands import autocast_dtype
from octavo.nn.weight_notes import WeightNotes
from octavo.recipes import FALLBACK, RecipeLike, load

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_PLAIN = (Tensor, nn.Parameter)
_KEPT = WeightNotes("octavo_keeps")
"""Notes on weights that every block leaves in high precision: the reasons."""


class autocast(TorchFunctionMode):
    """A block in which white operators compute by a recipe, forward and backward; all others are unchanged.

    `with octavo.autocast() as seen:` gives a report of the calls. Results have `torch.autocast`'s dtype where that is
    enabled, else the operands'. Blocks nest, the innermost one decides; with `enabled=False` nothing runs in FP8. A
    backward pass follows its forward, wherever it is called.

    Raises:
        ConfigError: an unknown recipe, or one with scales stored from step to step, which need a layer to hold them.
    """

    def __init__(
        self, recipe: RecipeLike = FALLBACK, operators: Operators | None = None, *, enabled: bool = True
    ) -> None:
        super().__init__()
        if torch.compiler.is_compiling():
            raise UnsupportedError(
                "octavo.autocast cannot begin in compiled code: call the compiled code inside of it."
            )
        self.recipe, self.operators, self.enabled = load(recipe), operators or Operators(), enabled
        if self.recipe.has_stored_scales:
            raise ConfigError(
                f"recipe '{self.recipe.name}' keeps scales from step to step, and operators have no layer to keep them "
                "in. Use a recipe with current scales, or octavo.convert."
            )
        self.seen = AutocastReport()
        self._watched = self.operators.watched()
        self._active = False
        """Whether this is the innermost block and enabled. Compiled code guards on it."""
        self._gains: dict[tuple[Rates, int, int, int, int, int], float] = {}

    def __enter__(self) -> AutocastReport:
        """Begin the block and return its report. A block that is entered again adds to the same report."""
        _blocks.enter(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self.seen

    def __exit__(self, *exception: Any) -> None:
        """End the block."""
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        _blocks.leave()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of PyTorch: in FP8 if it is white and can be, else unchanged."""
        kwargs = kwargs or {}
        name = self._watched.get(func) if self._active else None
        if name is None:
            return func(*args, **kwargs)
        found = self._judge(name, args, kwargs)
        if isinstance(found, str):
            self._note(name, found)
            return func(*args, **kwargs)
        self._note(name, "")
        if found.weight is not None:
            note_weight(found.weight)
        return found.compute(self.recipe, compute_dtype(found.tensors[0]))

    def _note(self, operator: str, why: str) -> None:
        if torch.compiler.is_compiling():
            _note_compiled(operator, why)
        else:
            self.seen.calls[operator, why] += 1

    def _judge(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MatmulCall | str:
        """Return the product to compute in FP8, or why the call stays unchanged."""
        if (own := self.operators.own.get(name)) is not None and name not in self.operators.black:
            name, *rest = own(*args, **kwargs)
            args, kwargs = tuple(rest), {}
            if name not in self.operators.white:
                return f"its reader says '{name}', which is not white"
        black = self.operators.black.get(name)
        product = _read(name, args, kwargs) if black is None else black
        return product if isinstance(product, str) else self._why_not(product) or product

    def _why_not(self, product: MatmulCall) -> str | None:
        """Return why a product stays unchanged, or None. The text has no numbers: a compiler may make them symbolic."""
        if not self.recipe.is_fp8:
            return "the recipe says bf16"
        return _kept_reason(product) or _no_operands(product) or self._too_small(product)

    def _too_small(self, product: MatmulCall) -> str | None:
        rules, device = self.operators, product.tensors[0].device
        if product.features < rules.min_features:
            return "fewer than `min_features`"
        if product.batch > 1 and any(size % rules.multiple for size in product.sizes):
            return "a batch whose sizes are no multiples of `multiple`"
        if device.type != "cuda":
            return None
        if (known := rates(device)) and self._gain(known, *product.sizes, product.taps, product.batch) < rules.min_gain:
            return "too small to gain: below `min_gain`"
        if product.batch > rules.max_loop and (reason := self._why_looped(device)) is not None:
            return f"a batch of more than `max_loop`: {reason}"
        return None

    def _gain(self, known: Rates, rows: int, cols: int, terms: int, taps: int, batch: int) -> float:
        if torch.compiler.is_compiling():  # a traced function must not change what it reads
            return predicted_gain(self.recipe, cols, terms, rows, taps, batch, rates=known)
        key = known, rows, cols, terms, taps, batch
        if key not in self._gains:
            self._gains[key] = predicted_gain(self.recipe, cols, terms, rows, taps, batch, rates=known)
        return self._gains[key]

    def _why_looped(self, device: torch.device) -> str | None:
        kinds = [((a.format, a.granularity), (b.format, b.granularity)) for _, a, b in self.recipe.gemms()]
        return next(filter(None, (batched_unsupported_reason(device, a, b) for a, b in kinds)), None)


def _read(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MatmulCall | str:
    try:
        return PARSERS[name](*args, **kwargs)
    except (TypeError, AttributeError):  # another form of arguments, or wrong ones: PyTorch decides
        return "called with arguments of another form"


def keep(layer: nn.Module, reason: str | None) -> None:
    """Let every block leave a layer's weight in high precision, for this reason; None ends that."""
    _KEPT.put(layer, reason)


def _kept_reason(product: MatmulCall) -> str | None:
    operands = product.tensors if product.weight is None else (product.weight, *product.tensors)
    return next(filter(None, map(_KEPT.of, operands)), None)


def _no_operands(product: MatmulCall) -> str | None:
    """Return why these operands cannot be those of an FP8 product, or None."""
    first = product.tensors[0]
    for x in product.tensors:
        if type(x) not in _PLAIN or x.layout != torch.strided:
            return f"an operand is a {type(x).__name__}, {x.layout}"
        if x.dtype not in _DTYPES:
            return f"an operand is {x.dtype}"
        if x.device != first.device:
            return "its operands are on different devices"
        if x.dtype != first.dtype and autocast_dtype(x.device.type) is None:
            return "its operands have different dtypes"
    return None


class _Blocks(threading.local):
    """The open blocks of this thread, the innermost last; None stands for `suspended`."""

    def __init__(self) -> None:
        self.open: list[autocast | None] = []

    def enter(self, block: autocast | None) -> None:
        self.open.append(block)
        self._activate_innermost()

    def leave(self) -> None:
        if (block := self.open.pop()) is not None:
            block._active = False
        self._activate_innermost()

    def _activate_innermost(self) -> None:
        for block in filter(None, self.open):
            block._active = block.enabled and block is self.open[-1]


_blocks = _Blocks()


@contextmanager
def suspended() -> Iterator[None]:
    """Run everything unchanged inside, whatever `autocast` blocks are open around it."""
    _blocks.enter(None)
    try:
        yield
    finally:
        _blocks.leave()


@assume_constant_result
def _note_compiled(operator: str, why: str) -> None:
    """Count a call in code that is being compiled. A compiler runs this once, when it traces."""
    if _blocks.open and (block := _blocks.open[-1]) is not None:
        block.seen.compiled[operator, why] += 1


@dataclass(eq=False)
class AutocastReport:
    """Calls of the listed operators. `print` shows them as a table.

    Backward passes are not counted: every product that ran in FP8 has gradients by the recipe. `octavo.kernels.record`
    counts the GEMMs themselves.
    """

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(operator, reason it was unchanged; empty for FP8) -> calls."""
    compiled: Counter[tuple[str, str]] = field(default_factory=Counter)
    """The same for calls in code that was compiled inside the block; each is counted once."""

    def fp8(self, operator: str) -> int:
        """Return how many calls of an operator ran in FP8; those in compiled code count once."""
        return self.calls[operator, ""] + self.compiled[operator, ""]

    def kept(self, operator: str) -> dict[str, int]:
        """Return the reasons why an operator was unchanged, and how often each applied."""
        found = self.calls + self.compiled
        return {why: count for (name, why), count in found.items() if name == operator and why}

    def rows(self) -> list[tuple[str, str, int, int, str]]:
        """Return (operator, `fp8` or `as it is`, calls, compiled calls, reason), the most frequent first."""
        keys = sorted(self.calls | self.compiled, key=lambda key: (bool(key[1]), -self.calls[key], key))
        return [(key[0], "as it is" if key[1] else "fp8", self.calls[key], self.compiled[key], key[1]) for key in keys]

    def to_json(self) -> str:
        """Return the rows as JSON."""
        names = ("operator", "precision", "calls", "compiled", "why")
        return json.dumps([dict(zip(names, row, strict=True)) for row in self.rows()], indent=1)

    def __str__(self) -> str:
        rows = [("operator", "runs in", "calls", "compiled", "why"), *(tuple(map(str, row)) for row in self.rows())]
        total, every = (sum(row[2] + row[3] for row in self.rows() if kept or not row[4]) for kept in (False, True))
        return "\n".join([*columns(rows), "", f"{total} of {every} calls in FP8"])

"""Kernels as custom operators, `torch.ops.octavo.<name>`.

Eager code on plain tensors calls a kernel's function directly. The operator serves users of the dispatcher:
`torch.compile`, fake tensors, tensor subclasses, dispatch modes. An `in_graph` operator is decomposed by AOTAutograd:
the compiler sees its Triton launches and vendor GEMMs, and launches them itself. All others, and every operator while a
ledger is open or `gemm_by` names an accumulator, are one opaque call, which reads the host state when it runs.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo._util.compiler import assume_constant_result
from octavo.kernels.quant_spec import QuantSpec, parse_spec
from octavo.kernels.runtime.dispatch import PLAIN, is_triton_off
from octavo.kernels.runtime.host_state import host_state
from octavo.numerics import Quantized, granularity_named

_library = torch.library.Library("octavo", "FRAGMENT")
_composites: dict[str, Callable[..., Any]] = {}


def define(
    signature: str,
    run: Callable[..., Any],
    shape: Callable[..., Any],
    *tags: torch.Tag,
    in_graph: Callable[..., bool] | None = None,
) -> None:
    """Define an operator for every device.

    Args:
        signature: `name(arguments) -> results`, a PyTorch operator schema.
        run: implementation.
        shape: fake implementation: returns results of the same shapes, dtypes and strides, without data.
        tags: operator tags, in addition to `pt2_compliant_tag`.
        in_graph: takes the arguments of `run`; returns whether `run` consists only of Triton launches and PyTorch
            operators, so that a compiler may trace it.
    """
    name = signature.partition("(")[0]
    _library.define(signature, tags=(torch.Tag.pt2_compliant_tag, *tags))
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"octavo::{name}", shape, lib=_library)
    if in_graph is not None:
        _decompose(name, run, in_graph)
    if not run.__module__.startswith("octavo.kernels"):
        _composites[f"octavo::{name}"] = run


def _decompose(name: str, run: Callable[..., Any], in_graph: Callable[..., bool]) -> None:
    """Let AOTAutograd trace `run` in place of the operator: a conditional `torch.library.triton_op`."""
    from torch._subclasses.functional_tensor import FunctionalTensorMode

    def trace(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not in_graph(*args, **(kwargs or {})):
            return mode.__torch_dispatch__(func, types, args, kwargs or {})
        with mode:
            return run(*args, **(kwargs or {}))

    torch.library.register_torch_dispatch(f"octavo::{name}", FunctionalTensorMode, trace, lib=_library)


def is_direct(x: Tensor) -> bool:
    """Return whether to bypass the operator: eager code on a plain tensor with data."""
    return not torch.compiler.is_compiling() and type(x) in PLAIN and not x.is_meta


def composite(operator: Any) -> Callable[..., Any] | None:
    """Return the function of an operator that calls several kernels; None for any other operator."""
    name = operator._schema.name if isinstance(operator, torch._ops.OpOverload) else ""
    return _composites.get(name)


# --- operators on structures, packed into a list of tensors and a string that describes them --------------------------


def define_packed(
    name: str,
    run: Callable[..., Any],
    shape: Callable[..., Any],
    *tags: torch.Tag,
    in_graph: Callable[..., bool] | None = None,
) -> None:
    """Define an operator on structures, for use by `call`. Arguments as for `define`.

    Arguments may be tensors, `Quantized`, `QuantSpec`, dtypes, strings without `|`, numbers, None, and sequences of
    these; named tuples may arrive as lists. Results are a sequence of tensors, matrices with codes and scale, and None.
    """

    def flat(function: Callable[..., Any]) -> Callable[[Sequence[Tensor], Sequence[float], str], Any]:
        @functools.wraps(function)
        def unpacked(tensors: Sequence[Tensor], numbers: Sequence[float], arguments: str) -> Any:
            return function(*unpack(tensors, numbers, arguments))

        return unpacked

    def flattened(function: Callable[..., Any]) -> Callable[[Sequence[Tensor], Sequence[float], str], Any]:
        @functools.wraps(function)
        def listed(tensors: Sequence[Tensor], numbers: Sequence[float], arguments: str) -> list[Tensor]:
            flat_results: list[Tensor] = []
            for one in function(*unpack(tensors, numbers, arguments)):
                flat_results += [] if one is None else [one] if isinstance(one, Tensor) else [one.codes, one.scale]
            return flat_results

        return listed

    def unless_opaque(in_graph: Callable[..., bool]) -> Callable[..., bool]:
        return lambda tensors, numbers, arguments: (
            not arguments.startswith(_OPAQUE) and in_graph(tensors, numbers, arguments)
        )

    signature = f"{name}(Tensor[] tensors, float[] numbers, str arguments) -> Tensor[]"
    traced = None if in_graph is None else unless_opaque(flat(in_graph))
    define(signature, flattened(run), flattened(shape), *tags, in_graph=traced)


def call(
    name: str, run: Callable[..., Any], arguments: Sequence[Any], results: Sequence[QuantSpec | bool | None]
) -> Any:
    """Call an operator of `define_packed`; eager code on plain tensors calls `run` directly.

    Args:
        arguments: arguments of `run`. The first is a tensor, a `Quantized`, or a sequence of either.
        results: kind of each result: a tensor (True), codes and scales (`QuantSpec`), or none (False, None).
    """
    first = arguments[0]
    while not isinstance(first, Tensor):
        first = first[0]
    if is_direct(first):
        return run(*arguments)
    tensors, numbers, text = pack(arguments)
    text = f"code {_code()}|{text}" if host_state().is_open_to_compilers else _OPAQUE + text
    made = iter(getattr(torch.ops.octavo, name)(tensors, numbers, text))
    return [
        Quantized(next(made), next(made), result.tile) if isinstance(result, QuantSpec) else next(made)
        if result
        else None
        for result in results
    ]  # fmt: skip


_OPAQUE = "opaque|"
"""Prefix of the arguments of a call that no compiler may look into. It is part of the graph, and thus of the key under
which PyTorch caches compiled code, also on disk: what a process-wide switch says is not."""
_HEADS = ("opaque", "code")
"""Kinds of words that describe no argument."""


@assume_constant_result
def _code() -> str:
    """Return what names the code that an operator is decomposed into: a digest of its sources, and OCTAVO_TRITON.

    PyTorch caches compiled code on disk by the graph before decomposition. Without this, code that another version of
    Octavo compiled would be found under the key of this one.
    """
    return f"{_digest_of_sources()} {'reference' if is_triton_off() else 'triton'}"


@functools.cache
def _digest_of_sources() -> str:
    digest, package = hashlib.sha256(), Path(__file__).parents[2]
    for folder in ("kernels", "numerics"):
        for path in sorted((package / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


_DTYPES = {getattr(torch, name): name for name in ("float32", "bfloat16", "float16", "float64")}


def pack(arguments: Sequence[Any]) -> tuple[list[Tensor], list[float], str]:
    """Pack arguments for an operator of `define_packed`."""
    tensors: list[Tensor] = []
    numbers: list[float] = []
    return tensors, numbers, "|".join([_pack(argument, tensors, numbers) for argument in arguments])


def _pack(x: Any, tensors: list[Tensor], numbers: list[float]) -> str:
    """Describe an argument as a string; append its tensors, and its floats, which Dynamo may trace as symbols."""
    if x is None:
        return "none"
    if isinstance(x, Tensor):
        tensors.append(x)
        return "tensor"
    if isinstance(x, float):
        numbers.append(x)
        return "number"
    if isinstance(x, Quantized):
        tensors += x[:2]
        return "quantized " + x.granularity.name
    if isinstance(x, QuantSpec):  # not `str(x)`: Dynamo of PyTorch 2.11 cannot join its result
        return f"spec {x.format} {x.granularity} {x.scaling} {x.rounding} {x.rotation}"
    if isinstance(x, torch.dtype):
        return "dtype " + _DTYPES[x]
    if isinstance(x, tuple | list):
        return "|".join([f"sequence {len(x)}", *[_pack(each, tensors, numbers) for each in x]])
    return f"{'bool' if isinstance(x, bool) else type(x).__name__} {x}"


def unpack(tensors: Sequence[Tensor], numbers: Sequence[float], arguments: str) -> list[Any]:
    """Undo `pack`."""
    words, values = iter(_words(arguments)), (iter(tensors), iter(numbers))
    return [_argument(kind, value, words, *values) for kind, value in words]


@functools.lru_cache(maxsize=4096)
def _words(arguments: str) -> list[tuple[str, str]]:
    words = (word.partition(" ") for word in arguments.split("|"))
    return [(kind, value) for kind, _, value in words if kind not in _HEADS]


_PARSERS: dict[str, Callable[[str], Any]] = {
    "none": lambda _: None,
    "spec": parse_spec,
    "dtype": lambda name: getattr(torch, name),
    "bool": lambda text: text == "True",
    "int": int,
    "str": str,
}


def _argument(
    kind: str, value: str, words: Iterator[tuple[str, str]], tensors: Iterator[Tensor], numbers: Iterator[float]
) -> Any:
    if kind == "tensor":
        return next(tensors)
    if kind == "number":
        return next(numbers)
    if kind == "quantized":
        return Quantized(next(tensors), next(tensors), granularity_named(value))
    if kind == "sequence":
        return [_argument(*next(words), words, tensors, numbers) for _ in range(int(value))]
    return _PARSERS[kind](value)

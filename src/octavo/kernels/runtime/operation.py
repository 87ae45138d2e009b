"""Operations: what a contract in `kernels/` decorates, as custom operators `torch.ops.octavo.<name>`.

    @operation(reference=reference.rotate, fake=lambda x, *_: x.new_empty(x.shape))
    def _rotate(x: Tensor, cos: Tensor, sin: Tensor, conjugate: bool) -> Tensor: ...

Eager code on plain tensors runs an operation directly. The operator serves users of the dispatcher: `torch.compile`,
fake tensors, tensor subclasses, dispatch modes. Its schema follows from the annotations (`_codec_of`).

An operation with `in_graph` is decomposed by AOTAutograd: the compiler sees its Triton launches and vendor GEMMs, and
launches them itself. All others, and every operation while a ledger is open or `gemm_by` names an accumulator, are one
opaque call, which reads the host state when it runs.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from octavo._util.compiler import assume_constant_result
from octavo.kernels.quant_spec import QuantSpec, parse_spec
from octavo.kernels.runtime import host_state
from octavo.kernels.runtime.dispatch import PLAIN, is_triton_off, run_kernel, runs_triton
from octavo.numerics import Granularity, Quantized, granularity_named

P = ParamSpec("P")
R = TypeVar("R")
Implementation = Callable[..., Any]

_library = torch.library.Library("octavo", "FRAGMENT")
_operations: dict[str, Operation[..., Any]] = {}
"""By the name of the operator."""


def operation(
    *,
    fake: Implementation,
    name: str | None = None,
    reference: Implementation | None = None,
    unsupported: Callable[..., str | None] | None = None,
    ledger: str | Callable[..., str] | None = None,
    results: Callable[..., Sequence[QuantSpec | type | bool | None]] | None = None,
    in_graph: Callable[..., bool] | None = None,
    tags: Sequence[torch.Tag] = (),
) -> Callable[[Callable[P, R]], Operation[P, R]]:
    """Decorate an operation. Every function given takes the operation's arguments.

    Args:
        fake: returns results of the same structure, shapes, dtypes and strides, without data.
        name: of the operator; default that of the function, without leading underscores.
        reference: the definition; the decorated function is a signature only. On a GPU, the function of the same name
            in the `triton.py` beside it runs instead (`dispatch.run_kernel`). None: the decorated function runs, for
            operations composed of others and those that prepare the arguments of their kernel.
        unsupported: returns why the Triton kernel does not support these arguments, or None. Called where Triton runs.
        ledger: name in the ledger's fallbacks, or a function that returns it; default that of the operator.
        results: kind of each result: a tensor (True), codes and scales (`QuantSpec`), a named tuple of two tensors
            (its type), or none (False, None). Required if a result may be absent or is a structure.
        in_graph: returns whether the operation consists only of Triton launches and PyTorch operators, so that a
            compiler may trace it.
        tags: of the operator, in addition to `pt2_compliant_tag`.
    """

    def decorate(function: Callable[P, R]) -> Operation[P, R]:
        made: Operation[P, R] = Operation(name or function.__name__.lstrip("_"), function, fake, results)
        if reference is not None:
            made.run = _dispatched(reference, made.lead, ledger or made.name, unsupported)
        made.define(tags, in_graph)
        return made

    return decorate


def _dispatched(
    reference: Implementation,
    lead: int,
    label: str | Callable[..., str],
    unsupported: Callable[..., str | None] | None,
) -> Implementation:
    """Return a function that runs the Triton kernel on a GPU, the reference elsewhere."""
    kernel = f"{reference.__module__.split('.')[-2]}.{reference.__name__}"

    def run(*arguments: Any) -> Any:
        x = arguments[lead]
        refused = unsupported(*arguments) if unsupported is not None and runs_triton(x) else None
        return run_kernel(kernel, x, arguments, label if isinstance(label, str) else label(*arguments), refused)

    return run


def is_direct(x: Tensor) -> bool:
    """Return whether to bypass the operator: eager code on a plain tensor with data."""
    return not torch.compiler.is_compiling() and type(x) in PLAIN and not x.is_meta


def composite(operator: Any) -> Implementation | None:
    """Return the implementation of an operator that calls several kernels; None for any other operator."""
    qualified = operator._schema.name if isinstance(operator, torch._ops.OpOverload) else ""
    made = _operations.get(qualified.removeprefix("octavo::")) if qualified.startswith("octavo::") else None
    return None if made is None or made.__module__.startswith("octavo.kernels") else made.on_flat(made.run)


class Operation(Generic[P, R]):
    """A function on tensors and structures of them, and the operator that represents it wherever PyTorch traces."""

    def __init__(
        self,
        name: str,
        signature: Callable[P, R],
        fake: Implementation,
        results: Callable[..., Sequence[Any]] | None,
    ) -> None:
        functools.update_wrapper(self, signature)
        hints, parameters = typing.get_type_hints(signature), inspect.signature(signature).parameters
        codecs = {parameter: _codec_of(hints[parameter]) for parameter in parameters}
        self.name = name
        self.run: Implementation = signature
        self.fake = fake
        self._results, self._structure = results, _structure_of(hints["return"])
        self._result = "Tensor" if hints["return"] is Tensor else "Tensor[]"
        self._names, self._defaults = tuple(parameters), tuple(x.default for x in parameters.values())
        self._schema = [
            (parameter + suffix, kind) for parameter, codec in codecs.items() for suffix, kind in codec.flat
        ]
        self._decoders = [codec.decode for codec in codecs.values()]
        self.layout = tuple(codec.layout for codec in codecs.values())
        self.lead = next(i for i, codec in enumerate(codecs.values()) if codec.flat[0][1].startswith("Tensor"))
        self.operator: Any = None

    def define(self, tags: Sequence[torch.Tag], in_graph: Callable[..., bool] | None) -> None:
        """Define the operator for every device."""
        arguments = ", ".join(f"{kind} {name}" for name, kind in self._schema)
        run, fake = self.on_flat(self.run), self.on_flat(self.fake)
        signature = f'{self.name}({arguments}, *, str code="") -> {self._result}'
        _library.define(signature, tags=(torch.Tag.pt2_compliant_tag, *tags))
        _library.impl(self.name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"octavo::{self.name}", fake, lib=_library)
        if in_graph is not None:
            self._decompose(run, in_graph)
        _operations[self.name] = self
        self.operator = getattr(torch.ops.octavo, self.name).default

    def on_flat(self, function: Implementation) -> Implementation:
        """Return a function of the operator's arguments."""

        def on_flat(*flat: Any, code: str = "") -> Tensor | list[Tensor]:
            made = function(*self.decode(flat))
            return made if isinstance(made, Tensor) else list(_tensors_of(made))

        return on_flat

    def _decompose(self, run: Implementation, in_graph: Callable[..., bool]) -> None:
        """Let AOTAutograd trace the operation in place of the operator: a conditional `torch.library.triton_op`."""
        from torch._subclasses.functional_tensor import FunctionalTensorMode

        def trace(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not (kwargs or {}).get("code") or not in_graph(*self.decode(args)):
                return mode.__torch_dispatch__(func, types, args, kwargs or {})
            with mode:
                return run(*args)

        torch.library.register_torch_dispatch(f"octavo::{self.name}", FunctionalTensorMode, trace, lib=_library)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the operation, through the operator where something traces."""
        lead, layout = (self.lead, self.layout) if not torch.compiler.is_compiling() else _constants_of(self.name)
        arguments: Sequence[Any] = args if len(args) == len(layout) else self._bound(args, kwargs)
        made: R
        x = arguments[lead]
        while not isinstance(x, Tensor):
            x = x[0]
        if not torch.compiler.is_compiling() and type(x) in PLAIN and not x.is_meta:  # `is_direct`, a call less
            made = self.run(*arguments)
            return made
        made = self._through_operator(arguments, _encode(arguments, layout))
        return made

    def _bound(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        """Return all arguments by position."""
        arguments = [*args, *self._defaults[len(args) :]]
        for name, value in kwargs.items():
            if name not in self._names[len(args) :]:
                raise TypeError(f"{self.name}() takes no argument '{name}', or has it by position already.")
            arguments[self._names.index(name)] = value
        if len(arguments) > len(self._names) or any(x is inspect.Parameter.empty for x in arguments[len(args) :]):
            raise TypeError(f"{self.name}() takes the arguments {', '.join(self._names)}: one is missing, or too many.")
        return arguments

    def _through_operator(self, arguments: Sequence[Any], flat: Sequence[Any]) -> Any:
        made = self.operator(*flat, code=_code() if host_state.now.is_open_to_compilers else "")
        if self._structure is None:
            return made
        if self._results is None:
            return self._structure(*made)
        values: list[Any] = []
        rest = iter(made)
        for kind in self._results(*arguments):
            if isinstance(kind, QuantSpec):
                values.append(Quantized(next(rest), next(rest), kind.tile))
            elif isinstance(kind, type):
                values.append(kind(next(rest), next(rest)))
            else:
                values.append(next(rest) if kind else None)
        return self._structure(*values)

    def encode(self, *arguments: Any) -> list[Any]:
        """Return the operator's arguments."""
        return _encode(arguments, self.layout)

    def decode(self, flat: Sequence[Any]) -> list[Any]:
        """Return the operation's arguments: undo `encode`."""
        values = iter(flat)
        return [decode(values) for decode in self._decoders]


def _structure_of(returned: Any) -> Implementation | None:
    """Return what makes the operation's result of the operator's: None if they are the same."""
    if returned in (Tensor, list[Tensor]):
        return None
    if returned is Quantized:
        return lambda quantized: quantized
    return returned if hasattr(returned, "_fields") else lambda *values: values


def _tensors_of(made: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested results."""
    if isinstance(made, Tensor):
        yield made
    elif isinstance(made, tuple | list):
        for part in made:
            yield from _tensors_of(part)


@assume_constant_result
def _constants_of(name: str) -> tuple[int, Layout]:
    """Return where the first tensor of an operation is, and its layout, on which Dynamo need not guard."""
    return _operations[name].lead, _operations[name].layout


@assume_constant_result
def _code() -> str:
    """Return what names the code that an operator is decomposed into: a digest of its sources, and OCTAVO_TRITON.

    PyTorch caches compiled code by the graph before decomposition, also on disk. Without this, code that another
    version of Octavo compiled would be found under the key of this one. Empty in a call that no compiler may look into:
    what a process-wide switch says is not part of the key by itself.
    """
    return f"{_digest_of_sources()} {'reference' if is_triton_off() else 'triton'}"


@functools.cache
def _digest_of_sources() -> str:
    digest, package = hashlib.sha256(), Path(__file__).parents[2]
    for folder in ("kernels", "numerics"):
        for path in sorted((package / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


# --- the arguments of an operator, by annotation ----------------------------------------------------------------------

Layout = Any
"""How many arguments an operator has for a value: 1, or a tuple with the layout of each field.

(0, layout) for a sequence of structures, which becomes a list per field."""


class _Codec(NamedTuple):
    """How an operator takes values of one annotation."""

    flat: tuple[tuple[str, str], ...]
    """Suffix of the name, and type in the schema, of each argument."""
    layout: Layout
    decode: Callable[[Iterator[Any]], Any]
    """Takes as many arguments from an iterator, and returns the value."""


def _leaf(kind: str, decode: Callable[[Any], Any] = lambda x: x) -> _Codec:
    return _Codec((("", kind),), 1, lambda flat: decode(next(flat)))


_LEAVES: dict[Any, _Codec] = {
    Tensor: _leaf("Tensor"),
    torch.dtype: _leaf("ScalarType"),
    bool: _leaf("bool"),
    int: _leaf("SymInt"),
    float: _leaf("float"),
    str: _leaf("str"),
    QuantSpec: _leaf("str", parse_spec),
    Granularity: _leaf("str", granularity_named),
}


def _codec_of(annotation: Any) -> _Codec:
    """Return the codec of an annotation: a leaf, a literal, `X | None`, `Tensor | Structure`, a sequence, a structure.

    A structure is a named tuple, or a tuple of fixed length, with an argument per leaf.

    Raises:
        TypeError: no operator can take such values.
    """
    if annotation in _LEAVES:
        return _LEAVES[annotation]
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return _LEAVES[str]
    if origin in (types.UnionType, typing.Union):
        return _union(annotation, [part for part in parts if part is not type(None)])
    if origin in (list, Sequence) or (origin is tuple and parts[-1] is Ellipsis):
        return _sequence(_codec_of(parts[0]), tuple if origin is tuple else list)
    if origin is tuple:
        return _fields(lambda values: tuple(values), {f"_{i}": part for i, part in enumerate(parts)})
    if hasattr(annotation, "_fields"):
        hints = typing.get_type_hints(annotation)
        return _fields(lambda values: annotation(*values), {f"_{name}": hints[name] for name in annotation._fields})
    raise TypeError(f"no operator can take an argument of type {annotation}.")


def _union(annotation: Any, parts: list[Any]) -> _Codec:
    if len(parts) == 1 != len(typing.get_args(annotation)):
        return _optional(_codec_of(parts[0]))
    if len(parts) != 2 or parts[0] is not Tensor or not hasattr(parts[1], "_fields"):
        raise TypeError(f"an argument is a tensor or one structure, not {annotation}.")
    return _tensor_or(_codec_of(parts[1]), "?" if len(typing.get_args(annotation)) > 2 else "")


def _optional(inner: _Codec) -> _Codec:
    """None is a None for each argument; the first that cannot be None otherwise tells them apart."""
    kinds = [kind for _, kind in inner.flat]
    telling = next(i for i, kind in enumerate(kinds) if not kind.endswith("?"))

    def decode(flat: Iterator[Any]) -> Any:
        values = [next(flat) for _ in kinds]
        return None if values[telling] is None else inner.decode(iter(values))

    return _Codec(tuple((name, kind.rstrip("?") + "?") for name, kind in inner.flat), inner.layout, decode)


def _tensor_or(inner: _Codec, optional: str) -> _Codec:
    """Take a tensor in place of the first argument of a structure, without the others."""
    (_, first), *others = inner.flat

    def decode(flat: Iterator[Any]) -> Any:
        values = [next(flat) for _ in inner.flat]
        return values[0] if all(x is None for x in values[1:]) else inner.decode(iter(values))

    rest = ((name, kind.rstrip("?") + "?") for name, kind in others)
    return _Codec((("", first + optional), *rest), inner.layout, decode)


def _sequence(inner: _Codec, build: Callable[[Iterator[Any]], Any]) -> _Codec:
    flat = tuple((name, kind + "[]") for name, kind in inner.flat)
    if inner.layout == 1:
        return _Codec(flat, 1, lambda values: build(inner.decode(iter([x])) for x in next(values)))
    return _Codec(
        flat,
        (0, inner.layout),
        lambda values: build(inner.decode(iter(row)) for row in zip(*(next(values) for _ in flat), strict=True)),
    )


def _fields(build: Callable[[list[Any]], Any], fields: dict[str, Any]) -> _Codec:
    codecs = {name: _codec_of(field) for name, field in fields.items()}
    return _Codec(
        tuple((name + suffix, kind) for name, codec in codecs.items() for suffix, kind in codec.flat),
        tuple(codec.layout for codec in codecs.values()),
        lambda values: build([codec.decode(values) for codec in codecs.values()]),
    )


def _encode(value: Any, layout: Layout) -> list[Any]:
    """Return the arguments for a value. One function for all annotations, as Dynamo guards on each that it traces."""
    if isinstance(value, QuantSpec):  # not `str(x)`: Dynamo of PyTorch 2.11 cannot join its result
        return [f"{value.format} {value.granularity} {value.scaling} {value.rounding} {value.rotation}"]
    if layout == 1:
        return [value.name if isinstance(value, Granularity) else value]
    if value is None or isinstance(value, Tensor):
        return [value] + [None] * (_count(layout) - 1)
    if layout[0] == 0:
        rows = [_encode(part, layout[1]) for part in value]
        return [list(column) for column in zip(*rows, strict=True)] if rows else [[] for _ in range(_count(layout))]
    return [flat for part, inner in zip(value, layout, strict=True) for flat in _encode(part, inner)]


def _count(layout: Layout) -> int:
    return layout if isinstance(layout, int) else sum(map(_count, layout))

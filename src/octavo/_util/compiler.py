"""Annotations for PyTorch's compiler, and questions to it, which is imported only where they are asked."""

from __future__ import annotations

import itertools
import operator
import re
import sys
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType
from typing import Any, TypeVar, cast

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

Function = TypeVar("Function", bound=Callable[..., Any])


def skip_own_guards(guards: Sequence[Any]) -> list[bool]:
    """Filter for `torch.compile`: keep all guards but those on Octavo's own code and constants.

        block.compile(fullgraph=True, options={"guard_filter_fn": octavo.skip_own_guards})

    In every call Dynamo checks that each function it has traced through is still the same: for a block in FP8 several
    hundred checks, more than all others. Those on tensors, layers, recipes and settings remain. Do not pass it to code
    that replaces functions or constants of Octavo between calls.

    Args:
        guards: PyTorch's `GuardFilterEntry` of each guard.

    Returns:
        For each guard, whether to keep it.
    """
    return [not _is_on_own_code(guard.name) for guard in guards]


_OWN = re.compile(r"G\['__import_(octavo(?:_dot_\w+)?)'\]((?:\.\w+)*)")
"""How Dynamo names a module of Octavo, and what a guard is on in it."""


def _is_on_own_code(name: str) -> bool:
    """Return whether a guard is on a module, function or class of Octavo, on a constant, or on a part of one.

    Constants and classes have names with a capital. Other variables of a module are state, which may change.
    """
    found = _OWN.search(name)
    if found is None:
        return False
    value: Any = sys.modules.get(found[1].replace("_dot_", "."))
    for part in found[2].split(".")[1:]:
        if part.lstrip("_")[:1].isupper() or isinstance(value, FunctionType):
            return True
        value = getattr(value, part, None)
    return isinstance(value, FunctionType | ModuleType)


def assume_constant_result(function: Function) -> Function:
    """Mark a function for evaluation at trace time only.

    Equivalent to `torch.compiler.assume_constant_result`, which would import the compiler. That doubles the import time
    of PyTorch, and many programs compile nothing.
    """
    marked: Any = function
    marked._dynamo_marked_constant = True
    return function


def opaque(function: Function) -> Function:
    """Mark an autograd Function that Dynamo puts into the graph as one call; AOTAutograd traces what the call does.

    Tracing through its Python would take most of the time to compile a block, and guard on each function, class and
    field that it reads. A guard is left for nothing but the arguments: what decides how the function computes must be
    among them, or be read where Dynamo traces. Calls in compiled code come after `enter_graph`.

    Equivalent to `torch.compiler.allow_in_graph`, which would import the compiler.
    """
    _opaque.append(function)
    return function


_opaque: list[Callable[..., Any]] = []


@assume_constant_result
def enter_graph(is_open_to_compilers: bool) -> None:
    """Let Dynamo know what is `opaque`. In compiled code only, before the first call of such a function.

    Args:
        is_open_to_compilers: that of `host_state.now`, which opaque functions read: an argument, so that it is guarded.
    """
    from torch.compiler import allow_in_graph

    while _opaque:
        allow_in_graph(_opaque.pop())


def run_eagerly(function: Function) -> Function:
    """Mark a function that Dynamo calls and does not trace. As `torch.compiler.disable`, without the import."""
    marked: Any = function
    marked._torchdynamo_disable = True
    return function


def traced_version(x: Tensor) -> int:
    """Return a version of x, which changes when traced code writes to it; no two traces share one.

    A graph has no versions, but the tensors that Dynamo traces with do, and code that runs while it traces sees them.
    They do not count writes through `x.data` and those of `_foreach_` functions: the graph shows these.
    """
    version: int | None = ask_tracer(x, _find_version, None)
    return next(_serials) if version is None else version


def ask_tracer(x: Any, find: Callable[[Any], None], module: Any) -> Any:
    """Return what `find` answers of x while Dynamo traces; None where something else does, such as `torch.export`.

    What it reads is not guarded: of x and of the module only what Dynamo itself reads is, which traced code must do.

    Args:
        x: a tensor, or a list of tensors and None.
        find: a function at module level that calls `answer`. It takes Dynamo's `ComptimeContext`, in which x is `x`.
        module: None, or a module, which is `module_of(context)` there.
    """
    from torch._dynamo.comptime import comptime

    comptime(find, _answer_nothing)
    return _answer_found()


def module_of(context: Any) -> Any:
    """Return the module that `ask_tracer` was given, itself."""
    return context.get_local("module")._i_will_not_complain_if_bc_breaks_VariableTracker().value


def answer(value: Any) -> None:
    """Give the answer to `ask_tracer`: numbers, strings, dtypes, None and tuples of these, which become constants."""
    global _answer
    _answer = value


_answer: Any = 0
_serials = itertools.count(2)
_numbers: Any = WeakIdKeyDictionary()
"""Tensor of a trace -> its version when it was last asked for, and the number given for that."""


def _find_version(context: Any) -> None:
    answer(version_in(context, context.get_local("x").as_fake()))


def version_in(context: Any, fake: Tensor) -> int:
    """Return `traced_version` of a tensor that Dynamo traces with; for functions that `ask_tracer` calls."""
    before, number = _numbers.get(fake, (None, 0))
    version = fake._version, _count_writes(context.graph(), fake.untyped_storage()._cdata)
    if version != before:
        number = next(_serials)
        _numbers[fake] = version, number
    return cast(int, number)


def _count_writes(graph: Any, memory: int) -> int:
    """Return the number of operations in a graph that write to this memory, by any tensor."""
    return sum(_writes(node) and memory in map(_memory_of, node.all_input_nodes) for node in graph.nodes)


def _memory_of(node: Any) -> int | None:
    value = node.meta.get("example_value")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def _writes(node: Any) -> bool:
    """Return whether an operation writes to an argument: `mul_`, `setitem`, `out=`, an operator that says so."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if (name.endswith("_") and not name.endswith("__")) or "out" in node.kwargs or name in _WRITING:
        return True
    schemas = [getattr(node.target, "_schema", None)]
    schemas += getattr(node.target, "_schemas", {}).values()  # of an operator without its overload
    return any(schema is not None and schema.is_mutable for schema in schemas)


_WRITING = {name for name in dir(operator) if name[:1] == "i" and hasattr(operator, f"__{name[1:]}__")}
_WRITING |= {"setitem", "__setitem__", "delitem", "triton_kernel_wrapper_mutation"}
"""Names of operations on arguments, besides those that end with an underscore: `iadd` and its like."""


def _answer_nothing() -> None:
    answer(None)


@assume_constant_result
def _answer_found() -> Any:
    return _answer

"""Triton kernels run compiled where there is a GPU and in Triton's interpreter elsewhere. It is chosen at import."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def interprets() -> bool:
    """Return whether kernels are interpreted: not on a GPU, and not by `compile_only`, which overrides the knob."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


@pytest.fixture
def device() -> str:
    return DEVICE


@pytest.fixture
def loops_with_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let loops have bounds in the interpreter: it converts them by `int(array)`, which NumPy 2.4 refuses."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


@pytest.fixture(autouse=True)
def masks_are_boolean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter take what it computes itself as a mask: 3.9 makes int32 of a vector and a scalar.

    The mask of a descriptor is an array up to 3.8, and boolean.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def boolean(mask):
        is_boolean = not isinstance(mask, TensorHandle) or mask.data.dtype == bool
        return mask if is_boolean else TensorHandle(mask.data.astype(bool), mask.dtype)

    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    monkeypatch.setattr(
        InterpreterBuilder,
        "create_masked_load",
        lambda self, ptrs, mask, *rest, **named: load(self, ptrs, boolean(mask), *rest, **named),
    )
    monkeypatch.setattr(
        InterpreterBuilder,
        "create_masked_store",
        lambda self, ptrs, value, mask, *rest, **named: store(self, ptrs, value, boolean(mask), *rest, **named),
    )


@pytest.fixture(autouse=True)
def made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter keep what it makes anew all the time: that would be most of the time of these tests.

    At every call of a function `triton.language` as it is inside of a kernel; at every operation the type of its
    result with its shape as constants, a table of NumPy's types, and the type that two operands are converted to.
    Shapes of the same sizes are one object, so that operands of one shape need no broadcast.
    """
    if not interprets():
        return  # the compiler stays as it is
    from triton.language.core import block_type, tensor
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    patched, dtypes, blocks, shapes, interned, common = set(), {}, {}, {}, {}, {}
    launch, patch, numpy_type = interpreter.GridExecutor.__call__, interpreter._patch_lang, interpreter._get_np_dtype
    fill, make = block_type.__init__, tensor.__init__
    convert, promote = TritonSemantic.cast, TritonSemantic.computation_type_impl
    broadcast = TritonSemantic.broadcast_impl_value

    def launch_anew(self, *args, **kwargs):
        patched.clear()
        return launch(self, *args, **kwargs)

    def patch_once(fn):
        if id(fn.__globals__) in patched:
            return None
        patched.add(id(fn.__globals__))
        return patch(fn)

    def numpy_type_once(kind):
        name = kind.scalar.name
        if name not in dtypes:
            dtypes[name] = numpy_type(kind)
        return dtypes[name]

    def fill_once(self, element_ty, shape):
        sizes = element_ty.name, *(getattr(size, "value", size) for size in shape)
        if sizes not in blocks:
            fill(self, element_ty, shape)
            self.shape = interned.setdefault(sizes[1:], self.shape)
            blocks[sizes] = vars(self).copy()
        vars(self).update(blocks[sizes])

    def make_once(self, handle, type):
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes not in shapes:
            make(self, handle, type)
            shapes[sizes] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[sizes]

    def convert_others(self, x, kind, *rest, **named):
        return x if kind is x.dtype else convert(self, x, kind, *rest, **named)

    def promote_once(self, a, a_is_scalar, b, b_is_scalar, *rest):
        pair = a.name, a_is_scalar, b.name, b_is_scalar, rest
        if pair not in common:
            common[pair] = promote(self, a, a_is_scalar, b, b_is_scalar, *rest)
        return common[pair]

    def broadcast_others(self, a, b):
        is_same = a.type.is_block() and b.type.is_block() and a.type.shape is b.type.shape
        return (a, b) if is_same else broadcast(self, a, b)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch_anew)
    monkeypatch.setattr(TritonSemantic, "cast", convert_others)
    monkeypatch.setattr(TritonSemantic, "computation_type_impl", promote_once)
    monkeypatch.setattr(TritonSemantic, "broadcast_impl_value", broadcast_others)
    monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
    monkeypatch.setattr(interpreter, "_get_np_dtype", numpy_type_once)
    monkeypatch.setattr(block_type, "__init__", fill_once)
    monkeypatch.setattr(tensor, "__init__", make_once)


@pytest.fixture(autouse=True)
def overflow_checked_by_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the sums and products of signed integers at once, in place of eight operations of the interpreter for each.

    Those decide nothing: it ignores what they assert. Unsigned integers may wrap around, as those of a hash do.
    """
    import numpy as np
    from triton.language.semantic import TritonSemantic

    operations = {"add": np.add, "sub": np.subtract, "mul": np.multiply}

    def check(self, a, b, operation):
        kind = a.type.scalar
        if kind.int_bitwidth >= 64 or not kind.is_int_signed():
            return
        wide = operations[operation.__name__](a.handle.data.astype(np.int64), b.handle.data.astype(np.int64))
        fits = kind.get_int_min_value() <= wide.min() and wide.max() <= kind.get_int_max_value()
        assert fits, f"{kind} overflow detected for operation {operation.__name__}"

    if interprets():
        monkeypatch.setattr(TritonSemantic, "binary_op_sanitize_overflow_impl", check)

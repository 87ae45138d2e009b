"""A pytest plugin: each launch of a Triton kernel is compiled for an H200, which need not be there, and nothing runs.

    make kernels

`OCTAVO_COMPILE_FOR=8.9` compiles for another compute capability. Launches with FP8 arguments are left out where Triton
has no FP8.

An interpreter takes what a compiler refuses: branches of two types, a table that does not fit shared memory. A test
fails here only where a kernel of it cannot be compiled; what it asserts of values is not looked at (`python -O`).
"""

from __future__ import annotations

import os

os.environ.pop("TRITON_INTERPRET", None)

import pytest
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime import jit

CAPABILITY = int(os.environ.get("OCTAVO_COMPILE_FOR", "9.0").replace(".", ""))
TARGET = GPUTarget("cuda", CAPABILITY, 32)
SHARED = (227 if CAPABILITY == 90 else 99) * 2**10
"""Bytes of shared memory that a block may have on Hopper; on RTX 30 and 40, where an A100 has more."""
HAS_FP8 = CAPABILITY >= 89
_backend = make_backend(TARGET)
_compiled: set[tuple[str, str, str]] = set()


class CompilationFailed(Exception):
    """A kernel cannot be compiled as it is launched."""


def compile_launch(self, *args, grid, warmup=False, **kwargs):
    """Stand for `JITFunction.run`: specialise and compile as it does, once for each kind of launch."""
    if not HAS_FP8 and any("float8" in str(_dtype(x)) for x in args):
        return
    kwargs["debug"] = False
    bound, specialization, options = jit.create_function_from_signature(self.signature, self.params, _backend)(
        *args, **kwargs
    )
    key = f"{self.__module__}.{self.__name__}", str(specialization), str(options)
    if key in _compiled:
        return
    _compiled.add(key)
    try:
        chosen, signature, constants, attributes = self._pack_args(_backend, kwargs, bound, specialization, options)
        source = ASTSource(self, signature, constants, attributes)
        made = triton.compile(source, target=TARGET, options=chosen.__dict__)
    except Exception as error:
        raise CompilationFailed(f"{key[0]} {specialization}: {error}") from error
    if made.metadata.shared > SHARED:
        raise CompilationFailed(f"{key[0]} {specialization}: {made.metadata.shared} bytes of shared memory")


def _dtype(x):
    """Return the dtype of a tensor, or of what a descriptor describes; None of other arguments."""
    return getattr(getattr(x, "base", x), "dtype", None)


jit.JITFunction.run = compile_launch
type(knobs.runtime).interpret = property(lambda _: False)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """Pass every test whose kernels compile."""
    result = yield
    report = result.get_result()
    if report.failed and not call.excinfo.errisinstance(CompilationFailed):
        report.outcome, report.longrepr = "passed", None

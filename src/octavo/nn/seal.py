"""Proof that nobody has written to a tensor's memory, for results that were computed from it and are used later.

`_version` is no proof: it does not count writes through `x.data` or `_foreach_` functions on it, nor those of
collectives, DLPack, NumPy and kernels of other libraries. A check of the values would read x again. So x is *sealed*:
its storage gets the mark that PyTorch has for copy-on-write, and no second owner. Whatever writes to the memory has to
ask the storage for a mutable pointer first, through whichever tensor, view or alias, and the storage drops the mark
before it answers. Sealing launches nothing, reads nothing and allocates no memory; nor is anything copied when the mark
is dropped, since nobody else owns the data.

    a mark that is there       no mutable pointer has left the storage since x was sealed: x holds the same values
    a mark that is gone        x may have changed, or a kernel asked for a mutable pointer only to read

What this cannot see, and why:

- a pointer that left the storage before x was sealed, in a NumPy array or a tensor of another library. Memory that
  Octavo has just allocated has none, so that for results of norms, attention and gathers the proof is complete. For an
  input of a user's (`octavo.nn.shared`) values are compared on a CPU (`Unwritten`). On a GPU such an alias, taken
  before the first layer of a group and written to before the last, is not seen;
- kernels that write through a pointer they asked for as const. On CUDA PyTorch's multi-tensor kernels do (`_foreach_`
  functions, fused optimizers, `GradScaler`): a write to x is counted by its version, which is compared as well, but
  such a kernel on `x.data` is not seen. On a CPU it is.

A sealed storage frees its memory by another function than the allocator's, and `Tensor.record_stream` ignores memory
that is not the allocator's. Hooks that move saved tensors to the host rely on it, so that nothing on a GPU is sealed
while such hooks are active. Those of PyTorch and Octavo keep references instead. So must other code that has a second
stream read a sealed tensor.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from octavo.kernels.runtime.dispatch import PLAIN


class Seal(NamedTuple):
    """A tensor at the time when it was sealed. The mark itself is in its storage."""

    storage: torch.UntypedStorage | None
    """Held, so that no other storage gets its address; None for a fake tensor, which has no values."""
    state: tuple[Any, ...]
    """Version and layout."""
    is_new: bool = False
    """Whether it was not sealed before."""

    @classmethod
    def of(cls, x: Tensor) -> Seal | None:
        """Seal x; None if it cannot be: a subclass, or memory that is not PyTorch's (`from_blob`, shared memory)."""
        if isinstance(x, FakeTensor):
            return cls(None, _state(x))
        if type(x) not in PLAIN or (x.is_cuda and _are_saved_tensors_moved()):
            return None
        with _marking:
            is_new = not _is_marked(x)
            try:
                if is_new:
                    torch._lazy_clone(x)  # the clone goes at once, the mark stays
            except RuntimeError:
                return None
        return cls(x.untyped_storage(), _state(x), is_new)

    def holds(self, x: Tensor) -> bool:
        """Return whether x is as it was when it was sealed: same memory, same layout, no write."""
        if self.storage is None:
            return isinstance(x, FakeTensor) and self.state == _state(x)
        return x.untyped_storage()._cdata == self.storage._cdata and self.state == _state(x) and _is_marked(x)

    def lift(self) -> None:
        """Undo `of`: unseal the tensor, unless it had been sealed before."""
        if self.storage is not None and self.is_new:
            with _marking:
                self.storage.data_ptr()


_marking = threading.Lock()
"""PyTorch's marking is not safe in several threads at once."""


class Unwritten(NamedTuple):
    """Tensors that may have had aliases when a result was computed from them, and whether they are as they were then.

    On a CPU their values are compared. Elsewhere they are sealed.
    """

    before: tuple[Tensor | Seal | None, ...]

    @classmethod
    def of(cls, *tensors: Tensor) -> Unwritten:
        """Take note of tensors as they are now."""
        return cls(tuple(_copy_of(x) if _compares(x) else Seal.of(x) for x in tensors))

    def holds(self, *tensors: Tensor) -> bool:
        """Return whether the same tensors are as they were."""
        return all(_is_as_before(*pair) for pair in zip(self.before, tensors, strict=True))

    @property
    def is_provable(self) -> bool:
        """Whether `holds` may be true: all tensors could be copied or sealed."""
        return all(before is not None for before in self.before)

    def lift(self) -> None:
        """Unseal the tensors that `of` has sealed."""
        for before in self.before:
            if isinstance(before, Seal):
                before.lift()


def _state(x: Tensor) -> tuple[Any, ...]:
    return None if x.is_inference() else x._version, x.storage_offset(), x.shape, x.stride()


def _is_marked(x: Tensor) -> bool:
    return torch._C._is_cow_tensor(x)  # type: ignore[attr-defined, no-any-return]  # missing in PyTorch's stubs


def _are_saved_tensors_moved() -> bool:
    """Return whether hooks get the tensors that are saved for backward, others than PyTorch's and Octavo's."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and not (getattr(hooks[0], "__module__", None) or "").startswith(("torch.", "octavo."))


def _compares(x: Tensor) -> bool:
    return x.device.type == "cpu" and not isinstance(x, FakeTensor)


def _copy_of(x: Tensor) -> Tensor:
    return x.detach().clone(memory_format=torch.contiguous_format)


def _is_as_before(before: Tensor | Seal | None, x: Tensor) -> bool:
    if isinstance(before, Tensor):
        same_kind = before.shape == x.shape and before.dtype == x.dtype
        return same_kind and torch.equal(_bits(before), _bits(x.detach().contiguous()))  # also of NaN
    return before is not None and before.holds(x)


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dim() and type(x) in PLAIN else x

"""FP8 tensors in a state dict: other libraries write their values, PyTorch's own files and `copy_` keep the codes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.tensor.fp8_tensor import FP8Tensor


class SavedFP8Tensor(FP8Tensor):
    """An FP8 tensor whose memory, for code that asks for it, is that of its values in the dtype that it represents.

    So safetensors, and whatever compares storages to find tied weights, see a plain tensor. That memory is allocated
    when it is first asked for, holds the values of the last time it was, and is freed with this tensor. Codes and
    scales are shared with the weight: `copy_` writes to it, and `torch.save` stores an `FP8Tensor`.
    """

    _memory: Tensor | None = None

    @classmethod
    def of(cls, tensor: FP8Tensor) -> SavedFP8Tensor:
        """Return a tensor that shares codes and scales with an FP8 tensor."""
        saved = cls(tensor.codes, tensor.scale, tensor.granularity, tensor.dtype, tensor.scaling)
        saved.shares_scale = tensor.shares_scale
        return saved

    def plain(self) -> FP8Tensor:
        """Return it as an `FP8Tensor`, which shares codes and scales."""
        tensor = FP8Tensor(self.codes, self.scale, self.granularity, self.dtype, self.scaling)
        tensor.shares_scale = self.shares_scale
        return tensor

    def _in_memory(self) -> Tensor:
        values = self.plain().dequantize()  # anew each time: writes inside of a wrapper count no version
        self._memory = values if self._memory is None else self._memory.copy_(values)
        return self._memory

    def data_ptr(self) -> int:
        """Return the address of the values."""
        return self._in_memory().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage of the values."""
        return self._in_memory().untyped_storage()

    def storage(self) -> Any:
        """Return the typed storage of the values."""
        return self._in_memory().storage()

    def __deepcopy__(self, memo: dict[int, Any]) -> FP8Tensor:
        return self.clone()  # type: ignore[return-value]  # PyTorch's would copy the storage

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

"""The FP8 tensor: codes and scales as one tensor."""

from octavo.tensor.fp8_tensor import FP8Tensor, implements
from octavo.tensor.local import WrapperTensor, is_distributed, local, non_finite
from octavo.tensor.rows import columns_of, rows_of
from octavo.tensor.saved import SavedFP8Tensor

__all__ = [
    "FP8Tensor",
    "SavedFP8Tensor",
    "WrapperTensor",
    "columns_of",
    "implements",
    "is_distributed",
    "local",
    "non_finite",
    "rows_of",
]

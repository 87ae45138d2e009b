"""Reference gradient storage and sums of squares. Values are in groups, (G, 128); see `storage`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.kernels.storage import FLOATS, GRADIENT_CODES, Scaling
from octavo.kernels.storage import reference as codec


def store_gradient(gradient: Tensor, codes: Tensor, scale: Tensor, scaling: Scaling) -> None:
    """Quantise a gradient. See `octavo.kernels.optimizer.store_gradient`."""
    fmt = FLOATS[GRADIENT_CODES[codes.dtype]]
    groups = codec.to_groups(gradient.float())
    amax = torch.where(groups.isfinite(), groups, 0.0).abs().amax(dim=1, keepdim=True)
    exponent = codec.scale_code(amax if scaling == "group" else amax.amax().reshape(1, 1), fmt)
    scale.copy_(exponent.reshape(scale.shape))
    code = codec.encode(groups * codec.inverse_of(exponent), fmt)
    sign, largest = code & 0x80, {"e4m3": (0x7F, 0x7F), "e5m2": (0x7C, 0x7E)}[fmt.name]
    code = torch.where(groups.isinf(), sign | largest[0], code)
    codec.store(torch.where(groups.isnan(), largest[1], code), codes)


def load_gradient(codes: Tensor, scale: Tensor) -> Tensor:
    """Dequantise a stored gradient. See `octavo.kernels.optimizer.load_gradient`."""
    groups = codec.to_groups(codes.float()) * codec.scale_of(scale.int()).reshape(-1, 1)
    return codec.from_groups(groups, *codes.shape)


def squares(tensors: Sequence[Tensor], scales: Sequence[Tensor | None], *_unused: object) -> Tensor:
    """See `octavo.kernels.optimizer.squares`."""
    values = (t if s is None else load_gradient(t, s) for t, s in zip(tensors, scales, strict=True))
    return torch.stack([value.double().square().sum() for value in values])

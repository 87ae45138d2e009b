"""A row of a plan: the precision and kernels of a linear layer, a convolution or a product of experts, and why."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from octavo.recipes import Evidence

Weights = Literal["unchanged", "fp8"]
"""Storage of the weight of a converted linear layer."""

IN_PROJECTION_KIND = "q, k, v"
"""`LayerPlan.kind` of the in-projection of an `nn.MultiheadAttention`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPlan:
    """The plan of one linear layer, convolution, in-projection of attention or product of experts."""

    name: str
    kind: str = "linear"
    """`linear`, `stored as K x N` of a transposed one, `q, k, v` of an `nn.MultiheadAttention`, the convolution and its
    kernel, as in `conv2d 3x3`, the number of experts, as in `128 experts`, or of matrices in a module with one product
    per expert, as in `16 matrices`."""
    shape: tuple[int, int]
    """(N, K) of its GEMM: output features, input features; of a convolution channels out, and in times kernel; of q, k
    and v with a weight each (`kdim`, `vdim`) (E, sum of their input features)."""
    count: int = 1
    """Number of such matrices: more than one for experts."""
    active: float = 1.0
    """Share of them that one token is multiplied by; below 1 for experts."""
    recipe: str
    precision: str
    """fprop / dgrad / wgrad, each fp8 or bf16."""
    kernels: str
    """The kernel of each FP8 GEMM; `-` for one in BF16."""
    gain: float | None
    """Predicted BF16 time / FP8 time on this GPU; None if Octavo has no rates for it, and for layers in BF16."""
    reason: str
    """Why it stays in BF16, or a note on its kernels."""

    keeps_input: bool = False
    """Whether backward quantises its input again (`Policy.requantise`)."""
    weight: Weights = "unchanged"
    """Whether its weight is to be stored in FP8 (`Policy.weights`) or already is."""
    saves: int = 0
    """Bytes of memory saved by storing it in FP8."""
    evidence: Evidence | None = None
    """Its entry in a precision map."""

    @property
    def weights(self) -> int:
        """Number of its weights."""
        return self.count * math.prod(self.shape)

    @property
    def multiplied(self) -> float:
        """Number of weights that one token is multiplied by."""
        return self.active * self.weights

    @property
    def is_experts(self) -> bool:
        """Whether it is a product of a module of experts, whose name is extended by the product's."""
        return self.kind.endswith(" experts")

    @property
    def is_in_projection(self) -> bool:
        """Whether it is q, k and v of an `nn.MultiheadAttention`, whose name is extended too."""
        return self.kind == IN_PROJECTION_KIND

    @property
    def module(self) -> str:
        """The full name of its module: a module of experts has two products, and attention is more than one."""
        return self.name.rpartition(".")[0] if self.is_experts or self.is_in_projection else self.name

    @property
    def is_fp8(self) -> bool:
        """Whether any of its GEMMs runs in FP8."""
        return "fp8" in self.precision

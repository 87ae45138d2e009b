"""Tensors with their states, for the tests of kernels and references."""

from __future__ import annotations

import torch

from octavo.kernels.gradient import reference as gradients
from octavo.kernels.optimizer import COEFFICIENTS, Control, Layout, Slot, reference
from octavo.kernels.storage import GRADIENT_CODES, Storage
from octavo.kernels.storage.reference import to_groups
from octavo.optim.states import TIERS, state_tensors

FP8 = torch.float8_e4m3fn
EVEN, RAGGED = ((4, 256), (3, 128)), ((5, 100), (2, 303), (1, 5))
KINDS = {
    "fp32": ("fp32", torch.float32),
    "fp32, bf16 weight": ("fp32", torch.bfloat16),
    "fp32 master apart": ("fp32", torch.float16),
    "exact": ("exact", torch.bfloat16),
    "fp8-lm": ("fp8-lm", torch.bfloat16),
    "fp8-lm, fp8 weight": ("fp8-lm", FP8),
    "fp8": ("fp8", torch.bfloat16),
    "fp8, fp32 weight": ("fp8", torch.float32),
    "fp8, fp16 weight": ("fp8", torch.float16),
    "fp8, fp8 weight": ("fp8", FP8),
    "fp8-min": ("fp8-min", FP8),
    "fp8-min, bf16 weight": ("fp8-min", torch.bfloat16),
}
"""Tier and dtype of the weight."""


def layout_of(
    kind: str,
    rule: str = "adamw",
    gradient: torch.dtype = torch.float32,
    stochastic: bool = True,
    scaling: str = "none",
) -> Layout:
    tier, weight = KINDS[kind]
    layout = TIERS[tier].layout(rule, weight, gradient, stochastic)._replace(gradient_scaling=scaling)
    return layout._replace(first=None, second=None) if rule == "given" else layout


def slot(layout: Layout, shape: tuple[int, int], row: int, device: str = "cpu") -> Slot:
    """Random weights, and no step made yet."""
    weight = 0.02 * torch.randn(shape)
    scale = torch.full((shape[0], 1), 2.0**-12) if layout.weight == FP8 else None
    state = {name: torch.zeros(s, dtype=dtype) for name, (s, dtype) in state_tensors(layout, *shape).items()}
    made = Slot(
        row=row,
        number=row,
        weight=torch.zeros(shape, dtype=layout.weight),
        weight_scale=scale,
        gradient=torch.zeros(shape, dtype=layout.gradient),
        master=state.get("remainder", state.get("master")),
        master_scale=state.get("master_scale"),
        first=state.get("exp_avg"),
        first_scale=state.get("exp_avg_scale"),
        second=state.get("exp_avg_sq"),
        second_scale=state.get("exp_avg_sq_scale"),
    )
    reference.write_weight(to_groups(weight), made, layout, None)
    return copy(made, device)


def copy(original: Slot, device: str = "cpu") -> Slot:
    return Slot(*(t.clone().to(device) if isinstance(t, torch.Tensor) else t for t in original))


def gradient(layout: Layout, shape: tuple[int, int]) -> torch.Tensor:
    """Values over many powers of two, some of them zero."""
    return wide(shape).to(layout.gradient)


def wide(shape: tuple[int, int]) -> torch.Tensor:
    values = torch.randn(shape) * torch.exp(2 * torch.randn(shape)) * 1e-3
    return torch.where(torch.rand(shape) < 0.1, 0.0, values)


def with_gradient(slot: Slot, layout: Layout) -> Slot:
    """The slot with a random gradient, stored as the layout says."""
    if layout.gradient_scaling == "none":
        return slot._replace(gradient=gradient(layout, slot.weight.shape))
    return slot._replace(**dict(zip(("gradient", "gradient_scale"), stored(layout, slot.weight.shape), strict=True)))


def stored(layout: Layout, shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a random gradient."""
    codes, scale = empty(layout.gradient, layout.gradient_scaling, shape)
    gradients.store_gradient(wide(shape), codes, scale, layout.gradient_scaling)
    return codes, scale


def empty(dtype: torch.dtype, scaling: str, shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a gradient could be stored."""
    scales = Storage(GRADIENT_CODES[dtype], scaling).scale_shape(*shape)
    return torch.zeros(shape, dtype=dtype), torch.zeros(scales, dtype=torch.uint8)


def control(step: int, rows: int, device: str = "cpu", **changed: float) -> Control:
    """Coefficients of AdamW with betas (0.9, 0.95), and a bound that some updates meet."""
    values = {
        "factor": 0.7, "first_share": 0.1, "second_decay": 0.95, "second_share": 0.05,
        "first_correction": 1 / (1 - 0.9**step), "root_correction": (1 - 0.95**step) ** -0.5, "eps": 1e-8, "lr": 1e-3,
        "weight_kept": 0.9999, "weight_decay": 0.1, "largest_update": 0.9, "first_decay": 0.9, **changed,
    }  # fmt: skip
    table = torch.tensor([[values[name] for name in COEFFICIENTS]] * rows, dtype=torch.float32, device=device)
    steps = torch.full((rows,), step, dtype=torch.int32, device=device)
    skip = torch.zeros(1, dtype=torch.int32, device=device)
    return Control(table, steps, skip, torch.zeros(1, dtype=torch.int64, device=device), 0x123456789AB)


def different(a: Slot, b: Slot) -> list[str]:
    """Return the names of the tensors that are not the same bytes."""
    names = [name for name in Slot._fields if isinstance(getattr(a, name), torch.Tensor)]
    return [name for name in names if not torch.equal(_bytes(getattr(a, name)), _bytes(getattr(b, name)))]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().view(torch.uint8)


def storage(format: str, scaling: str = "none", root: bool = False) -> Storage:
    return Storage(format, scaling, root)

"""Loss scaling: the loss is multiplied before backward, the gradients are divided after it.

The scale keeps small gradients away from the end of a 16-bit format's range. BF16 has the range of FP32 and FP8 has
scales of its own, so `none` is the default; FP16, or FP8 scales that many values share, is what the others are for.

`dynamic` (Micikevicius et al., arXiv 1710.03740, section 4.1): where a gradient overflows, the step is skipped and the
scale is halved; after a window of steps without an overflow it is doubled. All of this happens on the device, so that
no step waits for the host. Scales are powers of two, so that multiplying and dividing change no bit of a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.errors import ConfigError
from octavo.tensor import is_distributed

Mode = Literal["none", "constant", "dynamic"]
GIVE_UP = 16
"""Overflows in a row after which a run is broken: halving the scale as often has not helped."""


class LossScale:
    """The scale of a loss, for one model and its optimizer.

    In a loop of one's own, the last three in this order, once a step:

        scale.scaled(loss).backward()
        scale.unscale(model.parameters())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)     # sees the gradients themselves
        scale.step(optimizer)
    """

    def __init__(
        self,
        mode: Mode = "dynamic",
        *,
        start: float = 2.0**8,
        window: int = 2000,
        device: torch.device | str = "cpu",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Start with the scale `start`.

        Args:
            mode: `dynamic`; `constant`, which keeps `start`; or `none`, a scale of 1. Only `dynamic` skips steps.
            start: a power of two.
            window: steps without an overflow after which `dynamic` doubles the scale.
            device: where the gradients are.
            group: ranks that have other gradients of the same model, such as the stages of a pipeline: what overflows
                on one overflows on all. Ranks that a gradient is spread over, as a DTensor, need not be named.

        Raises:
            ConfigError: an unknown mode, a start that is no power of two, or a window below 1.
        """
        if mode not in ("none", "constant", "dynamic"):
            raise ConfigError(f"loss scale: '{mode}' is none of none, constant, dynamic.")
        if not 0 < start < math.inf or math.frexp(start)[0] != 0.5:
            raise ConfigError(f"loss scale: {start} is no power of two, so it would round every gradient. Take 256.")
        if window < 1:
            raise ConfigError(f"loss scale: a window of {window} steps is not positive.")
        self.mode, self.window, self.group = mode, window, group
        self.scale = torch.full((), 1.0 if mode == "none" else start, device=device)
        """What the loss is multiplied by; FP32, shape ()."""
        self.streak = torch.zeros((), dtype=torch.int64, device=device)
        """Steps since the last overflow or doubling; below zero, overflows in a row."""
        self.overflows = torch.zeros((), dtype=torch.int64, device=device)
        """Steps skipped so far."""
        self._overflow = torch.zeros((), device=device)

    @property
    def skips(self) -> bool:
        """Whether steps that overflow are skipped."""
        return self.mode == "dynamic"

    @property
    def has_given_up(self) -> Tensor:
        """Whether the last `GIVE_UP` steps all overflowed: not the scale's fault. Boolean, shape (), on the device."""
        return self.streak <= -GIVE_UP

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss to call `backward` on."""
        return loss if self.mode == "none" else loss * self.scale

    def unscale(self, parameters: Iterable[Tensor], loss: Tensor | None = None) -> None:
        """Divide the gradients of `parameters` by the scale, in place, and see whether any of them overflowed.

        Args:
            loss: a NaN or infinity here counts as an overflow too.
        """
        if self.mode == "none":
            return
        self._overflow.zero_()
        inverse = self.scale.reciprocal()
        gradients: dict[object, list[Tensor]] = {}
        for parameter in parameters:
            if parameter.grad is not None:
                gradients.setdefault(_kind(parameter.grad), []).append(parameter.grad)
        for alike in gradients.values():
            torch._amp_foreach_non_finite_check_and_unscale_(alike, self._overflow, inverse)
        if loss is not None:
            self._overflow = torch.maximum(self._overflow, (~torch.isfinite(loss)).float())
        if self.group is not None:
            dist.all_reduce(self._overflow, dist.ReduceOp.MAX, group=self.group)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the optimizer's step unless a gradient overflowed, then choose the next scale.

        A fused optimizer of PyTorch skips on the device; any other one has to wait for the host to look.
        """
        if not self.skips:
            optimizer.step()
            return
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            # What `torch.amp.GradScaler` tells a fused optimizer, in the same two attributes.
            optimizer.grad_scale, optimizer.found_inf = None, self._overflow  # type: ignore[attr-defined]
            try:
                optimizer.step()
            finally:
                del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
        elif not bool(self._overflow):
            optimizer.step()
        self._update(self._overflow > 0)

    def state_dict(self) -> dict[str, Tensor]:
        """Return what a resumed run needs; nothing where the scale never changes."""
        return {"scale": self.scale, "streak": self.streak, "overflows": self.overflows} if self.skips else {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from what `state_dict` returned."""
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])

    def _update(self, overflow: Tensor) -> None:
        streak = torch.where(overflow, self.streak.clamp(max=0) - 1, self.streak.clamp(min=0) + 1)
        quiet = streak >= self.window
        factor = torch.where(overflow, 0.5, torch.where(quiet, 2.0, 1.0))
        self.overflows += overflow
        self.streak.copy_(torch.where(quiet, 0, streak))
        self.scale.copy_((self.scale * factor).clamp(2.0**-126, 2.0**126))


def _kind(gradient: Any) -> object:
    """Return what gradients that are looked at together have in common: PyTorch asks the ranks that the first has."""
    spread = (gradient.device_mesh, gradient.placements) if is_distributed(gradient) else None
    return gradient.dtype, spread

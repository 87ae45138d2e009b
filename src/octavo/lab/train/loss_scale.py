"""Loss scaling: multiply the loss before backward, divide the gradients after it.

The scale keeps small gradients within the range of a 16-bit format. BF16 has the range of FP32 and FP8 codes have
scales of their own, so the default is `none`; FP16, or FP8 scales shared by many values, may need one.

`dynamic` (Micikevicius et al., arXiv 1710.03740, section 4.1): if a gradient overflows, the step is skipped and the
scale halved; after a window of steps without overflow it is doubled. This happens on the device: no step waits for the
host. Scales are powers of two, so that scaling and unscaling are exact.
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
"""Consecutive overflows after which a run has failed: halving the scale did not help."""


class LossScale:
    """The loss scale of one model and its optimizer.

    In a training loop, in this order; with several micro-batches the first line is called for each, the others once:

        scale.scaled(loss).backward()
        scale.unscale(model.parameters())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # reads unscaled gradients
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
            device: device of the gradients.
            group: ranks with other gradients of the same model, such as pipeline stages, which skip steps together. Not
                needed for ranks that a DTensor gradient is sharded over.

        Raises:
            ConfigError: unknown mode, a start that is not a power of two, or a window below 1.
        """
        if mode not in ("none", "constant", "dynamic"):
            raise ConfigError(f"loss scale: '{mode}' is none of none, constant, dynamic.")
        if not 0 < start < math.inf or math.frexp(start)[0] != 0.5:
            raise ConfigError(f"loss scale: {start} is not a power of two and would round every gradient. Take 256.")
        if window < 1:
            raise ConfigError(f"loss scale: a window of {window} steps is not positive.")
        self.mode, self.window, self.group = mode, window, group
        self.scale = torch.full((), 1.0 if mode == "none" else start, device=device)
        """Factor on the loss; FP32, shape ()."""
        self.streak = torch.zeros((), dtype=torch.int64, device=device)
        """Steps since the last overflow or doubling; if negative, consecutive overflows."""
        self.overflows = torch.zeros((), dtype=torch.int64, device=device)
        """Steps skipped so far."""
        self._overflow = torch.zeros((), device=device)

    @property
    def skips(self) -> bool:
        """True if steps that overflow are skipped."""
        return self.mode == "dynamic"

    @property
    def has_given_up(self) -> Tensor:
        """True if the last `GIVE_UP` steps all overflowed. Boolean, shape (), on the device."""
        return self.streak <= -GIVE_UP

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss to call `backward` on."""
        return loss if self.mode == "none" else loss * self.scale

    def unscale(self, parameters: Iterable[Tensor], loss: Tensor | None = None) -> None:
        """Divide the gradients of `parameters` by the scale, in place, and record whether any overflowed.

        Args:
            parameters: parameters with gradients.
            loss: a NaN or infinity in it counts as an overflow too.
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
        """Step the optimizer unless a gradient overflowed, then update the scale.

        A fused optimizer of PyTorch skips on the device; for any other one the host waits for the result.
        """
        if not self.skips:
            optimizer.step()
            return
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            # The two attributes by which `torch.amp.GradScaler` makes a fused optimizer skip.
            optimizer.grad_scale, optimizer.found_inf = None, self._overflow  # type: ignore[attr-defined]
            try:
                optimizer.step()
            finally:
                del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
        elif not bool(self._overflow):
            optimizer.step()
        self._update(self._overflow > 0)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of a dynamic scale; empty for other modes."""
        return {"scale": self.scale, "streak": self.streak, "overflows": self.overflows} if self.skips else {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the result of `state_dict`."""
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
    """Return the key that groups gradients for one check: PyTorch reduces over the mesh of the first of a group."""
    spread = (gradient.device_mesh, gradient.placements) if is_distributed(gradient) else None
    return gradient.dtype, spread

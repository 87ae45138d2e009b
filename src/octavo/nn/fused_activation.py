"""A user's gated MLP whose layers are called one by one, in whichever precision, and whose activation is one kernel.

    h = f(gate(x)) * up(x)        y = down(h)

Eager code passes gate, f(gate), up and h three times as often in forward and backward as one kernel each way does, and
saves f(gate) besides gate and up. For layers in FP8 `octavo.nn.fused` writes the codes of h in the same pass instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.modules.module import _has_any_global_hook

from octavo._util.autograd import first_order, refuse_transforms
from octavo.kernels.activation import activate_plain, activation_backward_plain
from octavo.kernels.runtime.dispatch import gains_by_kernels, is_plain
from octavo.nn.fused import MLPRoles
from octavo.nn.modules import has_hooks
from octavo.nn.recognised import Recognised

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class FusedActivation(Recognised):
    """Mixin for the class of a module that computes a gated MLP; `adopt` adds it, `release` removes it."""

    prefix = "Fused"
    fields = (*Recognised.fields, "activation_roles", "enabled")
    activation_roles: MLPRoles
    enabled: bool
    """False: compute like the parent."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the MLP of x (..., D). Compiled code, and calls of another kind, run the module's own forward."""
        if is_compiling() or kwargs or len(args) != 1 or not self._takes(args[0]):
            return super().forward(*args, **kwargs)
        roles, x = self.activation_roles, args[0]
        gate, up = (self.get_submodule(name)(x) for name in roles.inner)
        if not all(is_plain(h) and h.dtype in _DTYPES for h in (gate, up)) or gate.dtype != up.dtype:
            return super().forward(x)
        return self.get_submodule(roles.down)(activated(roles.kind, gate, up))

    def _find_call_key(self) -> str:
        return f"{'on' if self.enabled else 'off'}|{self.activation_roles}"

    def extra_repr(self) -> str:
        """Return what `print(model)` shows of this module."""
        return ", ".join(filter(None, (super().extra_repr(), f"activation={self.activation_roles.kind}")))

    def _takes(self, x: Any) -> bool:
        """Return whether a kernel gains something for x, and nothing reads what only the module's own forward has."""
        if not self.enabled or not isinstance(x, Tensor) or not is_plain(x) or not gains_by_kernels(x.device):
            return False
        if x.dtype not in _DTYPES:  # not found out from gate and up: the module would compute them once more
            return False
        layers = [self.get_submodule(name) for name in (*self.activation_roles.inner, self.activation_roles.down)]
        others = [child for child in self.modules() if child is not self and all(child is not each for each in layers)]
        return not _has_any_global_hook() and not any(map(has_hooks, others)) and self.is_as_recognised()


def adopt(module: nn.Module, roles: MLPRoles) -> None:
    """Turn a module that computes the gated MLP of these roles into a `FusedActivation`, in place."""
    FusedActivation.take(module, activation_roles=roles, enabled=True)


def activated(kind: str, gate: Tensor, up: Tensor) -> Tensor:
    """Return f(gate) * up, contiguous, rounded once to their dtype.

    Args:
        kind: f, by its name in `octavo.kernels.activation`.
        gate: (..., F).
        up: as gate, of the same dtype.
    """
    refuse_transforms()
    h: Tensor = _Activated.apply(kind, gate, up)  # type: ignore[no-untyped-call]
    return h


class _Activated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kind: str, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.kind = kind
        ctx.set_materialize_grads(False)
        width = gate.shape[-1]
        return activate_plain(kind, gate.reshape(-1, width), up.reshape(-1, width)).view(gate.shape)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[None, Tensor | None, Tensor | None]:
        if grad_outputs[0] is None:
            return None, None, None
        gate, up = ctx.saved_tensors
        dh, *inputs = (x.reshape(-1, gate.shape[-1]) for x in (grad_outputs[0], gate, up))
        d_gate, d_up = activation_backward_plain(ctx.kind, dh, *inputs)
        assert d_up is not None
        return None, d_gate.view(gate.shape), d_up.view(up.shape)

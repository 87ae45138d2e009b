"""Norms that hand the FP8 codes of their result to the linear layer that reads it.

As for `octavo.nn.Linear`, a module is converted and reverted by changing its class: parameters, names, state_dict,
hooks and flags stay. It only replaces the parent's computation if that gains something: in eager mode on a GPU, where
one kernel writes y and its codes. Compiled code runs the parent's forward. So does input that the kernels would treat
differently from the parent.

Backward reads the input. In a transformer that is the residual stream, which no other operation saves: the additions
that compute it save nothing. A norm can save it in FP8 (`input_format`); it then always replaces the parent's
computation, in compiled code too. The effect on gradients is small. The error of the input reaches dx only through the
term that subtracts the mean of dy * n from each row, and the rest of dx is exact; dweight sums the errors over all
tokens.

Layers that read a compiled RMS norm make their codes of the norm's input (`octavo.nn.attached_codes.NormSource`), in a
pass that reads it and the rstd of its rows, so that y is not written. In backward they make the same codes again, bit
for bit, and save none.
"""

from __future__ import annotations

from functools import cache
from numbers import Real
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from octavo import kernels
from octavo._util.autograd import first_order, refuse_transforms
from octavo._util.compiler import assume_constant_result
from octavo.kernels import ledger, norm
from octavo.kernels.dispatch import is_plain, on_gpu, triton_unsupported_reason
from octavo.kernels.quant_spec import QuantSpec
from octavo.kernels.quantize import COMPILED_ROW, LONGEST_NORM
from octavo.kernels.tape import Result, replay
from octavo.nn.adopted import own_class
from octavo.nn.attached_codes import attach_codes, attach_norm_source
from octavo.nn.operands import autocast_dtype
from octavo.nn.probe import CALLS, computes, is_as_its_class, random_tensor, shallow_copy
from octavo.nn.recognised import Recognised
from octavo.nn.side_effects import Conduct
from octavo.numerics import Quantized
from octavo.recipes import Precision

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Norm(Recognised):
    """Base of converted norms; `adopt` converts a user's norm."""

    fields = (*Recognised.fields, "target", "enabled", "input_format")
    weight: Tensor | None
    target: QuantSpec | None
    """Quantisation of y for its reader; None: only y is written."""
    enabled: bool
    """False: compute like the parent."""
    input_format: Precision
    """Format of the input saved for backward: `bf16` unchanged, `fp8` as codes, with a scale per 128 of them."""
    normalized_shape: tuple[int, ...]

    @property
    def is_centred(self) -> bool:
        """Whether it is a layer norm."""
        return isinstance(self, nn.LayerNorm)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the norm of x (..., D) over its last dimension. Calls with other arguments go to the parent."""
        if torch.compiler.is_compiling() and self.input_format != "fp8" and not _is_long(args):
            return super().forward(*args, **kwargs)  # the compiler fuses it with what reads it
        if not kwargs and len(args) == 1 and self._is_recomputed(args[0]):
            return self._forward_to_recompute(args[0])
        if kwargs or len(args) != 1 or not self._takes(args[0]):
            self._note_that_nothing_is_saved(args)
            return super().forward(*args, **kwargs)
        x: Tensor = args[0]
        x_MD = x.reshape(-1, x.shape[-1])
        eps = self._eps(x)
        target = None if torch.compiler.is_compiling() or not _gains(x.device) else self.target
        keeps_codes = self.input_format == "fp8" and torch.is_grad_enabled()
        refuse_transforms()
        y_MD, codes, scale = _Function.apply(x_MD, *self._affine(), eps, target, self.is_centred, keeps_codes)  # type: ignore[no-untyped-call]
        y = y_MD.view(x.shape)
        if target is not None:
            attach_codes(y, Quantized(codes, scale, target.tile), target)
        return y

    def extra_repr(self) -> str:
        """Return what `print(model)` shows of this module."""
        shown = [
            super().extra_repr(),
            f"codes={self.target}" if self.target else "",
            "" if self.input_format == "bf16" else f"input_format={self.input_format}",
            "" if self.enabled else "disabled",
        ]
        return ", ".join(filter(None, shown))

    def _eps(self, x: Tensor) -> float:
        eps = _eps_of(self)
        return _default_eps(x.dtype, x.device) if eps is None else eps

    def _affine(self) -> tuple[Tensor | None, Tensor | None]:
        """Return weight and bias; only for a layer norm is `bias` the bias of the formula."""
        return self.weight, getattr(self, "bias", None) if self.is_centred else None

    def _takes(self, x: Any) -> bool:
        """Return whether the kernels gain anything for x, with the parent's result, dtype included."""
        if not self.enabled or not is_plain(x):
            return False
        if self.input_format != "fp8" and (torch.compiler.is_compiling() or not _gains(x.device)):
            return False
        if not self.is_as_recognised():
            return False
        parameters = [p for p in self._affine() if p is not None]
        shape = parameters[0].shape if parameters else self.normalized_shape
        if x.shape[-1:] != shape or not 0 < x.shape[-1] <= norm.LONGEST_ROW:
            return False
        if any((p.dtype, p.device) != (x.dtype, x.device) or not is_plain(p) for p in parameters):
            return False
        # Whether autocast runs a norm in FP32 depends on its class, the version and the device. FP32 input stays FP32.
        return x.dtype in _DTYPES if autocast_dtype(x.device.type) is None else x.dtype == torch.float32

    def _is_recomputed(self, x: Any) -> bool:
        """Return whether compiled readers of y make their codes of x, which backward saves."""
        if not (torch.compiler.is_compiling() and self.enabled and is_plain(x)):
            return False
        if self.is_centred or self.weight is None or self.target is None or self.input_format == "fp8":
            return False
        known = _is_long((x,)) and on_gpu(x) and x.dtype == self.weight.dtype and x.dtype in _DTYPES
        return known and self.is_as_recognised()

    def _forward_to_recompute(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        with torch.no_grad():
            x_MD = x.reshape(-1, x.shape[-1])
            rstd = torch.rsqrt(x_MD.float().pow(2).mean(-1) + self._eps(x))
            attach_norm_source(y, x_MD, (rstd, cast(Tensor, self.weight).detach()))
        return y

    def _note_that_nothing_is_saved(self, args: tuple[Any, ...]) -> None:
        if self.input_format != "fp8" or not self.enabled or torch.compiler.is_compiling():
            return
        if torch.is_grad_enabled() and args and isinstance(args[0], Tensor):
            ledger.fall_back(
                f"a norm kept its input as it is, not in FP8: {type(self).__name__} of {type(args[0]).__name__} "
                f"{tuple(args[0].shape)} {args[0].dtype}, which its kernels do not compute as it does"
            )


def _is_long(args: tuple[Any, ...]) -> bool:
    """Return whether the rows of the first of these are quantised by a kernel of their own in compiled code.

    Shorter ones are quantised where they are computed.
    """
    return len(args) == 1 and isinstance(args[0], Tensor) and COMPILED_ROW < args[0].shape[-1] <= LONGEST_NORM


def adopts(module: nn.Module) -> bool:
    """Return whether `adopt` takes this module: a norm of PyTorch's over one dimension, or a user's RMS norm.

    The latter is recognised by its behaviour: it has one parameter, `weight` (D,), and an epsilon, and computes the RMS
    norm of random rows and nothing else, in FP32 and in BF16 (`octavo.nn.probe`). Models of Hugging Face have such
    classes of their own.
    """
    if is_parametrized(module):
        return False
    if isinstance(module, Norm) and module.is_as_recognised():
        return True
    kind = own_class(module).parent if isinstance(module, Norm) else type(module)
    if kind in (nn.RMSNorm, nn.LayerNorm):
        norm = cast(nn.RMSNorm, module)
        return len(norm.normalized_shape) == 1 and isinstance(norm.eps, Real | None)
    return _is_rms_norm(module)


def adopt(module: nn.Module, target: QuantSpec | None, input_format: Precision = "bf16") -> None:
    """Turn a module that `adopts` takes into a `Norm`, in place. It remains an instance of its class.

    If the target needs the maximum of all of y (`tensor`), the reader quantises: only y is written.
    """
    target = None if target is None or norm.unsupported_reason(target) else target
    Norm.take(module, target=target, enabled=True, input_format=input_format)


def _gains(device: torch.device) -> bool:
    return on_gpu(device) and (device.type != "cuda" or triton_unsupported_reason(device) is None)


def _eps_of(module: nn.Module) -> float | None:
    for name in ("eps", "variance_epsilon", "epsilon"):
        if isinstance(eps := getattr(module, name, None), Real):
            return float(eps)
    return None


@assume_constant_result
def _default_eps(dtype: torch.dtype, device: torch.device) -> float:
    return _measured_default_eps(dtype, device)


@cache
def _measured_default_eps(dtype: torch.dtype, device: torch.device) -> float:
    """Return the default eps of PyTorch's RMS norm, which depends on the version: that of x's dtype, or of FP32."""
    single = torch.finfo(torch.float32).eps
    if dtype == torch.float32:
        return single
    x = torch.full((1, 8), single**0.5, dtype=dtype, device=device)
    y = float(F.rms_norm(x, (8,))[0, 0])  # 1 / sqrt(2) with FP32's eps, far less with a 16-bit one
    return single if y > 0.5 else torch.finfo(dtype).eps


def _is_rms_norm(module: nn.Module) -> bool:
    parameters = dict(module.named_parameters())
    if list(parameters) != ["weight"] or parameters["weight"].dim() != 1 or _eps_of(module) is None:
        return False
    if not parameters["weight"].numel():  # partitioned by DeepSpeed's ZeRO-3: it cannot run
        return False
    if not is_as_its_class(module) or any(True for _ in (*module.children(), *module.buffers())):
        return False
    if not isinstance(module, Norm) and any(hasattr(module, name) for name in Norm.fields):  # they stay the user's
        return False
    return _gives_rms_norm(module, torch.float32, 1e-5) and _gives_rms_norm(module, torch.bfloat16, 2e-2)


def _gives_rms_norm(module: nn.Module, dtype: torch.dtype, tolerance: float) -> bool:
    """Run the module's forward, with another weight, on rows that eps changes not at all, by half, and very much."""
    eps, width = cast(float, _eps_of(module)), cast(Tensor, module.weight).shape[0]

    def draw(*shape: int) -> Tensor:
        rows = torch.tensor([[[1.0], [30.0]], [[eps**0.5], [eps]]], device="cpu", dtype=torch.float32)
        x = random_tensor(0, *shape, width) if shape else random_tensor(0, 2, 2, width) * rows
        return x.to(dtype)

    def probe(training: bool) -> nn.Module:
        made = shallow_copy(module, training)
        made._parameters["weight"] = nn.Parameter(random_tensor(1, width).to(dtype))
        return made

    def formula(probe: nn.Module, x: Tensor) -> Tensor:
        wide = x.double()
        normed = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
        return normed * cast(Tensor, probe.weight).double()

    return computes(probe, formula, draw, tolerance, CALLS, Conduct(shapes=((0,), (3,), (1, 1))))


class _Function(torch.autograd.Function):
    """y, and its codes and scales if there is a target."""

    @staticmethod
    def forward(
        ctx: Any,
        x_MD: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        target: QuantSpec | None,
        centred: bool,
        keeps_codes: bool,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        keeps_codes = keeps_codes and any(ctx.needs_input_grad)
        made, kept = replay(_forward, (eps, target, centred, keeps_codes), (x_MD, weight, bias))
        ctx.save_for_backward(*kept)
        ctx.set_materialize_grads(False)  # otherwise backward gets zeros for the codes
        y_MD, codes, scale = made
        if codes is not None:
            ctx.mark_non_differentiable(codes, scale)
        return y_MD, codes, scale

    @staticmethod
    @first_order
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_outputs[0] is None:
            return (None,) * 7
        (gradients,) = replay(_backward, (), (grad_outputs[0], *ctx.saved_tensors))
        return *gradients, *(None,) * (7 - len(gradients))


def _forward(options: tuple[Any, ...], x_MD: Tensor, weight: Tensor | None, bias: Tensor | None) -> Result:
    """Return y, its codes and scale, and what is saved for backward."""
    eps, target, centred, keeps_codes = options
    made = norm.normalise(x_MD, weight, bias, eps, centred=centred, target=target)
    kept = kernels.quantize(x_MD, *norm.KEPT)[:2] if keeps_codes else (x_MD, None)
    codes = (None, None) if made.quantized is None else made.quantized[:2]
    return (made.y, *codes), (*kept, weight, bias, made.mean, made.rstd)


def _backward(options: tuple[Any, ...], dy: Tensor, *saved: Any) -> Result:
    """Return the gradients of x, weight and bias."""
    x_MD, scale, weight, bias, mean, rstd = saved
    x = x_MD if scale is None else Quantized(x_MD, scale, norm.KEPT.tile)
    return (norm.normalise_backward(dy, x, weight, bias, mean, rstd),)

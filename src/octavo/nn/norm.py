"""Norms that hand the codes of their result to the linear layer that reads it.

As for `octavo.nn.Linear`, a module is converted and reverted by changing its class: parameters, names, state_dict,
hooks and flags stay. It only replaces the parent's computation if that gains something: in eager mode on a GPU, where
one kernel writes y and its codes, both sets of them where wgrad reads others than fprop (`rotated`). Compiled code runs
the parent's forward. So does input that the kernels would treat differently from the parent.

In a block whose residual stream is a `Stream` (`octavo.nn.residual`) the norm adds what the block has computed in the
same pass, and its backward the gradient that passes by it.

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

from collections.abc import Sequence
from functools import cache
from numbers import Real
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.utils.parametrize import is_parametrized

from octavo import kernels
from octavo._util.autograd import first_order, refuse_transforms
from octavo._util.compiler import answer, ask_tracer, assume_constant_result, module_of
from octavo.kernels import norm
from octavo.kernels.quant_spec import QuantSpec
from octavo.kernels.quantize import COMPILED_ROW, LONGEST_NORM
from octavo.kernels.runtime import host_state, ledger
from octavo.kernels.runtime.dispatch import PLAIN, gains_by_kernels, is_plain, on_gpu
from octavo.kernels.runtime.tape import Result, replay
from octavo.nn.adopted import own_class
from octavo.nn.attached_codes import attach_codes, attach_norm_source
from octavo.nn.autocast_effects import ignores_autocast
from octavo.nn.operands import autocast_dtype
from octavo.nn.probe import CALLS, as_written, computes, is_as_its_class, random_tensor, shallow_copy
from octavo.nn.recognised import Recognised
from octavo.nn.side_effects import Conduct
from octavo.nn.stream import Stream
from octavo.numerics import Quantized
from octavo.recipes import Precision

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Norm(Recognised):
    """Base of converted norms; `adopt` converts a user's norm."""

    fields = (*Recognised.fields, "target", "second", "enabled", "input_format", "form", "ignores_autocast")
    weight: Tensor | None
    target: QuantSpec | None
    """Quantisation of y for fprop of its reader; None: only y is written."""
    second: QuantSpec | None = None
    """The same for wgrad, if that reads other codes (`LinearPlan.x_second`). They are written where autograd is on and
    the norm is trained. Readers of a frozen one are usually frozen, too, as with LoRA, whose adapters keep y, and with
    it all that is attached to it; a reader that is trained makes them itself."""
    enabled: bool
    """False: compute like the parent."""
    input_format: Precision
    """Format of the input saved for backward: `bf16` unchanged, `fp8` as codes, with a scale per 128 of them."""
    normalized_shape: tuple[int, ...]
    form: str = ""
    """`layer`: a layer norm; `offset`: an RMS norm that multiplies by 1 + weight, as Gemma's; otherwise an RMS norm."""
    ignores_autocast: bool = False
    """Whether autocast changes nothing of the parent's forward for 16-bit x (`octavo.nn.autocast_effects`)."""

    @property
    def is_centred(self) -> bool:
        """Whether it is a layer norm."""
        return self.form == "layer" or isinstance(self, nn.LayerNorm)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the norm of x (..., D) over its last dimension. Calls with other arguments go to the parent."""
        if len(args) == 1 and type(args[0]) is Stream and not kwargs:
            return self._forward_of_stream(args[0])
        way = traced_way(self, args[0] if len(args) == 1 and not kwargs else None) if is_compiling() else ""
        if way == "recompute":
            return self._forward_to_recompute(args[0])
        if way == "parent":
            return super().forward(*args, **kwargs)  # the compiler fuses it with what reads it
        if kwargs or len(args) != 1 or not self._takes(args[0]):
            self._note_that_nothing_is_saved(args)
            return super().forward(*args, **kwargs)
        x: Tensor = args[0]
        refuse_transforms()
        options = self._options(x)
        y_MD, *codes = _Function.apply(x.reshape(-1, x.shape[-1]), *self._affine(), options)  # type: ignore[no-untyped-call]
        return _with_codes(y_MD.view(x.shape), codes, options[1])

    def _forward_of_stream(self, stream: Stream) -> Any:
        """Return the norm of a residual stream, and leave its value to it."""
        x, addend = stream.parts
        is_sum = (
            addend is not None and addend.dtype in _DTYPES and torch.promote_types(x.dtype, addend.dtype) == x.dtype
        )
        passes_gradients = addend is None and torch.is_grad_enabled() and x.requires_grad
        if is_compiling() or not (is_sum or passes_gradients) or not self._takes(x):
            return self.forward(stream.tensor())
        refuse_transforms()
        options = self._options(x)
        rows = [None if each is None else each.reshape(-1, x.shape[-1]) for each in (x, addend)]
        sum_MD, y_MD, *codes = _StreamFunction.apply(*rows, *self._affine(), options)  # type: ignore[no-untyped-call]
        stream.set_value(sum_MD.view(x.shape))
        return _with_codes(y_MD.view(x.shape), codes, options[1])

    def _find_call_key(self) -> str:
        return f"{'on' if self.enabled else 'off'}|{self.target}|{self.input_format}|{self.form}"

    def extra_repr(self) -> str:
        """Return what `print(model)` shows of this module."""
        shown = [
            super().extra_repr(),
            f"codes={self.target}" if self.target else "",
            "" if self.input_format == "bf16" else f"input_format={self.input_format}",
            "" if self.enabled else "disabled",
        ]
        return ", ".join(filter(None, shown))

    def _options(self, x: Tensor) -> tuple[Any, ...]:
        """Return eps, the targets, whether it is centred, and whether backward keeps codes of x."""
        keeps_codes = self.input_format == "fp8" and torch.is_grad_enabled()
        return self._eps(x), self._targets(x.device), self.is_centred, keeps_codes

    def _eps(self, x: Tensor) -> float:
        eps = _eps_of(self)
        return _default_eps(x.dtype, x.device) if eps is None else eps

    def _affine(self) -> tuple[Tensor | None, Tensor | None]:
        """Return weight and bias of the formula; only a layer norm has the latter."""
        weight, bias = self._own_parameters()
        return weight.float() + 1 if self.form == "offset" and weight is not None else weight, bias

    def _own_parameters(self) -> tuple[Tensor | None, Tensor | None]:
        return self.weight, getattr(self, "bias", None) if self.is_centred else None

    def _takes(self, x: Any) -> bool:
        """Return whether the kernels gain anything for x, with the parent's result, dtype included."""
        if not self.enabled or not is_plain(x):
            return False
        if self.input_format != "fp8" and (is_compiling() or not gains_by_kernels(x.device)):
            return False
        if not self.is_as_recognised():
            return False
        parameters = [p for p in self._own_parameters() if p is not None]
        shape = parameters[0].shape if parameters else self.normalized_shape
        if x.shape[-1:] != shape or not 0 < x.shape[-1] <= norm.LONGEST_ROW:
            return False
        if any((p.dtype, p.device) != (x.dtype, x.device) or not is_plain(p) for p in parameters):
            return False
        # Whether autocast runs PyTorch's norms in FP32 depends on the version and the device. FP32 input stays FP32.
        is_as_without = self.ignores_autocast or autocast_dtype(x.device.type) is None
        return x.dtype in _DTYPES if is_as_without else x.dtype == torch.float32

    def _targets(self, device: torch.device) -> tuple[QuantSpec, ...]:
        """Return the targets of the codes that are written with y: for fprop of its reader, and for wgrad."""
        if self.target is None or is_compiling() or not gains_by_kernels(device):
            return ()
        trains = torch.is_grad_enabled() and (self.weight is None or self.weight.requires_grad)
        return (self.target, self.second) if self.second is not None and trains else (self.target,)

    def _is_recomputed(self, x: Tensor) -> bool:
        """Return whether compiled readers of y make their codes of x, which backward saves. x: plain."""
        if self.is_centred or self.form or self.weight is None or self.target is None or not self.enabled:
            return False
        return self._is_long(x) and on_gpu(x) and x.dtype == self.weight.dtype and x.dtype in _DTYPES

    def _is_long(self, x: Tensor) -> bool:
        """Return whether the rows of x are quantised by a kernel of their own in compiled code.

        Inductor quantises shorter rows where it computes them, and again in backward; it cannot rotate them.
        """
        rotates = self.target is not None and self.target.rotation != 0
        return (0 if rotates else COMPILED_ROW) < x.shape[-1] <= LONGEST_NORM

    def _forward_to_recompute(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        with torch.no_grad():
            x_MD = x.reshape(-1, x.shape[-1])
            rstd = torch.rsqrt(x_MD.float().pow(2).mean(-1) + self._eps(x))
            attach_norm_source(y, x_MD, (rstd, cast(Tensor, self.weight).detach()))
        return y

    def _note_that_nothing_is_saved(self, args: tuple[Any, ...]) -> None:
        if self.input_format != "fp8" or not self.enabled or is_compiling():
            return
        if torch.is_grad_enabled() and args and isinstance(args[0], Tensor):
            ledger.fall_back(
                f"a norm kept its input as it is, not in FP8: {type(self).__name__} of {type(args[0]).__name__} "
                f"{tuple(args[0].shape)} {args[0].dtype}, which its kernels do not compute as it does"
            )


def traced_way(norm: Norm, x: Any) -> str:
    """Return how compiled code computes a norm of x, its only argument, otherwise None; with few guards.

    `parent`: by the parent's forward; `recompute`: so that readers make their codes of x (`NormSource`); empty: as in
    eager mode.
    """
    answered = ask_tracer(x, _find_way, norm)
    if answered is None:
        return "" if norm.input_format == "fp8" else "parent"
    key, fake, way = answered
    if norm.call_key != key or host_state.now.fake != fake:
        return ""
    if way == "recompute" and not norm.is_as_recognised():
        way = "parent"
    return way  # type: ignore[no-any-return]


def _find_way(context: Any) -> None:
    """Answer what `traced_way` returns, after what it depends on: `call_key` and `HostState.fake`."""
    norm, x = module_of(context), context.get_local("x")
    is_recomputed = x.python_type() in PLAIN and norm._is_recomputed(x.as_fake())
    way = "" if norm.input_format == "fp8" else "recompute" if is_recomputed else "parent"
    answer((norm.call_key, host_state.now.fake, way))


def form_of(module: nn.Module) -> str | None:
    """Return the `Norm.form` of a module that `adopt` takes, None of any other.

    It takes norms of PyTorch's over one dimension, and a user's RMS or layer norm. These are recognised by their
    behaviour: they have a `weight` (D,), a layer norm perhaps a `bias` (D,) too, and an epsilon, and compute the norm
    of random rows and nothing else, in FP32 and in BF16 (`octavo.nn.probe`). Models of Hugging Face and timm have such
    classes of their own; Gemma's multiplies by 1 + weight.
    """
    if is_parametrized(module):
        return None
    if isinstance(module, Norm) and module.is_as_recognised():
        return module.form
    kind = own_class(module).parent if isinstance(module, Norm) else type(module)
    if kind in (nn.RMSNorm, nn.LayerNorm):
        norm = cast(nn.RMSNorm, module)
        is_taken = len(norm.normalized_shape) == 1 and isinstance(norm.eps, Real | None)
        return ("layer" if kind is nn.LayerNorm else "") if is_taken else None
    return _recognised_form(module)


def adopts(module: nn.Module) -> bool:
    """Return whether `adopt` takes this module."""
    return form_of(module) is not None


def adopt(
    module: nn.Module,
    target: QuantSpec | None,
    input_format: Precision = "bf16",
    form: str | None = None,
    second: QuantSpec | None = None,
) -> None:
    """Turn a module that `adopts` takes into a `Norm`, in place. It remains an instance of its class.

    If the target needs the maximum of all of y (`tensor`), the reader quantises: only y is written.

    Args:
        form: the result of `form_of`, if it is known.
        second: see `Norm`.
    """
    form = (form_of(module) or "") if form is None else form
    if target is None or norm.unsupported_reason(target):
        target = second = None
    fields = {"input_format": input_format, "form": form, "ignores_autocast": _ignores_autocast(module)}
    Norm.take(module, target=target, second=second, enabled=True, **fields)


def _ignores_autocast(module: nn.Module) -> bool:
    """Return `Norm.ignores_autocast` of a norm that was recognised."""
    weight = getattr(module, "weight", None)
    if weight is None or type(module) in (nn.RMSNorm, nn.LayerNorm):
        return False
    return ignores_autocast(_random_copy(module, False, torch.bfloat16), random_tensor(0, 2, len(weight)).bfloat16())


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


def _recognised_form(module: nn.Module) -> str | None:
    """Return the `Norm.form` of a module whose forward is a norm; None if it is none."""
    parameters = dict(module.named_parameters())
    if not {"weight"} <= {*parameters} <= {"weight", "bias"} or any(p.dim() != 1 for p in parameters.values()):
        return None
    if _eps_of(module) is None or not parameters["weight"].numel():  # partitioned by DeepSpeed's ZeRO-3: it cannot run
        return None
    if not is_as_its_class(module) or any(True for _ in (*module.children(), *module.buffers())):
        return None
    if not isinstance(module, Norm) and any(hasattr(module, name) for name in Norm.fields):  # they stay the user's
        return None
    form = _likely_form(module)
    if form is None:
        return None
    if "bias" in parameters and form != "layer":
        return None
    is_norm = _gives_norm(module, form, torch.float32, 1e-5) and _gives_norm(module, form, torch.bfloat16, 2e-2)
    return form if is_norm else None


@torch.no_grad()
def _likely_form(module: nn.Module) -> str | None:
    """Return the form that a module has if it is a norm, by its results for a constant row; None if it cannot run."""
    results = []
    for weight in (0.0, 1.0):
        probe = shallow_copy(module, training=False)
        width = cast(Tensor, module.weight).shape[0]
        values = {"weight": torch.full((width,), weight, device="cpu", dtype=torch.float32)}
        values["bias"] = torch.zeros(width, device="cpu", dtype=torch.float32)
        named = module._parameters.items()
        probe._parameters = {k: nn.Parameter(values[k]) if p is not None and k in values else None for k, p in named}
        try:
            with as_written():
                y = type(probe).forward(probe, torch.full((1, width), 2.0, device="cpu", dtype=torch.float32))
        except Exception:  # it needs more than one tensor
            return None
        results.append(isinstance(y, Tensor) and bool((y.abs() > 0.5).all()))
    return {(False, False): "layer", (True, True): "offset"}.get((results[0], results[1]), "")


def _gives_norm(module: nn.Module, form: str, dtype: torch.dtype, tolerance: float) -> bool:
    """Run the module's forward, with other parameters, on rows that eps changes not at all, by half, and very much."""
    eps, width = cast(float, _eps_of(module)), cast(Tensor, module.weight).shape[0]

    def draw(*shape: int) -> Tensor:
        rows = torch.tensor([[[1.0], [30.0]], [[eps**0.5], [eps]]], device="cpu", dtype=torch.float32)
        x = random_tensor(0, *shape, width) if shape else random_tensor(0, 2, 2, width) * rows
        return x.to(dtype)

    def probe(training: bool) -> nn.Module:
        return _random_copy(module, training, dtype)

    def formula(probe: nn.Module, x: Tensor) -> Tensor:
        wide = x.double()
        wide = wide - wide.mean(-1, keepdim=True) if form == "layer" else wide
        normed = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
        y = normed * (cast(Tensor, probe.weight).double() + (form == "offset"))
        bias = probe._parameters.get("bias")
        return y if bias is None else y + bias.double()

    return computes(probe, formula, draw, tolerance, CALLS, Conduct(shapes=((0,), (3,), (1, 1))))


def _random_copy(module: nn.Module, training: bool, dtype: torch.dtype) -> nn.Module:
    """Return a copy of a norm with other parameters, on the CPU."""
    made = shallow_copy(module, training)
    for seed, name in enumerate(("weight", "bias")):
        if (parameter := made._parameters.get(name)) is not None:
            made._parameters[name] = nn.Parameter(random_tensor(1 + seed, len(parameter)).to(dtype))
    return made


def _holds(dtype: torch.dtype, addend: torch.dtype) -> bool:
    """Return whether the sum of a tensor of a dtype with one of another has the first."""
    return torch.promote_types(dtype, addend) == dtype


def _with_codes(y: Tensor, codes: Sequence[Tensor], targets: Sequence[QuantSpec]) -> Tensor:
    """Return y with codes and scales attached, in the order of their targets."""
    if targets:
        pairs = zip(codes[::2], codes[1::2], targets, strict=True)
        attach_codes(y, *[(Quantized(each, scale, target.tile), target) for each, scale, target in pairs])
    return y


class _Function(torch.autograd.Function):
    """y, and codes and scales for each target, of which there are at most two. options: `Norm._options`."""

    @staticmethod
    def forward(
        ctx: Any, x_MD: Tensor, weight: Tensor | None, bias: Tensor | None, options: tuple[Any, ...]
    ) -> tuple[Tensor, ...]:
        made, kept = replay(_forward, _with_grad(options, ctx), (x_MD, None, weight, bias))
        _, *results = made
        ctx.save_for_backward(*kept)
        ctx.set_materialize_grads(False)  # otherwise backward gets zeros for the codes
        ctx.mark_non_differentiable(*results[1:])
        return tuple(results)  # type: ignore[arg-type]  # none is None

    @staticmethod
    @first_order
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_outputs[0] is None:
            return (None,) * 4
        (gradients,) = replay(_backward, (), (grad_outputs[0], None, *ctx.saved_tensors))
        return *gradients, *(None,) * (4 - len(gradients))


class _StreamFunction(torch.autograd.Function):
    """The sum, and what `_Function` returns for it; without an addend x itself, whose gradient then passes through."""

    @staticmethod
    def forward(
        ctx: Any,
        x_MD: Tensor,
        addend_MD: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        options: tuple[Any, ...],
    ) -> tuple[Tensor, ...]:
        made, kept = replay(_forward, _with_grad(options, ctx), (x_MD, addend_MD, weight, bias))
        total, *results = made
        ctx.save_for_backward(*kept)
        ctx.addend = None if addend_MD is None else addend_MD.dtype
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*results[1:])
        return (x_MD if total is None else total), *results  # type: ignore[arg-type]  # none is None

    @staticmethod
    @first_order
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        passing, dy, *_ = grad_outputs
        if dy is None:
            dx, rest = passing, []
        else:
            ((dx, *rest),) = replay(_backward, (), (dy, passing, *ctx.saved_tensors))
        d_addend = None if ctx.addend is None or dx is None else dx.to(ctx.addend)
        return dx, d_addend, *rest, *(None,) * (3 - len(rest))


def _with_grad(options: tuple[Any, ...], ctx: Any) -> tuple[Any, ...]:
    """Return options that keep codes only if there is a backward."""
    *others, keeps_codes = options
    return *others, keeps_codes and any(ctx.needs_input_grad)


def _forward(
    options: tuple[Any, ...], x_MD: Tensor, addend_MD: Tensor | None, weight: Tensor | None, bias: Tensor | None
) -> Result:
    """Return the sum, if there is one, y and its codes and scales, and what is saved for backward."""
    eps, targets, centred, keeps_codes = options
    target, second = (*targets, None, None)[:2]
    if addend_MD is None:
        made = norm.normalise(x_MD, weight, bias, eps, target, centred, second)
    else:
        made = norm.normalise_sum(x_MD, addend_MD, weight, bias, eps, target, centred, second)
        x_MD = x_MD if made.sum is None else made.sum
    kept = kernels.quantize(x_MD, *norm.KEPT)[:2] if keeps_codes else (x_MD, None)
    codes = [tensor for each in (made.quantized, made.second) if each is not None for tensor in each[:2]]
    return (made.sum, made.y, *codes), (*kept, weight, bias, made.mean, made.rstd)


def _backward(options: tuple[Any, ...], dy: Tensor, passing: Tensor | None, *saved: Any) -> Result:
    """Return the gradients of x, weight and bias."""
    x_MD, scale, weight, bias, mean, rstd = saved
    x = x_MD if scale is None else Quantized(x_MD, scale, norm.KEPT.tile)
    return (norm.normalise_backward(dy, x, weight, bias, mean, rstd, passing),)

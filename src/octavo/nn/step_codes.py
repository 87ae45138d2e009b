"""Weight codes that are made once per optimizer step, over its micro-batches, while no weight is seen to change.

In every forward of the model the weights are checked (`octavo.nn.seal`): whatever has written to one, codes are made
again. What is not seen is a write by a replayed CUDA graph, or on a GPU by a `_foreach_` function on `weight.data`,
between two micro-batches of a step; optimizers end the step for the codes. Codes of all weights stay in memory from a
step's first forward to its end: one byte per element, two where dgrad reads a second set.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from octavo._util.compiler import run_eagerly
from octavo.kernels.runtime.dispatch import PLAIN
from octavo.nn.code_reuse import quantising_layers, reuse_weight_codes, weights_of
from octavo.nn.seal import Unwritten


def reuse_weight_codes_per_step(model: nn.Module, *optimizers: Optimizer) -> StepCodes:
    """Quantise the weights of a model in the first forward of each optimizer step only. The returned object undoes it.

    For gradient accumulation: with one forward per step it saves nothing. Results are bitwise the same. The model may
    have compiled blocks (`octavo.compile`), and is not to be compiled as a whole.

    On a GPU it saves nothing yet: there values are not compared, and a kernel of a step that asks for a pointer to a
    weight breaks the seal that stands for them, so that every forward makes codes again. Where you know that no
    weight is written between two micro-batches, `reuse_weight_codes` around them saves the passes there.

    Args:
        model: converted, as it is called in training.
        optimizers: all that step its parameters; those of Accelerate, too.
    """
    codes = StepCodes(model)
    codes.handles.append(model.register_forward_pre_hook(_BeforeForward(codes), prepend=True))
    for optimizer in optimizers:
        inner = getattr(optimizer, "optimizer", optimizer)  # Accelerate's steps it once per accumulation
        codes.handles.append(inner.register_step_pre_hook(_BeforeStep(codes)))
    return codes


class StepCodes:
    """The codes of one optimizer step. `remove()` lets every forward quantise weights again."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.handles: list[Any] = []
        self._open = ExitStack()
        self._before: tuple[Any, ...] | None = None
        self._unwritten = Unwritten(())

    def check(self) -> None:
        """Quantise the weights unless the codes of this step are still valid: same weights, unwritten, same recipes."""
        if self._before is not None and self._holds():
            return
        self.drop()
        if torch.is_grad_enabled():
            self._open.enter_context(reuse_weight_codes(self.model))
            weights, self._before = self._state()
            self._unwritten = Unwritten.of(*weights)  # after codes were made: kernels ask for pointers
            if not self._unwritten.is_provable:
                self.drop()

    def drop(self) -> None:
        """Drop the codes: the weights are about to change."""
        self._open.close()
        self._unwritten.lift()
        self._unwritten, self._before = Unwritten(()), None

    def remove(self) -> None:
        """Undo `reuse_weight_codes_per_step`."""
        self.drop()
        for handle in self.handles:
            handle.remove()

    def _holds(self) -> bool:
        weights, state = self._state()
        return state == self._before and self._unwritten.holds(*weights)

    def _state(self) -> tuple[list[Tensor], tuple[Any, ...]]:
        """Return the weights whose codes are reused, and what else the codes depend on."""
        layers = quantising_layers(self.model)
        weights = [weight for layer in layers for weight in weights_of(layer) if type(weight) in PLAIN]
        # No `data_ptr`: it breaks the seal.
        places = ((weight.device, weight.untyped_storage()._cdata, weight.shape) for weight in weights)
        return weights, (*((id(layer), id(layer.recipe)) for layer in layers), *places)


class _Hook:
    """A hook that copies and files of its module do not keep."""

    def __init__(self, codes: StepCodes | None = None) -> None:
        self.codes = codes

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


class _BeforeForward(_Hook):
    @run_eagerly
    def __call__(self, module: nn.Module, *_: Any) -> None:
        if self.codes is not None and module is self.codes.model:  # no replica of `nn.DataParallel`
            self.codes.check()


class _BeforeStep(_Hook):
    @run_eagerly
    def __call__(self, *_: Any) -> None:
        if self.codes is not None:
            self.codes.drop()

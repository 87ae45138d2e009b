"""`octavo.nn.Linear`: an `nn.Linear` whose GEMMs run in FP8. Its parameters stay the master weights."""

from __future__ import annotations

from typing import Any, NamedTuple, Self
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from octavo.nn.functional import WeightCodes, linear, quantize_weight
from octavo.recipes import Recipe, RecipeLike, load


class CachedCodes(NamedTuple):
    """A quantised weight, and what it was made from."""

    weight: ReferenceType[Tensor]
    """The very parameter: another one in the same memory is another weight."""
    key: tuple[Any, ...]
    """Its state: version, optimizer steps, address, device, dtype; and the recipe."""
    with_dgrad: bool
    """Whether the codes of dgrad are there too."""
    codes: WeightCodes


class _OptimizerSteps:
    """How many steps any optimizer of this process has made.

    PyTorch's fused optimizers write weights without moving their version counters, so the counter alone does not tell.
    """

    count = 0

    @classmethod
    def made(cls, *_: Any) -> None:
        cls.count += 1


register_optimizer_step_post_hook(_OptimizerSteps.made)


class Linear(nn.Linear):
    """A linear layer computed by a recipe.

    Parameters, names, state_dict, hooks and flags are those of `nn.Linear`, so that a layer becomes one of these and
    back by changing its class (`adopt`, `release`). The quantised weight is kept until the weight changes: it is
    keyed on the parameter's version counter, which every in-place update moves. Writing through `weight.data` moves
    no counter; call `forget_codes()` after that.
    """

    recipe: Recipe
    enabled: bool
    """False: compute as `nn.Linear` does, for an evaluation in high precision."""
    _cached: CachedCodes | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: RecipeLike = "folded",
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self._start(load(recipe))

    @classmethod
    def adopt(cls, module: nn.Linear, recipe: Recipe) -> None:
        """Turn an `nn.Linear` into this class in place; everything attached to it stays."""
        module.__class__ = cls
        assert isinstance(module, cls)
        module._start(recipe)

    def release(self) -> None:
        """Turn this layer back into an `nn.Linear` in place."""
        for name in ("recipe", "enabled", "_cached"):
            self.__dict__.pop(name, None)
        self.__class__ = nn.Linear  # type: ignore[assignment]

    def forward(self, input: Tensor) -> Tensor:
        """Return x W^T + b for x (..., K), in x's dtype, or in autocast's where that is on."""
        if not self.enabled:
            return super().forward(input)
        device = input.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype
        # Compiled code quantises the weight where it uses it: a version counter read there would recompile every step.
        codes = None if torch.compiler.is_compiling() else self.codes(input.requires_grad and torch.is_grad_enabled())
        return linear(input, self.weight, self.bias, self.recipe, codes, dtype)

    def codes(self, needs_dgrad: bool = True) -> WeightCodes:
        """Return the quantised weight, made anew only if the weight has changed since the last call."""
        weight = self.weight
        if weight.is_inference():  # such a tensor counts no versions
            return quantize_weight(weight, self.recipe, needs_dgrad)
        steps = _OptimizerSteps.count if weight.requires_grad else 0
        key = (weight._version, steps, weight.data_ptr(), weight.device, weight.dtype, self.recipe)
        cached = self._cached
        current = cached is not None and cached.weight() is weight and cached.key == key
        if cached is None or not current or (needs_dgrad and not cached.with_dgrad):
            with torch.no_grad():
                codes = quantize_weight(weight, self.recipe, needs_dgrad)
            cached = CachedCodes(ref(weight), key, needs_dgrad, codes)
            self._cached = cached
        return cached.codes

    def forget_codes(self) -> None:
        """Drop the quantised weight, so that the next forward makes it anew."""
        self._cached = None

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self.forget_codes()  # the weight moves or changes its dtype: its new memory may have the old address
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def extra_repr(self) -> str:
        """Return what `print(model)` shows of this layer."""
        return f"{super().extra_repr()}, recipe={self.recipe.name}" + ("" if self.enabled else ", disabled")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cached": None}  # copies and files carry the weight, never its cached codes

    def _start(self, recipe: Recipe) -> None:
        self.recipe, self.enabled = recipe, True
        self.forget_codes()

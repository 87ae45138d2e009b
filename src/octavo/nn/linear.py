"""`octavo.nn.Linear`: an `nn.Linear` whose GEMMs run in FP8.

Its parameters are the master weights; or its weight is an `FP8Tensor`, and the optimizer keeps the master.

    LinearLayer          what all linear layers in FP8 share
      Linear             a converted `nn.Linear`, or one that is created in FP8
        RecognisedLinear a converted subclass of `nn.Linear` whose own `forward` was recognised by its results
      TransposedLinear   a converted `Conv1D` of transformers: no `nn.Linear`, since its weight is (K, N)
"""

from __future__ import annotations

import sys
from typing import Any, Self, TypeGuard, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from octavo._util.compiler import assume_constant_result
from octavo.errors import ConfigError
from octavo.kernels.runtime.ledger import warn_once
from octavo.nn.adopted import Adopted, is_taken, own_class
from octavo.nn.calibration_file import check
from octavo.nn.first_call import AWAITS_CALL
from octavo.nn.fp8_weights import values
from octavo.nn.functional import linears, settings_of
from octavo.nn.operands import layer_of
from octavo.nn.recognised import Recognised
from octavo.nn.scaling_state import ScalingSlot, ScalingState, attach_scaling_state
from octavo.nn.shared import SharedInput
from octavo.nn.telemetry_ops import StatsSlot
from octavo.nn.traced import traced_output
from octavo.nn.weight_codes import WeightCodes
from octavo.recipes import FALLBACK, Recipe, RecipeLike, load
from octavo.tensor import FP8Tensor

_PLACE = "place_in_shared"
"""Key in copies and files of a layer: its place among those of `shared`."""


class LinearLayer(Adopted):
    """A linear layer computed by a recipe.

    Parameters, names, state_dict, hooks and flags are those of the parent, so that a layer is converted and reverted by
    changing its class (`adopt`, `release`); a layer of a subclass of `nn.Linear` remains an instance of it. The weight
    is quantised in each forward (`octavo.nn.weight_codes`).
    """

    weight: Tensor
    bias: Any
    in_features: int
    out_features: int
    fields: tuple[str, ...] = (
        "recipe", "enabled", "shared", "keeps_input", "scaling_state", "scaling_slot", "reads_codes", "weight_codes",
        "stats_slot", AWAITS_CALL,
    )  # fmt: skip
    recipe: Recipe
    enabled: bool
    """False: compute like `nn.Linear`, for an evaluation in high precision."""
    shared: SharedInput | None
    """The layers that are computed together with this one, because they read the same input."""
    keeps_input: bool
    """Whether backward quantises the input again, instead of saving its codes (`Policy.requantise`). The same for all
    layers that are computed together."""
    scaling_state: ScalingState | None
    """Stored scales of the model; None if this layer's recipe stores none."""
    scaling_slot: ScalingSlot | None
    """Position of this layer's scales in it."""
    reads_codes: bool = False
    """Whether its input arrives from other ranks as codes, so that quantisation errors are not known here."""
    weight_codes: WeightCodes | None = None
    """The weight as fprop reads it, or those of all layers of `shared`, while it is known not to change."""
    stats_slot: StatsSlot | None = None
    """Telemetry buffer of this layer, while telemetry is on (`octavo.nn.telemetry`)."""

    @property
    def matrix(self) -> Tensor:
        """The weight as GEMMs read it, (N, K)."""
        return self.weight

    @classmethod
    def adopt(cls, module: nn.Module, recipe: Recipe) -> None:
        """Turn a layer of PyTorch's into one of Octavo's in place; everything attached to it stays."""
        kind: type[LinearLayer] = Linear if has_forward_of_linear(module) else RecognisedLinear
        kind = kind if isinstance(module, nn.Linear) else TransposedLinear
        none: dict[str, Any] = dict.fromkeys(("shared", "scaling_state", "scaling_slot"))
        kind.take(module, recipe=recipe, enabled=True, keeps_input=False, **none)

    def forward(self, input: Tensor) -> Tensor:
        """Return x W^T + b for x (..., K), in x's dtype, or in autocast's dtype if it is on.

        If the parent's `forward` has been replaced since the conversion, that runs.

        Raises:
            ConfigError: x is no tensor, or its dtype or last dimension does not fit.
        """
        if torch.compiler.is_compiling() and (y := traced_output(self, input)) is not None:
            return y
        if not self.is_as_converted():
            return cast(Tensor, super().forward(input))
        if not isinstance(input, Tensor):
            raise ConfigError(f"{layer_of(self.weight)}a linear layer takes a tensor, got {type(input).__name__}.")
        if not self.enabled:
            return self._in_high_precision(input)
        if self.shared is not None:
            return self.shared.output(self, input)
        return linears(input, [self.matrix], [self.bias], *settings_of([self], input))[0]

    def _find_call_key(self) -> str:
        slot = self.stats_slot
        parts = [
            "on" if self.enabled else "off",
            "keeps input" if self.keeps_input else "",
            "" if self.shared is None else "shared input",  # no more: in old files a group comes after its layers
            "" if self.scaling_slot is None else "stored scales",
            "" if self.weight_codes is None else "weight codes",
            "" if slot is None else f"statistics of {slot.layers}",
            self.recipe.plan.key,
        ]
        return "|".join(parts)

    def _in_high_precision(self, x: Tensor) -> Tensor:
        weight = self.matrix  # read once: a parametrization may compute another one each time
        return F.linear(x, values(weight, weight.dtype), self.bias)

    def is_as_converted(self) -> bool:
        """Return whether the parent's `forward` is still the one that was converted; warn if it is not."""
        if type(self).parent.forward is type(self).parent_forward:
            return True
        _warn_of_patch(type(self).parent.__name__)
        return False

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.scaling_state is not None:
            self.scaling_state.move(self.weight.device)
        return self

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name != "weight_codes"}  # copies change
        place = None if self.shared is None else self.shared.place_of(self)
        return state if place is None else {**state, _PLACE: place}

    def __setstate__(self, state: dict[str, Any]) -> None:
        place = state.get(_PLACE)
        super().__setstate__({name: value for name, value in state.items() if name != _PLACE})
        if self.shared is not None and place is not None:
            self.shared.take_place(self, place)
        if self.scaling_state is not None:
            self.scaling_state.add(self)

    def extra_repr(self) -> str:
        """Return what `print(model)` shows of this layer."""
        return f"{super().extra_repr()}, recipe={self.recipe.name}" + ("" if self.enabled else ", disabled")


@assume_constant_result
def _warn_of_patch(cls: str) -> None:
    warn_once(f"{cls}.forward has changed since octavo.convert. Layers of this class now run it, in high precision")


class Linear(LinearLayer, nn.Linear):
    """An `nn.Linear` computed by a recipe."""

    parent = nn.Linear
    parent_forward = nn.Linear.forward

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: RecipeLike = FALLBACK,  # not DEFAULT: it runs on every device, and reads a weight that is stored in FP8
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.adopt(self, load(recipe))
        check({"": self.recipe}, None)
        attach_scaling_state({"": self})


class RecognisedLinear(Recognised, Linear):
    """A subclass of `nn.Linear` with a `forward` of its own that was recognised by its results.

    As all that is recognised it runs its own `forward` once an attribute or its code has changed.
    """

    fields = (*Recognised.fields, *Linear.fields)

    def _in_high_precision(self, x: Tensor) -> Tensor:
        if isinstance(self.weight, FP8Tensor):  # which its own forward cannot read
            return super()._in_high_precision(x)
        return type(self).parent_forward(self, x)

    def is_as_converted(self) -> bool:
        """Return whether the layer's attributes and code are those that were recognised; warn if they are not."""
        return self.is_as_recognised()


class TransposedLinear(LinearLayer):
    """A linear layer whose weight is stored as (K, N): `Conv1D` of transformers, as in GPT-2.

    It is no `nn.Linear`: whoever tests for one, as PEFT does when it merges an update, takes the weight for (N, K).
    """

    @property
    def matrix(self) -> Tensor:
        """The weight as GEMMs read it, (N, K), a view."""
        return self.weight.t()

    @property
    def in_features(self) -> int:  # type: ignore[override]
        """K."""
        return self.weight.shape[0]

    @property
    def out_features(self) -> int:  # type: ignore[override]
        """N."""
        return self.weight.shape[1]

    def __repr__(self) -> str:
        return nn.Module.__repr__(self)


def has_forward_of_linear(module: nn.Module) -> bool:
    """Return whether the `forward` of a module, before its conversion, is that of `nn.Linear`."""
    kind = own_class(module)
    forward: Any = kind.parent_forward if is_taken(module) else kind.forward
    return forward in (nn.Linear.forward, LinearLayer.forward)


def is_transposed(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether a module is a linear layer whose weight is (K, N), converted or not."""
    if isinstance(module, TransposedLinear):
        return True
    theirs = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    return theirs is not None and type(module) is theirs


def is_adopted(module: nn.Module) -> TypeGuard[Linear]:
    """Return whether a module computes as `Linear` does from its parameters, and is of no subclass by a user."""
    return isinstance(module, LinearLayer) and is_taken(module) and not is_parametrized(module)

"""`octavo.nn.Linear`: an `nn.Linear` whose GEMMs run in FP8.

Its parameters stay the master weights, or its weight is an `FP8Tensor` and the optimizer keeps the master.
"""

from __future__ import annotations

from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.nn.calibration import check
from octavo.nn.functional import linear, target_of
from octavo.nn.handoff import taken
from octavo.nn.own_codes import values
from octavo.nn.scales import Page, ScaleBook, keep_scales
from octavo.nn.shared import SharedInput
from octavo.nn.watched import Watch, page_of
from octavo.nn.weights import forget
from octavo.recipes import Recipe, RecipeLike, load


class Linear(nn.Linear):
    """A linear layer computed by a recipe.

    Parameters, names, state_dict, hooks and flags are those of `nn.Linear`, so that a layer becomes one of these and
    back by changing its class (`adopt`, `release`). The quantised weight is kept until the weight changes (see
    `octavo.nn.weights`).
    """

    recipe: Recipe
    enabled: bool
    """False: compute as `nn.Linear` does, for an evaluation in high precision."""
    shared: SharedInput | None
    """The layers that are computed together with this one, because they read the same input."""
    keeps_input: bool
    """Whether backward quantises the input again, instead of keeping its codes (`Policy.requantise`)."""
    book: ScaleBook | None
    """The scales that the model keeps from step to step; None if this layer's recipe keeps none."""
    page: Page | None
    """Where this layer's are in it."""
    reads_codes: bool = False
    """Whether its input comes from other ranks as codes: what was lost in making them is not known here."""
    watch: Watch | None = None
    """Where telemetry of this layer goes, while there is any (`octavo.nn.telemetry`)."""

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
        check({"": self.recipe}, None)
        keep_scales({"": self})

    @classmethod
    def adopt(cls, module: nn.Linear, recipe: Recipe) -> None:
        """Turn an `nn.Linear` into this class in place; everything attached to it stays."""
        module.__class__ = cls
        assert isinstance(module, cls)
        module._start(recipe)

    def release(self) -> None:
        """Turn this layer back into an `nn.Linear` in place."""
        for name in ("recipe", "enabled", "shared", "keeps_input", "book", "page", "reads_codes", "watch"):
            self.__dict__.pop(name, None)
        self.__class__ = nn.Linear  # type: ignore[assignment]

    def forward(self, input: Tensor) -> Tensor:
        """Return x W^T + b for x (..., K), in x's dtype, or in autocast's where that is on."""
        if not self.enabled:
            return F.linear(input, values(self.weight, self.weight.dtype), self.bias)
        if self.shared is not None:
            return self.shared.output(self, input)
        ready = taken(input, target_of(self.recipe.fprop.input))
        cells = None if self.page is None else self.page.cells
        dtype = compute_dtype(input)
        page = page_of([self])
        return linear(input, self.weight, self.bias, self.recipe, dtype, ready, cells, self.keeps_input, page)

    def forget_codes(self) -> None:
        """Drop the quantised weight, so that the next forward makes it anew."""
        forget(self.weight)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self.forget_codes()  # the weight moves or changes its dtype: its new memory may have the old address
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.book is not None:
            self.book.move(self.weight.device)
        return self

    def extra_repr(self) -> str:
        """Return what `print(model)` shows of this layer."""
        return f"{super().extra_repr()}, recipe={self.recipe.name}" + ("" if self.enabled else ", disabled")

    def _start(self, recipe: Recipe) -> None:
        self.recipe, self.enabled, self.shared, self.keeps_input = recipe, True, None, False
        self.book, self.page = None, None


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype that a linear layer computes x in: autocast's where that is on, else its own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype

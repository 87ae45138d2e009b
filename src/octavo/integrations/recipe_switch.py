"""Change of recipe for the last share of a run's steps, which recovers loss of FP8."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from octavo._util.last_share import in_last_share
from octavo.conversion import Plan
from octavo.errors import ConfigError
from octavo.nn.scaling_state import restore_scales, stored_scales
from octavo.recipes import RecipeLike


class RecipeSwitch:
    """The one change of recipe in a run: when it is due, and a rehearsal that finds what refuses it."""

    def __init__(self, last_share: float, last_recipe: RecipeLike) -> None:
        """Take the share of the steps, at the end, and their recipe. With a share of 0 it is never due.

        Raises:
            ConfigError: the share is not between 0 and 1.
        """
        if not 0 <= last_share <= 1:
            raise ConfigError(f"last_share: {last_share} is not between 0 and 1.")
        self.last_share, self.last_recipe = last_share, last_recipe
        self._is_done = False

    def rehearse(
        self, model: nn.Module, recipe: RecipeLike | None, convert: Callable[[RecipeLike | None], Plan]
    ) -> None:
        """Convert a model, wrapped and sharded as in training, to `recipe`, the last recipe and back, before step 1.

        Stored scales stay what they are.

        Raises:
            ConfigError: weights are stored in FP8.
            OctavoError: `octavo.convert` refuses a recipe.
        """
        self._is_done = False
        stored = stored_scales(model)
        if any(layer.weight == "fp8" for layer in convert(recipe).layers):
            raise ConfigError(
                "last_share: weights stored in FP8 have the format of the first recipe to the end. Leave out"
                " Policy(weights='fp8'), or last_share."
            )
        convert(self.last_recipe)
        convert(recipe)
        restore_scales(model, stored)

    def is_due(self, step: int, steps: int) -> bool:
        """Return True once: at the first step, counted from 0, that is in the last share."""
        is_due = not self._is_done and in_last_share(step, steps, self.last_share)
        self._is_done |= is_due
        return is_due

"""A user's module that multiplies sorted rows by one matrix per expert, computing in FP8: `JetMoeParallelExperts`.

    y[t] = x[t] W[e(t)]^T      x (T, K): the rows of expert 0 first, and so on. W (E, N, K).

It is a `GroupedLinear` whose parameter, name and state_dict are those of the user's module, which is called with rows
and their number per expert.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from octavo.nn.adopted import own_class
from octavo.nn.grouped import GroupedLinear
from octavo.nn.recognised import Recognised
from octavo.recipes import Recipe


class RecognisedStack(Recognised, GroupedLinear):
    """A module with one stack of matrices that was recognised by what it computes: mixed into its class."""

    prefix = "FP8"
    fields = (*Recognised.fields, "recipe", "enabled", "stack_arguments", "weight_codes", "stats_slot")
    stack_arguments: tuple[str, str]
    """Names of the arguments of its `forward`: sorted rows, and their number per expert."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return y (T, N) for rows x (T, K) and the number of rows of each expert, integers (E,) or a list of them.

        In x's dtype, or in autocast's if it is on. The module's own forward runs while FP8 is off
        (`octavo.disabled`), where the module has changed since its conversion, and for sizes that do not add up to T,
        which it refuses.
        """
        named = dict(zip(self.stack_arguments, args, strict=False)) | kwargs
        x, sizes = (named.get(name) for name in self.stack_arguments)
        if not self.enabled or len(named) != 2 or not self._fits(x, sizes) or not self.is_as_recognised():
            return cast(Tensor, own_class(self).parent.forward(self, *args, **kwargs))
        counts = torch.as_tensor(sizes, device=cast(Tensor, x).device)
        return self.multiply(cast(Tensor, x), self.weight, counts.cumsum(0, dtype=torch.int32))

    def _fits(self, x: Any, sizes: Any) -> bool:
        """Return whether these are rows and their number per expert. Sizes in a tensor stay on their device."""
        count, _, width = self.weight.shape
        if not isinstance(x, Tensor) or x.dim() != 2 or x.shape[1] != width:
            return False
        if isinstance(sizes, Tensor):
            return sizes.shape == (count,)
        return isinstance(sizes, list | tuple) and len(sizes) == count and sum(sizes) == len(x)


def adopt(module: Any, arguments: tuple[str, str], recipe: Recipe) -> None:
    """Make a recognised module compute by a recipe, in place. Parameters, names and state_dict stay."""
    RecognisedStack.take(module, stack_arguments=arguments, recipe=recipe, enabled=True)

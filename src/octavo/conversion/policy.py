"""The policy: which layers stay in BF16 whatever the recipe, and why. A user reads it, edits it and passes it on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

from octavo.nn import Linear

_ROUTER = "router: a small error sends a token to another expert"


def _keep() -> dict[str, str]:
    return {
        "*lm_head": "output head: its error goes straight into the loss",
        "output": "output head: its error goes straight into the loss",
        "*embed*": "embedding",
        "*router": _ROUTER,
        "*.gate": _ROUTER,
    }


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What `plan` and `convert` leave alone."""

    keep: dict[str, str] = field(default_factory=_keep)
    """Name pattern -> reason. `*` matches anything, dots included."""
    min_features: int = 32
    """A layer with fewer input or output features stays in BF16."""
    min_gain: float = 1.0
    """On a GPU, a layer whose predicted gain is below this stays in BF16. 0 converts all."""
    fuse: bool = True
    """Whether layers that share an input, MLPs and norms are computed together where they are recognised."""
    filter: Callable[[str, nn.Linear], bool] | None = None
    """A further test, (name, layer) -> whether to convert it."""

    def reason_to_keep(self, name: str, layer: nn.Linear, in_mlp: bool = False) -> str | None:
        """Return why this layer stays in BF16, or None. `in_mlp`: it belongs to an MLP, whose gate routes nothing."""
        for pattern, reason in self.keep.items():
            if fnmatchcase(name, pattern) and not (in_mlp and reason == _ROUTER):
                return reason
        if type(layer) not in (nn.Linear, Linear):
            return f"{type(layer).__name__} is a subclass of nn.Linear with a forward of its own"
        if min(layer.in_features, layer.out_features) < self.min_features:
            return f"fewer than {self.min_features} features"
        if self.filter is not None and not self.filter(name, layer):
            return "left out by the policy's filter"
        return None

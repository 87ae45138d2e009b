"""Training by torchtitan in FP8: `OctavoConverter.Config()` among the converters of a model's spec."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from torch import nn
from torchtitan.tools.logging import logger

from octavo.conversion import Policy, convert

try:  # where it is in torchtitan since September 2026
    from torchtitan.config.transform import ModelConfigConverter
except ImportError:
    from torchtitan.protocols.model import ModelConfigConverter


class OctavoConverter(ModelConfigConverter):
    """Conversion of a model when torchtitan builds it: before it is sharded, checkpointed and compiled.

    Layers keep their class, `param_init` and `sharding_config`. Tensor parallelism of torchtitan makes DTensors of
    their weights, which FP8 layers refuse.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):
        """Options."""

        recipe: str | None = None
        """Name or file of a recipe; None: the default (`octavo.recipes.DEFAULT`)."""
        filter_fqns: list[str] = field(default_factory=list)
        """Name patterns of layers that stay in BF16, beside heads and routers (`Policy.keep`)."""
        device: str = "cuda"
        """The type of device that the model runs on."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """Return a config of the same class whose `build` gives a converted model."""
        kind, options = type(model_config), self.config

        def build(config: Any, **given: Any) -> nn.Module:
            model: nn.Module = kind.build(config, **given)
            plan = convert(model, options.recipe, policy=Policy(keep=options.filter_fqns), device=options.device)
            logger.info("Octavo: %d of %d layers in FP8", plan.fp8_layers, len(plan.layers))
            return model

        names = {"build": build, "__slots__": (), "__module__": kind.__module__, "__qualname__": kind.__qualname__}
        return type(kind.__name__, (kind,), names)(**{f.name: getattr(model_config, f.name) for f in fields(kind)})

"""Accelerate in FP8: `octavo.integrations.accelerate.Accelerator`, and scripts that run with it without a change.

    accelerate launch --mixed_precision bf16 -m octavo.integrations.accelerate train.py --lr 3e-4

runs `train.py` with this Accelerator in the place of `accelerate.Accelerator`. Accelerate's own `--mixed_precision fp8`
has a closed list of backends, to which no library can add itself.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import accelerate
from torch import nn

from octavo.conversion import Plan, Policy, convert
from octavo.errors import ConfigError
from octavo.nn.adopted import is_taken
from octavo.recipes import RecipeLike

RECIPE = "OCTAVO_RECIPE"
"""Environment variable with the name or file of the recipe; by default that of `octavo.convert`."""


class Accelerator(accelerate.Accelerator):
    """An Accelerator that converts each model that it prepares: before it is sharded, wrapped or compiled.

    Parameters stay the same objects, so that an optimizer may be made before. Models that are converted already stay as
    they are.
    """

    plan: Plan | None = None
    """Plan of the model that was converted last."""
    octavo_recipe: RecipeLike | None = None
    """Recipe; None: that of the environment variable `OCTAVO_RECIPE`, or the default."""
    octavo_policy: Policy | None = None

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Convert the models among the arguments, then prepare all of them.

        Raises:
            ConfigError: `mixed_precision` is "fp8", which another library would compute.
        """
        for model in args:
            if isinstance(model, nn.Module):
                self._convert(model)
        return super().prepare(*args, **kwargs)

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Convert and prepare one model, such as a reference in evaluation."""
        self._convert(model)
        prepared: nn.Module = super().prepare_model(model, *args, **kwargs)
        return prepared

    def _convert(self, model: nn.Module) -> None:
        if self.mixed_precision == "fp8":
            raise ConfigError(
                'mixed_precision="fp8" is computed by torchao, Transformer Engine or MS-AMP. With Octavo pass "bf16", '
                "which is the dtype of everything that is not in FP8."
            )
        if any(map(is_taken, model.modules())):
            return
        recipe = self.octavo_recipe or os.environ.get(RECIPE)
        chosen = () if recipe is None else (recipe,)
        self.plan = convert(model, *chosen, policy=self.octavo_policy, device=self.device)


def main(arguments: list[str]) -> None:
    """Run a script as `python SCRIPT ...` would, with this Accelerator as `accelerate.Accelerator`.

    Raises:
        ConfigError: no script is named.
    """
    if not arguments:
        raise ConfigError("name a script: accelerate launch -m octavo.integrations.accelerate SCRIPT [ARGUMENTS]")
    accelerate.Accelerator = Accelerator
    sys.argv = arguments
    sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    from octavo.integrations.accelerate import main as run  # the module by its name, as its users import it

    run(sys.argv[1:])

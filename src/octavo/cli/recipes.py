"""`octavo recipes`."""

from __future__ import annotations

import json
from typing import Annotated

from cyclopts import Parameter


def recipes(
    name: str | None = None, /, *, json_output: Annotated[bool, Parameter(name="--json", negative=())] = False
) -> int:
    """List the FP8 recipes, or explain one.

    Examples:

        octavo recipes
        octavo recipes folded
        octavo recipes my-recipe.toml --json

    Parameters
    ----------
    name
        A recipe's name, or the path of a recipe file.
    json_output
        Print JSON.
    """
    from octavo import recipes as known
    from octavo import strict

    if name is not None:
        recipe = known.load(name)
        print(json.dumps(strict.to_dict(recipe), indent=2) if json_output else known.explain(recipe))
    elif json_output:
        print(json.dumps(known.names()))
    else:
        print("\n\n".join(known.explain(known.load(each)) for each in known.names()))
    return 0

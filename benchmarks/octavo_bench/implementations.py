"""Timed implementations: BF16, torchao and Transformer Engine if installed, and every recipe."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

import octavo
from octavo import recipes
from octavo.recipes import Recipe
from octavo_bench import engine

TORCHAO = "torchao tensorwise"
BF16 = "bf16"
"""Baseline of the implementations, and of the precisions of a GEMM."""
ONCE = ", gathered once"
"""Name suffix of sharded implementations that keep gathered weights until backward has read them."""
HEAD = "lm_head"
FASTEST = ("folded_fast", "rotated_fast")
"""Recipes with fast accumulation, also timed with every other saving of a whole model."""


def is_no_head(name: str, layer: nn.Module) -> bool:
    """Return whether to convert a layer: heads stay in BF16, as in the peers."""
    return name != HEAD


def is_in_even_block(name: str, layer: nn.Module) -> bool:
    """Return whether to convert a layer if every second block stays in BF16, which shows the cost of a fallback."""
    return is_no_head(name, layer) and int(name.split(".")[1]) % 2 == 0


def _leave(model: nn.Module, tokens: int) -> None:
    """Change nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Implementation:
    """One way to compute a workload."""

    name: str
    """Name in results."""
    convert: Callable[[nn.Module, int], object] = _leave
    """(BF16 model, tokens per step): converts the model to this implementation, in place."""
    compile: bool = True
    """Each block can be compiled."""
    fullgraph: bool = True
    """Each block compiles as one graph."""
    gemms: tuple[str, str, str] = (BF16, BF16, BF16)
    """The precision of fprop, dgrad and wgrad, as `octavo_bench.rates` names them."""
    fp8_head: bool = False
    """The output head runs in this precision too; otherwise in BF16."""
    has_floor: bool = True
    """All blocks have these GEMMs, so that a floor can be computed."""
    own_optimizer: bool = False
    """A whole model is updated by `octavo.optim.AdamW` with exact states; otherwise by PyTorch's fused AdamW."""
    package: str | None = None
    """Distribution of a peer, whose version the row records."""

    @property
    def is_fp8(self) -> bool:
        """True if any GEMM of the blocks runs in FP8."""
        return self.gemms != (BF16, BF16, BF16)


def implementations(*, head: bool = False) -> dict[str, Implementation]:
    """Return every implementation by name, the baseline first. Peers must be installed.

    Args:
        head: include those with an FP8 head, for whole models.
    """
    found = [Implementation(name=BF16)]
    if importlib.util.find_spec("torchao") is not None:
        found += [_torchao("tensorwise", "tensor"), _torchao("rowwise", "row")]
    if importlib.util.find_spec("transformer_engine") is not None:
        found += [_engine(recipe) for recipe in engine.RECIPES]
        found += [_engine(recipe, modules=True) for recipe in engine.RECIPES]
    found += [_octavo(name) for name in recipes.names() if name != BF16 and _is_timed(recipes.load(name))]
    found.append(_octavo("folded", " (eager)", compile=False))
    found.append(_octavo("folded", " + fp8 activation inputs", activation_inputs="fp8"))
    found.append(_octavo("folded", " (memory low)", memory="low"))
    half = _octavo("folded", " (every second block in BF16)", filter=is_in_even_block)
    found.append(replace(half, has_floor=False))
    if head:
        found += [_octavo(name, " + fp8 head", fp8_head=True) for name in ("folded", "rotated", *FASTEST)]
        fastest = [_octavo(name, " + fp8 head, octavo.optim", fp8_head=True) for name in FASTEST]
        found += [replace(one, own_optimizer=True) for one in fastest]
    return {implementation.name: implementation for implementation in found}


def _is_timed(recipe: Recipe) -> bool:
    """Return False for static scales, which need calibration by another recipe, and for emulation."""
    return not recipe.needs_calibration and not recipe.is_emulated


def precisions(recipe: Recipe) -> tuple[str, str, str]:
    """Return the precision of fprop, dgrad and wgrad as in `octavo_bench.rates`: BF16, or scales and accumulation."""
    operands = {name: {a.granularity, b.granularity} for name, a, b in recipe.gemms()}
    fprop, dgrad, wgrad = (_precision(operands.get(name), recipe.gemm(name).accumulate) for name in recipes.GEMMS)
    return fprop, dgrad, wgrad


def _precision(granularities: set[str] | None, accumulate: str) -> str:
    if granularities is None:
        return BF16
    if not granularities <= {"tensor", "row", "column"}:
        return "block"
    return f"{'tensor' if granularities == {'tensor'} else 'row'} {accumulate}"


def _torchao(recipe: str, scales: str) -> Implementation:
    # Its recipes accumulate fast in fprop alone (`Float8LinearConfig.gemm_config_output`).
    gemms = (f"{scales} fast", f"{scales} slow", f"{scales} slow")
    convert = partial(convert_torchao, recipe=recipe)
    return Implementation(name=f"torchao {recipe}", convert=convert, gemms=gemms, package="torchao")


def _engine(recipe: str, *, modules: bool = False) -> Implementation:
    scales = ("block",) * 3 if recipe == "block" else ("tensor fast", "tensor slow", "tensor slow")
    return Implementation(
        name=f"transformer engine {recipe}{' (modules)' if modules else ''}",
        convert=partial(engine.convert, recipe=recipe, block=engine.ModuleBlock if modules else engine.LayerBlock),
        compile=modules,
        fullgraph=False,
        gemms=scales,
        package="transformer-engine",
    )


def _octavo(
    recipe: str,
    suffix: str = "",
    *,
    compile: bool = True,
    fp8_head: bool = False,
    **policy: Any,
) -> Implementation:
    return Implementation(
        name=f"octavo {recipe}{suffix}",
        convert=partial(_convert_octavo, recipe=recipe, fp8_head=fp8_head, **policy),
        compile=compile,
        gemms=precisions(recipes.load(recipe)),
        fp8_head=fp8_head,
    )


def convert_torchao(model: nn.Module, tokens: int = 0, *, recipe: str = "tensorwise", **options: Any) -> None:
    """Convert all linear layers except the head by torchao: by one of its recipes, or tensorwise with options."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(**options) if options else Float8LinearConfig.from_recipe_name(recipe)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda layer, name: is_no_head(name, layer))


def _convert_octavo(model: nn.Module, tokens: int, recipe: str, fp8_head: bool, **policy: Any) -> None:
    given = {"min_gain": 0.0, "keep_defaults": False, "filter": None if fp8_head else is_no_head} | policy
    chosen = octavo.Policy(**given)
    octavo.convert(model, recipe, policy=chosen, tokens=tokens, strict=True)

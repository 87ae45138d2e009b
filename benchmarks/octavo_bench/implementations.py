"""Implementations that are timed: BF16, torchao if it is installed, and every recipe."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

import octavo
from octavo import recipes
from octavo.recipes import Recipe

BF16 = "bf16"
"""The baseline: of the implementations, and of the precisions of a GEMM."""
HEAD = "lm_head"


def is_no_head(name: str, layer: nn.Module) -> bool:
    """Return whether to convert a layer: heads stay in BF16, as those of the peers."""
    return name != HEAD


def _leave(model: nn.Module, tokens: int) -> None:
    """Change nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Implementation:
    """One way to compute a workload."""

    name: str
    """Name in results."""
    convert: Callable[[nn.Module, int], object] = _leave
    """(BF16 model, tokens per step): makes the model into this implementation, in place."""
    compile: bool = True
    """Each block can be compiled."""
    gemms: tuple[str, str, str] = (BF16, BF16, BF16)
    """The precision of fprop, dgrad and wgrad, as `octavo_bench.rates` names them."""
    fp8_head: bool = False
    """The output head computes in this precision too; otherwise in BF16."""

    @property
    def is_fp8(self) -> bool:
        """True if any GEMM of the blocks runs in FP8."""
        return self.gemms != (BF16, BF16, BF16)


def implementations(*, head: bool = False) -> dict[str, Implementation]:
    """Return every implementation by name, the baseline first. torchao's are there when it is installed.

    Args:
        head: of a whole model, where the head may be in FP8 too.
    """
    found = [Implementation(name=BF16)]
    if importlib.util.find_spec("torchao") is not None:
        found += [_torchao("tensorwise", "tensor"), _torchao("rowwise", "row")]
    found += [_octavo(name) for name in recipes.names() if name != BF16 and _is_timed(recipes.load(name))]
    found.append(_octavo("folded", " (eager)", compile=False))
    found.append(_octavo("folded", " + fp8 activation inputs", activation_inputs="fp8"))
    found.append(_octavo("folded", " + outputs of norms", norm_inputs="output"))
    found.append(_octavo("folded", " (memory low)", memory="low"))
    if head:
        found.append(_octavo("folded", " + fp8 head", fp8_head=True))
    return {implementation.name: implementation for implementation in found}


def _is_timed(recipe: Recipe) -> bool:
    """Return False for static scales, which another recipe has to calibrate, and for emulation."""
    return not recipe.needs_calibration and not recipe.is_emulated


def precisions(recipe: Recipe) -> tuple[str, str, str]:
    """Return the precision of fprop, dgrad and wgrad: BF16, or scales and accumulation, as a ceiling is measured."""
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
    return Implementation(name=f"torchao {recipe}", convert=partial(_convert_torchao, recipe=recipe), gemms=gemms)


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


def _convert_torchao(model: nn.Module, tokens: int, recipe: str) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda layer, name: name != HEAD)


def _convert_octavo(model: nn.Module, tokens: int, recipe: str, fp8_head: bool, **policy: Any) -> None:
    chosen = octavo.Policy(min_gain=0.0, keep_defaults=False, filter=None if fp8_head else is_no_head, **policy)
    octavo.convert(model, recipe, policy=chosen, tokens=tokens, strict=True)

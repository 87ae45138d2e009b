"""The ladder of recipes: a layer that FP8 harms moves up to finer ones, and down again after a quiet period.

    its own recipe -> a wider scale window, for stored scales -> folded -> block -> bf16

More headroom only flushes more: a layer whose codes are flushed skips the wider window. Rungs no finer than a layer's
own recipe are left out. A layer that fails again soon after it moved down stays up twice as long. The state is plain
data, equal on all ranks, and part of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from octavo.recipes import Recipe, load
from octavo.recipes.spec import OPERANDS, override

WIDER = 2
"""Bits of headroom added to the scale window."""
EVERYTHING = "*"
"""Pattern for all layers."""
TYPICAL = 4096
"""Assumed size of a tensor dimension that one scale spans."""


class Move(NamedTuple):
    """A change of recipe of a layer."""

    layer: str
    """Full name, or `EVERYTHING`."""
    before: str
    """Name of the old recipe."""
    after: str
    """Name of the new recipe."""


@dataclass
class _Standing:
    """The position of a layer."""

    rung: int
    since: int
    """Step of the last alarm or move."""
    quiet: int
    """Steps without alarm after which it moves down."""
    is_flushed: bool = False
    """True if codes were flushed when it left its recipe: a wider window is no rung then."""


class Ladder:
    """The positions of all layers that have left the recipe of the run, `base`."""

    def __init__(self, base: Recipe, quiet: int) -> None:
        self.base, self._quiet = base, quiet
        self._standing: dict[str, _Standing] = {}

    def rungs(self, layer: str, is_flushed: bool = False) -> list[Recipe]:
        """Return the recipes available to a layer, from its own to BF16; without a wider window if it is flushed."""
        own = replace(self.base.for_layer(layer), modules={})
        if not own.is_fp8:
            return [own]
        finer = [recipe for recipe in map(load, ("folded", "block")) if _coarseness(recipe) < _coarseness(own)]
        fp8 = own.with_fprop_in_fp8()  # a float's error does not grow with the largest value of its row
        return [own, *([] if fp8 is None else [fp8]), *([] if is_flushed else _wider(own)), *finer, load("bf16")]

    def up(self, layer: str, step: int, *, is_flushed: bool = False) -> Move | None:
        """Move a layer to the next rung at an alarm of `step`; None if it is in BF16 already.

        Args:
            is_flushed: the alarm is of codes that are zero.
        """
        now = self._standing.get(layer)
        if now is None or now.rung == 0:
            now = _Standing(0, step, self._quiet if now is None else 2 * now.quiet, is_flushed)
        rungs = self.rungs(layer, now.is_flushed)
        if now.rung + 1 >= len(rungs):
            return None
        self._standing[layer] = replace(now, rung=now.rung + 1, since=step)
        return Move(layer, rungs[now.rung].name, rungs[now.rung + 1].name)

    def in_bf16(self) -> list[str]:
        """Return the layers that alarms have moved to BF16."""
        return [layer for layer, recipe in self._refined().items() if not recipe.is_fp8]

    def stay_in_bf16(self, layers: Sequence[str], step: int) -> None:
        """Put layers that are not there on their last rung, as by an alarm of `step`."""
        already = self.in_bf16()
        for layer in layers:
            if layer not in already and (last := len(self.rungs(layer)) - 1) > 0:
                self._standing[layer] = _Standing(last, step, self._quiet)

    def down(self, step: int) -> list[Move]:
        """Move each layer after its quiet period one rung down; return the moves."""
        moves = []
        for layer, now in self._standing.items():
            if now.rung and step - now.since >= now.quiet:
                rungs = self.rungs(layer, now.is_flushed)
                moves.append(Move(layer, rungs[now.rung].name, rungs[now.rung - 1].name))
                now.rung, now.since = now.rung - 1, step
        return moves

    def recipe(self) -> Recipe:
        """Return the recipe of the run with the refined layers in `modules`."""
        refined = self._refined()
        last = {EVERYTHING: refined.pop(EVERYTHING)} if EVERYTHING in refined else {}  # the last match wins
        return replace(self.base, modules=override(self.base.modules, {**refined, **last}))

    def _refined(self) -> dict[str, Recipe]:
        """Return the recipe of each layer that has left its own."""
        standing = self._standing.items()
        return {layer: self.rungs(layer, now.is_flushed)[now.rung] for layer, now in standing if now.rung}

    def state_dict(self) -> dict[str, Any]:
        """Return the positions as JSON values."""
        return {layer: asdict(now) for layer, now in self._standing.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`, also of a run by another recipe: layers without such a rung are left out."""
        known = {layer: _Standing(**now) for layer, now in state.items()}
        rungs = {layer: len(self.rungs(layer, now.is_flushed)) for layer, now in known.items()}
        self._standing = {layer: now for layer, now in known.items() if rungs[layer] > max(now.rung, 1)}


def _wider(recipe: Recipe) -> list[Recipe]:
    """Return the recipe with more headroom over past maxima, if its scales come from a history."""
    if not recipe.has_stored_scales or recipe.needs_calibration:
        return []
    history = replace(recipe.history, margin=recipe.history.margin + WIDER)
    return [replace(recipe, name=f"{recipe.name}+{WIDER}bits", history=history)]


def _coarseness(recipe: Recipe) -> int:
    """Return the largest number of elements of an input or gradient that share a scale, over all GEMMs."""
    named = ((OPERANDS[gemm], operands) for gemm, *operands in recipe.gemms())
    each = (pair for roles, operands in named for pair in zip(roles, operands, strict=True))
    tiles = [operand.tile for role, operand in each if role != "weight"]
    return max((tile.rows or TYPICAL) * (tile.cols or TYPICAL) for tile in tiles)

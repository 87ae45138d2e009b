"""The ladder: recipes that a layer climbs when FP8 harms it, and comes down again after a quiet time.

    its own recipe -> a wider scale window, where scales are kept -> folded -> block -> bf16

Rungs that are no finer than a layer's own recipe are left out. A layer that fails again soon after it came down stays
up twice as long. All that is here is plain data: it goes into a checkpoint, and every rank computes the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from octavo.recipes import Recipe, load
from octavo.recipes.spec import OPERANDS

WIDER = 2
"""Bits that the scale window is raised by."""
EVERYTHING = "*"
"""The name that stands for all layers."""
TYPICAL = 4096
"""Rows or columns that a tile is taken to have that spans all of them."""


class Move(NamedTuple):
    """A layer that changes its recipe."""

    layer: str
    """Full name, or `EVERYTHING`."""
    before: str
    """Name of the recipe that it leaves."""
    after: str
    """Name of the recipe that it takes."""


@dataclass
class _Standing:
    """Where a layer stands."""

    rung: int
    since: int
    """Step of the last alarm or move."""
    quiet: int
    """Steps without an alarm after which it comes down."""


class Ladder:
    """Where the layers of a model stand that have left the recipe of the run."""

    def __init__(self, base: Recipe, quiet: int) -> None:
        self._base, self._quiet = base, quiet
        self._standing: dict[str, _Standing] = {}

    def rungs(self, layer: str) -> list[Recipe]:
        """Return what a layer may compute by, its own recipe first, BF16 last."""
        own = self._base
        for pattern, recipe in self._base.modules.items():
            own = recipe if fnmatchcase(layer, pattern) else own
        own = replace(own, modules={})
        return [own] if not own.is_fp8 else [own, *_wider(own), *_finer(own), load("bf16")]

    def up(self, layer: str, step: int) -> Move | None:
        """Move a layer to the next rung at an alarm of `step`; None where it computes in BF16 already."""
        rungs = self.rungs(layer)
        now = self._standing.get(layer)
        rung = now.rung if now else 0
        if rung + 1 >= len(rungs):
            return None
        quiet = self._quiet if now is None else now.quiet * (2 if now.rung == 0 else 1)
        self._standing[layer] = _Standing(rung + 1, step, quiet)
        return Move(layer, rungs[rung].name, rungs[rung + 1].name)

    def down(self, step: int) -> list[Move]:
        """Move each layer that was quiet long enough one rung down; return the moves."""
        moves = []
        for layer, now in self._standing.items():
            if now.rung and step - now.since >= now.quiet:
                rungs = self.rungs(layer)
                moves.append(Move(layer, rungs[now.rung].name, rungs[now.rung - 1].name))
                now.rung, now.since = now.rung - 1, step
        return moves

    def recipe(self) -> Recipe:
        """Return the recipe of the run, with those of the layers that have left it."""
        moved = {layer: self.rungs(layer)[now.rung] for layer, now in self._standing.items() if now.rung}
        everything = {layer: moved.pop(layer) for layer in [EVERYTHING] if layer in moved}
        return replace(self._base, modules={**self._base.modules, **moved, **everything})

    def state_dict(self) -> dict[str, Any]:
        """Return where the layers stand, as JSON has it."""
        return {layer: asdict(now) for layer, now in self._standing.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the standings that `state_dict` returned."""
        self._standing = {layer: _Standing(**now) for layer, now in state.items()}


def _wider(recipe: Recipe) -> list[Recipe]:
    """Return a recipe with more headroom over the maxima of the past, where its scales come from there."""
    if not recipe.keeps_scales or recipe.needs_calibration:
        return []
    history = replace(recipe.history, margin=recipe.history.margin + WIDER)
    return [replace(recipe, name=f"{recipe.name}+{WIDER}bits", history=history)]


def _finer(recipe: Recipe) -> list[Recipe]:
    return [finer for finer in map(load, ("folded", "block")) if _coarseness(finer) < _coarseness(recipe)]


def _coarseness(recipe: Recipe) -> int:
    """Return how many elements of an input or a gradient share a scale, the most of all GEMMs."""
    named = ((OPERANDS[gemm], operands) for gemm, *operands in recipe.gemms())
    each = (pair for roles, operands in named for pair in zip(roles, operands, strict=True))
    tiles = [operand.tile for role, operand in each if role != "weight"]
    return max((tile.rows or TYPICAL) * (tile.cols or TYPICAL) for tile in tiles)

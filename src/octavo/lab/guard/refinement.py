"""Layers that FP8 harms: found by probes, moved up the ladder of recipes, and down again after a quiet period."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from octavo.lab.guard import diagnosis
from octavo.lab.guard.alarms import Alarm, GuardEvent
from octavo.lab.guard.config import GuardConfig
from octavo.lab.guard.diagnosis import IsWell
from octavo.lab.guard.guarded import Guarded
from octavo.lab.guard.ladder import EVERYTHING, Ladder
from octavo.lab.guard.rules import LASTING, AlarmRules
from octavo.recipes import Recipe, load

MOVES = 8
"""Layers refined per alarm before the whole model goes to BF16."""
ALONE = 4
"""Layers probed one at a time, the most harmed first, before groups of them are halved."""


class Refinement:
    """The recipes of a run's layers, as alarms have refined them.

    Args:
        run: the training loop.
        rules: decide which refusals are reported.
        recipe: recipe of the run; None: no layer is refined.
        config: limits and mode.
    """

    def __init__(self, run: Guarded, rules: AlarmRules, recipe: Recipe | None, config: GuardConfig) -> None:
        self._run, self._rules, self._config = run, rules, config
        self._ladder = Ladder(recipe or load("bf16"), config.quiet)
        self._ladders = [self._ladder]
        """One for each recipe that the run has had, should a rollback come back to it."""

    def change_recipe(self, recipe: Recipe) -> str:
        """Convert the model to another recipe of the run, from which layers are refined from now on.

        Layers that have left FP8 stay in BF16. A rollback to an earlier recipe finds its refinements as they were.

        Returns:
            Why that is impossible, or an empty string.
        """
        before, in_bf16 = self._ladder, self._ladder.in_bf16()
        known = next((each for each in self._ladders if each.base == recipe), None)
        self._ladder = known or Ladder(recipe, self._config.quiet)
        self._ladders += [] if known else [self._ladder]
        self._ladder.stay_in_bf16(in_bf16, self._run.done)
        if reason := self._run.change_recipe(self._ladder.recipe()):
            self._ladder = before
        return reason

    def up(self, layer: str, alarm: Alarm) -> bool:
        """Move a layer one rung up the ladder; return False if that is impossible."""
        before = self._ladder.state_dict()
        move = self._ladder.up(layer, alarm.step, is_flushed=alarm.rule == "flushed")
        if move is None:
            return False
        name = _name(layer)
        if reason := self._convert():
            self._ladder.load_state_dict(before)
            if self._rules.is_news(alarm._replace(rule="refused")):
                text = f"{alarm}: {name} cannot leave {move.before}: {reason}"
                self._run.emit(alarm.event(text, level="error"))
            return False
        text, action = f"{alarm}: {move.before} is too coarse for {name}", f"{name} computes by {move.after}"
        self._run.emit(alarm.event(text, cause="precision", action=action, layer=layer))
        return True

    def down(self) -> None:
        """Move the layers without a recent alarm one rung down."""
        step, before = self._run.done, self._ladder.state_dict()
        moves = self._ladder.down(step)
        if moves and self._convert():
            self._ladder.load_state_dict(before)
            return
        for move in moves:
            text = f"{_name(move.layer)} raised no alarm by {move.before}"
            self._run.emit(GuardEvent(step, "info", "guard", text, f"back to {move.after}", move.layer))

    def up_until_well(self, alarm: Alarm, harmed: Sequence[str], is_well: IsWell) -> None:
        """Refine the layers whose FP8 makes the next batch bad one by one until it is fine, finally all of them."""
        for layer in [*self._culprits(alarm, harmed, is_well)[:MOVES], EVERYTHING]:
            while self.up(layer, alarm):
                if is_well(self._run.probe()):
                    return

    def compare_with_bf16(self) -> None:
        """Compare the next batch in FP8 and BF16, and those after it if it is harmed; in mode `act`, refine layers.

        The last batch alone decides nothing.
        """
        fp8, bf16 = (self._run.probe(fp8=is_fp8, backward=False) for is_fp8 in (True, False))
        gap, limit, acts = diagnosis.loss_gap(fp8, bf16), self._config.shadow_gap, self._config.mode == "act"
        following = self._gap_of_following() if gap > limit else None
        is_harm = following is not None and following > limit
        text = f"the loss of a batch in FP8 is {abs(gap):.3f} % {'above' if gap >= 0 else 'below'} that in BF16"
        text += "; no batch follows that could confirm it" if gap > limit and following is None else ""
        text += "; guardrails that only watch leave it so" if is_harm and not acts else ""
        level = "warning" if is_harm else "info"
        self._run.emit(GuardEvent(self._run.done, level, "shadow", text, value=gap, limit=limit))
        if is_harm and acts:
            alarm = Alarm(self._run.done, "shadow", "", "", gap, limit)
            self.up_until_well(alarm, [], lambda probe: diagnosis.loss_gap(probe, bf16) <= limit)

    def state_dict(self) -> dict[str, Any]:
        """Return the positions of layers on the ladder as JSON values."""
        return self._ladder.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`, and convert the layers to the recipes that they had."""
        self._ladder.load_state_dict(state)
        if self._ladder.state_dict():
            self._convert()

    def _convert(self) -> str:
        """Convert the layers to their recipes on the ladder; return why that is impossible, or an empty string."""
        return self._run.cannot_refine or self._run.change_recipe(self._ladder.recipe())

    def _culprits(self, alarm: Alarm, harmed: Sequence[str], is_well: IsWell) -> list[str]:
        """Return the layers to refine: one that cures the batch alone in BF16, else the smallest group found."""
        measured = [row[0] for row in self._run.rows]
        names = [name for name in dict.fromkeys([alarm.layer, *harmed, *measured]) if name in measured]
        for name in names[:ALONE]:
            if is_well(self._run.probe(without=[name])):
                return [name]
        group = names
        while len(group) > 1:
            halves = group[: len(group) // 2], group[len(group) // 2 :]
            better = next((half for half in halves if is_well(self._run.probe(without=half))), None)
            if better is None:
                break
            group = better
        return group

    def _gap_of_following(self) -> float | None:
        """Return the mean gap of the batches after the next one: a small batch alone may have any. None without one."""
        both = (self._run.probe_following(LASTING, fp8=is_fp8, backward=False) for is_fp8 in (True, False))
        gaps = [diagnosis.loss_gap(fp8, bf16) for fp8, bf16 in zip(*both, strict=True)]
        return fmean(gaps) if gaps else None


def _name(layer: str) -> str:
    return "the model" if layer == EVERYTHING else layer

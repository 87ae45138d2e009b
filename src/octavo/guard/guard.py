"""The state machine. It makes no step itself: a loop asks it before a step, and tells it after.

    watching     each step is held against the rules; every `snapshot_every` steps a snapshot is taken
    suspicious   an alarm: the run is back at the snapshot before it, and the same steps are made again
                 - before the step that raised it, its batch is tried in both precisions (`octavo.guard.diagnosis`)
                 - a cause that can be acted on is: a batch is passed over, the learning rate held, a layer refined
                 - the steps that come out otherwise than before were struck by something transient, now repaired

Nothing depends on the clock or on what has arrived in time: with equal measurements every rank decides the same. The
state, all but the snapshots, goes into a checkpoint.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.errors import RunError
from octavo.guard.config import GuardConfig
from octavo.guard.diagnosis import Cause, Evidence, diagnose
from octavo.guard.guarded import Guarded, Note
from octavo.guard.ladder import EVERYTHING, Ladder
from octavo.guard.watch import UPDATE, Alarm, Observation, Watch, first_difference, worst_layers
from octavo.recipes import Recipe

SNAPSHOTS = 2
"""Kept in memory: where the newest was taken after the damage was done, the one before helps."""
MARGIN = 3
"""Steps before an alarm that a snapshot should be taken, so that it is not damaged already."""
MOVES = 8
"""Layers that are refined for one alarm, before all of the model goes to BF16."""
HOLD = 2.0
"""The learning rate may rise by this factor each quiet time, after it was held."""


@dataclass
class _Snapshot:
    step: int
    state: Any
    watch: dict[str, Any]


@dataclass
class _Suspicion:
    """An alarm whose cause is being looked for."""

    alarm: Alarm
    since: int
    """Step of the snapshot that the run went back to."""
    damage: str
    harmed: list[str]
    """Layers, the most harmed by FP8 first."""
    seen: dict[int, Observation]
    """What the steps since then measured the first time."""
    where: tuple[str, str] | None = None
    """Layer and role of the first tensor that differs now."""
    is_tried: bool = False
    """Whether its batch was tried, so that a second alarm of the same step is no news."""


class Guard:
    """Guardrails of one run. Call `before` before each step, `after` with what each step measured.

    Args:
        run: what is watched, and can be taken back.
        recipe: that of the run; without one no layer is refined.
        config: limits, and whether to act.
    """

    def __init__(self, run: Guarded, recipe: Recipe | None = None, config: GuardConfig | None = None) -> None:
        self.config = config or GuardConfig()
        self._run = run
        self._watch = Watch(self.config, run.rows)
        self._ladder = None if recipe is None or not recipe.is_fp8 else Ladder(recipe, self.config.quiet)
        self._snapshots: deque[_Snapshot] = deque(maxlen=SNAPSHOTS)
        self._record: deque[Observation] = deque(maxlen=SNAPSHOTS * self.config.snapshot_every)
        self._suspicion: _Suspicion | None = None
        self._rolled_back: list[int] = []
        self._lr_limit: float | None = None
        self._lr_held_at = 0
        self._gaps = 0
        self._told: dict[str, int] = {}

    @property
    def acts(self) -> bool:
        """Whether it does more than note."""
        return self.config.mode == "act"

    def lr(self, wanted: float) -> float:
        """Return the learning rate of the next step: what the schedule says, or less where that did harm."""
        return wanted if self._lr_limit is None else min(wanted, self._lr_limit)

    def before(self) -> None:
        """Make ready for the next step: take a snapshot, look at the shadow, or try the batch that raised an alarm."""
        if self.config.mode == "off":
            return
        next_step = self._run.done + 1
        if self._suspicion is not None:
            if next_step == self._suspicion.alarm.step and not self._suspicion.is_tried:
                self._try(self._suspicion)
            return
        self._let_lr_rise()
        self._come_down()
        if self.acts and (
            not self._snapshots or self._run.done - self._snapshots[-1].step >= self.config.snapshot_every
        ):
            self._snapshots.append(_Snapshot(self._run.done, self._run.take(), self._watch.state_dict()))
        every = self.config.shadow_every
        if every and self._run.done and self._run.done % every == 0:
            self._compare_with_shadow()

    def after(self, seen: Observation) -> bool:
        """Hold a step against the rules; return whether the run went back, so that nothing of the step counts.

        Raises:
            RunError: the run was rolled back too often.
        """
        if self.config.mode == "off":
            return False
        alarm = self._watch.look(seen)
        if self._suspicion is not None:
            self._compare(self._suspicion, seen)
        if alarm is not None:
            return self._alarmed(alarm, seen)
        self._record.append(seen)
        if self._suspicion is not None and seen.step >= self._suspicion.alarm.step:
            self._conclude(self._suspicion)
        for over in self._watch.over_budget(seen):
            self._over_budget(over)
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return what a run that is resumed needs, as JSON has it."""
        return {
            "watch": self._watch.state_dict(),
            "ladder": self._ladder.state_dict() if self._ladder is not None else {},
            "rolled_back": [*self._rolled_back],
            "lr_limit": self._lr_limit,
            "lr_held_at": self._lr_held_at,
            "gaps": self._gaps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned: layers take the recipes that they had."""
        self._watch.load_state_dict(state["watch"])
        self._rolled_back, self._gaps = [*state["rolled_back"]], state["gaps"]
        self._lr_limit, self._lr_held_at = state["lr_limit"], state["lr_held_at"]
        if self._ladder is not None and state["ladder"]:
            self._ladder.load_state_dict(state["ladder"])
            self._carry_out()

    # --- an alarm ---------------------------------------------------------------------------------------------------

    def _alarmed(self, alarm: Alarm, seen: Observation) -> bool:
        suspicion = self._suspicion
        if not self.acts or not self._snapshots:
            self._note(alarm, str(alarm), level="error" if alarm.rule == "nonfinite" else "warning")
            return False
        if suspicion is not None and suspicion.is_tried and alarm.step == suspicion.alarm.step:
            # Its batch did well when it was tried: only the update itself can be at fault.
            self._blame_optimizer(suspicion, "it comes back with the update alone")
            return True
        self._note(alarm, str(alarm), level="warning", action=f"back to step {self._newest(alarm).step}")
        self._go_back(alarm, seen)
        return True

    def _newest(self, alarm: Alarm) -> _Snapshot:
        """Return the newest snapshot some steps before an alarm, or the oldest: a fault may show late."""
        return next(
            (taken for taken in reversed(self._snapshots) if taken.step + MARGIN < alarm.step), self._snapshots[0]
        )

    def _go_back(self, alarm: Alarm, seen: Observation) -> None:
        self._count_rollback(alarm.step)
        snapshot = self._newest(alarm)
        record = {each.step: each for each in [*self._record, seen] if each.step > snapshot.step}
        damage = ""
        if alarm.role == "weight":
            reach = UPDATE * sum(each.lr for each in record.values())
            damage = self._run.damage(alarm.layer, snapshot.state, reach)
        harmed = worst_layers(self._watch.rows, seen.values)
        self._suspicion = _Suspicion(alarm, snapshot.step, damage, harmed, record)
        self._return_to(snapshot)

    def _return_to(self, snapshot: _Snapshot) -> None:
        while self._snapshots[-1] is not snapshot:
            self._snapshots.pop()
        self._run.restore(snapshot.state)
        self._watch.load_state_dict(snapshot.watch)
        kept = [each for each in self._record if each.step <= snapshot.step]
        self._record.clear()
        self._record.extend(kept)

    def _count_rollback(self, step: int) -> None:
        recent = [*(at for at in self._rolled_back if abs(step - at) < self.config.quiet), step]
        self._rolled_back = recent
        if len(recent) > self.config.rollbacks:
            raise RunError(
                f"rolled back {len(recent)} times around step {step}, and it did not help (guard.rollbacks). The events"
                " of the run say what was tried: `octavo dashboard` shows them."
            )

    def _compare(self, suspicion: _Suspicion, seen: Observation) -> None:
        """Note the first tensor that is not what it was when the step was made before."""
        before = suspicion.seen.get(seen.step)
        if suspicion.where is not None or before is None or before.values is None or seen.values is None:
            return
        if before.values.shape == seen.values.shape:
            suspicion.where = first_difference(self._watch.rows, before.values, seen.values)

    # --- its cause --------------------------------------------------------------------------------------------------

    def _try(self, suspicion: _Suspicion) -> None:
        """Try the batch that raised the alarm, with the weights that it met, and act on the cause."""
        suspicion.is_tried = True
        evidence = self._evidence(suspicion)
        cause = diagnose(evidence)
        if cause == "precision":
            self._refine_until_well(suspicion, evidence)
        elif cause == "optimizer":
            self._blame_optimizer(suspicion, "a batch of before is as bad now, in BF16 too")
        elif cause == "data":
            self._blame_data(suspicion)

    def _evidence(self, suspicion: _Suspicion) -> Evidence:
        limits = self._watch.loss_limit, self._watch.gradient_limit
        evidence = Evidence(self._run.probe(fp8=True), self._run.probe(fp8=False), *limits)
        losses = {each.step: each.loss for each in self._record}
        for taken in reversed(self._snapshots):
            if taken.step + 1 in losses and taken.step + 1 < suspicion.alarm.step:
                earlier = self._run.probe(fp8=False, earlier=taken.state)
                return evidence._replace(earlier=earlier, earlier_loss=losses[taken.step + 1])
        return evidence

    def _blame_data(self, suspicion: _Suspicion) -> None:
        alarm, where = suspicion.alarm, self._run.locate()
        first = f"; not finite first: {where}" if where else ""
        layer = where.split(" ")[0] if where else ""
        self._run.skip()
        text = f"{alarm}: BF16 does no better on this batch, and does well on others: not FP8's doing{first}"
        self._note(alarm, text, cause="data", action="batch passed over", layer=layer or alarm.layer)
        self._suspicion = None

    def _blame_optimizer(self, suspicion: _Suspicion, why: str) -> None:
        """Go back further, and hold the learning rate to what it was there."""
        alarm, oldest = suspicion.alarm, self._snapshots[0]
        rates = [each.lr for each in (*suspicion.seen.values(), *self._record)]
        worst = max(rates)
        self._lr_limit = max((rate for rate in rates if rate <= worst / HOLD), default=worst / HOLD)
        self._lr_held_at = oldest.step
        self._suspicion = None
        text = (
            f"{alarm}: {why}: the weights are bad, not FP8; the learning rate had risen to {worst:.3g},"
            f" {worst / self._lr_limit:.3g} times what it is held to now"
        )
        action = f"back to step {oldest.step}, learning rate at most {self._lr_limit:.3g}"
        self._note(alarm, text, cause="optimizer", action=action)
        self._return_to(oldest)

    def _refine_until_well(self, suspicion: _Suspicion, evidence: Evidence) -> None:
        """Move the most harmed layers up the ladder until the batch does well, in the end all of them."""
        alarm = suspicion.alarm
        candidates = ([alarm.layer] if alarm.layer else []) + suspicion.harmed
        for layer in [*dict.fromkeys(candidates)][:MOVES] + [EVERYTHING] * 4:
            if not self._refine(layer, alarm):
                continue
            if not self._run.probe(fp8=True).is_bad(evidence.loss_limit, evidence.gradient_limit):
                break
        self._suspicion = None

    def _conclude(self, suspicion: _Suspicion) -> None:
        """The step that raised the alarm was made again without one: what struck it was transient."""
        alarm = suspicion.alarm
        layer, role = suspicion.where or (alarm.layer, alarm.role)
        if alarm.role == "weight":
            layer, role = alarm.layer, alarm.role
        where = f", first in {layer} {role}" if layer else ""
        what = f": {suspicion.damage}" if suspicion.damage else ""
        text = (
            f"{alarm} did not come back when the steps from {suspicion.since + 1} on were made again{where}{what}: a"
            " fault of the hardware, or of something outside of training"
        )
        self._note(alarm, text, cause="transient", action="steps made again", layer=layer, role=role)
        self._suspicion = None

    # --- budgets, the ladder, the shadow ----------------------------------------------------------------------------

    def _over_budget(self, alarm: Alarm) -> None:
        self._watch.forgive(alarm.layer)
        if not self.acts or self._suspicion is not None or not self._refine(alarm.layer, alarm):
            self._note_seldom(alarm)

    def _note_seldom(self, alarm: Alarm) -> None:
        """Note what nothing is done about once in a quiet time."""
        if self._is_news(f"{alarm.layer} {alarm.role} {alarm.rule}", alarm.step):
            self._note(alarm, f"{alarm}, for {self.config.patience} steps", level="warning")

    def _is_news(self, what: str, step: int) -> bool:
        """Return whether something was not told for a quiet time; it is told now."""
        is_news = step - self._told.get(what, -self.config.quiet) >= self.config.quiet
        if is_news:
            self._told[what] = step
        return is_news

    def _refine(self, layer: str, alarm: Alarm) -> bool:
        """Move a layer one rung up; return whether that was possible."""
        if self._ladder is None:
            return False
        before = self._ladder.state_dict()
        move = self._ladder.up(layer, alarm.step)
        if move is None:
            return False
        refused = self._carry_out()
        if refused:
            self._ladder.load_state_dict(before)
            if self._is_news(f"{layer} refused", alarm.step):
                self._note(alarm, f"{alarm}: {_name(layer)} cannot leave {move.before}: {refused}", level="error")
            return False
        text = f"{alarm}: {move.before} is too coarse for {_name(layer)}"
        self._note(alarm, text, cause="precision", action=f"{_name(layer)} computes by {move.after}", layer=layer)
        return True

    def _let_lr_rise(self) -> None:
        """Raise the limit of the learning rate after each quiet time."""
        step = self._run.done
        if self._lr_limit is not None and step - self._lr_held_at >= self.config.quiet:
            self._lr_limit, self._lr_held_at = self._lr_limit * HOLD, step

    def _come_down(self) -> None:
        """Move the layers that were quiet long enough one rung down."""
        if self._ladder is None or not self.acts:
            return
        step, before = self._run.done, self._ladder.state_dict()
        moves = self._ladder.down(step)
        if moves and self._carry_out():
            self._ladder.load_state_dict(before)
            return
        for move in moves:
            text = f"{_name(move.layer)} was quiet by {move.before}"
            self._tell(Note(step, "info", "guard", text, f"back to {move.after}", move.layer))

    def _carry_out(self) -> str:
        """Compute by the recipe that the ladder says; return why that is not possible."""
        assert self._ladder is not None
        refused = self._run.refine(self._ladder.recipe())
        self._watch.rows = self._run.rows
        return refused

    def _compare_with_shadow(self) -> None:
        fp8, bf16 = (self._run.probe(fp8=is_fp8, backward=False) for is_fp8 in (True, False))
        gap = 100 * (fp8.loss - bf16.loss) / bf16.loss
        self._gaps = self._gaps + 1 if gap > self.config.shadow_gap else 0
        is_over = self._gaps >= 2
        text = f"the loss of a batch in FP8 is {abs(gap):.3f} % {'above' if gap >= 0 else 'below'} that in BF16"
        step, limit = self._run.done, self.config.shadow_gap
        self._tell(Note(step, "warning" if is_over else "info", "shadow", text, value=gap, limit=limit))

    def _note(
        self, alarm: Alarm, text: str, *, level: str = "warning", action: str = "", cause: Cause | str = "",
        layer: str | None = None, role: str | None = None,
    ) -> None:  # fmt: skip
        where = alarm.layer if layer is None else layer, alarm.role if role is None else role
        self._tell(Note(alarm.step, level, alarm.rule, text, action, *where, alarm.value, alarm.limit, cause))

    def _tell(self, note: Note) -> None:
        self._run.note(note)


def _name(layer: str) -> str:
    return "the model" if layer == EVERYTHING else layer

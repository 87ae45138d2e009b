"""The state machine of guardrails. It makes no step itself: a training loop calls `before` and `after` each step.

    watching     each step is checked against the rules; a snapshot is taken every `snapshot_every` steps
    incident     an alarm: the run is rolled back to a snapshot, and the same steps are made again
                 - before the step that raised it, its batch is computed in both precisions (`octavo.guard.diagnosis`)
                 - if the cause is known, it is acted on: a batch is skipped, the learning rate limited, a layer refined
                 - if the retry is clean, the fault was transient, and is now repaired

Decisions depend on measurements only, never on the clock or on arrival times: every rank decides the same. The state,
except for snapshots, is part of a checkpoint.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from octavo.errors import RunError
from octavo.guard.alarms import UPDATE, Alarm, AlarmRules, Observation, first_difference, worst_layers
from octavo.guard.config import GuardConfig
from octavo.guard.diagnosis import Cause, Evidence, diagnose
from octavo.guard.guarded import Guarded, GuardEvent, Snapshot
from octavo.guard.ladder import EVERYTHING, Ladder
from octavo.recipes import Recipe

SNAPSHOTS = 2
"""Snapshots kept in memory: if the newest was taken after the fault, the older one helps."""
MARGIN = 3
"""Steps that a snapshot should precede an alarm by, so that it does not contain the fault."""
MOVES = 8
"""Layers refined per alarm before the whole model goes to BF16."""
HOLD = 2.0
"""Factor by which the limit on the learning rate may rise per quiet period."""


class _SavePoint(NamedTuple):
    snapshot: Snapshot
    rules: dict[str, Any]


@dataclass
class Incident:
    """An alarm under investigation."""

    alarm: Alarm
    since: int
    """Step of the snapshot that the run was rolled back to."""
    weight_diff: str
    harmed: list[str]
    """Layers, the most harmed by FP8 first."""
    first_run: dict[int, Observation]
    """Measurements of the steps since then, from before the rollback."""
    where: tuple[str, str] | None = None
    """Layer and role of the first tensor that differs in the retry."""
    is_probed: bool = False
    """The batch was probed: a second alarm at the same step adds no information."""


class Guard:
    """Guardrails of one run. Call `before` before each step and `after` with its measurements.

    Args:
        run: the training loop.
        recipe: recipe of the run; without one no layer is refined.
        config: limits and mode.
    """

    def __init__(self, run: Guarded, recipe: Recipe | None = None, config: GuardConfig | None = None) -> None:
        self.config = config or GuardConfig()
        self._run = run
        self._rules = AlarmRules(self.config, run.rows)
        self._ladder = None if recipe is None or not recipe.is_fp8 else Ladder(recipe, self.config.quiet)
        self._saved: deque[_SavePoint] = deque(maxlen=SNAPSHOTS)
        self._record: deque[Observation] = deque(maxlen=SNAPSHOTS * self.config.snapshot_every)
        self._incident: Incident | None = None
        self._rolled_back: list[int] = []
        self._lr_limit: float | None = None
        self._lr_limited_at = 0
        self._gaps = 0
        self._emitted: dict[str, int] = {}

    @property
    def acts(self) -> bool:
        """True if the mode is `act`."""
        return self.config.mode == "act"

    def lr(self, scheduled: float) -> float:
        """Return the learning rate of the next step: the scheduled one, or the limit if that is lower."""
        return scheduled if self._lr_limit is None else min(scheduled, self._lr_limit)

    def before(self) -> None:
        """Prepare the next step: take a snapshot, compare with the shadow, or probe the batch that raised an alarm."""
        if self.config.mode == "off":
            return
        done = self._run.done
        if self._incident is not None:
            if done + 1 == self._incident.alarm.step and not self._incident.is_probed:
                self._probe(self._incident)
            return
        if self._lr_limit is not None and done - self._lr_limited_at >= self.config.quiet:
            self._lr_limit, self._lr_limited_at = self._lr_limit * HOLD, done
        self._come_down()
        if self.acts and (not self._saved or done - self._saved[-1].snapshot.step >= self.config.snapshot_every):
            self._saved.append(_SavePoint(self._run.snapshot(), self._rules.state_dict()))
        every = self.config.shadow_every
        if every and done and done % every == 0:
            self._compare_with_shadow()

    def after(self, step: Observation) -> bool:
        """Check a step against the rules; return True if the run was rolled back, so that the step does not count.

        Raises:
            RunError: too many rollbacks.
        """
        if self.config.mode == "off":
            return False
        alarm = self._rules.check(step)
        if self._incident is not None:
            self._compare(self._incident, step)
        if alarm is not None:
            return self._raise(alarm, step)
        self._record.append(step)
        if self._incident is not None and step.step >= self._incident.alarm.step:
            self._conclude(self._incident)
        for over in self._rules.over_budget(step):
            self._over_budget(over)
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, as JSON values."""
        return {
            "watch": self._rules.state_dict(),
            "ladder": self._ladder.state_dict() if self._ladder is not None else {},
            "rolled_back": [*self._rolled_back],
            "lr_limit": self._lr_limit,
            "lr_held_at": self._lr_limited_at,
            "gaps": self._gaps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`; layers are converted to the recipes that they had."""
        self._rules.load_state_dict(state["watch"])
        self._rolled_back, self._gaps = [*state["rolled_back"]], state["gaps"]
        self._lr_limit, self._lr_limited_at = state["lr_limit"], state["lr_held_at"]
        if self._ladder is not None and state["ladder"]:
            self._ladder.load_state_dict(state["ladder"])
            self._apply_ladder()

    # --- alarms and rollbacks ---------------------------------------------------------------------------------------

    def _raise(self, alarm: Alarm, step: Observation) -> bool:
        incident = self._incident
        if not self.acts or not self._saved:
            self._emit(alarm, str(alarm), level="error" if alarm.rule == "nonfinite" else "warning")
            return False
        if incident is not None and incident.is_probed and alarm.step == incident.alarm.step:
            # Its batch was fine when it was probed: the update itself must be at fault.
            self._blame_optimizer(incident, "it comes back with the update alone")
            return True
        target = self._newest_before(alarm)
        self._emit(alarm, str(alarm), action=f"back to step {target.snapshot.step}")
        self._count_rollback(alarm.step)
        self._open_incident(alarm, step, target)
        self._roll_back(target)
        return True

    def _newest_before(self, alarm: Alarm) -> _SavePoint:
        """Return the newest snapshot over `MARGIN` steps before an alarm, else the oldest: faults may show late."""
        return next((s for s in reversed(self._saved) if s.snapshot.step + MARGIN < alarm.step), self._saved[0])

    def _open_incident(self, alarm: Alarm, step: Observation, target: _SavePoint) -> None:
        since = target.snapshot.step
        record = {each.step: each for each in [*self._record, step] if each.step > since}
        diff = ""
        if alarm.role == "weight":
            reach = UPDATE * sum(each.lr for each in record.values())
            diff = self._run.weight_diff(alarm.layer, target.snapshot, reach)
        self._incident = Incident(alarm, since, diff, worst_layers(self._rules.rows, step.values), record)

    def _roll_back(self, target: _SavePoint) -> None:
        while self._saved[-1] is not target:
            self._saved.pop()
        self._run.restore(target.snapshot)
        self._rules.load_state_dict(target.rules)
        kept = [each for each in self._record if each.step <= target.snapshot.step]
        self._record.clear()
        self._record.extend(kept)

    def _count_rollback(self, step: int) -> None:
        self._rolled_back = [*(at for at in self._rolled_back if abs(step - at) < self.config.quiet), step]
        if len(self._rolled_back) > self.config.rollbacks:
            raise RunError(
                f"rolled back {len(self._rolled_back)} times around step {step} without success (guard.rollbacks). The"
                " events of the run list what was tried: see `octavo dashboard`."
            )

    def _compare(self, incident: Incident, step: Observation) -> None:
        """Record the first tensor that differs between the first run of a step and its retry."""
        before = incident.first_run.get(step.step)
        if incident.where is not None or before is None or before.values is None or step.values is None:
            return
        if before.values.shape == step.values.shape:
            incident.where = first_difference(self._rules.rows, before.values, step.values)

    # --- diagnosis --------------------------------------------------------------------------------------------------

    def _probe(self, incident: Incident) -> None:
        """Probe the batch that raised the alarm, with the weights of that step, and act on the cause."""
        incident.is_probed = True
        evidence = self._evidence(incident)
        cause = diagnose(evidence)
        if cause == "precision":
            self._refine_until_well(incident, evidence)
        elif cause == "optimizer":
            self._blame_optimizer(incident, "an earlier batch is as bad now, in BF16 too")
        elif cause == "data":
            self._blame_data(incident)

    def _evidence(self, incident: Incident) -> Evidence:
        limits = self._rules.loss_limit, self._rules.gradient_limit
        evidence = Evidence(self._run.probe(fp8=True), self._run.probe(fp8=False), *limits)
        losses = {each.step: each.loss for each in self._record}
        for snapshot, _ in reversed(self._saved):
            if snapshot.step + 1 in losses and snapshot.step + 1 < incident.alarm.step:
                earlier = self._run.probe(fp8=False, earlier=snapshot)
                return evidence._replace(earlier=earlier, earlier_loss=losses[snapshot.step + 1])
        return evidence

    def _blame_data(self, incident: Incident) -> None:
        alarm, where = incident.alarm, self._run.locate()
        first = f"; first non-finite tensor: {where}" if where else ""
        layer = where.split(" ")[0] if where else ""
        self._run.skip()
        text = f"{alarm}: BF16 is no better on this batch, and fine on others: not caused by FP8{first}"
        self._emit(alarm, text, cause="data", action="batch passed over", layer=layer or alarm.layer)
        self._incident = None

    def _blame_optimizer(self, incident: Incident, why: str) -> None:
        """Roll back to the oldest snapshot, and limit the learning rate."""
        alarm, oldest = incident.alarm, self._saved[0]
        rates = [each.lr for each in (*incident.first_run.values(), *self._record)]
        worst = max(rates)
        self._lr_limit = max((rate for rate in rates if rate <= worst / HOLD), default=worst / HOLD)
        self._lr_limited_at = oldest.snapshot.step
        self._incident = None
        text = (
            f"{alarm}: {why}: the weights are bad, not FP8; the learning rate had risen to {worst:.3g},"
            f" {worst / self._lr_limit:.3g} times its limit now"
        )
        action = f"back to step {oldest.snapshot.step}, learning rate at most {self._lr_limit:.3g}"
        self._emit(alarm, text, cause="optimizer", action=action)
        self._roll_back(oldest)

    def _refine_until_well(self, incident: Incident, evidence: Evidence) -> None:
        """Refine the most harmed layers one by one until the batch is fine, finally all of them."""
        alarm = incident.alarm
        candidates = ([alarm.layer] if alarm.layer else []) + incident.harmed
        for layer in [*dict.fromkeys(candidates)][:MOVES] + [EVERYTHING] * 4:
            if not self._refine(layer, alarm):
                continue
            if not self._run.probe(fp8=True).is_bad(evidence.loss_limit, evidence.gradient_limit):
                break
        self._incident = None

    def _conclude(self, incident: Incident) -> None:
        """Close an incident whose alarm did not come back: the fault was transient."""
        alarm = incident.alarm
        layer, role = incident.where or (alarm.layer, alarm.role)
        if alarm.role == "weight":
            layer, role = alarm.layer, alarm.role
        where = f", first in {layer} {role}" if layer else ""
        diff = f": {incident.weight_diff}" if incident.weight_diff else ""
        text = (
            f"{alarm} did not come back when the steps from {incident.since + 1} on were repeated{where}{diff}: a fault"
            " of the hardware, or of something outside of training"
        )
        self._emit(alarm, text, cause="transient", action="steps made again", layer=layer, role=role)
        self._incident = None

    # --- budgets, ladder, shadow ------------------------------------------------------------------------------------

    def _over_budget(self, alarm: Alarm) -> None:
        self._rules.forgive(alarm.layer)
        if self.acts and self._incident is None and self._refine(alarm.layer, alarm):
            return
        if self._is_due(f"{alarm.layer} {alarm.role} {alarm.rule}", alarm.step):
            self._emit(alarm, f"{alarm}, for {self.config.patience} steps")

    def _is_due(self, key: str, step: int) -> bool:
        """Return True, and record it, if an event was not emitted within the last quiet period."""
        is_due = step - self._emitted.get(key, -self.config.quiet) >= self.config.quiet
        if is_due:
            self._emitted[key] = step
        return is_due

    def _refine(self, layer: str, alarm: Alarm) -> bool:
        """Move a layer one rung up the ladder; return False if that is impossible."""
        if self._ladder is None:
            return False
        before = self._ladder.state_dict()
        move = self._ladder.up(layer, alarm.step)
        if move is None:
            return False
        name = _name(layer)
        if reason := self._apply_ladder():
            self._ladder.load_state_dict(before)
            if self._is_due(f"{layer} refused", alarm.step):
                self._emit(alarm, f"{alarm}: {name} cannot leave {move.before}: {reason}", level="error")
            return False
        text = f"{alarm}: {move.before} is too coarse for {name}"
        self._emit(alarm, text, cause="precision", action=f"{name} computes by {move.after}", layer=layer)
        return True

    def _come_down(self) -> None:
        """Move the layers without a recent alarm one rung down."""
        if self._ladder is None or not self.acts:
            return
        step, before = self._run.done, self._ladder.state_dict()
        moves = self._ladder.down(step)
        if moves and self._apply_ladder():
            self._ladder.load_state_dict(before)
            return
        for move in moves:
            text = f"{_name(move.layer)} raised no alarm by {move.before}"
            self._run.emit(GuardEvent(step, "info", "guard", text, f"back to {move.after}", move.layer))

    def _apply_ladder(self) -> str:
        """Convert the model to the recipe of the ladder; return why that is impossible, or an empty string."""
        assert self._ladder is not None
        reason = self._run.refine(self._ladder.recipe())
        self._rules.rows = self._run.rows
        return reason

    def _compare_with_shadow(self) -> None:
        fp8, bf16 = (self._run.probe(fp8=is_fp8, backward=False) for is_fp8 in (True, False))
        gap = 100 * (fp8.loss - bf16.loss) / bf16.loss
        self._gaps = self._gaps + 1 if gap > self.config.shadow_gap else 0
        level = "warning" if self._gaps >= 2 else "info"
        text = f"the loss of a batch in FP8 is {abs(gap):.3f} % {'above' if gap >= 0 else 'below'} that in BF16"
        self._run.emit(GuardEvent(self._run.done, level, "shadow", text, value=gap, limit=self.config.shadow_gap))

    def _emit(
        self, alarm: Alarm, text: str, *, level: str = "warning", action: str = "", cause: Cause | str = "",
        layer: str | None = None, role: str | None = None,
    ) -> None:  # fmt: skip
        where = alarm.layer if layer is None else layer, alarm.role if role is None else role
        self._run.emit(GuardEvent(alarm.step, level, alarm.rule, text, action, *where, alarm.value, alarm.limit, cause))


def _name(layer: str) -> str:
    return "the model" if layer == EVERYTHING else layer

"""The state machine of guardrails. It makes no step itself: a training loop calls `before` and `after` each step.

    watching     each step is checked against the rules; a snapshot is taken every `snapshot_every` steps
    incident     an alarm: the run is rolled back to a snapshot, and the same steps are made again
                 - before the step that raised it, its batch is computed in both precisions (`octavo.guard.diagnosis`)
                 - if the cause is known, it is acted on: a batch is skipped, the learning rate limited, a layer refined
                 - if the retry is clean, the fault was transient, and is now repaired
    given up     nothing helped: the level is adopted and the rule only reports for `quiet` steps

An incident is solved once the run is past it. A finite loss never ends a run.

Decisions depend on measurements only, never on the clock or on arrival times: every rank decides the same. The state,
except for snapshots, is part of a checkpoint.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from octavo._util.terminal import quantity
from octavo.errors import RunError
from octavo.guard import diagnosis
from octavo.guard.alarms import Alarm, GuardEvent, Observation
from octavo.guard.config import GuardConfig
from octavo.guard.diagnosis import Cause, Evidence, IsWell, Probe
from octavo.guard.guarded import Guarded, Snapshot
from octavo.guard.ladder import EVERYTHING, Ladder
from octavo.guard.parameters import is_same
from octavo.guard.rules import LASTING, RULES, UPDATE, AlarmRules
from octavo.guard.telemetry_rows import first_difference, layer_of, worst_layers
from octavo.recipes import Recipe

SNAPSHOTS = 2
"""Snapshots kept in memory: if the newest was taken after the fault, the older one helps."""
MARGIN = 3
"""Steps that a snapshot should precede an alarm by, so that it does not contain the fault."""
MOVES = 8
"""Layers refined per alarm before the whole model goes to BF16."""
ALONE = 4
"""Layers probed one at a time, the most harmed first, before groups of them are halved."""
HOLD = 2.0
"""Factor by which the limit on the learning rate may rise per quiet period."""


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
    suspect: Alarm | None = None
    """The layer whose parameters no update explains, if there is one."""
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
        self._ladder = _ladder(recipe, self.config)
        self._saved: deque[Snapshot] = deque(maxlen=SNAPSHOTS)
        self._record: deque[Observation] = deque(maxlen=SNAPSHOTS * self.config.snapshot_every)
        self._incident: Incident | None = None
        self._skipped: list[int] = []
        """Positions of batches that are passed over, also after a rollback."""
        self._unsolved: list[int] = []
        """Steps of the alarms since the run last got past one."""
        self._tried: dict[str, int] = {}
        """How often each cause was acted on since then."""
        self._given_up: dict[str, int] = {}
        """By rule: the step until which it only reports."""
        self._lr_limit: float | None = None
        self._lr_limited_at = 0
        self._has_begun = False
        self._fingerprints: Mapping[str, Sequence[float]] = {}

    @property
    def acts(self) -> bool:
        """True if the mode is `act`."""
        return self.config.mode == "act"

    @property
    def oldest_position(self) -> int:
        """Position of the data at the oldest snapshot; 0 without one."""
        return self._saved[0].position if self._saved else 0

    def lr(self, scheduled: float) -> float:
        """Return the learning rate of the next step: the scheduled one, or the limit if that is lower."""
        return scheduled if self._lr_limit is None else min(scheduled, self._lr_limit)

    def before(self) -> None:
        """Prepare the next step: take a snapshot, compare with the shadow, or probe the batch that raised an alarm.

        Raises:
            RunError: a NaN or infinity that nothing removes.
        """
        if self.config.mode == "off":
            return
        if not self._has_begun:
            self._begin()
        self._pass_over()
        if self._incident is not None:
            if self._run.done + 1 == self._incident.alarm.step and not self._incident.is_probed:
                self._probe(self._incident)
        else:
            self._prepare(self._run.done)
        self._pass_over()

    def after(self, step: Observation) -> bool:
        """Check a step against the rules; return True if the run was rolled back, so that the step does not count.

        Raises:
            RunError: a NaN or infinity that nothing removes.
        """
        if self.config.mode == "off":
            return False
        alarm, rows = self._rules.check(step), self._rules.rows
        if self._incident is not None:
            self._compare(self._incident, step)
        if alarm is not None and self._raise(alarm, step):
            return True
        self._record.append(step)
        if alarm is None and self._incident is not None and step.step >= self._incident.alarm.step:
            self._conclude(self._incident)
        if alarm is None and self._incident is None and step.step > max(self._unsolved, default=0) + MARGIN:
            self._unsolved.clear()
            self._tried.clear()
        # Telemetry of layers that an alarm has just refined is of the rows before.
        for over in self._rules.over_budget(step) if self._rules.rows is rows else ():
            self._over_budget(over)
        return False

    def change_recipe(self, recipe: Recipe) -> str:
        """Convert the model to another recipe of the run, which alarms refine from now on.

        Layers that have left FP8 stay in BF16.

        Returns:
            Why that is impossible, or an empty string.
        """
        in_bf16 = [] if self._ladder is None else self._ladder.in_bf16()
        self._ladder = _ladder(recipe, self.config)
        if self._ladder is not None:
            self._ladder.stay_in_bf16(in_bf16, self._run.done)
            recipe = self._ladder.recipe()
        reason = self._run.change_recipe(recipe)
        self._rules.rows = self._run.rows
        return reason

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, as JSON values."""
        checked = self._run.parameters
        return {
            "watch": self._rules.state_dict(),
            "ladder": self._ladder.state_dict() if self._ladder is not None else {},
            "skipped": [*self._skipped],
            "unsolved": [*self._unsolved],
            "tried": {**self._tried},
            "given_up": {**self._given_up},
            "lr_limit": self._lr_limit,
            "lr_held_at": self._lr_limited_at,
            "fingerprints": {} if checked is None else checked.fingerprints(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`; layers are converted to the recipes that they had.

        The weights are compared with those of the checkpoint before the next step.
        """
        self._rules.load_state_dict(state["watch"])
        self._skipped, self._unsolved = [*state.get("skipped", ())], [*state.get("unsolved", ())]
        self._tried, self._given_up = {**state.get("tried", {})}, {**state.get("given_up", {})}
        self._lr_limit, self._lr_limited_at = state["lr_limit"], state["lr_held_at"]
        self._fingerprints, self._has_begun = state.get("fingerprints", {}), False
        if self._ladder is not None and state["ladder"]:
            self._ladder.load_state_dict(state["ladder"])
            self._convert(self._ladder.recipe())

    # --- before a step ----------------------------------------------------------------------------------------------

    def _prepare(self, done: int) -> None:
        if self._lr_limit is not None and done - self._lr_limited_at >= self.config.quiet:
            self._lr_limit, self._lr_limited_at = self._lr_limit * HOLD, done
        self._come_down()
        if self.acts and (not self._saved or done - self._saved[-1].step >= self.config.snapshot_every):
            self._take_snapshot(done)
        every = self.config.shadow_every
        if every and done and done % every == 0:
            self._compare_with_shadow()

    def _take_snapshot(self, done: int) -> None:
        """Take a snapshot, which is good by construction: a parameter that is not finite is an alarm."""
        bad = self._run.nonfinite_parameter()
        if not bad:
            self._saved.append(replace(self._run.snapshot(), rules=self._rules.state_dict()))
            return
        alarm = Alarm(done, "nonfinite", layer_of(bad), "weight", math.nan, math.inf)
        self._raise(alarm, Observation(done, math.nan, math.nan, 0.0))

    def _pass_over(self) -> None:
        while self._run.position in self._skipped:
            self._run.skip()

    def _begin(self) -> None:
        """Start from the present weights; compare those of a resumed run with what its checkpoint was written with."""
        self._has_begun, checked = True, self._run.parameters
        if checked is None:
            return
        checked.restart(self._run.done)
        saved, now = self._fingerprints, checked.fingerprints() if self._fingerprints else {}
        for name in now:
            if name not in saved or is_same(saved[name], now[name]):
                continue
            source = next((other for other in saved if is_same(saved[other], now[name])), "")
            text = f"{name} is not what the checkpoint was written with" + (f": it is {source}" if source else "")
            advice = "Resume from another checkpoint, or compare how the two runs name their layers."
            event = GuardEvent(self._run.done + 1, "error", "fingerprint", f"{text}. {advice}", cause="model")
            self._run.emit(event._replace(layer=layer_of(name), role="weight"))

    # --- alarms and rollbacks ---------------------------------------------------------------------------------------

    def _raise(self, alarm: Alarm, step: Observation) -> bool:
        rule = RULES[alarm.rule]
        only_reports = rule.kind == "reported" or alarm.step < self._given_up.get(alarm.rule, 0)
        if not self.acts or not self._saved or only_reports:  # given up, or a rollback cannot help
            if self._rules.is_news(alarm):
                self._emit(alarm, str(alarm), level=rule.level, cause=rule.cause)
            return False
        incident = self._incident
        if incident is not None and incident.is_probed and alarm.step == incident.alarm.step:
            return self._comes_back(incident, alarm, step)
        self._unsolved.append(alarm.step)
        if len(self._unsolved) > self.config.rollbacks:
            self._give_up(alarm, f"{quantity(self.config.rollbacks, 'rollback')} without success (guard.rollbacks)")
            return False
        target = self._newest_before(alarm)
        self._open_incident(alarm, step, target)
        self._roll_back(target, alarm, str(alarm))
        return True

    def _newest_before(self, alarm: Alarm) -> Snapshot:
        """Return the newest snapshot from before a fault may have begun, else the oldest."""
        rule = RULES[alarm.rule]
        margin = MARGIN + rule.delay + (self.config.parameters_every if rule.kind == "update" else 0)
        return next((s for s in reversed(self._saved) if s.step + margin < alarm.step), self._saved[0])

    def _open_incident(self, alarm: Alarm, step: Observation, target: Snapshot) -> None:
        since = target.step
        record = {each.step: each for each in [*self._record, step] if each.step > since}
        diff = ""
        if alarm.role == "weight":
            reach = UPDATE * sum(each.lr for each in record.values())
            diff = self._run.weight_diff(alarm.layer, target, reach)
        self._incident = Incident(alarm, since, diff, worst_layers(self._rules.rows, step.values), record)
        self._incident.is_probed = RULES[alarm.rule].kind != "sudden"  # the batch is not to blame
        checked = self._run.parameters
        if checked is not None and step.parameters is None:
            checked.measure(self._run.done, now=True)
            step = step._replace(parameters=checked.arrived(self._run.done))
        self._incident.suspect = self._rules.suspect(step)

    def _roll_back(self, target: Snapshot, alarm: Alarm, text: str, action: str = "", **details: Any) -> None:
        self._emit(alarm, text, action=f"back to step {target.step}{action}", back_to=target.step, **details)
        while self._saved[-1] is not target:
            self._saved.pop()
        self._run.restore(target)
        self._rules.load_state_dict(target.rules)
        kept = [each for each in self._record if each.step <= target.step]
        self._record.clear()
        self._record.extend(kept)

    def _give_up(self, alarm: Alarm, why: str, cause: Cause | str = "") -> None:
        """Adopt the level that raised an alarm, and only report its rule for a while.

        Raises:
            RunError: a value is not finite, so that there is no level to adopt; the first such tensor is named.
        """
        self._incident = None
        if alarm.rule == "nonfinite":
            where = self._run.nonfinite_parameter() or self._run.locate() or str(alarm)
            raise RunError(
                f"step {alarm.step}: {where} is not finite, and nothing helps: {why}. The events of the run list what"
                " was tried: see `octavo dashboard`."
            )
        self._given_up[alarm.rule] = alarm.step + self.config.quiet
        self._rules.adopt(alarm)
        self._emit(alarm, f"{alarm}: {why}", cause=cause, action="the new level is adopted")

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
        limits = self._rules.loss_limit, self._rules.gradient_limit
        evidence = Evidence(self._run.probe(), self._run.probe(fp8=False), *limits)
        evidence = self._with_earlier(evidence, incident.alarm.step)
        cause = diagnosis.diagnose(evidence)
        if cause is None:
            return
        if bad := self._run.nonfinite_parameter():
            self._blame_model(incident, f"{bad} is not finite", layer_of(bad))
        elif cause == "precision":
            self._incident = None
            self._refine_until_well(incident.alarm, incident.harmed, lambda probe: not probe.is_bad(*limits))
        elif cause == "optimizer":
            self._blame_optimizer(incident, "an earlier batch is as bad now, in BF16 too")
        elif why := self._is_new_level(incident.alarm, evidence):
            self._give_up(incident.alarm, why, diagnosis.new_level_of(evidence))
        else:
            self._blame_data(incident)

    def _is_new_level(self, alarm: Alarm, evidence: Evidence) -> str:
        """Return why a bad batch is not passed over: others are like it; empty if it is the only one, or not finite."""
        if alarm.rule == "nonfinite":
            return ""
        if self._tried.get("data", 0) >= LASTING:
            return f"the {LASTING} batches passed over were followed by others like them"
        following = self._run.probe_following(LASTING, fp8=False)
        bad = sum(probe.is_bad(evidence.loss_limit, evidence.gradient_limit) for probe in following)
        return f"{bad} of the next {len(following)} batches are as bad" if 2 * bad > len(following) else ""

    def _with_earlier(self, evidence: Evidence, before: int) -> Evidence:
        """Add a probe of a batch that was trained on before a step."""
        record = {each.step: each for each in self._record}
        for snapshot in reversed(self._saved):
            if snapshot.step + 1 in record and snapshot.step + 1 < before and snapshot.position not in self._skipped:
                earlier = self._run.probe(fp8=False, earlier=snapshot)
                then = record[snapshot.step + 1]
                return evidence._replace(earlier=earlier, in_training=Probe(then.loss, then.gradient_norm))
        return evidence

    def _comes_back(self, incident: Incident, alarm: Alarm, step: Observation) -> bool:
        """Act on an alarm that came back although its batch was fine; return True if the run was rolled back."""
        if RULES[alarm.rule].kind == "sudden":
            return self._blame_optimizer(incident, "it comes back with the update alone")
        if share := self._newly_over(incident, alarm.layer, step):
            self._incident = None
            self._rules.adopt(alarm)
            if not self._refine(alarm.layer, share):
                self._give_up(alarm, f"it comes back, with {share}", "precision")
            return False
        fp8, bf16 = (self._run.probe(fp8=is_fp8) for is_fp8 in (True, False))
        evidence = self._with_earlier(Evidence(fp8, bf16, math.inf, math.inf), alarm.step)
        first = self._rules.rows[0][0] if self._rules.rows else ""
        cause = diagnosis.lasting_cause(alarm, first, evidence)
        if cause == "precision":
            self._incident = None
            self._rules.adopt(alarm)
            self._refine_until_well(alarm, incident.harmed, diagnosis.wellness(alarm.rule, fp8, bf16))
            return False
        if cause == "optimizer" and alarm.rule != "no update" and self._has_risen(incident):
            return self._blame_optimizer(incident, "it comes back")
        self._give_up(alarm, "it comes back when the steps before it are repeated", cause)
        return False

    def _newly_over(self, incident: Incident, layer: str, step: Observation) -> Alarm | None:
        """Return a share of a layer's elements that is above its limit in a step, and was not at the snapshot."""
        first = incident.first_run.get(incident.since + 1, step)
        before = {(share.role, share.rule) for share in self._rules.shares_over(first, layer)}
        now = self._rules.shares_over(step, layer)
        return next((share for share in now if (share.role, share.rule) not in before), None)

    def _blame_data(self, incident: Incident) -> None:
        alarm, where = incident.alarm, self._run.locate()
        first = f"; first non-finite tensor: {where}" if where else ""
        layer, role = where.replace(",", "").split(" ")[:2] if where else ("", "")
        if role == "weight":
            self._blame_model(incident, f"{where} is not finite", layer)
            return
        self._tried["data"] = self._tried.get("data", 0) + 1
        self._skipped.append(self._run.position)
        self._run.skip()
        text = f"{alarm}: BF16 is no better on this batch, and fine on others: not caused by FP8{first}"
        self._emit(alarm, text, cause="data", action="batch passed over", layer=layer or alarm.layer)
        self._incident = None

    def _blame_model(self, incident: Incident, why: str, layer: str) -> None:
        """Roll back to an older snapshot because of bad weights.

        Raises:
            RunError: there is no older one.
        """
        oldest = self._saved[0]
        if oldest.step >= incident.since:
            self._give_up(incident.alarm, why, "model")
            return
        self._incident = None
        self._roll_back(oldest, incident.alarm, f"{incident.alarm}: {why}", cause="model", layer=layer)

    def _has_risen(self, incident: Incident) -> bool:
        """Return True if the learning rate rose by more than `HOLD` within the steps on record."""
        rates = [each.lr for each in (*incident.first_run.values(), *self._record) if each.lr > 0]
        return bool(rates) and max(rates) >= HOLD * min(rates)

    def _blame_optimizer(self, incident: Incident, why: str) -> bool:
        """Roll back to the oldest snapshot, and limit a learning rate that had risen, or is blamed again."""
        alarm, oldest = incident.alarm, self._saved[0]
        self._incident = None
        self._tried["optimizer"] = self._tried.get("optimizer", 0) + 1
        if self._tried["optimizer"] > LASTING:
            self._give_up(alarm, why, "optimizer")
            return False
        rates = [each.lr for each in (*incident.first_run.values(), *self._record)]
        worst, has_risen = max(rates), self._has_risen(incident)
        action, text = "", f"{alarm}: {why}: the weights are bad, not FP8"
        if has_risen or self._tried["optimizer"] > 1:
            self._lr_limit = max((rate for rate in rates if 0 < rate <= worst / HOLD), default=worst / HOLD)
            self._lr_limited_at = oldest.step
            action = f", learning rate at most {self._lr_limit:.3g}"
        if has_risen and self._lr_limit:
            text += f"; the learning rate had risen to {worst:.3g}, {worst / self._lr_limit:.3g} times its limit now"
        self._roll_back(oldest, alarm, text, action, cause="optimizer")
        return True

    def _refine_until_well(self, alarm: Alarm, harmed: Sequence[str], is_well: IsWell) -> None:
        """Refine the layers whose FP8 makes the next batch bad one by one until it is fine, finally all of them."""
        for layer in [*self._culprits(alarm, harmed, is_well)[:MOVES], EVERYTHING]:
            while self._refine(layer, alarm):
                if is_well(self._run.probe()):
                    return

    def _culprits(self, alarm: Alarm, harmed: Sequence[str], is_well: IsWell) -> list[str]:
        """Return the layers to refine: one that cures the batch alone in BF16, else the smallest group found."""
        measured = [row[0] for row in self._rules.rows]
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

    def _conclude(self, incident: Incident) -> None:
        """Close an incident whose alarm did not come back: the fault was transient."""
        alarm = incident.alarm
        layer, role = incident.where or (alarm.layer, alarm.role)
        if alarm.rule == "nonfinite" and incident.suspect is not None:
            layer, role = incident.suspect.layer, incident.suspect.role
        elif alarm.layer and (alarm.role in ("weight", "moments") or alarm.rule == "layer shift"):
            layer, role = alarm.layer, alarm.role
        elif incident.suspect is not None and role in ("", "input"):  # an input differs because of a layer before
            layer, role = incident.suspect.layer, incident.suspect.role
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
        if self._rules.is_news(alarm):
            self._emit(alarm, f"{alarm}, for {quantity(self.config.patience, 'step')}")

    def _refine(self, layer: str, alarm: Alarm) -> bool:
        """Move a layer one rung up the ladder; return False if that is impossible."""
        if self._ladder is None:
            return False
        before = self._ladder.state_dict()
        move = self._ladder.up(layer, alarm.step, is_flushed=alarm.rule == "flushed")
        if move is None:
            return False
        name = _name(layer)
        if reason := self._convert(self._ladder.recipe()):
            self._ladder.load_state_dict(before)
            if self._rules.is_news(alarm._replace(rule="refused")):
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
        if moves and self._convert(self._ladder.recipe()):
            self._ladder.load_state_dict(before)
            return
        for move in moves:
            text = f"{_name(move.layer)} raised no alarm by {move.before}"
            self._run.emit(GuardEvent(step, "info", "guard", text, f"back to {move.after}", move.layer))

    def _convert(self, recipe: Recipe) -> str:
        """Convert the model to another recipe; return why that is impossible, or an empty string."""
        reason = self._run.refine(recipe)
        self._rules.rows = self._run.rows
        return reason

    def _compare_with_shadow(self) -> None:
        """Compare the next batch in FP8 and BF16, and those after it if it is harmed; in mode `act`, refine layers.

        The last batch alone decides nothing.
        """
        fp8, bf16 = (self._run.probe(fp8=is_fp8, backward=False) for is_fp8 in (True, False))
        gap, limit = diagnosis.loss_gap(fp8, bf16), self.config.shadow_gap
        following = self._gap_of_following() if gap > limit else None
        is_harm = following is not None and following > limit
        text = f"the loss of a batch in FP8 is {abs(gap):.3f} % {'above' if gap >= 0 else 'below'} that in BF16"
        text += "; no batch follows that could confirm it" if gap > limit and following is None else ""
        text += "; guardrails that only watch leave it so" if is_harm and not self.acts else ""
        level = "warning" if is_harm else "info"
        self._run.emit(GuardEvent(self._run.done, level, "shadow", text, value=gap, limit=limit))
        if is_harm and self.acts:
            alarm = Alarm(self._run.done, "shadow", "", "", gap, limit)
            self._refine_until_well(alarm, [], lambda probe: diagnosis.loss_gap(probe, bf16) <= limit)

    def _gap_of_following(self) -> float | None:
        """Return the mean gap of the batches after the next one: a small batch alone may have any. None without one."""
        both = (self._run.probe_following(LASTING, fp8=is_fp8, backward=False) for is_fp8 in (True, False))
        gaps = [diagnosis.loss_gap(fp8, bf16) for fp8, bf16 in zip(*both, strict=True)]
        return fmean(gaps) if gaps else None

    def _emit(self, alarm: Alarm, text: str, **details: Any) -> None:
        self._run.emit(alarm.event(text, **details))


def _ladder(recipe: Recipe | None, config: GuardConfig) -> Ladder | None:
    return None if recipe is None or not recipe.is_fp8 else Ladder(recipe, config.quiet)


def _name(layer: str) -> str:
    return "the model" if layer == EVERYTHING else layer

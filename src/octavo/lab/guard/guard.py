"""The state machine of guardrails, a part of a training loop.

A run is watched: each step is checked against the rules, and a snapshot is taken every `snapshot_every` steps. An alarm
rolls the run back to a snapshot and opens an `Incident`: the same steps are made again. Before the step that raised the
alarm, its batch is probed in FP8 and in BF16. The probes, or whether the alarm comes back, show the cause
(`octavo.lab.guard.diagnosis`), which closes the incident and decides what is done:

    transient   nothing: the repeated steps are the repair
    data        the batch is skipped
    optimizer   rollback to the oldest snapshot, with a limit on a learning rate that had risen
    model       rollback to the oldest snapshot
    precision   layers are refined (`Refinement`)

If nothing helps, the new level is adopted and its rule only reports for `quiet` steps. A finite loss never ends a run.

Decisions depend on measurements only, never on the clock or on arrival times: every rank decides the same. The state,
except for snapshots, is part of a checkpoint.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from octavo._util.terminal import quantity
from octavo.errors import RunError
from octavo.kernels.runtime.transfers import AsyncHostCopy
from octavo.lab.guard import diagnosis
from octavo.lab.guard.alarms import Alarm, GuardEvent, Observation
from octavo.lab.guard.config import GuardConfig
from octavo.lab.guard.diagnosis import Cause, Evidence, Probe
from octavo.lab.guard.guarded import Guarded, Snapshot
from octavo.lab.guard.incident import Incident
from octavo.lab.guard.parameters import ParameterCheck, ParameterStats, PendingStats
from octavo.lab.guard.refinement import Refinement
from octavo.lab.guard.rules import LASTING, RULES, UPDATE, AlarmRules
from octavo.lab.guard.telemetry_rows import layer_of, worst_layers
from octavo.lab.loop import Part, Step
from octavo.recipes import Recipe

SNAPSHOTS = 2
"""Snapshots kept in memory: if the newest was taken after the fault, the older one helps."""
MARGIN = 3
"""Steps that a snapshot should precede an alarm by, so that it does not contain the fault."""
HOLD = 2.0
"""Factor by which the limit on the learning rate may rise per quiet period."""


class _Pending(NamedTuple):
    """A step that has not been checked yet."""

    step: int
    lr: float
    scalars: AsyncHostCopy
    """Loss, gradient norm and loss of the BF16 baseline (NaN without one), FP64 (3,)."""
    parameters: PendingStats | None
    """Invariants of parameters; None if the step was not checked."""
    conversions: int
    """`Guarded.conversions` at that step: telemetry from before another conversion is of other tensors."""


class Guard(Part[Step]):
    """Guardrails of one run.

    Args:
        run: what is trained.
        recipe: recipe of the run; without one no layer is refined.
        config: limits and mode.
        check: invariants of the guarded model's parameters; None: they are not checked.
    """

    key = "guard"

    def __init__(
        self,
        run: Guarded,
        recipe: Recipe | None = None,
        config: GuardConfig | None = None,
        check: ParameterCheck | None = None,
    ) -> None:
        self.config = config or GuardConfig()
        self._run, self._parameter_check = run, None if self.config.mode == "off" else check
        self._rules = AlarmRules(self.config)
        self._refinement = Refinement(run, self._rules, recipe, self.config)
        self._pending: deque[_Pending] = deque()
        self._snapshots: deque[Snapshot] = deque(maxlen=SNAPSHOTS)
        self._record: deque[Observation] = deque(maxlen=SNAPSHOTS * self.config.snapshot_every)
        """Measurements of the last steps, at least since the older snapshot."""
        self._incident: Incident | None = None
        """The incident while the run retries; None while it is watched."""
        self._skipped: list[int] = []
        """Positions of batches that are skipped, also after a rollback."""
        self._unsolved: list[int] = []
        """Steps of the alarms since the run last got past one."""
        self._tried: Counter[str] = Counter()
        """Actions per cause since then."""
        self._given_up: dict[str, int] = {}
        """Rule -> step until which it only reports."""
        self._lr_limited_at = 0
        """Step after which the limit on the learning rate (`Guarded.lr_limit`) was last changed."""
        self._fingerprints: Mapping[str, Sequence[float]] | None = {}
        """Fingerprints of the weights in a resumed checkpoint; None once compared with the current weights."""

    @property
    def acts(self) -> bool:
        """True if the mode is `act`."""
        return self.config.mode == "act"

    def before_step(self) -> bool:
        """Prepare the next step: take a snapshot, compare with BF16, or probe the batch that raised an alarm.

        Returns:
            False: a step follows, also after a rollback.

        Raises:
            RunError: a NaN or infinity that nothing removes.
        """
        if self.config.mode != "off":
            self._prepare()
        self._run.forget_before(self._snapshots[0].position if self._snapshots else self._run.position)
        return False

    def after_step(self, step: Step) -> bool:
        """Queue the measurements of the newest step and check those that are due; all before weights are read.

        Returns:
            True if the run was rolled back, so that the newest step does not count.

        Raises:
            RunError: a NaN or infinity that nothing removes.
        """
        if self.config.mode == "off":
            return False
        self._queue(step)
        return self._check_queued(0 if "weights" in step.reads else self._run.lag)

    def check_all(self) -> bool:
        """Check all queued steps; return True if the run was rolled back."""
        return self._check_queued(0)

    def change_recipe(self, recipe: Recipe) -> str:
        """Convert the model to another recipe of the run; return why that is impossible, or an empty string.

        Layers that have left FP8 stay in BF16.
        """
        return self._refinement.change_recipe(recipe)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, as JSON values."""
        check = self._parameter_check
        return {
            "watch": self._rules.state_dict(),
            "ladder": self._refinement.state_dict(),
            "skipped": [*self._skipped],
            "unsolved": [*self._unsolved],
            "tried": {**self._tried},
            "given_up": {**self._given_up},
            "lr_limit": None if math.isinf(self._run.lr_limit) else self._run.lr_limit,
            "lr_held_at": self._lr_limited_at,
            "fingerprints": {} if check is None else check.fingerprints(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`; layers are converted to the recipes that they had.

        The weights are compared with those of the checkpoint before the next step.
        """
        self._rules.load_state_dict(state["watch"])
        self._skipped, self._unsolved = [*state.get("skipped", ())], [*state.get("unsolved", ())]
        self._tried, self._given_up = Counter(state.get("tried", {})), {**state.get("given_up", {})}
        limit = state["lr_limit"]
        if limit is not None and not 0 < limit < math.inf:
            raise ValueError(f"lr_limit {limit!r} is no learning rate")
        self._run.lr_limit, self._lr_limited_at = math.inf if limit is None else limit, state["lr_held_at"]
        self._fingerprints = state.get("fingerprints", {})
        self._refinement.load_state_dict(state["ladder"])

    # --- before a step ----------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        if self._fingerprints is not None:
            self._begin(self._fingerprints)
            self._fingerprints = None
        self._pass_over()
        incident = self._incident
        if incident is None:
            self._watch(self._run.done)
        elif self._run.done + 1 == incident.alarm.step and not incident.is_batch_cleared:
            self._probe(incident)
        self._pass_over()

    def _begin(self, fingerprints: Mapping[str, Sequence[float]]) -> None:
        """Take the present weights as reference; compare those of a resumed run with the fingerprints it saved."""
        if self._parameter_check is None:
            return
        self._parameter_check.restart(self._run.done)
        for name, source in self._parameter_check.changed_since(fingerprints):
            text = f"{name} is not what the checkpoint was written with" + (f": it is {source}" if source else "")
            advice = "Resume from another checkpoint, or compare how the two runs name their layers."
            event = GuardEvent(self._run.done + 1, "error", "fingerprint", f"{text}. {advice}", cause="model")
            self._run.emit(event._replace(layer=layer_of(name), role="weight"))

    def _pass_over(self) -> None:
        while self._run.position in self._skipped:
            self._run.skip()

    def _watch(self, done: int) -> None:
        """Without an incident: relax the learning rate and refinements, take a snapshot, compare with BF16."""
        config = self.config
        if math.isfinite(self._run.lr_limit) and done - self._lr_limited_at >= config.quiet:
            self._run.lr_limit, self._lr_limited_at = self._run.lr_limit * HOLD, done
        if self.acts:
            self._refinement.down()
            # At the same steps in a resumed run, whatever step it resumed from.
            every = config.snapshot_every
            if not self._snapshots or done // every > self._snapshots[-1].step // every:
                self._take_snapshot(done)
        if config.shadow_every and done and done % config.shadow_every == 0:
            self._refinement.compare_with_bf16()

    def _take_snapshot(self, done: int) -> None:
        """Take a snapshot, which is good by construction: a parameter that is not finite is an alarm."""
        bad = self._nonfinite_parameter()
        if not bad:
            self._snapshots.append(replace(self._run.snapshot(), rules=self._rules.state_dict()))
            return
        alarm = Alarm(done, "nonfinite", layer_of(bad), "weight", math.nan, math.inf)
        self._raise(alarm, Observation(done, math.nan, math.nan, 0.0))

    # --- after a step -----------------------------------------------------------------------------------------------

    def _queue(self, step: Step) -> None:
        run, check = self._run, self._parameter_check
        baseline = torch.full_like(step.loss, torch.nan) if step.baseline_loss is None else step.baseline_loss
        measured = step.loss, step.gradient_norm, baseline.to(step.loss.device)
        scalars = torch.stack([each.detach().double().reshape(()) for each in measured])
        parameters = None if check is None else check.measure(step.number)
        self._pending.append(_Pending(step.number, step.lr, AsyncHostCopy(scalars), parameters, run.conversions))

    def _check_queued(self, remaining: int) -> bool:
        while len(self._pending) > remaining:
            seen = self._observed(self._pending.popleft())
            if not self._run.was_skipped(seen.loss, seen.gradient_norm) and self._check(seen):
                return True
        return False

    def _observed(self, pending: _Pending) -> Observation:
        """Return the measurements of a queued step; waits for them."""
        run, step = self._run, pending.step
        loss, norm, baseline = pending.scalars.result().tolist()
        seen = Observation(step, loss, norm, pending.lr, baseline_loss=baseline)
        if pending.conversions == run.conversions:
            seen = seen._replace(values=run.telemetry_at(step), rows=run.rows)
        return seen if pending.parameters is None else seen._replace(parameters=pending.parameters())

    def _check(self, step: Observation) -> bool:
        """Check a step against the rules; return True if the run was rolled back."""
        conversions = self._run.conversions
        alarm = self._rules.check(step)
        if self._incident is not None:
            self._incident.compare(step)
        if alarm is not None and self._raise(alarm, step):
            return True
        self._record.append(step)
        if alarm is None:
            self._get_past(step.step)
        if self._run.conversions == conversions:  # else the alarm has just refined the layers that these shares are of
            for over in self._rules.over_budget(step):
                self._over_budget(over)
        return False

    def _get_past(self, step: int) -> None:
        """Close an incident whose alarm did not come back, and forget alarms that the run has left behind."""
        if self._incident is not None and step >= self._incident.alarm.step:
            self._conclude(self._incident)
        if self._incident is None and step > max(self._unsolved, default=0) + MARGIN:
            self._unsolved.clear()
            self._tried.clear()

    def _raise(self, alarm: Alarm, step: Observation) -> bool:
        """Report an alarm, or act on it; return True if the run was rolled back."""
        only_reports = RULES[alarm.rule].kind == "reported" or alarm.step < self._given_up.get(alarm.rule, 0)
        if not self.acts or not self._snapshots or only_reports:
            self._report(alarm)
            return False
        if self._incident is not None and self._incident.has_come_back(alarm):
            return self._act_on_return(self._incident, alarm, step)
        self._unsolved.append(alarm.step)
        if len(self._unsolved) > self.config.rollbacks:
            self._give_up(alarm, f"{quantity(self.config.rollbacks, 'rollback')} without success (guard.rollbacks)")
            return False
        target = self._newest_before(alarm)
        self._incident = self._open_incident(alarm, step, target)
        self._roll_back(target, alarm, str(alarm))
        return True

    def _newest_before(self, alarm: Alarm) -> Snapshot:
        """Return the newest snapshot from before a fault may have begun, else the oldest."""
        rule = RULES[alarm.rule]
        margin = MARGIN + rule.delay + (self.config.parameters_every if rule.kind == "update" else 0)
        return next((s for s in reversed(self._snapshots) if s.step + margin < alarm.step), self._snapshots[0])

    def _open_incident(self, alarm: Alarm, step: Observation, target: Snapshot) -> Incident:
        diff = ""
        first_run = {each.step: each for each in [*self._record, step] if each.step > target.step}
        if alarm.role == "weight":
            diff = self._run.weight_diff(alarm.layer, target, UPDATE * sum(each.lr for each in first_run.values()))
        if step.parameters is None:
            step = step._replace(parameters=self._newest_parameters())
        return Incident(
            alarm,
            target.step,
            first_run,
            harmed=worst_layers(step.rows, step.values),
            weight_diff=diff,
            suspect=self._rules.suspect(step),
            is_batch_cleared=RULES[alarm.rule].kind != "sudden",
        )

    def _newest_parameters(self) -> ParameterStats | None:
        """Return invariants of the parameters as they are now; None without a check, or if it has seen this step."""
        newest = self._pending[-1].parameters if self._pending else None
        if newest is None and self._parameter_check is not None:
            newest = self._parameter_check.measure(self._run.done, now=True)
        return None if newest is None else newest()

    def _nonfinite_parameter(self) -> str:
        """Return the first parameter that holds a NaN or infinity; empty if there is none. Waits for the device."""
        return "" if self._parameter_check is None else self._parameter_check.nonfinite()

    def _roll_back(self, target: Snapshot, alarm: Alarm, text: str, action: str = "", **details: Any) -> None:
        self._emit(alarm, text, action=f"back to step {target.step}{action}", back_to=target.step, **details)
        while self._snapshots[-1] is not target:
            self._snapshots.pop()
        self._pending.clear()
        self._run.restore(target)
        if self._parameter_check is not None:
            self._parameter_check.restart(target.step)
        self._rules.load_state_dict(target.rules)
        kept = [each for each in self._record if each.step <= target.step]
        self._record.clear()
        self._record.extend(kept)

    def _over_budget(self, alarm: Alarm) -> None:
        """Refine a layer above a budget, or report it."""
        self._rules.forgive(alarm.layer)
        if self.acts and self._incident is None and self._refinement.up(alarm.layer, alarm):
            return
        self._report(alarm)

    # --- diagnosis: each ends the incident, unless only the retry can tell ------------------------------------------

    def _probe(self, incident: Incident) -> None:
        """Probe the batch that raised the alarm, with the weights of that step, and act on the cause."""
        incident.is_batch_cleared = True
        limits = self._rules.loss_limit, self._rules.gradient_limit
        evidence = self._gather_evidence(incident.alarm.step, *limits)
        cause = diagnosis.diagnose(evidence)
        if cause is None:
            return
        self._incident = None
        if bad := self._nonfinite_parameter():
            self._blame_model(incident, f"{bad} is not finite", layer_of(bad))
        elif cause == "precision":
            self._refinement.up_until_well(incident.alarm, incident.harmed, lambda probe: not probe.is_bad(*limits))
        elif cause == "optimizer":
            self._blame_optimizer(incident, "an earlier batch is as bad now, in BF16 too")
        elif why := self._is_new_level(incident.alarm, evidence):
            self._give_up(incident.alarm, why, diagnosis.new_level_of(evidence))
        else:
            self._blame_data(incident)

    def _act_on_return(self, incident: Incident, alarm: Alarm, step: Observation) -> bool:
        """Act on an alarm that came back although its batch was fine; return True if the run was rolled back."""
        self._incident = None
        if RULES[alarm.rule].kind == "sudden":
            return self._blame_optimizer(incident, "it comes back with the update alone")
        if share := self._newly_over(incident, alarm.layer, step):
            self._rules.adopt(alarm)
            if not self._refinement.up(alarm.layer, share):
                self._give_up(alarm, f"it comes back, with {share}", "precision")
            return False
        evidence = self._gather_evidence(alarm.step)
        first = self._run.rows[0][0] if self._run.rows else ""
        cause = diagnosis.lasting_cause(alarm, first, evidence)
        if cause == "precision":
            self._rules.adopt(alarm)
            is_well = diagnosis.wellness(alarm.rule, evidence.fp8, evidence.bf16)
            self._refinement.up_until_well(alarm, incident.harmed, is_well)
            return False
        if cause == "optimizer" and alarm.rule != "no update" and _have_risen(self._learning_rates(incident)):
            return self._blame_optimizer(incident, "it comes back")
        self._give_up(alarm, "it comes back when the steps before it are repeated", cause)
        return False

    def _conclude(self, incident: Incident) -> None:
        """Report an alarm that did not come back: the fault was transient."""
        self._incident, alarm = None, incident.alarm
        layer, role = incident.place()
        where = f", first in {layer} {role}" if layer else ""
        diff = f": {incident.weight_diff}" if incident.weight_diff else ""
        text = (
            f"{alarm} did not come back when the steps from {incident.since + 1} on were repeated{where}{diff}:"
            " a fault of the hardware, or of something outside of training"
        )
        self._emit(alarm, text, cause="transient", action="steps made again", layer=layer, role=role)

    def _gather_evidence(self, before: int, loss_limit: float = math.inf, gradient_limit: float = math.inf) -> Evidence:
        """Probe the next batch in both precisions, and one that was trained on before a step."""
        evidence = Evidence(self._run.probe(), self._run.probe(fp8=False), loss_limit, gradient_limit)
        record = {each.step: each for each in self._record}
        for snapshot in reversed(self._snapshots):
            if snapshot.step + 1 in record and snapshot.step + 1 < before and snapshot.position not in self._skipped:
                earlier = self._run.probe(fp8=False, earlier=snapshot)
                then = record[snapshot.step + 1]
                return evidence._replace(earlier=earlier, in_training=Probe(then.loss, then.gradient_norm))
        return evidence

    def _is_new_level(self, alarm: Alarm, evidence: Evidence) -> str:
        """Return why a bad batch is not skipped: others are like it; empty if it is the only one, or not finite."""
        if alarm.rule == "nonfinite":
            return ""
        if self._tried["data"] >= LASTING:
            return f"the {LASTING} skipped batches were followed by others like them"
        following = self._run.probe_following(LASTING, fp8=False)
        bad = sum(probe.is_bad(evidence.loss_limit, evidence.gradient_limit) for probe in following)
        return f"{bad} of the next {len(following)} batches are as bad" if 2 * bad > len(following) else ""

    def _newly_over(self, incident: Incident, layer: str, step: Observation) -> Alarm | None:
        """Return a share of a layer's elements that is above its limit in a step, and was not at the snapshot."""
        first = incident.first_run.get(incident.since + 1, step)
        before = {(share.role, share.rule) for share in self._rules.shares_over(first, layer)}
        now = self._rules.shares_over(step, layer)
        return next((share for share in now if (share.role, share.rule) not in before), None)

    # --- remedies ---------------------------------------------------------------------------------------------------

    def _blame_data(self, incident: Incident) -> None:
        """Skip the batch, unless a weight is what makes it bad."""
        alarm, found = incident.alarm, self._run.locate()
        if found is not None and found.role == "weight":
            self._blame_model(incident, f"{found} is not finite", found.layer)
            return
        self._tried["data"] += 1
        self._skipped.append(self._run.position)
        self._run.skip()
        text = f"{alarm}: BF16 is no better on this batch, and fine on others: not caused by FP8"
        text += "" if found is None else f"; first non-finite tensor: {found}"
        layer = alarm.layer if found is None else found.layer or alarm.layer
        self._emit(alarm, text, cause="data", action="batch skipped", layer=layer)

    def _blame_model(self, incident: Incident, why: str, layer: str) -> None:
        """Roll back to an older snapshot because of bad weights.

        Raises:
            RunError: there is no older one.
        """
        oldest = self._snapshots[0]
        if oldest.step >= incident.since:
            self._give_up(incident.alarm, why, "model")
            return
        self._roll_back(oldest, incident.alarm, f"{incident.alarm}: {why}", cause="model", layer=layer)

    def _blame_optimizer(self, incident: Incident, why: str) -> bool:
        """Roll back to the oldest snapshot, and limit a learning rate that had risen, or is blamed again.

        Returns:
            False if that was tried too often, so that the new level is adopted.
        """
        alarm, oldest = incident.alarm, self._snapshots[0]
        self._tried["optimizer"] += 1
        if self._tried["optimizer"] > LASTING:
            self._give_up(alarm, why, "optimizer")
            return False
        rates = self._learning_rates(incident)
        worst, action, text = max(rates), "", f"{alarm}: {why}: the weights are bad, not FP8"
        if _have_risen(rates) or self._tried["optimizer"] > 1:
            self._run.lr_limit = max((rate for rate in rates if 0 < rate <= worst / HOLD), default=worst / HOLD)
            self._lr_limited_at = oldest.step
            action = f", learning rate at most {self._run.lr_limit:.3g}"
        if _have_risen(rates):
            text += (
                f"; the learning rate had risen to {worst:.3g}, {worst / self._run.lr_limit:.3g} times its limit now"
            )
        self._roll_back(oldest, alarm, text, action, cause="optimizer")
        return True

    def _learning_rates(self, incident: Incident) -> list[float]:
        return [each.lr for each in (*incident.first_run.values(), *self._record)]

    def _give_up(self, alarm: Alarm, why: str, cause: Cause | str = "") -> None:
        """Adopt the level that raised an alarm, and only report its rule for a while.

        Raises:
            RunError: a value is not finite, so that there is no level to adopt; the first such tensor is named.
        """
        self._incident = None
        if alarm.rule == "nonfinite":
            where = self._nonfinite_parameter() or self._run.locate() or alarm
            raise RunError(
                f"step {alarm.step}: {where} is not finite, and nothing helps: {why}. The events of the run list what"
                " was tried: see `octavo dashboard`."
            )
        self._given_up[alarm.rule] = alarm.step + self.config.quiet
        self._rules.adopt(alarm)
        self._emit(alarm, f"{alarm}: {why}", cause=cause, action="the new level is adopted")

    def _report(self, alarm: Alarm) -> None:
        if (event := self._rules.report(alarm)) is not None:
            self._run.emit(event)

    def _emit(self, alarm: Alarm, text: str, **details: Any) -> None:
        self._run.emit(alarm.event(text, **details))


def _have_risen(rates: Sequence[float]) -> bool:
    """Return True if some learning rates differ by `HOLD` or more."""
    positive = [rate for rate in rates if rate > 0]
    return bool(positive) and max(positive) >= HOLD * min(positive)

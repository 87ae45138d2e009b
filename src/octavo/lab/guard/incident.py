"""An alarm under investigation: what was measured before the run was rolled back, compared with the retry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from octavo.lab.guard.alarms import Alarm, Observation
from octavo.lab.guard.telemetry_rows import first_difference


@dataclass
class Incident:
    """An alarm under investigation."""

    alarm: Alarm
    since: int
    """Step of the snapshot that the run was rolled back to."""
    first_run: Mapping[int, Observation]
    """Measurements of the steps since then, from before the rollback."""
    harmed: Sequence[str] = ()
    """Layers, the most harmed by FP8 first."""
    weight_diff: str = ""
    """Elements of the alarm's weight that no update explains."""
    suspect: Alarm | None = None
    """The layer whose parameters no update explains, if it is one layer."""
    difference: tuple[str, str] | None = None
    """Layer and role of the first tensor that differs in the retry."""
    is_batch_cleared: bool = False
    """The batch is not to blame: it was probed, or the rule does not judge single batches."""

    def has_come_back(self, alarm: Alarm) -> bool:
        """Return True if an alarm is the same again, and its batch is not to blame."""
        return self.is_batch_cleared and alarm.step == self.alarm.step

    def compare(self, step: Observation) -> None:
        """Note the first tensor that differs between the first run of a step and its retry."""
        before = self.first_run.get(step.step)
        if self.difference is not None or before is None or before.values is None or step.values is None:
            return
        if before.values.shape == step.values.shape:
            self.difference = first_difference(step.rows, before.values, step.values)

    def place(self) -> tuple[str, str]:
        """Return layer and role of a transient fault: where the alarm, the parameters or the retry point to."""
        alarm, suspect = self.alarm, self.suspect
        layer, role = self.difference or (alarm.layer, alarm.role)
        if alarm.rule == "nonfinite" and suspect is not None:
            return suspect.layer, suspect.role
        if alarm.layer and (alarm.role in ("weight", "moments") or alarm.rule == "layer shift"):
            return alarm.layer, alarm.role
        if suspect is not None and role in ("", "input"):  # an input differs because of a layer before
            return suspect.layer, suspect.role
        return layer, role

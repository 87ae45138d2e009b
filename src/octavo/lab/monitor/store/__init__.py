"""The run store: one SQLite file per run, one commit per step, readable at any time. Needs no torch.

with RunWriter("runs/first/run.sqlite") as run:
    run.set_tensors([TensorRow("layers.0.wq", "input")])
    run.write_step(1, {"loss": 5.5}, snapshot)           float32 (tensors, statistics)
RunReader("runs/first").heatmap("flushed", "input")
"""

from octavo.lab.monitor.store.reader import (
    ConfigDifference,
    HeatMap,
    RunReader,
    Session,
    config_difference,
    find_runs,
)
from octavo.lab.monitor.store.schema import FILE, OF_CODES, ROLES, STATS, VERSION, TensorRow
from octavo.lab.monitor.store.series import Series
from octavo.lab.monitor.store.writer import RunWriter

__all__ = [
    "FILE",
    "OF_CODES",
    "ROLES",
    "STATS",
    "VERSION",
    "ConfigDifference",
    "HeatMap",
    "RunReader",
    "RunWriter",
    "Series",
    "Session",
    "TensorRow",
    "config_difference",
    "find_runs",
]

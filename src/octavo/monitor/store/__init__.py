"""The run store: one SQLite file a run, written a commit a step, readable all the while. No torch here.

with RunWriter("runs/first/run.sqlite") as run:
    run.set_tensors([TensorRow("layers.0.wq", "input")])
    run.write_step(1, {"loss": 5.5}, snapshot)           float32 (tensors, statistics)
RunReader("runs/first").heatmap("flushed", "input")
"""

from octavo.monitor.store.reader import HeatMap, RunReader, Session, find_runs
from octavo.monitor.store.sampling import Series
from octavo.monitor.store.schema import FILE, OF_CODES, ROLES, STATS, VERSION, TensorRow
from octavo.monitor.store.several import Difference, config_difference, side_by_side
from octavo.monitor.store.synthetic import synthetic_run
from octavo.monitor.store.writer import RunWriter

__all__ = [
    "FILE",
    "OF_CODES",
    "ROLES",
    "STATS",
    "VERSION",
    "Difference",
    "HeatMap",
    "RunReader",
    "RunWriter",
    "Series",
    "Session",
    "TensorRow",
    "config_difference",
    "find_runs",
    "side_by_side",
    "synthetic_run",
]

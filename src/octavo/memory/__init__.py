"""Memory before running: the peak of a training program by kind, found on fake tensors, without a GPU."""

from octavo.memory.forecast import Forecast, Program, forecast
from octavo.memory.timeline import KINDS, Kind

__all__ = ["KINDS", "Forecast", "Kind", "Program", "forecast"]

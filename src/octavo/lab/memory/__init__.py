"""Peak memory of a training program by kind, predicted on fake tensors, without a GPU."""

from octavo.lab.memory.forecast import Forecast, Program, forecast
from octavo.lab.memory.timeline import KINDS, Kind

__all__ = ["KINDS", "Forecast", "Kind", "Program", "forecast"]

"""Peak memory of a training program by kind, predicted on fake tensors, without a GPU."""

from octavo.memory.forecast import Forecast, Program, forecast
from octavo.memory.timeline import KINDS, Kind

__all__ = ["KINDS", "Forecast", "Kind", "Program", "forecast"]

"""Scales from representative data: `octavo.calibrate`, what it recommends, and when a training loop repeats it."""

from octavo.calibration.choice import Choice
from octavo.calibration.finding import Calibration, calibrate
from octavo.calibration.spectrum import Spectrum
from octavo.calibration.updates import Recalibration, Updates

__all__ = ["Calibration", "Choice", "Recalibration", "Spectrum", "Updates", "calibrate"]

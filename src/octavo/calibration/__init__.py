"""Static scales from representative data (`octavo.calibrate`), and their recalibration during training."""

from octavo.calibration.finding import Calibration, calibrate
from octavo.calibration.histogram import MagnitudeHistogram
from octavo.calibration.scale_policy import ScalePolicy
from octavo.calibration.updates import Recalibration, Updates

__all__ = ["Calibration", "MagnitudeHistogram", "Recalibration", "ScalePolicy", "Updates", "calibrate"]

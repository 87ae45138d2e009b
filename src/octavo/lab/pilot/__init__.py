"""`octavo pilot`: a short training of a user's model in each precision, and a recommendation on FP8.

measuring   a few training steps per precision: time by phase, energy, memory, losses
predicting  predicted times and memory of a GPU that is not available
judging     the recommendation: rules on the measurements, each with its reason and what would change it
report      the terminal, JSON, and one HTML file with plots
"""

from octavo.lab.pilot.run import Settings, run_pilot
from octavo.lab.train.opening import open_subject

__all__ = ["Settings", "open_subject", "run_pilot"]

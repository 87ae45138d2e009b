"""A small pilot on a user's workload: whether FP8 pays there, where, and how (`octavo pilot`).

measuring   one training of a few steps per precision: time by phase, energy, memory, losses
predicting  what a GPU that is not here would give, as far as it can be predicted
judging     a recommendation from the measurements: rules, each with its reason and what would change it
report      the terminal, JSON, and one HTML file with plots
"""

from octavo.pilot.run import Settings, run_pilot
from octavo.train.workload import load_workload

__all__ = ["Settings", "load_workload", "run_pilot"]

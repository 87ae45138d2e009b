"""Checks of a run that was recorded, or still is."""

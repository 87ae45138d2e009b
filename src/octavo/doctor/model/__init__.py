"""Checks of a model: whether it computes in FP8, as it should, as accurately, and as fast as the device lets it."""

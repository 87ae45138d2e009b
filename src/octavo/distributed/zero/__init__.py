"""Optimizer states distributed over ranks by whole tensors, as in FP8-LM."""

"""Optimizer states spread over ranks by whole tensors, as in FP8-LM."""

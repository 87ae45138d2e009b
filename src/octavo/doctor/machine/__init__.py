"""Checks of the machine: its software, its GPU, what FP8 kernels compute on it, and what a run needs around them."""

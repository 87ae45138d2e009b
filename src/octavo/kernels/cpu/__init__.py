"""Kernels for a CPU where calls of PyTorch would cost more than what they compute: in NumPy, after `reference/`."""

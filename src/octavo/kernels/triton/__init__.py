"""Triton kernels for NVIDIA GPUs. `reference/` defines each, under the same file name."""

"""Triton kernels for NVIDIA GPUs. Each has its twin under the same file name in `reference/`."""

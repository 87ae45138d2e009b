"""Triton kernels for NVIDIA GPUs. Each has its twin in `reference/`, under the same file name."""

"""Tensor and sequence parallel through PyTorch's `parallelize_module`."""

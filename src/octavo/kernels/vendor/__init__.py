"""Kernels that ship with PyTorch: cuBLAS on a GPU, oneDNN on a CPU, through `torch._scaled_mm` and `F.scaled_mm`."""

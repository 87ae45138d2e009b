"""The readable twin of every kernel, in plain PyTorch: what the fast ones are tested against, and what a CPU runs."""

"""Reference implementation of every kernel in plain PyTorch, for tests of the fast ones and for CPUs."""

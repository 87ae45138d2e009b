"""Gradient storage and norms; the contract is `kernels/optimizer`."""

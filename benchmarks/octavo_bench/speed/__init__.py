"""How fast: steps, products and fused kernels, beside BF16 and what the machine can do."""

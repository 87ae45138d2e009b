"""How accurate: losses, gradients and products, beside BF16 or FP64."""

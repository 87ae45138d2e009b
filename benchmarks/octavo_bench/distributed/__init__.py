"""Many GPUs: reductions of gradients, measured, and a whole step, on paper."""

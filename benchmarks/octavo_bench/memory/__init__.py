"""How much memory: optimizers, activations, and the peak of training."""

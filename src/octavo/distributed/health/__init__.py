"""Which rank is gone, or hangs: found, named, and the others stopped."""

"""Detection of dead or hung ranks."""

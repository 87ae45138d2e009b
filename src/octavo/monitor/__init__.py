"""Watching a run: the store it is written to, its readers, and what is sent elsewhere."""

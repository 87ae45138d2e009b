"""Pipeline parallel: stages with compressed communication, PyTorch's schedules, and their execution."""

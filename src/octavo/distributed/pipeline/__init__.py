"""Pipeline parallel: a stage and what it sends, the schedules of PyTorch, and stages that are run by one."""

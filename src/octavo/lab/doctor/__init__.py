"""The doctor: checks of a machine, of a model on it, and of a run. Each returns a verdict, numbers, and a remedy.

check        the type of a check
subjects     machine and model
software     versions, packages, environment variables, driver
hardware     clocks and memory errors of a GPU, shared memory, disk, open files
kernels      kernels in use, arithmetic, accumulation, compilers
collectives  communication between GPUs; `rank` is one of its processes
accuracy     of a model: NaN, drift, fast sums, serving
speed        of a model: layers, fallbacks, shapes, launches, host syncs
run          health of a recorded run
examination  runs all checks, `CHECKS`; the block for a bug report
"""
